"""Lanes over time: stopped, put aside, copied, taken up again, and narrowed.

Oracle: the same experiment in a run that nobody disturbs. All comparisons are of bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from coalesce.configuration import rides
from coalesce.engine.lanes import Lanes
from coalesce.errors import TaskError
from coalesce.experiment import Experiment
from coalesce.runner import planning
from coalesce.runner.listener import Latest, Progress, Result
from coalesce.runner.plan import Plan
from coalesce.runner.planning import grown, make_plan
from coalesce.runner.run import Begun, run
from coalesce.runner.snapshot import Snapshot
from coalesce.search.base import Copy, Ending, Listed, Report, Search, Stop, Trial, Verdict
from runner_helpers import Net, Picky, Ran, Recorder, planned, ran

PARAMS = {"seed": range(3), "steps": [20, 35, 13]}
USUAL: dict[str, Any] = {
    "optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.05},
    "schedule": {"name": "plateau", "patience": 0, "factor": 0.5, "threshold": 0.5},
    "arguments": {"dropout": 0.2, "splits": "train val test"},
    "width": 3,
    "every": 5,
    "evaluate_every": 5,
}


class Keeper(Recorder):
    """Takes a snapshot at each boundary, and may end the run at one of them."""

    def __init__(self, at: int = -1, early: bool = False):
        super().__init__()
        self.at, self.early, self.count = at, early, 0
        self.snapshots: list[Snapshot] = []

    def snapshot(self, take: Callable[[], Snapshot]) -> None:
        found = take()
        # what a file would keep of it
        facts = json.loads(json.dumps(dict(found.facts)))
        self.snapshots.append(Snapshot(facts, {name: t.clone() for name, t in found.tensors.items()}))
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt

    def wants_boundary(self) -> bool:
        return self.early


PLANS: dict[str, Plan] = {}


def plan_of(params: Mapping[str, Any] = PARAMS, **options: Any) -> Plan:
    """A plan, which a run does not change, and which is made once."""
    name = repr((params, options))
    if name not in PLANS:
        with patch.object(planning, "_check_traces"):
            PLANS[name] = planned(Net, params, **{**USUAL, **options})
    return PLANS[name]


def outcome(results: Sequence[Result], recorder: Recorder | None = None) -> dict[str, Any]:
    """Everything that must not depend on what happened meanwhile."""
    found = {}
    for r in results:
        told = recorder.curve(r.experiment) if recorder else []
        weights = {n: t.tolist() for w in (r.weights, r.best_weights) if w for n, t in w.items()}
        best = r.best_step, dict(r.best)
        found[r.experiment.id] = str((r.status, r.steps, dict(r.metrics), best, r.message, weights, told))
    return found


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    recorder = Keeper()
    run(plan_of(), [recorder])
    assert len(recorder.results) == 9
    return outcome(recorder.results)


@pytest.mark.parametrize(("at", "early"), [(1, False), (6, False), (2, True), (9, True)])
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


# a search that stops, puts aside and copies


class Scripted(Search):
    """Says what it was told to say: (id, step) → verdict."""

    asks_again = True

    def __init__(self, generations: Sequence[Sequence[Trial]], says: Mapping[tuple[str, int], Verdict] | None = None):
        self.generations, self.says = list(generations), says or {}
        self.told: list[Report] = []
        self.endings: list[Ending] = []
        self.place = 0

    def ask(self, width: int) -> Sequence[Trial]:
        self.place += 1
        return self.generations[self.place - 1] if self.place <= len(self.generations) else []

    def tell(self, reports: Sequence[Report]) -> Mapping[str, Verdict]:
        self.told += reports
        found = {r.experiment.id: self.says.get((r.experiment.id, r.step)) for r in reports}
        return {name: verdict for name, verdict in found.items() if verdict is not None}

    def ended(self, ending: Ending) -> None:
        self.endings.append(ending)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place = state["place"]

    @property
    def count(self) -> int:
        return len({trial.experiment.id for generation in self.generations for trial in generation})


def test_a_stopped_experiment_is_as_it_was_at_its_last_step() -> None:
    """Case 3 of stopping: momentum does not carry it on."""
    plan = plan_of({"seed": range(5), "steps": [35]})
    stopped = plan.experiments[1]
    search = Scripted([[Trial(e) for e in plan.experiments]], {(stopped.id, 15): Stop("enough")})
    recorder, once, short = Recorder(), Recorder(), Recorder()
    run(plan, [recorder], search=search)
    run(plan_of({"seed": range(5), "steps": [35]}), [once])
    (result,) = [r for r in recorder.results if r.experiment.id == stopped.id]
    assert (result.status, result.steps, result.message) == ("stopped", 15, "enough")
    assert recorder.curve(stopped)[-1] == (15, {n: v for n, v in result.metrics.items() if n.startswith("test/")})
    # a run of 15 steps ends in the same state: the schedule looks at metrics, not at how long it will last
    run(plan_of({"seed": range(5), "steps": [15]}), [short])
    (twin,) = [r for r in short.results if r.experiment.seed == stopped.seed]
    assert str(result.weights) == str(twin.weights)
    assert str(dict(result.metrics)) == str(dict(twin.metrics))
    others = {name: text for name, text in outcome(once.results, once).items() if name != stopped.id}
    found = outcome(recorder.results, recorder)
    assert {name: text for name, text in found.items() if name != stopped.id} == others
    assert [e.status for e in search.endings].count("stopped") == 1


def test_what_is_put_aside_goes_on_as_if_it_had_not_been() -> None:
    params = {"seed": range(5), "steps": [35]}
    plan, once, recorder = plan_of(params), Recorder(), Recorder()
    run(plan_of(params), [once])
    everyone = plan.experiments
    generations = [
        [Trial(e, until=10) for e in everyone],
        [Trial(e, until=25) for e in everyone[::-2]],
        [Trial(e) for e in everyone],
    ]
    search = Scripted(generations)
    run(plan, [recorder], search=search)
    assert outcome(recorder.results, recorder) == outcome(once.results, once)
    assert [c for c in recorder.calls if c == "compiling"] == ["compiling"] * 3, "a graph was built twice"


def test_what_is_put_aside_survives_an_interruption() -> None:
    params = {"seed": range(5), "steps": [35]}
    once = Recorder()
    run(plan_of(params), [once])
    for at in (2, 5):
        plan, first, second = plan_of(params), Keeper(at), Keeper()
        generations = [[Trial(e, until=10) for e in plan.experiments], [Trial(e) for e in plan.experiments]]
        with pytest.raises(KeyboardInterrupt):
            run(plan, [first], search=Scripted(generations))
        search = Scripted(generations)
        run(plan_of(params), [second], search=search, begun=Begun(first.results, first.snapshots[-1]))
        assert outcome(first.results) | outcome(second.results) == outcome(once.results)


def test_a_copied_lane_goes_on_as_its_source_would_with_the_new_floats() -> None:
    params = {"task.dropout": [0.0, 0.1, 0.3], "optimizer.lr": [0.01, 0.03]}
    options: dict[str, Any] = {"steps": 20, "schedule": "constant", "width": 6}
    plan = plan_of(params, **options)
    source, target = plan.experiments[4], plan.experiments[1]
    values = {"optimizer.lr": 0.02, "task.dropout": 0.2}
    search = Scripted([[Trial(e) for e in plan.experiments]], {(target.id, 10): Copy(source.id, values)})
    recorder = Recorder()
    run(plan, [recorder], search=search)
    (copied,) = [r for r in recorder.results if r.experiment.id == target.id]
    # the oracle: the source's own state after 10 steps, in a lane of its own, with the floats written into it
    twin = plan_of(params, **options)
    template = twin.cohorts[0].template
    lanes = Lanes(template, 6, compile=False)
    lanes.fill(2, source)
    lanes.advance(10)
    other = source.varied(values)
    for name, value in lanes._initial(other).items():
        if name.startswith(("optimizer/", "riding/")):
            lanes.state[name][2].copy_(value)
    lanes.advance(10)
    expected = lanes.state_dict(2)
    assert copied.weights is not None
    assert all(torch.equal(copied.weights[name], tensor) for name, tensor in expected.items())
    assert (copied.status, copied.steps) == ("finished", 20)
    assert copied.metrics["value/optimizer.lr"] == 0.02
    # and its neighbours, the source included, know nothing of it
    once = Recorder()
    run(plan_of(params, **options), [once])
    found, usual = outcome(recorder.results, recorder), outcome(once.results, once)
    assert {n: t for n, t in found.items() if n != target.id} == {n: t for n, t in usual.items() if n != target.id}


def test_two_that_copy_each_other_change_places() -> None:
    plan = plan_of({"optimizer.lr": [0.01, 0.05]}, steps=20, schedule="constant", width=2)
    one, two = plan.experiments
    says: dict[tuple[str, int], Verdict] = {(one.id, 10): Copy(two.id), (two.id, 10): Copy(one.id)}
    swapped, usual = Recorder(), Recorder()
    run(plan, [swapped], search=Scripted([[Trial(one), Trial(two)]], says))
    run(plan_of({"optimizer.lr": [0.01, 0.05]}, steps=20, schedule="constant", width=2), [usual])
    weights = [{r.experiment.id: str(r.weights) for r in told.results} for told in (swapped, usual)]
    assert weights[0] == {one.id: weights[1][two.id], two.id: weights[1][one.id]}


def test_a_copied_lane_survives_an_interruption() -> None:
    params = {"optimizer.lr": [0.01, 0.05], "task.dropout": [0.1, 0.2]}
    options: dict[str, Any] = {"steps": 20, "schedule": "constant", "width": 4}
    plan = plan_of(params, **options)
    ids = [e.id for e in plan.experiments]
    says: dict[tuple[str, int], Verdict] = {(ids[0], 10): Copy(ids[3], {"task.dropout": 0.5})}
    once, first, second = Recorder(), Keeper(3), Recorder()
    run(plan, [once], search=Scripted([[Trial(e) for e in plan.experiments]], says))
    with pytest.raises(KeyboardInterrupt):
        run(plan, [first], search=Scripted([[Trial(e) for e in plan.experiments]], says))
    search = Scripted([[Trial(e) for e in plan.experiments]], says)
    run(plan, [second], search=search, begun=Begun(first.results, first.snapshots[-1]))
    assert outcome(second.results) == outcome(once.results)


# memory


def broken_once(monkeypatch: pytest.MonkeyPatch, at: int, error: Callable[[], Exception]) -> list[int]:
    """Let the n-th call of advance run out of memory in the middle: half of the state is written."""
    calls: list[int] = []
    advance = Lanes.advance

    def failing(self: Lanes, count: int) -> None:
        calls.append(self.width)
        if len(calls) == at:
            advance(self, count)
            for name, value in self.state.items():
                if name.startswith("trained/"):
                    value.mul_(3)
            raise error()
        advance(self, count)

    monkeypatch.setattr(Lanes, "advance", failing)
    return calls


ERRORS: dict[str, Callable[[], Exception]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
    ),
    "python": MemoryError,
}


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


# failures


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


# experiments that are not known in advance


class Dreaming(Scripted):
    lists = False


def test_experiments_may_come_later() -> None:
    params = {"optimizer.lr": [0.01, 0.02, 0.04, 0.08]}
    everyone = plan_of(params).experiments
    empty = make_plan("dreamt", ["optimizer.lr"], [], rides, plan_of(params).trainer, probes=everyone[::3], count=4)
    assert (empty.experiments, empty.cohorts[0].width) == ((), 3)
    recorder, once = Recorder(), Recorder()
    search = Dreaming([[Trial(e) for e in everyone[:2]], [Trial(e) for e in everyone[1:]]])
    run(empty, [recorder], search=search, rides=rides)
    run(plan_of(params), [once])
    assert outcome(recorder.results) == outcome(once.results)
    assert recorder.calls.count("planned") == 2


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


def test_an_experiment_that_no_probe_is_like_is_refused() -> None:
    small, large = (planned(Net, {"seed": [0, 1]}, arguments={"hidden": n}) for n in (4, 8))
    with pytest.raises(LookupError, match="no graph for"):
        grown(small, large.experiments, rides)
    grew = grown(planned(Net, {"seed": [0, 1]}), planned(Net, {"seed": [2]}).experiments, rides)
    assert [e.seed for e in grew.cohorts[0].cohort.experiments] == [0, 1, 2]


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


class Dropping(Scripted):
    """Takes only the first of the experiments up again."""

    def dropped(self) -> Mapping[str, Stop]:
        names = [trial.experiment.id for trial in self.generations[0]]
        return {name: Stop("not among the best") for name in names[1:]} if self.place > 1 else {}


def test_what_is_dropped_ends_where_it_was_put_aside() -> None:
    plan = plan_of({"seed": range(5), "steps": [35]})
    first, *rest = plan.experiments
    recorder, short = Recorder(), Recorder()
    search = Dropping([[Trial(e, until=15) for e in plan.experiments], [Trial(first)]])
    run(plan, [recorder], search=search)
    run(plan_of({"seed": range(5), "steps": [15]}), [short])
    twins = {r.experiment.seed: r for r in short.results}
    found = {r.experiment.id: r for r in recorder.results}
    for experiment in rest:
        result, twin = found[experiment.id], twins[experiment.seed]
        assert (result.status, result.steps, result.message) == ("stopped", 15, "not among the best")
        assert str((result.metrics, result.best, result.weights)) == str((twin.metrics, twin.best, twin.weights))
    assert (found[first.id].status, found[first.id].steps) == ("finished", 35)
