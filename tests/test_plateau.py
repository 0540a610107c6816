"""The plateau: each lane judged by its own metric.

Oracles: `torch.optim.lr_scheduler.ReduceLROnPlateau` told the same metrics; and, for whole sweeps, plain loops with it
in float64, unequal constants in every lane.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

import coalesce
from cli_for_tests import CommandLine
from coalesce.configuration import check_trainer, make_experiments
from coalesce.engine.batches import Batches
from coalesce.engine.lane import hyperparameters, riding_hyperparameters
from coalesce.engine.lanes import Lanes
from coalesce.engine.order import Order
from coalesce.errors import ConfigError
from coalesce.experiment import Experiment
from coalesce.optim.schedules.plateau import Plateau
from engine_helpers import build_alone, experiment, lanes_of, make_optimizer
from runner_helpers import Net, ran
from schedule_oracles import make_plateau

Config = dict[str, Any]


def resolved(**given: Any) -> Config:
    config, problems = Plateau.check({"name": "plateau", "monitor": "val/loss", "every": 10, **given}, "schedule")
    assert problems == []
    return config


def rates(configs: Sequence[Config], lr: Sequence[float], metrics: Sequence[Sequence[float]]) -> list[list[float]]:
    """The learning rate of each lane after each evaluation, computed as the engine does it.

    Args:
        configs: of the lanes, with the same words.
        metrics: evaluation → lane → value.
    """
    riding = [riding_hyperparameters(Plateau, config) for config in configs]
    stacked = {key: torch.stack([lane[key] for lane in riding]) for key in riding[0]}
    state = {name: tensor.expand(len(configs)).clone() for name, tensor in Plateau.init(configs[0]).items()}
    base = torch.tensor(lr, dtype=torch.float64)

    def one(state: Any, value: Any, step: Any, lr: Any, riding: Any) -> Any:
        return Plateau.observe(state, value, step, lr, hyperparameters(Plateau, configs[0], riding))

    found = []
    for number, values in enumerate(metrics, 1):
        step = torch.full((len(configs),), number * 10)
        value = torch.tensor(values, dtype=torch.float64)
        new = vmap(one)(state, value, step, base, stacked)
        assert {n: t.dtype for n, t in new.items()} == {n: t.dtype for n, t in state.items()}
        state = new
        found.append((base * state["factor"]).tolist())
    return found


def torch_rates(config: Config, lr: float, metrics: Sequence[float]) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    scheduler = make_plateau(optimizer, config)
    found = []
    for value in metrics:
        scheduler.step(value)
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize("mode", ["max", "min"])
@settings(max_examples=50)
@given(st.data())
def test_equals_torch_whatever_the_metrics(mode: str, threshold_mode: str, data: st.DataObject) -> None:
    lane = st.fixed_dictionaries(
        {
            "factor": st.floats(0, 0.99),
            "patience": st.integers(0, 3),
            "cooldown": st.integers(0, 3),
            "threshold": st.sampled_from([0.0, 1e-4, 0.3, 2.0]),
            "min_lr": st.sampled_from([0.0, 1e-3, 0.5]),
            "eps": st.sampled_from([0.0, 1e-8, 0.2]),
        }
    )
    configs = [resolved(mode=mode, threshold_mode=threshold_mode, **c) for c in data.draw(st.lists(lane, min_size=1))]
    lr = [data.draw(st.sampled_from([0.0, 0.1, 1.0])) for _ in configs]
    value = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 0.7, 1.0, math.inf, -math.inf, math.nan]) | st.floats(-3, 3)
    metrics = data.draw(st.lists(st.tuples(*[value] * len(configs)), min_size=1, max_size=12))
    found = rates(configs, lr, metrics)
    for number, config in enumerate(configs):
        expected = torch_rates(config, lr[number], [values[number] for values in metrics])
        # torch multiplies the rate, this its factor: a rounding per fall
        assert [row[number] for row in found] == pytest.approx(expected, rel=1e-14, abs=0)


def test_by_hand() -> None:
    """Two bad evaluations are borne, then the rate falls; one more is left out, then two are borne again."""
    config = resolved(mode="min", patience=2, cooldown=1, factor=0.5, threshold=0.0)
    metrics = [1.0, 0.9, 0.9, 0.95, 2.0, 0.9, 0.9, 0.9, 0.9, 0.8]
    found = [row[0] for row in rates([config], [1.0], [[m] for m in metrics])]
    assert found == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_what_is_measured_before_the_warmup_ends_does_not_count() -> None:
    given = {"mode": "min", "patience": 0, "factor": 0.5, "threshold": 0.0}
    found = rates([resolved(warmup=30, **given), resolved(**given)], [1.0, 1.0], [[0.1] * 2, [1.0] * 2, [0.5] * 2] * 2)
    assert [row[0] for row in found] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.25]
    assert [row[1] for row in found] == [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125]


# at the lanes

NOW = {"name": "plateau", "mode": "min", "monitor": "val/loss", "every": 5, "patience": 0, "factor": 0.5}


def three() -> list[Experiment]:
    return [
        experiment(Net, {"double": True}, "sgd", {**NOW, "factor": f}, seed=i) for i, f in enumerate((0.5, 0.2, 0.1))
    ]


def verdict(lanes: Lanes) -> dict[str, list[float]]:
    return {n.removeprefix("verdict/"): t.tolist() for n, t in lanes.state.items() if n.startswith("verdict/")}


@pytest.fixture(scope="module")
def lanes() -> Lanes:
    return lanes_of(three())


def filled(lanes: Lanes) -> Lanes:
    for lane, one in enumerate(three()):
        lanes.fill(lane, one)
    return lanes


def test_only_lanes_that_are_told_of_move(lanes: Lanes) -> None:
    filled(lanes)
    lanes.observe({0: 1.0, 2: 1.0})
    lanes.observe({2: 2.0})
    assert verdict(lanes) == {
        "factor": pytest.approx([1.0, 1.0, 0.1]),
        "best": [1.0, math.inf, 1.0],
        "bad": [0, 0, 0],
        "cooling": [0, 0, 0],
    }
    lanes.observe({})
    lanes.observe({0: math.nan, 1: math.nan})
    assert verdict(lanes)["factor"] == pytest.approx([0.5, 0.2, 0.1])


def test_a_new_experiment_is_judged_anew(lanes: Lanes) -> None:
    filled(lanes).advance(7)
    expected = lanes.state_dict(1)
    filled(lanes)
    for value in (1.0, 2.0, 3.0):
        lanes.observe(dict.fromkeys(range(3), value))
    lanes.advance(7)
    assert verdict(lanes)["factor"] == pytest.approx([0.25, 0.04, 0.01])
    # the verdict has its effect
    judged = lanes.state_dict(1)
    assert not any(torch.equal(judged[name], expected[name]) for name in expected)
    lanes.fill(1, three()[1])
    lanes.advance(7)
    # and none on the next experiment of the lane
    assert verdict(lanes)["factor"] == pytest.approx([0.25, 1.0, 0.01])
    assert verdict(lanes)["best"] == [1.0, math.inf, 1.0]
    anew = lanes.state_dict(1)
    assert all(torch.equal(anew[name], expected[name]) for name in expected)


# whole sweeps


def train_judged(one: Experiment) -> tuple[dict[str, float], int]:
    """A plain loop with `ReduceLROnPlateau`: the last metrics, and how often the rate fell."""
    alone = build_alone(one)
    optimizer, _ = make_optimizer(alone.model, one)
    schedule = one.config["schedule"]
    # keeps the rate that the warm-up multiplies
    held = torch.optim.SGD([torch.zeros(1)], lr=one.config["optimizer"]["lr"])
    judge = make_plateau(held, schedule)
    data, order = alone.task.data(), Order(Batches(one.batch_size, "straddle"))
    falls, metrics = 0, {}
    for step in range(one.steps):
        rise = min(step / schedule["warmup"], 1.0) if schedule["warmup"] else 1.0
        rate = held.param_groups[0]["lr"] * (schedule["warmup_start"] + (1 - schedule["warmup_start"]) * rise)
        for group in optimizer.param_groups:
            group["lr"] = rate
        samples = order.batch(one.seed, step, data.sizes["train"])
        loss: Any = alone.task.loss(alone.model, data.batch("train", samples))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done = step + 1
        if done % schedule["every"] and done < one.steps:
            continue
        with torch.no_grad():
            found = alone.task.metrics(alone.model, data.batch("val", torch.arange(data.sizes["val"])))
        metrics = {"train/loss": loss.item(), **{f"val/{n}": v.item() for n, v in found.items()}}
        if schedule["warmup"] <= done < one.steps:
            before = held.param_groups[0]["lr"]
            judge.step(metrics[schedule["monitor"]])
            falls += held.param_groups[0]["lr"] < before
    return metrics, falls


#: Rates so high that the metric jumps about, and in the third lane away, so that it diverges. Everything that rides
#: differs between the lanes.
PARAMS: dict[str, list[Any]] = {
    "optimizer.lr": [0.12, 0.2, 1e6, 0.15, 0.1, 0.25],
    "schedule.factor": [0.5, 0.3, 0.5, 0.7, 0.1, 0.6],
    "schedule.patience": [0, 1, 0, 0, 0, 2],
    "schedule.threshold": [1e-4, 0.0, 0.0, 0.3, 0.1, 0.01],
    "schedule.cooldown": [0, 2, 0, 1, 0, 0],
    "schedule.min_lr": [0.0, 0.01, 0.0, 0.05, 0.0, 0.0],
    "schedule.every": [5, 10, 5, 5, 15, 5],
    "schedule.warmup": [0, 7, 0, 20, 0, 10],
    "seed": [0, 1, 2, 3, 4, 5],
}
SWEEP: dict[str, Any] = {
    "optimizer": {"name": "sgd", "momentum": 0.5},
    "schedule": {"name": "plateau", "warmup_start": 0.1},
    "steps": 61,
    "batch_size": 8,
}
TRAINER: dict[str, Any] = {"every": 5, "evaluate_every": 60, "monitor": "val/loss", "mode": "min", "compile": False}


def experiments_of(settings: Mapping[str, Any], **changed: Any) -> list[Experiment]:
    base = {"task": {"_target_": "runner_helpers.Net", "double": True}, "seed": 0, **SWEEP, **changed}
    return make_experiments(base, PARAMS, [list(PARAMS)], trainer=check_trainer(settings))[0]


def swept(**settings: Any) -> Any:
    task = {"_target_": "runner_helpers.Net", "double": True}
    return coalesce.sweep(task, PARAMS, zip=[list(PARAMS)], **SWEEP, **{**TRAINER, **settings})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        # two lanes, refilled while their neighbours go on
        {"width": 2, "monitor": "val/error", "mode": "max"},
        {"monitor": "train/loss", "evaluate_every": 100, "stack": False},
    ],
    ids=["stacked", "refilled", "unstacked"],
)
def test_a_sweep_equals_plain_loops(options: Config) -> None:
    frame = swept(**options)
    experiments = experiments_of({**TRAINER, **options})
    assert list(frame["experiment"]) == [one.id for one in experiments]
    assert len(set(frame["cohort"])) == 1
    assert list(frame["status"]) == ["finished", "finished", "diverged", "finished", "finished", "finished"]
    total = 0
    for row, one in zip(frame.to_dict("records"), experiments, strict=True):
        if row["status"] == "diverged":
            continue
        metrics, falls = train_judged(one)
        total += falls
        assert {name: row[name] for name in metrics} == pytest.approx(metrics, rel=1e-10, abs=1e-10)
    # else nothing was tried
    assert total >= 5


@pytest.mark.thorough
def test_compiled_bit_for_bit_whoever_the_neighbours_are() -> None:
    """Law 1, at equal width."""
    whole = ran(Net, PARAMS_OF_RAN, arguments={"double": True}, **SWEEP, **COMPILED)
    turned = ran(Net, PARAMS_OF_RAN, arguments={"double": True}, order=[2, 0, 3, 1], **SWEEP, **COMPILED)
    assert whole.curves() == turned.curves()
    for one in whole.plan.experiments:
        metrics, _ = train_judged(one)
        assert dict(whole.of(one).metrics) == pytest.approx(metrics, rel=1e-10, abs=1e-10)


PARAMS_OF_RAN = {"optimizer.lr": [0.2, 0.1], "schedule.factor": [0.5, 0.1]}
COMPILED = {**TRAINER, "compile": True, "width": 2}


# what belongs to the experiment


def ids(settings: Mapping[str, Any], **schedule: Any) -> list[str]:
    return [one.id for one in experiments_of({**TRAINER, **settings}, schedule={"name": "plateau", **schedule})]


def test_what_is_looked_at_belongs_to_the_id() -> None:
    """A setting of the trainer decides no result unseen: where it stands in for the schedule's, the id shows it."""
    usual = ids({})
    one = experiments_of(TRAINER)[0].config["schedule"]
    assert (one["monitor"], one["mode"]) == ("val/loss", "min")
    for changed in ({"monitor": "val/error"}, {"mode": "max"}):
        assert not set(ids(changed)) & set(usual)
    # how it is run decides nothing, nor does what the schedule says for itself
    assert ids({"width": 3, "evaluate_batch_size": 7}) == usual
    fixed = {"monitor": "val/loss", "mode": "min"}
    assert ids({}, **fixed) == ids({"monitor": "val/error", "mode": "max"}, **fixed) == usual


