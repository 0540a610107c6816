"""What every optimiser takes: clipping by value, parameter groups, averaged weights, micro-batches.

Oracle: `train_alone`: a plain loop with real parameter groups of `torch.optim`, `clip_grad_value_`, `clip_grad_norm_`,
`AveragedModel` and `backward` once a micro-batch; unequal values in every lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coalesce
from coalesce.configuration import make_experiments, rides
from coalesce.engine import compiling
from coalesce.engine.lanes import Lanes
from coalesce.engine.plain import Plain
from coalesce.errors import ConfigError
from coalesce.experiment import Experiment, group
from coalesce.optim import OPTIMIZERS
from coalesce.optim.base import Optimizer
from coalesce.optim.common import OPTIONS
from engine_helpers import GRAPHS, Toy, experiment, lanes_of, template_of, train_alone, worst
from optim_rows import BY_RULE
from test_optim_engine import Parts

STEPS = 12
Config = Mapping[str, Any]

#: Name → the options of three lanes.
WAYS: dict[str, list[Config]] = {
    "value": [{"clip_value": c} for c in (0.003, 0.05, 100.0)],
    "value, norm": [{"clip_value": c, "clip_norm": 0.3 * c} for c in (0.01, 0.1, 1.0)],
    "no decay": [{"no_decay": ["*.bias", "*norm*", "scale"]}] * 3,
    "factors": [{"lr_factors": {"tall*": f, "*.weight": 1 - f / 4, "scale": 0.0}} for f in (0.3, 1.0, 2.5)],
    "average": [{"ema": d} for d in (0.0, 0.6, 0.95)],
    "micro-batches": [{"accumulate": 4}] * 3,
    "all": [
        {
            "clip_value": 0.2 + 0.1 * i,
            "clip_norm": 0.1 + 0.3 * i,
            "no_decay": ["*.bias"],
            "lr_factors": {"wide.*": 0.5 + i},
            "ema": 0.5 + 0.2 * i,
            "accumulate": 2,
        }
        for i in range(3)
    ],
}
RULES: dict[str, list[Config]] = {
    "sgd": [{"lr": 0.1 + 0.1 * i, "momentum": 0.4 * i, "weight_decay": 0.1} for i in range(3)],
    "adamw": [{"lr": 0.02 + 0.01 * i, "weight_decay": 0.1 + i} for i in range(3)],
    "muon": [{"lr": 0.02, "adamw_lr": 0.01 + i / 100, "weight_decay": 1.0, "adamw": ["tall.weight"]} for i in range(3)],
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


def three(rule: str, way: str) -> list[Experiment]:
    pairs = zip(RULES[rule], WAYS[way], strict=True)
    warm = [{"name": "constant", "warmup": 4 * i, "warmup_start": 0.2} for i in range(3)]
    return [
        experiment(Parts, {"dtype": "float64"}, {"name": rule, **mine, **options}, warm[i], STEPS, 8, seed=i)
        for i, (mine, options) in enumerate(pairs)
    ]


def check(experiments: list[Experiment], compile: bool = False, tolerance: float = 1e-12) -> None:
    """Lanes and the plain loop for debugging against the oracle; that the options had an effect is seen as well."""
    lanes = lanes_of(experiments, compile=compile)
    lanes.advance(STEPS)
    reading, evaluated = lanes.read(), lanes.evaluate("val")["loss"]
    assert all(reading.alive)
    for lane, one in enumerate(experiments):
        alone = train_alone(one)
        final = alone.model if alone.averaged is None else alone.averaged.module
        assert worst(lanes, lane, final) < tolerance
        assert reading.metrics["loss"][lane] == pytest.approx(alone.losses[-1], abs=tolerance)
        batch = alone.task.data().splits["val"]
        assert evaluated[lane] == pytest.approx(alone.task.metrics(final, batch)["loss"].item(), abs=tolerance)
        raw = lanes.state_dict(lane, raw=True)
        plain = Plain(lanes.template)
        plain.fill(0, one)
        plain.advance(STEPS)
        assert plain.evaluate("val")["loss"][0] == pytest.approx(evaluated[lane], abs=tolerance)
        assert plain.read().metrics["loss"][0] == pytest.approx(reading.metrics["loss"][lane], abs=tolerance)
        for name, value in plain.state_dict(0, raw=True).items():
            torch.testing.assert_close(value, raw[name], rtol=0, atol=tolerance)
            torch.testing.assert_close(alone.model.state_dict()[name], raw[name], rtol=0, atol=tolerance)
            torch.testing.assert_close(plain.state_dict(0)[name], lanes.state_dict(lane)[name], rtol=0, atol=tolerance)


FAST = [("adamw", "all"), ("muon", "all"), ("sgd", "value"), ("sgd", "micro-batches")]
SLOW = [("adamw", way) for way in WAYS if way != "all"] + [("muon", "no decay"), ("muon", "factors")]


@pytest.mark.parametrize(("rule", "way"), [*FAST, *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in SLOW)])
def test_lanes_equal_plain_loops(rule: str, way: str) -> None:
    check(three(rule, way))


@pytest.mark.thorough
def test_compiled_lanes_equal_plain_loops() -> None:
    check(three("adamw", "all"), compile=True)


@pytest.mark.parametrize("way", WAYS)
def test_each_option_matters(way: str) -> None:
    """The oracle with and without: were they equal, the tests above would show nothing."""
    for rule in ("adamw", "sgd"):
        one = three(rule, way)[1]
        without = {k: v for k, v in one.config["optimizer"].items() if k not in OPTIONS}
        other = experiment(Parts, {"dtype": "float64"}, without, one.config["schedule"], STEPS, 8, seed=1)
        with_it, plain = train_alone(one), train_alone(other)
        found = (with_it.averaged.module if with_it.averaged else with_it.model).state_dict()
        distance = max((value - plain.model.state_dict()[n]).abs().max().item() for n, value in found.items())
        # micro-batches with a mean loss and without dropout are the full batch: that is their purpose
        assert distance < 1e-12 if way == "micro-batches" else distance > 1e-4


def test_case_9_norms_are_clipped_with_groups_and_micro_batches_as_they_are_without() -> None:
    """Gradients (3, 4) in the first lane and (0.3, 0.4) in the second, from two halves that are unlike."""
    options = {"name": "sgd", "lr": 1.0, "clip_norm": 1.0, "lr_factors": {"b": 0.5}, "accumulate": 2}
    experiments = [experiment(Halves, {"scale": s}, options, steps=1, batch_size=2) for s in (1.0, 0.1)]
    lanes = lanes_of(experiments)
    lanes.advance(1)
    found = [[1 - lanes.state_dict(lane)[n].item() for n in ("a", "b")] for lane in (0, 1)]
    assert found[0] == pytest.approx([0.6, 0.4], abs=1e-6)
    assert found[1] == pytest.approx([0.3, 0.2], abs=1e-12)


class Halves(coalesce.Task):
    """Two samples whose gradients by (a, b), weighed by ``scale``, are (2, 8) and (4, 0)."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def data(self) -> coalesce.Data:
        return coalesce.Data(train=torch.tensor([[2.0, 8.0], [4.0, 0.0]], dtype=torch.float64))

    def model(self) -> nn.Module:
        model = nn.Module()
        model.a = nn.Parameter(torch.ones((), dtype=torch.float64))
        model.b = nn.Parameter(torch.ones((), dtype=torch.float64))
        return model

    def loss(self, model: Any, batch: Tensor) -> Any:
        loss = (batch @ torch.stack([model.a, model.b])).mean() * self.scale
        return loss, {"first": batch[:, 0].mean(), "large": (batch[:, 0] > 3).all()}

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {}


