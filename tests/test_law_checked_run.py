"""Law 7 in a run: which cohorts are checked, when, and what it costs.

Oracle: counts by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from checked_helpers import FAULT, usual_lanes
from coalesce.engine.check import check
from coalesce.engine.lanes import Lanes
from coalesce.engine.plain import Plain
from coalesce.errors import TaskError
from runner_helpers import Picky, Recorder, ToyW, planned, ran


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


#: For `ToyW`, which has one sample and one metric more.
TOY: dict[str, Any] = {"batch_size": 1, "monitor": "train/loss"}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...]]]:
    """(width, splits) of each check that the runner makes."""
    from coalesce.runner import cohort

    calls: list[tuple[int, tuple[str, ...]]] = []

    def noted(lanes: Lanes, splits: Any) -> None:
        calls.append((lanes.width, tuple(splits)))
        check(lanes, splits)

    monkeypatch.setattr(cohort, "check", noted)
    return calls


def test_a_run_checks_each_cohort_before_it_trains(checked: list[Any]) -> None:
    told = ran(ToyW, {"task.blind": [-1.0, -2.0], "task.splits": ["train val", "train"]}, **TOY).told
    assert checked == [(2, ("val",)), (2, ())]
    assert told.calls.count("checking") == 2
    first = told.calls.index("checking")
    assert "compiling" in told.calls[:first]
    assert not {"metrics", "advanced", "ended"} & set(told.calls[:first])


@pytest.mark.parametrize("trainer", [{"check": False}, {"stack": False}], ids=str)
def test_a_run_without_check(checked: list[Any], trainer: dict[str, Any]) -> None:
    assert "checking" not in ran(ToyW, **trainer, **TOY).told.calls
    assert not checked


def test_a_fault_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, recorder = planned(ToyW, **TOY), Recorder()
    advance = Lanes.advance

    def broken(self: Lanes, count: int) -> None:
        advance(self, count)
        self.state["slot/momentum/w"].mul_(2)

    monkeypatch.setattr(Lanes, "advance", broken)
    from coalesce.runner.run import run

    with pytest.raises(TaskError, match=rf"{FAULT}(?s:.)*: w \(momentum\)"):
        run(plan, [recorder])
    assert recorder.calls[-2:] == ["checking", "closed"]
    assert not recorder.results


def test_an_experiment_that_cannot_be_built_costs_its_own_row(checked: list[Any]) -> None:
    # the farthest from the first cannot be built, and the next one is taken
    results = ran(Picky, {"task.scale": [1.0, 1.5, 3.0]}).in_order()
    assert [r.status for r in results] == ["finished", "finished", "failed"]
    assert len(checked) == 1


def test_it_costs_a_few_plain_steps_and_one_piece_of_each_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = usual_lanes("sgd", 2)
    monkeypatch.setattr(lanes._evaluations, "batch_size", 2)
    steps: list[int] = []
    pieces: list[Any] = []
    advance, evaluate = Plain.advance, Plain.evaluate_samples

    def advanced(self: Plain, count: int) -> None:
        steps.append(count)
        advance(self, count)

    def evaluated(self: Plain, *piece: Any) -> dict[str, Tensor]:
        pieces.append(piece)
        return evaluate(self, *piece)

    monkeypatch.setattr(Plain, "advance", advanced)
    monkeypatch.setattr(Plain, "evaluate_samples", evaluated)
    check(lanes, ["val"])
    # two experiments: two steps to find a rate, two to compare
    assert sum(steps) <= 2 * (2 + 2)
    # nine samples by two: the first piece, and the shorter last one, which has a graph of its own
    assert pieces == [("val", 0, 2), ("val", 8, 9)] * 2
