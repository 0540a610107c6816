"""Lanes over time: runs that are interrupted and go on, in any order of the queue.

Oracle: the same experiment in a run that nobody disturbs. All comparisons are of bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from coalesce.experiment import Experiment
from coalesce.runner.listener import Progress, Result
from coalesce.runner.run import Begun, run
from coalesce.runner.snapshot import Snapshot
from coalesce.search.base import Listed, Report, Verdict
from over_time_helpers import USUAL, Keeper, outcome, plan_of
from runner_helpers import Net, Ran, Recorder, ran
from thorough import kept


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    recorder = Keeper()
    run(plan_of(), [recorder])
    assert len(recorder.results) == 9
    return outcome(recorder.results)


@pytest.mark.parametrize(
    ("at", "early"), kept([(1, False), (6, False), (2, True), (9, True)], of=[(1, False), (9, True)])
)
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(whole: dict[str, Any], at: int, early: bool) -> None:
    first = Keeper(at, early)
    with pytest.raises(KeyboardInterrupt):
        run(plan_of(), [first])
    second = Keeper()
    begun = Begun(first.results, first.snapshots[-1])
    results = run(plan_of(), [second], begun=begun)
    assert [r.experiment.id for r in results[: len(first.results)]] == [r.experiment.id for r in first.results]
    assert outcome(first.results) | outcome(second.results) == whole
    assert len(first.results) + len(second.results) == 9, "one was trained twice"


class Watcher(Keeper):
    """Writes down where the run stood at each boundary, and what it was told of the process before."""

    def __init__(self, at: int = -1):
        super().__init__(at)
        self.seen: list[tuple[int, int, float | None]] = []
        self.before: list[str] = []

    def resumed(self, results: Sequence[Result]) -> None:
        self.before = [result.experiment.id for result in results]

    def advanced(self, progress: Progress) -> None:
        # its value: two may be equally good
        self.seen.append((progress.steps, progress.experiments, progress.best and progress.best[0]))


def test_the_display_goes_on_where_it_was() -> None:
    once, first, second = Watcher(), Watcher(6), Watcher()
    run(plan_of(), [once])
    with pytest.raises(KeyboardInterrupt):
        run(plan_of(), [first])
    run(plan_of(), [second], begun=Begun(first.results, first.snapshots[-1]))
    assert first.results
    assert first.seen + second.seen == once.seen
    assert second.before == [r.experiment.id for r in first.results]
    assert once.before == []


class Listening(Listed):
    """Writes down who was told of together."""

    def __init__(self, experiments: Sequence[Experiment]):
        super().__init__(experiments)
        self.calls: list[list[tuple[str, int]]] = []

    def tell(self, reports: Sequence[Report]) -> Mapping[str, Verdict]:
        self.calls.append([(report.experiment.id, report.step) for report in reports])
        return {}


def test_a_search_is_told_in_the_same_calls_though_boundaries_come_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that are no multiples of `every`: a lane at its end waits for the boundary that it would have had."""
    # a boundary after every step
    monkeypatch.setattr("coalesce.runner.cohort.POLL_S", 0.0)
    calls = []
    for early in (False, True):
        plan = plan_of()
        search = Listening(plan.experiments)
        run(plan, [Keeper(early=early)], search=search)
        calls.append(search.calls)
    assert calls[0] == calls[1]


def test_what_was_told_after_the_last_snapshot_is_told_again_and_equal() -> None:
    once, first, second = Keeper(), Keeper(5), Keeper()
    run(plan_of(), [once])
    with pytest.raises(KeyboardInterrupt):
        run(plan_of(), [first])
    run(plan_of(), [second], begun=Begun(first.results, first.snapshots[2]))
    rows = {(name, step, metric): value for name, step, values in first.rows for metric, value in values.items()}
    again = {(name, step, metric): value for name, step, values in second.rows for metric, value in values.items()}
    assert set(rows) & set(again), "nothing was repeated, so nothing was compared"
    assert all(str(rows[key]) == str(again[key]) for key in set(rows) & set(again))
    expected = {(name, step, metric): value for name, step, values in once.rows for metric, value in values.items()}
    assert str(sorted((rows | again).items())) == str(sorted(expected.items()))


