"""Update rules: one table of rules, one list of laws.

Oracles: the originals of `optim_rows.py`, `torch.optim` above all, over one plain tensor per lane, with unequal
hyperparameters in every lane; the numbers of cases 1, 4 and 13 of CASES.md. A new rule is one row of `ROWS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from coalesce.engine.lane import hyperparameters, riding_hyperparameters
from coalesce.optim import OPTIMIZERS
from coalesce.optim.base import Optimizer, State
from coalesce.optim.common import OPTIONS
from coalesce.optim.groups import config_of, hyper_of
from optim_rows import ROWS, Config, Muon, Row

SHAPES = [(), (3, 2), (2, 2, 3)]
#: The names of the parameter.
NAMES = ("weight",)
rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def test_every_rule_has_a_row() -> None:
    assert {row.rule for row in ROWS.values()} == set(OPTIMIZERS)


class Lanes:
    """One parameter in K lanes, updated as the engine does it."""

    def __init__(self, row: Row, params: Tensor, lanes: Sequence[Config] | None = None):
        self.rule: type[Optimizer] = OPTIMIZERS[row.rule]
        self.configs = [self._resolve(row, lane) for lane in (row.lanes if lanes is None else lanes)]
        riding = [riding_hyperparameters(self.rule, config) for config in self.configs]
        self.riding = {name: torch.stack([lane[name] for lane in riding]) for name in riding[0]}
        self.params = params
        pairs = zip(params, self.configs, strict=True)
        states = [self.rule.init(p, config_of(self.rule, config, NAMES)) for p, config in pairs]
        self.state = {name: torch.stack([state[name] for state in states]) for name in states[0]}

    def _resolve(self, row: Row, lane: Config) -> Config:
        config, problems = self.rule.check({"name": row.rule, **row.static, **lane}, "optimizer")
        assert problems == []
        return config

    def step(self, grads: Tensor, number: int, factor: float = 1.0) -> None:
        def one(param: Tensor, grad: Tensor, state: State, riding: Mapping[str, Tensor], step: Tensor) -> Any:
            values = hyperparameters(self.rule, self.configs[0], riding)
            return self.rule.update(param, grad, state, hyper_of(self.rule, values, NAMES), step)

        riding = {**self.riding, **{rate: self.riding[rate] * factor for rate in self.rule.rates}}
        steps = torch.full((len(self.params),), number)
        self.params, self.state = vmap(one)(self.params, grads, self.state, riding, steps)


class Originals:
    """The same with an original optimiser for each lane."""

    def __init__(self, row: Row, configs: Sequence[Config], params: Tensor):
        self.lanes = [nn.Parameter(p.clone()) for p in params]
        pairs = zip(self.lanes, configs, strict=True)
        self.optimizers = [row.build({NAMES[0]: param}, config) for param, config in pairs]

    @property
    def params(self) -> Tensor:
        return torch.stack([p.detach() for p in self.lanes])

    @property
    def states(self) -> list[dict[str, Tensor]]:
        """Each lane's state, after the first step."""
        return [optimizer.state[p] for optimizer, p in zip(self.optimizers, self.lanes, strict=True)]

    def step(self, grads: Tensor, factor: float = 1.0) -> None:
        default = torch.get_default_dtype()
        # NAdam keeps its product of momenta in the default dtype
        torch.set_default_dtype(torch.float64)
        for param, grad, optimizer in zip(self.lanes, grads, self.optimizers, strict=True):
            param.grad = grad.clone()
            group = optimizer.param_groups[0]
            group["lr"] = group["initial_lr"] * factor
            optimizer.step()
        torch.set_default_dtype(default)