def test_how_often_it_is_looked_at_belongs_to_the_id() -> None:
    def made(every: int | None, evaluate_every: int) -> Experiment:
        base = {"task": "runner_helpers.Net", "seed": 0, **SWEEP, "schedule": {"name": "plateau", "every": every}}
        (one,) = make_experiments(base, trainer=check_trainer({**TRAINER, "evaluate_every": evaluate_every}))[0]
        return one

    assert made(None, 60).config["schedule"]["every"] == 60
    assert made(None, 60).id == made(60, 5).id == made(60, 60).id
    assert len({made(every, 60).id for every in (None, 5, 10)}) == 3


def test_other_schedules_do_not_depend_on_the_trainer() -> None:
    def made(settings: Mapping[str, Any]) -> list[str]:
        return [
            one.id
            for name in ("constant", "cosine", "multi_step")
            for one in make_experiments(
                {"task": "runner_helpers.Net", "seed": 0, **SWEEP, "schedule": name}, trainer=check_trainer(settings)
            )[0]
        ]

    assert made(TRAINER) == made({**TRAINER, "evaluate_every": 10, "monitor": "val/error", "mode": "max"})


def test_the_command_line_fills_in_what_the_trainer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = CommandLine(tmp_path, monkeypatch, capsys)
    trainer = ("trainer.evaluate_every=200", "trainer.monitor=val/loss", "trainer.mode=min")
    order = cli.order("sweep.params={schedule: [cosine, plateau]}", *trainer)
    cosine, plateau = (one.config["schedule"] for one in order.experiments)
    assert not {"monitor", "mode", "every"} & set(cosine)
    assert [plateau[key] for key in ("monitor", "mode", "every")] == ["val/loss", "min", 200]
    own = cli.order("schedule=plateau", "schedule.every=300", "schedule.mode=max", *trainer).experiments[0]
    assert [own.config["schedule"][key] for key in ("monitor", "mode", "every")] == ["val/loss", "max", 300]
    assert "did you mean 'max'?" in cli.refused("schedule=plateau", "schedule.mode=maxx")


