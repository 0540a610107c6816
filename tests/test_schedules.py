"""Schedules: one table of schedules, one list of laws.

Oracles: `torch.optim.lr_scheduler` over the whole run, with unequal constants and lengths in every lane
(`schedule_oracles.py`); and the formulas of `schedule_rows.py`, also where torch has none. A new schedule is one row
there. What an evaluation does is in `test_plateau.py`, schedules in training in `test_schedules_train.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from coalesce.engine.lane import hyperparameters, riding_hyperparameters
from coalesce.optim import SCHEDULES
from coalesce.optim.base import Schedule
from schedule_oracles import ORIGINALS, make_scheduler
from schedule_rows import ROWS, RUNS, Config, unit

#: Steps and configuration.
Lane = tuple[int, Config]
RATE = 0.3
rows = pytest.mark.parametrize("name", ROWS)


def test_every_schedule_has_a_row() -> None:
    assert list(ROWS) == list(SCHEDULES) == list(ORIGINALS)


def resolved(name: str, given: Mapping[str, Any]) -> Config:
    config, problems = SCHEDULES[name].check({"name": name, **given}, "schedule")
    assert problems == []
    return config


def lanes_of(name: str, only: bool = False) -> list[Lane]:
    """Steps and resolved configuration of every lane of a row.

    Args:
        only: with those that torch has no word for.
    """
    lanes = []
    for steps, warmup, warmup_start in RUNS:
        for constants in [*ROWS[name].constants, *(ROWS[name].only if only else ())]:
            lanes.append((steps, resolved(name, {"warmup": warmup, "warmup_start": warmup_start, **constants})))
    return lanes


def computed(name: str, lanes: Sequence[Lane], count: int, first: int = 0, what: str = "factor") -> Tensor:
    """(count, K): the factors, or the momenta, of some steps, computed as the engine does it.

    Lanes whose words, switches and numbers of items differ would not share a graph, and are computed apart.
    """
    rule: type[Schedule] = SCHEDULES[name]
    riding = [riding_hyperparameters(rule, config) for _, config in lanes]
    groups: dict[str, list[int]] = {}
    for lane, (_, config) in enumerate(lanes):
        static = {key: value for key, value in config.items() if isinstance(value, bool | str | None)}
        groups.setdefault(repr([static, list(riding[lane])]), []).append(lane)
    found = torch.empty(count, len(lanes), dtype=torch.float64)
    clock = torch.arange(first, first + count)
    for members in groups.values():
        static = lanes[members[0]][1]
        stacked = {key: torch.stack([riding[lane][key] for lane in members]) for key in riding[members[0]]}
        lengths = torch.tensor([lanes[lane][0] for lane in members])

        def one(step: Tensor, steps: Tensor, riding: Mapping[str, Tensor], static: Config = static) -> Any:
            hyper = hyperparameters(rule, static, riding)
            if what == "momentum":
                return rule.momentum(step, steps, hyper)
            return rule.factor(step, steps, hyper, rule.init(static))

        values = vmap(vmap(one, in_dims=(None, 0, 0)), in_dims=(0, None, None))(clock, lengths, stacked)
        assert values.dtype == torch.float64
        found[:, members] = values
    return found


def original(steps: int, config: Config, kind: str = "sgd") -> tuple[list[float], list[float]]:
    """What torch's schedulers make of the rate, and of the momentum, at each step."""
    weight = [torch.zeros(1, requires_grad=True)]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(weight, lr=RATE, momentum=0.1)
    if kind == "adam":
        optimizer = torch.optim.Adam(weight, lr=RATE, betas=(0.1, 0.2))
    scheduler = make_scheduler(optimizer, config, steps)
    rates, momenta = [], []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        rates.append(float(group["lr"]))
        momenta.append(group["momentum"] if kind == "sgd" else group["betas"][0])
        optimizer.step()
        scheduler.step()
    return rates, momenta


