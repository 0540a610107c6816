"""A member of a population that diverges: its lane stands still, and copies one of the best at the next interval.

Oracle: `ToyW` follows a geometric series, so that it is known who breaks when; a copy that changes nothing ends as its
source does; and the run that nobody interrupts, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from unittest.mock import patch

import pytest

from coalesce.configuration import rides
from coalesce.runner import planning
from coalesce.runner.plan import Plan
from coalesce.runner.run import Begun, run
from coalesce.search.base import Copy, Trial
from coalesce.search.metric import Metric
from coalesce.search.population import Population
from coalesce.search.space import Axis
from coalesce.search.stopping import Stopping
from over_time_helpers import Keeper, Scripted, outcome
from runner_helpers import ToyW, planned

#: w is (1 - 2 lr)^n after n steps: of the large rates it is infinite, or its square is, at the second one.
RATES = (0.1, 0.2, 1e200, 1e-3, 1e190)
METRIC = Metric("val/score", "max")


def plan_of(rates: Sequence[float] = RATES, width: int = 5) -> Plan:
    with patch.object(planning, "_check_traces"):
        return planned(
            ToyW,
            {"optimizer.lr": list(rates)},
            arguments={"blind": -1e300},
            width=width,
            steps=30,
            batch_size=1,
            evaluate_every=5,
            monitor="val/score",
            mode="max",
            check=False,
        )


def search(plan: Plan) -> Population:
    """Nobody explores: a copy goes on as its source does."""
    rates = sorted({e.values["optimizer.lr"] for e in plan.experiments})
    axes = {"optimizer.lr": Axis(("optimizer.lr",), tuple((rate,) for rate in rates))}
    return Population(plan.experiments, METRIC, axes, interval=10, factors=[1.0], resample=0.0)


def test_it_goes_on_as_a_copy_of_one_of_the_best(caplog: pytest.LogCaptureFixture) -> None:
    plan, told = plan_of(), Keeper()
    with caplog.at_level(logging.WARNING, "coalesce"):
        run(plan, [told], search=search(plan), rides=rides)
    assert {(r.status, r.steps) for r in told.results} == {("finished", 30)}
    weights = {r.experiment.id: str(r.weights) for r in told.results}
    best = plan.experiments[3]
    for broken in (plan.experiments[2], plan.experiments[4]):
        # nothing is recorded while it stands still
        assert sorted({step for step, _ in told.curve(broken)}) == [1, 10, 15, 20, 25, 30]
        assert (10, {"value/optimizer.lr": 1e-3}) in told.curve(broken)
        assert told.curve(broken)[-1] == told.curve(best)[-1]
        assert weights[broken.id] == weights[best.id]
        says = f"{broken} broke after 1 steps, and goes on as a copy of experiment {best.id} at step 10"
        assert says in caplog.text
    # what it did not do is counted as done: the display comes to its end
    assert told.progress[-1].steps == told.progress[-1].total_steps == 150


@pytest.mark.parametrize("early", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_it_survives_an_interruption(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # early, after each step
    monkeypatch.setattr("coalesce.runner.cohort.POLL_S", 0.0)
    plan, whole = plan_of(), Keeper()
    run(plan, [whole], search=search(plan), rides=rides)
    expected = outcome(whole.results)
    # while it stands still, and behind it; with early, between two boundaries too
    for at in (3, 14) if early else (1, 2):
        first, second = Keeper(at, early), Keeper(early=early)
        with pytest.raises(KeyboardInterrupt):
            run(plan, [first], search=search(plan), rides=rides)
        run(plan, [second], search=search(plan), begun=Begun(first.results, first.snapshots[-1]), rides=rides)
        assert outcome(second.results) == expected
        assert second.rows == whole.rows[len(first.rows) :]


def test_a_population_that_is_larger_than_the_graph() -> None:
    plan, told = plan_of((*RATES, 0.3), width=3), Keeper()
    run(plan, [told], search=search(plan), rides=rides)
    assert [r.status for r in told.results] == ["finished"] * 6
    copied = {name for name, step, values in told.rows if step == 10 and "value/optimizer.lr" in values}
    assert {plan.experiments[2].id, plan.experiments[4].id} <= copied


def test_nobody_is_left_whom_it_could_copy() -> None:
    plan, told = plan_of(RATES[2::2], width=2), Keeper()
    run(plan, [told], search=search(plan), rides=rides)
    assert [(r.status, r.steps) for r in told.results] == [("diverged", 1)] * 2
    # at the first boundary: nothing that stands still trains on
    assert told.count == 1


class Silent(Scripted):
    """Might replace what broke."""

    replaces_broken = True


def test_what_is_not_replaced_has_diverged_at_its_end() -> None:
    plan, usual, told = plan_of(), Keeper(), Keeper()
    run(plan, [usual])
    run(plan, [told], search=Silent([[Trial(e) for e in plan.experiments]]))
    assert outcome(told.results, told) == outcome(usual.results, usual)
    broken = {plan.experiments[2].id, plan.experiments[4].id}
    assert {r.experiment.id for r in usual.results[:2]} == broken
    assert {r.experiment.id for r in told.results if r.status == "diverged"} == broken
    assert told.count == 6


def test_it_is_told_of_at_the_step_at_which_it_would_be() -> None:
    plan = plan_of(RATES[1:3], width=2)
    sound, broken = plan.experiments
    silent = Silent([[Trial(e) for e in plan.experiments]], {(broken.id, 15): Copy(sound.id)})
    told = Keeper()
    run(plan, [told], search=silent)
    reports = [(r.step, dict(r.metrics)) for r in silent.told if r.experiment.id == broken.id]
    assert reports[:3] == [(5, {}), (10, {}), (15, {})]
    assert reports[3:] == [(r.step, dict(r.metrics)) for r in silent.told if r.experiment.id == sound.id][3:]


def test_patience_does_not_keep_it_from_that() -> None:
    plan, told = plan_of(), Keeper()
    run(plan, [told], search=Stopping(search(plan), METRIC, patience=20), rides=rides)
    assert {r.status for r in told.results} == {"finished"}