def problems(schedule: Any, optimizer: Any = "sgd", **settings: Any) -> list[str]:
    options = {**SWEEP, "schedule": schedule, "optimizer": optimizer}
    with pytest.raises(ConfigError) as caught:
        coalesce.sweep(Net, **options, **{**TRAINER, **settings})
    return [str(problem) for problem in caught.value.problems]


def test_what_cannot_be_looked_at_is_refused() -> None:
    assert problems({"name": "plateau", "every": 12}) == [
        "schedule.every=12: must be a multiple of trainer.every, which is 5; valid: 5, 10, 15, …; or a smaller "
        "trainer.every"
    ]
    assert problems({"name": "plateau", "monitor": "val/los"}) == [
        "schedule.monitor='val/los': no such metric; valid: train/loss, val/loss, val/error; did you mean 'val/loss'?"
    ]
    assert problems({"name": "plateau", "mode": "least", "every": 0}) == [
        "schedule.mode='least': not a valid choice; valid: max, min, or null",
        "schedule.every=0: out of range; valid: an integer at least 1, or null",
    ]


def test_one_cycle_needs_a_momentum_to_move() -> None:
    (text,) = problems("one_cycle", "adagrad")
    assert text == (
        "schedule.cycle_momentum=True: optimizer 'adagrad' has neither momentum nor betas to move; valid: false, or "
        "another optimizer"
    )
    for rule, moves in (("adagrad", False), ("adam", True), ("rmsprop", True), ("muon", True)):
        schedule = {"name": "one_cycle", "cycle_momentum": moves}
        base = {"task": "runner_helpers.Net", "seed": 0, **SWEEP, "optimizer": rule, "schedule": schedule}
        assert len(make_experiments(base)[0]) == 1