def test_a_run_without_a_snapshot_trains_what_has_not_ended(whole: dict[str, Any]) -> None:
    first, second = Keeper(4), Keeper()
    with pytest.raises(KeyboardInterrupt):
        run(plan_of(), [first])
    assert first.results
    run(plan_of(), [second], begun=Begun(first.results))
    assert {r.experiment.id for r in first.results} & {r.experiment.id for r in second.results} == set()
    assert outcome(first.results) | outcome(second.results) == whole


def test_a_finished_run_trains_nothing() -> None:
    first = Keeper()
    results = run(plan_of(), [first])
    again = Keeper()
    assert run(plan_of(), [again], begun=Begun(results, first.snapshots[-1])) == results
    assert again.calls == ["started", "closed"]


def test_a_run_goes_on_unstacked() -> None:
    options: dict[str, Any] = {"stack": False, "check": False}
    params = {"seed": [0, 1], "steps": [13]}
    once, first, second = Keeper(), Keeper(1), Keeper()
    run(plan_of(params, **options), [once])
    with pytest.raises(KeyboardInterrupt):
        run(plan_of(params, **options), [first])
    run(plan_of(params, **options), [second], begun=Begun(first.results, first.snapshots[-1]))
    assert outcome(first.results) | outcome(second.results) == outcome(once.results)


def test_a_state_of_another_graph_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    first, second, once = Keeper(2), Keeper(), Keeper()
    plan = plan_of({"seed": [0, 1]})
    with pytest.raises(KeyboardInterrupt):
        run(plan, [first])
    last = first.snapshots[-1]
    wrong = {name: torch.cat([t, t]) if t.dim() else t for name, t in last.tensors.items()}
    run(plan_of({"seed": [0, 1]}), [second], begun=Begun(first.results, replace(last, tensors=wrong)))
    run(plan_of({"seed": [0, 1]}), [once])
    assert "another graph's" in caplog.text
    assert outcome(second.results) == outcome(once.results)


def test_what_cannot_be_taken_over_is_found_before_anything_is_told() -> None:
    class Refuses(Listed):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise KeyError("inner")

    plan, recorder = plan_of({"seed": [0, 1]}), Recorder()
    begun = Begun((), Snapshot({"search": {}, "ended": [], "slots": {}, "trials": []}, {}))
    with pytest.raises(KeyError):
        run(plan, [recorder], search=Refuses(plan.experiments), begun=begun)
    assert recorder.calls == ["closed"]


def test_the_queue_in_any_order() -> None:
    plan = plan_of()
    usual = Recorder()
    run(plan, [usual])
    for order in ([8, 3, 1, 0, 7, 2, 6, 5, 4], [4, 5, 6, 2, 7, 0, 1, 3, 8]):
        shuffled = Recorder()
        run(plan, [shuffled], search=Listed([plan.experiments[place] for place in order]))
        assert outcome(shuffled.results, shuffled) == outcome(usual.results, usual)


def test_the_test_split_is_looked_at_for_the_best_state_too() -> None:
    done: Ran = ran(Net, {"seed": range(4), "optimizer.lr": [0.9]}, **{**USUAL, "schedule": "constant"})
    earlier = [r for r in done.in_order() if r.best_step is not None and r.best_step < r.steps]
    assert earlier, "the last state was the best everywhere: nothing was tried"
    for result in earlier:
        assert result.best_weights is not None
        plain = Net(**{k: v for k, v in result.experiment.config["task"].items() if k != "_target_"})
        model = plain.model()
        model.load_state_dict({n: t.clone() for n, t in result.best_weights.items()})
        model.eval()
        with torch.no_grad():
            for split in ("val", "test"):
                batch = plain.data().batch(split, torch.arange(plain.data().sizes[split]))
                found: dict[str, Tensor] = plain.metrics(model, batch)
                for name, value in found.items():
                    assert math.isclose(float(value), result.best[f"{split}/{name}"], rel_tol=1e-5)


def test_a_listed_search_goes_on() -> None:
    experiments: list[Experiment] = list(plan_of().experiments)
    search = Listed(experiments)
    assert len(search.ask(4)) == 9
    other = Listed(experiments)
    other.load_state_dict(json.loads(json.dumps(search.state_dict())))
    assert other.ask(4) == []