def start(row: Row, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """(K, …): where the lanes start, each elsewhere."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn((len(row.lanes), *shape), generator=generator, dtype=torch.float64).to(dtype)


def gradient(params: Tensor, number: int) -> Tensor:
    """Of a bumpy loss whose minimum moves about, so that the moments never settle."""
    generator = torch.Generator().manual_seed(number)
    target = torch.randn(params.shape, generator=generator, dtype=torch.float64).to(params.dtype)
    return params + torch.sin(3 * params) / 2 - target


def rate_factor(number: int) -> float:
    return 1 + 0.5 * math.sin(number)


def train(row: Row, shape: tuple[int, ...], dtype: torch.dtype, steps: int) -> tuple[Lanes, Originals]:
    """Ours and torch's after some steps with a moving learning rate."""
    lanes = Lanes(row, start(row, shape, dtype))
    originals = Originals(row, lanes.configs, lanes.params)
    for number in range(1, steps + 1):
        lanes.step(gradient(lanes.params, number), number, rate_factor(number))
        originals.step(gradient(originals.params, number), rate_factor(number))
    return lanes, originals


@rows
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_its_original_in_float64(row: Row, shape: tuple[int, ...]) -> None:
    lanes, originals = train(row, shape, torch.float64, 100)
    torch.testing.assert_close(lanes.params, originals.params, rtol=0, atol=1e-10)
    # the lanes have moved, so that nothing is compared with itself
    moved = (lanes.params - start(row, shape)).view(len(row.lanes), -1).abs().amax(1)
    for distance, config in zip(moved, lanes.configs, strict=True):
        assert distance > 0.01 or 0.0 in [config[rate] for rate in lanes.rule.rates]


@rows
def test_equals_its_original_in_float32(row: Row) -> None:
    lanes, originals = train(row, (3, 2), torch.float32, 100)
    _, exact = train(row, (3, 2), torch.float64, 100)
    off = (lanes.params - originals.params).abs().amax((1, 2))
    # 100 steps that each round a number below 2 to the nearest of 24 bits, all in one direction: 100 * 2**-23. Where
    # rounding grows over the steps (a lane of Adadelta with rho = 0), as far as the original itself is from float64.
    bound = (originals.params - exact.params).abs().amax((1, 2)).clamp(min=1.2e-5)
    assert (off <= bound).all(), (off, bound)


@rows
def test_equals_its_original_in_bfloat16(row: Row) -> None:
    lanes, originals = train(row, (3, 2), torch.bfloat16, 3)
    # 3 steps that each round a number below 4 to the nearest of 8 bits; torch rounds in other places
    torch.testing.assert_close(lanes.params, originals.params, rtol=0, atol=3 * 2**-7)


@rows
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 3e-6)])
def test_state_equals_the_originals_after_one_step(row: Row, dtype: torch.dtype, rtol: float) -> None:
    # Two or three roundings, and a digit lost where decay and gradient cancel. 1 - beta2 computed in float32 would be
    # 1.3e-5 off, and the parameters would not show it.
    lanes, originals = train(row, (3, 2), dtype, 1)
    for name, ours in lanes.state.items():
        for lane, state in enumerate(originals.states):
            theirs = state.get(row.slots.get(name, name))
            assert theirs is not None or name in row.optional
            if theirs is not None:
                torch.testing.assert_close(ours[lane], theirs, rtol=rtol, atol=0)


@rows
def test_equals_its_original_after_a_million_steps(row: Row) -> None:
    lanes, originals = train(row, (3, 2), torch.float64, 5)
    for state in originals.states:
        if "step" in state:
            state["step"] += 10**6
    for number in range(6, 20):
        lanes.step(gradient(lanes.params, number), 10**6 + number)
        originals.step(gradient(originals.params, number))
    torch.testing.assert_close(lanes.params, originals.params, rtol=0, atol=1e-10)


