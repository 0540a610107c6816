"""Law 3: new values of what rides compile nothing. Compilations are counted, not timed.

Oracle: the counter of `compile_graph`, which the last test sees move; and that the new values have their effect.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coalesce.engine import compiling
from coalesce.engine.lanes import Lanes
from coalesce.experiment import Experiment
from engine_helpers import experiment, template_of, train_alone, worst
from test_law_invisible import Small

STEPS = 12


def make(number: int, **changed: Any) -> Experiment:
    """Two sets of values for every float, length and seed that can ride: numbers 0 to 3, and 4 and up."""
    optimizer = {
        "name": "adamw",
        "lr": 1e-3 * (1 + number),
        "betas": [0.8 + 0.02 * number, 0.99 - 0.01 * number],
        "eps": 10.0 ** (-8 + number % 4),
        "weight_decay": 0.03 * number,
        "clip_norm": 0.5 + number,
    }
    schedule = {"name": "cosine", "warmup": number, "warmup_start": 0.01 * number, "final": 0.05 * number}
    task = {"dropout": 0.08 * number, "smoothing": 0.04 * number}
    return experiment(Small, task, optimizer | changed, schedule, STEPS - number % 3, 17, 100 * number)


def check(lanes: Lanes, experiments: list[Experiment]) -> None:
    """Train, and compare with plain loops, so that values that were not taken up would show."""
    for lane, one in enumerate(experiments):
        lanes.fill(lane, one)
    lanes.advance(STEPS)
    evaluated = lanes.evaluate("val")
    assert lanes.read().steps == [one.steps for one in experiments]
    for lane, one in enumerate(experiments):
        alone = train_alone(one)
        # float32 after 12 steps of Adam, whose updates of at most 0.01 carry the rounding of their gradients' ratio
        assert worst(lanes, lane, alone.model) < 1e-5
        data = alone.task.data()
        batch = data.batch("val", torch.arange(data.sizes["val"]))
        expected = alone.task.metrics(alone.model.eval(), batch)
        assert evaluated["loss"][lane] == pytest.approx(expected["loss"].item(), abs=1e-5)


@pytest.fixture(scope="module")
def lanes() -> Lanes:
    lanes = Lanes(template_of([make(i) for i in range(4)]), 4)
    check(lanes, [make(i) for i in range(4)])
    return lanes


def test_refilled_lanes_compile_nothing(lanes: Lanes) -> None:
    before = compiling.compilations()
    check(lanes, [make(i) for i in range(4, 8)])
    assert compiling.compilations() == before


def test_another_sweep_of_other_values_compiles_nothing(lanes: Lanes) -> None:
    """New templates, new stacked tensors: the graph is known by what it computes."""
    before = compiling.compilations()
    again = Lanes(template_of([make(i) for i in range(5, 9)]), 4)
    check(again, [make(i) for i in range(5, 9)])
    assert compiling.compilations() == before


def test_the_counter_moves(lanes: Lanes) -> None:
    before = compiling.compilations()
    Lanes(lanes.template, 3).prepare_evaluation("val")
    assert compiling.compilations() == before + 1


def test_values_of_one_lane_do_not_reach_another(lanes: Lanes) -> None:
    """The same experiment beside others of the first and of the second set."""
    found = []
    for others in (range(1, 4), range(5, 8)):
        for lane, number in enumerate([0, *others]):
            lanes.fill(lane, make(number))
        lanes.advance(STEPS)
        found.append(lanes.state_dict(0))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