def torch_can(steps: int, config: Config) -> bool:
    """Whether torch has the same. Its OneCycleLR divides by zero where a phase has no length, and behind a warm-up it
    jumps where it begins with the fall."""
    if config["name"] != "one_cycle":
        return True
    return steps - config["warmup"] > 1 and (config["pct_start"] > 0 or config["warmup"] == 0)


def formula(name: str, steps: int, config: Config, step: int) -> float:
    """The factor, in Python's floats."""
    warmup, start = config["warmup"], config["warmup_start"]
    shape = ROWS[name].formula(config, max(step - warmup, 0), max(steps - warmup, 1))
    return float(start + (1 - start) * step / warmup) * shape if step < warmup else shape


@rows
def test_equals_torch_over_the_run(name: str) -> None:
    lanes = [lane for lane in lanes_of(name) if torch_can(*lane)]
    found = RATE * computed(name, lanes, max(steps for steps, _ in lanes))
    for lane, (steps, config) in enumerate(lanes):
        expected = torch.tensor(original(steps, config)[0], dtype=torch.float64)
        # torch multiplies step by step, and so collects a rounding for each
        torch.testing.assert_close(found[:steps, lane], expected, rtol=1e-13, atol=1e-15, msg=f"{steps}, {config}")


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_one_cycle_moves_the_momentum_as_torch_does(kind: str) -> None:
    lanes = [lane for lane in lanes_of("one_cycle") if torch_can(*lane)]
    found = computed("one_cycle", lanes, 200, what="momentum")
    for lane, (steps, config) in enumerate(lanes):
        expected = torch.tensor(original(steps, config, kind)[1], dtype=torch.float64)
        torch.testing.assert_close(found[:steps, lane], expected, rtol=1e-13, atol=0, msg=f"{steps} steps of {config}")


@rows
def test_equals_its_formula_within_and_beyond_the_run(name: str) -> None:
    lanes = lanes_of(name, only=True)
    found = computed(name, lanes, max(steps for steps, _ in lanes) + 20)
    for lane, (steps, config) in enumerate(lanes):
        expected = [formula(name, steps, config, step) for step in range(len(found))]
        # relative for those that rise, or fall to next to nothing
        assert found[:, lane].tolist() == pytest.approx(expected, rel=1e-13, abs=1e-15), config


@rows
@given(st.data())
def test_any_run_equals_its_formula(name: str, data: st.DataObject) -> None:
    steps, warmup = data.draw(st.integers(1, 2**40)), data.draw(st.integers(0, 2**40))
    given = {key: data.draw(strategy, label=key) for key, strategy in ROWS[name].drawn.items()}
    if name == "plateau":
        given = dict(ROWS[name].constants[0])
    config = resolved(name, {"warmup": warmup, "warmup_start": data.draw(unit), **given})
    step = data.draw(st.integers(0, 2 * steps))
    found = computed(name, [(steps, config)], 1, step).item()
    # a phase of 2**40 steps that begins at 2**39.3: the place in it is known to 1e-12 or so of a cosine's argument
    assert found == pytest.approx(formula(name, steps, config, step), rel=1e-9, abs=1e-11)
    assert 0 <= found <= 1 + 1e-15


@rows
@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_factors_are_float64_whatever_the_default(name: str, default: torch.dtype) -> None:
    lanes = lanes_of(name)
    expected = computed(name, lanes, 200)
    torch.set_default_dtype(default)
    assert computed(name, lanes, 200).equal(expected)


@rows
def test_a_neighbour_changes_nothing(name: str) -> None:
    lanes = lanes_of(name)
    usual = computed(name, lanes, 100)
    for healthy in (0, 1):
        changed = list(lanes)
        for sick in range(1 - healthy, len(lanes), 2):
            config = {key: math.nan if isinstance(value, float) else value for key, value in lanes[sick][1].items()}
            changed[sick] = 3, config
        assert computed(name, changed, 100)[:, healthy::2].equal(usual[:, healthy::2])


@rows
def test_without_warmup_the_start_does_not_matter(name: str) -> None:
    runs = [(50, {**lanes_of(name)[0][1], "warmup": 0, "warmup_start": start}) for start in (0.0, 0.5, 1.0)]
    found = computed(name, runs, 50)
    assert (found == found[:, :1]).all()
    assert found[0, 0] == pytest.approx(formula(name, 50, runs[0][1], 0), rel=1e-15)