class Square(Halves):
    """One weight w = 1 with the loss 0.5 w², whatever the samples."""

    def loss(self, model: Any, batch: Tensor) -> Any:
        return 0.5 * model.a.square() + 0 * batch.sum()


def test_case_10_two_micro_batches_are_one_step() -> None:
    lanes = lanes_of([experiment(Square, {}, {"name": "sgd", "lr": 0.1, "accumulate": 2}, steps=1, batch_size=2)])
    lanes.advance(1)
    # 0.9025 would be an update at every micro-batch
    assert lanes.state_dict(0)["a"].item() == pytest.approx(0.9, abs=1e-15)


def test_what_is_recorded_is_the_mean_over_micro_batches() -> None:
    lanes = lanes_of([experiment(Halves, {"scale": 1.0}, {"name": "sgd", "accumulate": 2}, steps=1, batch_size=2)])
    lanes.advance(1)
    assert lanes.read().metrics == {"loss": [7.0], "first": [3.0], "large": [0.5]}


def test_each_micro_batch_has_masks_of_its_own() -> None:
    """As the oracle draws them, numbered on from micro-batch to micro-batch."""
    experiments = [
        experiment(Toy, {"dropout": p, "dtype": "float64"}, {"name": "sgd", "lr": 0.3, "accumulate": 3}, batch_size=9)
        for p in (0.5, 0.2)
    ]
    lanes = lanes_of(experiments)
    lanes.advance(10)
    for lane, one in enumerate(experiments):
        assert worst(lanes, lane, train_alone(one).model) < 1e-12