@rows
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (5,), (0,)], ids=str)
def test_keeps_shapes_and_dtypes(row: Row, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    lanes = Lanes(row, start(row, shape, dtype))
    before = {name: (t.shape, t.dtype) for name, t in lanes.state.items()}
    for number in (1, 2, 3):
        lanes.step(gradient(lanes.params, number), number)
        assert (lanes.params.shape, lanes.params.dtype) == ((len(row.lanes), *shape), dtype)
        assert {name: (t.shape, t.dtype) for name, t in lanes.state.items()} == before
        # without eps a gradient of 0 is NaN, as in torch; bfloat16 makes one
        sound = [config.get("eps", 1.0) > 0 for config in lanes.configs]
        assert lanes.params[sound].isfinite().all()


@rows
@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
def test_the_default_dtype_does_not_matter(row: Row, default: torch.dtype) -> None:
    expected = train(row, (3, 2), torch.float32, 10)[0].params
    torch.set_default_dtype(default)
    assert train(row, (3, 2), torch.float32, 10)[0].params.equal(expected)


@rows
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_repeats_bit_for_bit(row: Row, dtype: torch.dtype) -> None:
    first, second = train(row, (3, 2), dtype, 20)[0], train(row, (3, 2), dtype, 20)[0]
    assert first.params.equal(second.params)
    assert all(first.state[name].equal(second.state[name]) for name in first.state)


@rows
@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_a_neighbour_changes_nothing(row: Row, poison: float) -> None:
    count = len(row.lanes)
    usual = Lanes(row, start(row, (3, 2), torch.float32))
    for number in range(1, 11):
        usual.step(gradient(usual.params, number), number, rate_factor(number))
    for sick in range(count):
        others = [lane for lane in range(count) if lane != sick]
        wild = {"lr": 7.0, "weight_decay": 0.9}
        configs = [lane if i != sick else {**lane, **wild} for i, lane in enumerate(row.lanes)]
        params = start(row, (3, 2), torch.float32)
        params[sick] = poison
        lanes = Lanes(row, params, configs)
        for number in range(1, 11):
            lanes.step(gradient(lanes.params, number), number, rate_factor(number))
        assert lanes.params[others].equal(usual.params[others])
        assert all(lanes.state[name][others].equal(usual.state[name][others]) for name in usual.state)
        assert not lanes.params[sick].equal(usual.params[sick])


@rows
def test_a_lane_equals_itself_alone_and_elsewhere(row: Row) -> None:
    # Not bit for bit outside the compiled graph: eager `pow` rounds one float64 in a hundred another way where a
    # vector's rest is computed number by number.
    usual = train(row, (3, 2), torch.float64, 20)[0].params
    alone = []
    for lane in range(len(row.lanes)):
        only = Lanes(row, start(row, (3, 2))[lane : lane + 1], [row.lanes[lane]])
        for number in range(1, 21):
            everywhere = usual.new_zeros(usual.shape)
            everywhere[lane] = only.params[0]
            only.step(gradient(everywhere, number)[lane : lane + 1], number, rate_factor(number))
        alone.append(only.params[0])
    torch.testing.assert_close(torch.stack(alone), usual, rtol=0, atol=1e-14)


@rows
def test_defaults_are_the_originals(row: Row) -> None:
    config = OPTIMIZERS[row.rule].check({"name": row.rule}, "optimizer")[0]
    original = row.original([nn.Parameter(torch.zeros(1))])
    config = row.arguments({k: v for k, v in config.items() if k not in ("name", *OPTIONS)})
    adamw = {k: config.pop(k) for k in list(config) if k.startswith("adamw")}
    # as the authors' own code has them
    assert list(adamw.values()) in ([], [[], 3e-4, [0.9, 0.95], 1e-10, 0.01])
    # the rate of SGD is ours: torch's is so small that nobody means it
    ours = {"lr": 0.1} if row.rule == "sgd" else {}
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()} == {
        k: v for k, v in {**original.defaults, **ours}.items() if k in config
    }
    known = {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "adamw"}
    assert set(original.defaults) - set(config) <= known