@rows
def test_a_warmup_longer_than_the_run_only_rises(name: str) -> None:
    config = {**lanes_of(name)[0][1], "warmup": 100, "warmup_start": 0.0}
    found = computed(name, [(10, config)], 10)
    first = ROWS[name].formula(config, 0, 1)
    assert found[:, 0].tolist() == pytest.approx([first * step / 100 for step in range(10)], abs=1e-15)


@rows
def test_the_warmup_ends_where_the_schedule_begins(name: str) -> None:
    """No jump: the step after the warm-up has the rate that the schedule alone begins with."""
    for _, config in lanes_of(name, only=True)[: len(ROWS[name].constants)]:
        alone = computed(name, [(90, {**config, "warmup": 0})], 90)
        behind = computed(name, [(100, {**config, "warmup": 10, "warmup_start": 0.0})], 100)
        # the last bit of a power or a cosine depends on the place in the processor's vector
        torch.testing.assert_close(behind[10:], alone, rtol=1e-15, atol=0)
        assert behind[9] == pytest.approx(0.9 * alone[0].item(), rel=1e-15)


def test_by_hand() -> None:
    """The places where schedules bend, to the bit."""

    def factors(name: str, steps: int, count: int, **given: Any) -> list[float]:
        return computed(name, [(steps, resolved(name, given))], count)[:, 0].tolist()

    assert factors("cosine", 6, 9, warmup=2, warmup_start=0.5, final=0.2) == pytest.approx(
        [0.5, 0.75, 1.0, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2, 0.2, 0.2], abs=1e-15
    )
    assert factors("linear", 9, 6, length=4) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert factors("polynomial", 2, 4, power=2.0) == [1.0, 0.25, 0.0, 0.0]
    assert factors("exponential", 9, 4, gamma=0.5) == [1.0, 0.5, 0.25, 0.125]
    assert factors("step", 9, 5, step_size=2, gamma=0.5) == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert factors("multi_step", 9, 5, milestones=[3, 1, 1], gamma=0.5) == [1.0, 0.25, 0.25, 0.125, 0.125]
    assert factors("multi_step", 9, 4, milestones=[1], gamma=0.5, warmup=1, warmup_start=0.5) == [0.5, 1.0, 0.5, 0.5]
    assert factors("cosine_restarts", 9, 8, period=2, growth=2.0) == pytest.approx(
        [1.0, 0.5, 1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 1.0, (1 + math.cos(math.pi / 8)) / 2], abs=1e-15
    )
    one_cycle = {"pct_start": 0.5, "div_factor": 4.0, "final_div_factor": 2.0, "anneal_strategy": "linear"}
    assert factors("one_cycle", 6, 8, **one_cycle) == pytest.approx(
        [0.25, 0.625, 1.0, 17 / 24, 10 / 24, 0.125, 0.125, 0.125], abs=1e-15
    )
    assert factors("wsd", 6, 7, decay=2) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    assert factors("wsd", 5, 6, decay=4, shape="sqrt") == pytest.approx(
        [1.0, 1.0, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0.0], abs=1e-15
    )
    # longer than the training: it fills it
    assert factors("wsd", 4, 5, decay=9) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert factors("wsd", 4, 5, decay=9, warmup=2, warmup_start=0.0) == [0.0, 0.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("growth", range(2, 12))
@pytest.mark.parametrize("period", [1, 3, 1000])
def test_cycles_restart_on_the_step(growth: int, period: int) -> None:
    """Where a quotient of logarithms is a whole number, as long as a training may last."""
    config, begin = resolved("cosine_restarts", {"period": period, "growth": growth}), 0
    for cycle in range(40):
        if begin > 2**40:
            break
        assert computed("cosine_restarts", [(2**41, config)], 1, begin).item() == 1, (cycle, begin)
        begin += period * growth**cycle
        if period > 1:
            assert computed("cosine_restarts", [(2**41, config)], 1, begin - 1).item() < 0.5


@pytest.mark.parametrize("growth", [1 + 1e-15, 1 + 1e-9, 1 + 1e-6])
def test_cycles_that_hardly_grow(growth: float) -> None:
    even = computed("cosine_restarts", [(9, resolved("cosine_restarts", {"period": 10}))], 95)
    grown = computed("cosine_restarts", [(9, resolved("cosine_restarts", {"period": 10, "growth": growth}))], 95)
    apart = torch.minimum((grown - even).abs(), grown + (1 - even))
    # where a cycle of a hair more than 10 steps has not quite ended
    assert apart.max() < 1e-3


INTEGERS = "a list of integers, each at least 1"
WRONG: list[tuple[str, Config, str, str, str]] = [
    ("cosine", {"warmup": -1}, "warmup", "out of range", "an integer at least 0"),
    ("cosine", {"warmup": 0.5}, "warmup", "must be a whole number", "an integer at least 0"),
    ("cosine", {"warmup_start": 1.5}, "warmup_start", "out of range", "a finite number at least 0 and at most 1"),
    ("cosine", {"final": math.nan}, "final", "must be finite", "a finite number at least 0 and at most 1"),
    ("cosine", {"length": 0}, "length", "out of range", "an integer at least 1, or null"),
    ("step", {"step_size": 0}, "step_size", "out of range", "an integer at least 1"),
    ("step", {"gamma": 0.0}, "gamma", "out of range", "a finite number above 0"),
    (
        "multi_step",
        {"milestones": []},
        "milestones",
        "must be a list of at least 1 number",
        INTEGERS,
    ),
    (
        "multi_step",
        {"milestones": 30},
        "milestones",
        "must be a list of at least 1 number",
        INTEGERS,
    ),
    ("multi_step", {"milestones": [30, 0]}, "milestones.1", "out of range", INTEGERS),
    (
        "multi_step",
        {"milestones": [2.5]},
        "milestones.0",
        "must be a whole number",
        INTEGERS,
    ),
    ("cosine_restarts", {"growth": 0.5}, "growth", "out of range", "a finite number at least 1"),
    ("one_cycle", {"anneal_strategy": "cosine"}, "anneal_strategy", "not a valid choice", "cos, linear"),
    ("one_cycle", {"base_momentum": 1.0}, "base_momentum", "out of range", "a finite number at least 0 and below 1"),
    (
        "one_cycle",
        {"three_phase": True, "pct_start": 0.6},
        "pct_start",
        "must be at most 0.5 with schedule.three_phase=true, which rises and falls for as long",
        "0 to 0.5",
    ),
    ("wsd", {"shape": 1}, "shape", "not a valid choice", "linear, cosine, sqrt"),
    ("plateau", {"mode": "least"}, "mode", "not a valid choice", "max, min, or null"),
    ("plateau", {"monitor": " "}, "monitor", "must be text, not empty", "text, or null"),
    ("plateau", {"factor": 1.0}, "factor", "out of range", "a finite number at least 0 and below 1"),
]


@pytest.mark.parametrize(("name", "given", "key", "rule", "valid"), WRONG, ids=[f"{w[0]}-{w[2]}" for w in WRONG])
def test_wrong_constants_are_refused(name: str, given: Config, key: str, rule: str, valid: str) -> None:
    (problem,) = SCHEDULES[name].check({"name": name, **given}, "schedule")[1]
    assert (problem.key, problem.rule, problem.valid) == (f"schedule.{key}", rule, valid)


def test_unknown_constants_get_the_nearest() -> None:
    (problem,) = SCHEDULES["cosine"].check({"name": "cosine", "finale": 0.1}, "schedule")[1]
    assert problem.rule == "unknown key for schedule 'cosine'"
    assert problem.valid == "warmup, warmup_start, final, length"
    assert problem.nearest == "final"
    (problem,) = SCHEDULES["wsd"].check({"name": "wsd", "shape": "linaer"}, "schedule")[1]
    assert problem.nearest == "linear"
