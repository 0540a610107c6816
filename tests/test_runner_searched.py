"""Experiments that a search stops, puts aside, copies, drops, or makes as it goes.

Oracle: the same experiment in a run that nobody disturbs. All comparisons are of bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from coalesce.configuration import rides
from coalesce.engine.lane import initial_state
from coalesce.engine.lanes import Lanes
from coalesce.runner.planning import grown, make_plan
from coalesce.runner.run import Begun, run
from coalesce.search.base import Copy, Stop, Trial, Verdict
from over_time_helpers import Dreaming, Keeper, Scripted, outcome, plan_of
from runner_helpers import Net, Recorder, planned


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
    for name, value in initial_state(template, other).items():
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


def test_an_experiment_that_no_probe_is_like_is_refused() -> None:
    small, large = (planned(Net, {"seed": [0, 1]}, arguments={"hidden": n}) for n in (4, 8))
    with pytest.raises(LookupError, match="no graph for"):
        grown(small, large.experiments, rides)
    grew = grown(planned(Net, {"seed": [0, 1]}), planned(Net, {"seed": [2]}).experiments, rides)
    assert [e.seed for e in grew.cohorts[0].cohort.experiments] == [0, 1, 2]