class Counted(Parts):
    """With statistics that the forward pass keeps."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5)).to(self.dtype)


def test_statistics_go_through_the_micro_batches() -> None:
    options = {"name": "sgd", "lr": 0.1, "accumulate": 2, "ema": 0.7}
    one = experiment(Counted, {"dtype": "float64"}, options, steps=6, batch_size=8)
    lanes = lanes_of([one, one])
    lanes.advance(6)
    alone = train_alone(one)
    assert lanes.state_dict(0)["1.num_batches_tracked"].item() == 12
    assert alone.averaged is not None
    # the bias in front of the normalisation has a gradient of zero in mathematics: left out
    assert worst(lanes, 0, alone.averaged.module, leave_out=("0.bias",)) < 1e-12


def test_an_average_stands_where_its_lane_broke() -> None:
    experiments = [
        experiment(Parts, {"dtype": "float32"}, {"name": "sgd", "lr": lr, "ema": 0.9}, steps=30, batch_size=8)
        for lr in (1e30, 0.1)
    ]
    lanes = lanes_of(experiments)
    lanes.advance(30)
    assert lanes.read().alive == [False, True]
    assert all(torch.isfinite(value).all() for value in lanes.state_dict(0).values())


class Tied(Parts):
    """The last layer is the first one, turned over: one parameter of two names."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Linear(4, 5, bias=False), "head": nn.Linear(4, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model.to(self.dtype)

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        loss: Tensor = (model["head"](x) + model["embed"](x) - y).square().mean()
        return loss


def test_a_tied_parameter_has_two_names() -> None:
    def moved(options: Config) -> Tensor:
        one = experiment(Tied, {"dtype": "float64"}, {"name": "sgd", "lr": 0.1, **options}, steps=1, batch_size=8)
        lanes = lanes_of([one])
        before = lanes.state_dict(0)["embed.weight"]
        lanes.advance(1)
        return lanes.state_dict(0)["embed.weight"] - before

    for name in ("embed.weight", "head.weight"):
        torch.testing.assert_close(moved({"lr_factors": {name: 3.0}}), 3 * moved({}))


# what makes a graph, and what is an error


def test_patterns_and_counts_split_and_floats_ride(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_compiled", {})
    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs, options: module)
    options: list[dict[str, Any]] = [
        {"lr_factors": {"tall*": f, "*.bias": 2 * f}, "ema": e, "clip_value": c, "no_decay": ["*.bias"]}
        for f, e, c in ((0.5, 0.5, 1.0), (2.0, 0.9, 0.1))
    ]
    # the order in which patterns are written says nothing
    options.append({**options[1], "lr_factors": {"*.bias": 0.0, "tall*": 0.0}, "no_decay": ["*.bias", "*.bias"]})
    one, other, third = (
        experiment(Parts, {"dtype": "float64"}, {"name": "adamw", **o}, steps=3, batch_size=8) for o in options
    )
    lanes = Lanes(template_of([one, other]), 2)
    for lane, each in enumerate((one, third)):
        lanes.fill(lane, each)
    lanes.advance(3)
    # all of the third's factors are 0 where they match
    start = Plain(lanes.template)
    start.fill(0, third)
    still = {n for n, v in start.state_dict(0).items() if torch.equal(v, lanes.state_dict(1, raw=True)[n])}
    assert still == {"wide.bias", "norm.bias", "tall.weight", "frozen", "unused"}
    Lanes(template_of([other, third]), 2).prepare_step()
    assert compiling.compilations() == GRAPHS
    unlike: list[dict[str, Any]] = [
        {"no_decay": []},
        {"accumulate": 2},
        {"ema": None},
        {"lr_factors": {"tall*": 1.0}},
        {"clip_value": None},
    ]
    for change in unlike:
        config: dict[str, Any] = {"name": "adamw", **options[0], **change}
        assert len(group([one, experiment(Parts, {"dtype": "float64"}, config, batch_size=8)], rides)) == 2


