"""Schedules in training: one table of schedules, one list of laws.

Oracle: plain loops with `torch.optim` and `torch.optim.lr_scheduler` in float64 (`train_alone`), unequal constants,
lengths, rates and steps in every lane; and the counter of compiled graphs. A new schedule is one row of `LANES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from coalesce.configuration import make_experiments, rides
from coalesce.engine import compiling
from coalesce.engine.lanes import Lanes
from coalesce.experiment import Experiment, group
from coalesce.optim import SCHEDULES
from engine_helpers import GRAPHS, experiment, lanes_of, template_of, train_alone, worst
from runner_helpers import Net

Config = dict[str, Any]

#: schedule → what does not ride, and constants and lengths of the lanes: three, and a fourth that comes later.
LANES: dict[str, tuple[Config, Sequence[Config]]] = {
    "constant": ({}, [{}, {}, {}, {}]),
    "linear": ({"length": 25}, [{}, {"start": 0.5, "length": 300}, {"start": 0.3, "final": 1.0}, {"final": 0.5}]),
    "polynomial": ({}, [{"power": 2.0}, {"power": 0.5, "final": 0.1}, {"power": 0.0}, {"power": 3.0}]),
    "exponential": ({}, [{"gamma": 0.97}, {"gamma": 0.9}, {"gamma": 1.01}, {"gamma": 0.95}]),
    "step": ({}, [{"step_size": 15}, {"step_size": 7, "gamma": 0.8}, {"step_size": 999}, {"step_size": 5}]),
    "multi_step": ({}, [{"milestones": m, "gamma": 0.6} for m in ([10, 25], [30, 1], [15, 15], [7, 999])]),
    "cosine": ({}, [{}, {"final": 0.3}, {"final": 1.0}, {"final": 0.1}]),
    "cosine_restarts": (
        {},
        [{"period": 10}, {"period": 7, "growth": 2}, {"period": 3, "growth": 3, "final": 0.2}, {"period": 999}],
    ),
    "one_cycle": (
        {"three_phase": False},
        [
            {},
            {"pct_start": 0.5, "div_factor": 5.0, "base_momentum": 0.3, "max_momentum": 0.6},
            {"pct_start": 0.1, "final_div_factor": 3.0, "max_momentum": 0.99},
            {"div_factor": 2.0},
        ],
    ),
    "wsd": ({"shape": "sqrt"}, [{"decay": 15}, {"decay": 0}, {"decay": 999, "final": 0.1}, {"decay": 9}]),
    "plateau": ({"mode": "min", "monitor": "val/loss", "every": 5}, [{}, {"factor": 0.5}, {"factor": 0.2}, {}]),
}
OPTIMIZERS: dict[str, Config] = {
    "sgd": {"name": "sgd", "momentum": 0.4},
    "adamw": {"name": "adamw", "weight_decay": 0.1},
}


def make(name: str, number: int, optimizer: str, longer: int = 1) -> Experiment:
    """The experiment of a lane, so many times longer than in the quick tests."""
    static, lanes = LANES[name]
    rising = {"warmup": (0, 3, 7, 9)[number] * longer, "warmup_start": 0.01 + 0.2 * number}
    rate = (0.05 if optimizer == "sgd" else 0.01) * (1 + number)
    return experiment(
        Net,
        {"double": True, "hidden": 5},
        {**OPTIMIZERS[optimizer], "lr": rate},
        {"name": name, **rising, **static, **lanes[number]},
        steps=(40, 37, 44, 25)[number] * longer,
        seed=number,
    )


def check(lanes: Lanes, lane: int, one: Experiment) -> None:
    assert worst(lanes, lane, train_alone(one).model) < 1e-10


def test_every_schedule_has_a_row() -> None:
    assert list(LANES) == list(SCHEDULES)


#: Those that read no more than the step and floats go the way of `cosine_restarts`: all of them in CI.
PLAIN = ("constant", "linear", "polynomial", "exponential", "step", "cosine")


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(pytest.param(name, "sgd", marks=[pytest.mark.thorough] if name in PLAIN else []) for name in LANES),
        ("one_cycle", "adamw"),
    ],
)
def test_lanes_equal_plain_loops_and_new_values_compile_nothing(
    name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncompiled(module: fx.GraphModule, inputs: Sequence[Tensor], options: Any) -> fx.GraphModule:
        return module

    # what would be compiled is counted, and run operation by operation
    monkeypatch.setattr(torch._inductor, "compile", uncompiled)
    monkeypatch.setattr(compiling, "_compiled", {})
    experiments = [make(name, number, optimizer) for number in range(4)]
    lanes = lanes_of(experiments[:3], compile=True)
    lanes.advance(44)
    assert compiling.compilations() == GRAPHS
    for lane in range(3):
        check(lanes, lane, experiments[lane])
    # another experiment in a lane that is over, beside two that stand still
    lanes.fill(1, experiments[3])
    lanes.advance(25)
    check(lanes, 1, experiments[3])
    if name in ("multi_step", "one_cycle"):
        # another template, which had other values: half of this test's time, so not for every schedule
        Lanes(template_of([experiments[3], experiments[1], experiments[0]]), 3).prepare_step()
    assert compiling.compilations() == GRAPHS, "a value is written into the graph"


def test_milestones_ride_in_lists_of_one_length() -> None:
    base = {"task": "runner_helpers.Net", "optimizer": "sgd", "schedule": "multi_step", "steps": 9, "batch_size": 8}
    values = [[10, 20], [30.0, 40], [5], [7, 7]]
    experiments, _ = make_experiments({**base, "seed": 0}, {"schedule.milestones": values})
    assert [one.values["schedule.milestones"] for one in experiments] == [[10, 20], [30, 40], [5], [7, 7]]
    assert [len(cohort.experiments) for cohort in group(experiments, rides)] == [3, 1]
    (one,) = make_experiments({**base, "seed": 0}, {"schedule.milestones.1": [99]})[0]
    assert one.config["schedule"]["milestones"] == [1000, 99]


def test_static_words_and_numbers_of_items_split() -> None:
    pairs: list[tuple[str, Config, Config]] = [
        ("multi_step", {"milestones": [1, 2]}, {"milestones": [1, 2, 3]}),
        ("linear", {"length": 5}, {"length": None}),
        ("one_cycle", {"anneal_strategy": "cos"}, {"anneal_strategy": "linear"}),
        ("one_cycle", {"cycle_momentum": True}, {"cycle_momentum": False}),
        ("wsd", {"shape": "linear"}, {"shape": "sqrt"}),
    ]
    for name, mine, theirs in pairs:
        both = [experiment(Net, optimizer="sgd", schedule={"name": name, **c}) for c in (mine, theirs)]
        with pytest.raises(AssertionError, match="2 cohorts"):
            template_of(both)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough) for name in ("cosine_restarts", "one_cycle")],
)
def test_compiled_lanes_equal_plain_loops_whoever_their_neighbours_are(name: str) -> None:
    experiments = [make(name, number, "adamw", longer=3) for number in range(4)]
    found = []
    for numbers in ((0, 1), (3, 0)):
        lanes = lanes_of([experiments[number] for number in numbers], compile=True)
        lanes.advance(132)
        for lane, number in enumerate(numbers):
            check(lanes, lane, experiments[number])
        found.append(lanes.state_dict(numbers.index(0)))
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
