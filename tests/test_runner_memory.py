"""Memory that does not suffice, and experiments that fail.

Oracle: the same experiment in a run that nobody disturbs. All comparisons are of bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coalesce.configuration import rides
from coalesce.engine.lanes import Lanes
from coalesce.errors import TaskError
from coalesce.runner.listener import Latest
from coalesce.runner.planning import make_plan
from coalesce.runner.run import run
from coalesce.search.base import Trial
from coalesce.search.halving import Halving
from coalesce.search.metric import Metric
from over_time_helpers import ERRORS, Dreaming, Keeper, broken_once, failing_once, outcome, plan_of
from runner_helpers import Picky, Recorder, planned, ran


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    recorder = Keeper()
    run(plan_of(), [recorder])
    assert len(recorder.results) == 9
    return outcome(recorder.results)


@pytest.mark.parametrize(("error", "at"), [("cuda", 1), ("cpu", 9), ("python", 5)])
def test_memory_that_does_not_suffice_halves_the_width(
    monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any], error: str, at: int
) -> None:
    recorder = Keeper()
    calls = broken_once(monkeypatch, at, ERRORS[error])
    run(plan_of(), [recorder])
    # operation by operation the last bit may depend on the width; this network's does not
    assert outcome(recorder.results) == whole
    assert calls[-1] == 2
    assert {r.width for r in recorder.results} <= {3, 2}
    assert recorder.results[-1].width == 2
    assert "narrowed" in recorder.calls
    # there was a snapshot at each boundary: what had been measured was not measured again
    told = [(name, step, metric) for name, step, values in recorder.rows for metric in values]
    assert len(told) == len(set(told))


@pytest.mark.parametrize(("error", "method", "at"), [("cuda", "save", 4), ("cpu", "fill", 5)])
def test_memory_that_does_not_suffice_at_a_boundary(
    monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any], error: str, method: str, at: int
) -> None:
    """While a snapshot is taken, and while lanes are filled."""
    recorder = Keeper()
    calls = failing_once(monkeypatch, method, at, ERRORS[error])
    run(plan_of(), [recorder])
    assert len(calls) > at
    assert outcome(recorder.results) == whole
    assert recorder.calls.count("narrowed") == 1
    assert recorder.results[-1].width == 2


def halved(recorder: Recorder) -> dict[str, Any]:
    """One of five goes on from step 5."""
    plan = plan_of({"seed": range(5)}, steps=10)
    run(plan, [recorder], search=Halving(plan.experiments, Metric("val/loss", "min"), min_steps=5, factor=5))
    assert [r.status for r in recorder.results] == ["stopped"] * 4 + ["finished"]
    return outcome(recorder.results)


def test_memory_that_does_not_suffice_while_experiments_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked at as they were when they were put aside, whatever the last snapshot has of them."""
    once = halved(Recorder())
    # before these nobody is looked at on the test split, put into a lane again, or taken out
    for method, at in (("measure", 1), ("state_dict", 4)):
        with monkeypatch.context() as patched:
            calls = failing_once(patched, method, at, ERRORS["cuda"], lambda *given: given == ("val",))
            recorder = Recorder()
            assert halved(recorder) == once
        assert len(calls) > at
        assert recorder.calls.count("narrowed") == 1


def test_nothing_smaller_than_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Lanes, count: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Lanes, "advance", failing)
    with pytest.raises(torch.OutOfMemoryError):
        run(plan_of(), [])


def test_another_runtime_error_is_not_taken_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_once(monkeypatch, 2, lambda: RuntimeError("a kernel failed"))
    with pytest.raises(RuntimeError, match="a kernel failed"):
        run(plan_of(), [])


def test_memory_that_does_not_suffice_for_a_later_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has grown since the lanes were made, and keeps what it has grown by."""
    params = {"optimizer.lr": [0.01, 0.02, 0.04, 0.08]}
    everyone = plan_of(params).experiments
    empty = make_plan("dreamt", ["optimizer.lr"], [], rides, plan_of(params).trainer, probes=everyone[::3], count=4)
    once, recorder, latest = Recorder(), Recorder(), Latest(empty)
    run(plan_of(params), [once])
    advance = Lanes.advance

    def failing(self: Lanes, count: int) -> None:
        if len(recorder.results) == 2 and self.width == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        advance(self, count)

    monkeypatch.setattr(Lanes, "advance", failing)
    search = Dreaming([[Trial(e)] for e in everyone])
    run(empty, [recorder, latest], search=search, rides=rides)
    assert recorder.calls.count("narrowed") == 1
    assert outcome(recorder.results) == outcome(once.results)
    (planned_cohort,) = latest.plan.cohorts
    assert (planned_cohort.width, planned_cohort.cohort.experiments) == (2, everyone)


def test_a_failed_experiment_stops_the_run_if_that_is_wanted() -> None:
    params = {"task.scale": [1.0, 3.0, 1.5]}
    kept, recorder = Recorder(), Recorder()
    with pytest.raises(TaskError, match="on_error=stop"):
        run(planned(Picky, params, on_error="stop"), [recorder])
    assert [r.status for r in recorder.results] == ["failed"]
    run(planned(Picky, params), [kept])
    assert sorted(r.status for r in kept.results) == ["failed", "finished", "finished"]


@pytest.mark.parametrize("scales", [[3.0, 1.0, 1.5], [3.0, 3.5, 1.0]])
def test_the_first_may_fail(scales: list[float]) -> None:
    done = ran(Picky, {"task.scale": scales})
    alone = ran(Picky, {"task.scale": [s for s in scales if s < 2]})
    assert [r.status for r in done.in_order()] == ["failed" if s > 2 else "finished" for s in scales]
    assert all("no model for" in r.message for r in done.results if r.status == "failed")
    sound = [r for r in done.in_order() if r.status == "finished"]
    assert outcome(sound) == outcome(alone.in_order())