@pytest.mark.parametrize("key", ["no_decay", "lr_factors", "adamw"])
def test_a_pattern_that_matches_nothing_is_named(key: str) -> None:
    patterns = ["*.bias", "tal.weight", "*nrom*"]
    value = dict.fromkeys(patterns, 2.0) if key == "lr_factors" else patterns
    with pytest.raises(ConfigError) as caught:
        template_of([experiment(Parts, {"dtype": "float64"}, {"name": "muon", key: value}, batch_size=8)])
    assert [(p.key, p.value, p.rule) for p in caught.value.problems] == [
        (f"optimizer.{key}", "*nrom*", "matches no parameter"),
        (f"optimizer.{key}", "tal.weight", "matches no parameter"),
    ]
    assert "8 parameters; the nearest names: tall.weight, " in caught.value.problems[1].valid
    assert "norm." in caught.value.problems[0].valid


@pytest.mark.parametrize(
    ("options", "key", "rule"),
    [
        ({"clip_value": 0}, "clip_value", "out of range"),
        ({"ema": 1.0}, "ema", "out of range"),
        ({"accumulate": 0}, "accumulate", "out of range"),
        ({"accumulate": 1.5}, "accumulate", "must be an integer"),
        ({"accumulate": True}, "accumulate", "must be an integer"),
        ({"no_decay": "*.bias"}, "no_decay", "must be a list"),
        ({"no_decay": [3]}, "no_decay.0", "must be text; put it into quotes"),
        ({"no_decay": [""]}, "no_decay.0", "must be a name, or a pattern"),
        ({"lr_factors": ["*.bias"]}, "lr_factors", "must be a mapping"),
        ({"lr_factors": {"*.bias": -1}}, "lr_factors.*.bias", "out of range"),
        ({"lr_factors": {"*.bias": "fast"}}, "lr_factors.*.bias", "must be a number"),
        ({"accumulate": 3}, "accumulate", "must divide batch_size=8 into equal micro-batches"),
    ],
)
def test_wrong_values_are_told(options: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_experiments(base(options))
    (problem,) = caught.value.problems
    assert (problem.key, problem.rule) == (f"optimizer.{key}", rule)
    assert problem.valid


def base(options: Config) -> dict[str, Any]:
    task = {"_target_": f"{Parts.__module__}.Parts"}
    optimizer = {"name": "adamw", **options}
    return {"task": task, "optimizer": optimizer, "schedule": "constant", "steps": 5, "batch_size": 8, "seed": 0}


def test_numbers_become_floats_and_patterns_an_order() -> None:
    options = {"no_decay": ["b", "a", "b"], "lr_factors": {"z": 1, "a": "1e-3"}, "accumulate": "4", "ema": "0.5"}
    config = make_experiments(base(options))[0][0].config["optimizer"]
    assert config["no_decay"] == ["a", "b"]
    assert list(config["lr_factors"].items()) == [("a", 1e-3), ("z", 1.0)]
    assert isinstance(config["lr_factors"]["z"], float)
    assert (config["accumulate"], config["ema"]) == (4, 0.5)


def test_an_experiment_without_options_keeps_its_id() -> None:
    (old,) = make_experiments(base({}))[0]
    bare = {k: v for k, v in old.config["optimizer"].items() if k not in (*Optimizer.introduced, "amsgrad")}
    assert old.id == Experiment({**old.config, "optimizer": bare}, introduced=old.introduced).id
    for key, spec in OPTIONS.items():
        default = list(spec.default) if isinstance(spec.default, tuple) else spec.default
        # clip_norm was there from the start
        assert key == "clip_norm" or Optimizer.introduced[key] == default
    ids = {make_experiments(base(o))[0][0].id for way in WAYS.values() for o in way}
    assert len({*ids, old.id}) == len(ids) + 1


def test_every_rule_takes_every_option() -> None:
    assert set(BY_RULE) == set(OPTIMIZERS)
    for rule in OPTIMIZERS.values():
        assert OPTIONS.items() <= rule.hyper.items()
        assert Optimizer.introduced.items() <= rule.introduced.items()
        assert {*rule.rates, *rule.decays} <= set(rule.hyper)