# single rules


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)], ids=str)
@pytest.mark.parametrize("matched", [False, True])
def test_muon_is_torchs_but_for_its_rounding(shape: tuple[int, ...], matched: bool) -> None:
    """torch runs the Newton-Schulz iteration in bfloat16, whose rounding it enlarges up to 3.44 ** 5 times."""
    row = Row("muon", Muon, [{"weight_decay": 0.1}, {"momentum": 0.5}, {"lr": 0.1}], {"match_rms_adamw": matched})
    lanes = Lanes(row, start(row, shape))
    originals = []
    for param, config in zip(lanes.params, lanes.configs, strict=True):
        arguments = {k: config[k] for k in ("lr", "momentum", "weight_decay", "nesterov", "eps", "ns_steps")}
        adjust = "match_rms_adamw" if matched else "original"
        originals.append(torch.optim.Muon([nn.Parameter(param.clone())], adjust_lr_fn=adjust, **arguments))
    for number in range(1, 11):
        grads = gradient(lanes.params, number)
        before = lanes.params
        lanes.step(grads, number)
        for lane, original in enumerate(originals):
            (param,) = original.param_groups[0]["params"]
            param.data.copy_(before[lane])
            param.grad = grads[lane].clone()
            original.step()
            mine, theirs = lanes.params[lane] - before[lane], param.detach() - before[lane]
            # measured: up to 0.05; without the scale of a tall matrix it would be 0.29, without the decay 0.2
            assert (mine - theirs).norm() < 0.1 * mine.norm()


def test_radam_waits_until_rho_exceeds_five() -> None:
    """beta2 = 0.9, 0.8 and 0.5: rho tends to 19, 9 and 3, and exceeds 5 from step 6, from step 7, never."""
    lanes = [{"betas": [0.0, beta2], "lr": 0.01, "eps": 0.0} for beta2 in (0.9, 0.8, 0.5)]
    for number in range(1, 15):
        before, after = toy("radam", lanes, number - 1), toy("radam", lanes, number)
        plain = [after[i] == pytest.approx(before[i] * 0.98, rel=1e-12) for i in range(3)]
        assert plain == [number < 6, number < 7, True], number


def toy(rule: str, lanes: Sequence[Config], steps: int) -> list[float]:
    """Toy-w of CASES.md: one weight, 1 at the start, with the loss w**2, in every lane."""
    row = Row(rule, torch.optim.SGD, lanes)
    state = Lanes(row, torch.ones(len(lanes), dtype=torch.float64))
    for number in range(1, steps + 1):
        state.step(2 * state.params, number)
    found: list[float] = state.params.tolist()
    return found


def test_case_1_rates_of_their_own() -> None:
    assert toy("sgd", [{"lr": 0.1}, {"lr": 0.01}, {"lr": 0.001}], 3) == pytest.approx(
        [0.512, 0.941192, 0.994011992], abs=1e-12
    )


def test_case_4_betas_and_decay_of_their_own() -> None:
    lanes = [
        {"lr": 0.1, "betas": [0.9, 0.999], "weight_decay": 0.0},
        {"lr": 0.1, "betas": [0.5, 0.9], "weight_decay": 0.0},
        {"lr": 0.1, "betas": [0.9, 0.999], "weight_decay": 0.1},
    ]
    # eps, 1e-8 beside a gradient of 2, is in the ninth digit of what the case gives as 0.9
    assert toy("adamw", lanes, 1) == pytest.approx([0.9, 0.9, 0.89], abs=1e-9)
    assert toy("adamw", lanes, 5) == pytest.approx([0.507963659, 0.527070209, 0.469952657], abs=1e-9)


def test_case_13_ten_steps_of_adam() -> None:
    assert toy("adam", [{"lr": 0.1}], 10) == pytest.approx([0.07624915560691209], abs=1e-12)


def test_no_decay_is_exactly_no_decay() -> None:
    lanes = [{"weight_decay": 0.0, "lr": 0.05}, {"weight_decay": 0.3, "lr": 0.05}]
    decoupled, coupled = toy("adamw", lanes, 20), toy("adam", lanes, 20)
    assert decoupled[0] == coupled[0]
    assert decoupled[1] != coupled[1]


def test_without_eps_a_gradient_of_zero_is_torchs_nan() -> None:
    row = Row("adam", torch.optim.Adam, [{"eps": 0.0}, {}])
    lanes = Lanes(row, torch.ones(2, dtype=torch.float64))
    originals = Originals(row, lanes.configs, lanes.params)
    lanes.step(torch.zeros(2, dtype=torch.float64), 1)
    originals.step(torch.zeros(2, dtype=torch.float64))
    assert lanes.params.isnan().tolist() == originals.params.isnan().tolist() == [True, False]
