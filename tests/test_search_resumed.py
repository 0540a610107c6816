"""Searches that are interrupted: whenever, and however old the last snapshot is, the run ends as if nothing had been.

Oracle: the run that nobody interrupts, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from coalesce.configuration import check_search, check_trainer, make_search, rides
from coalesce.experiment import Experiment
from coalesce.runner import planning
from coalesce.runner.listener import Result
from coalesce.runner.plan import Plan
from coalesce.runner.planning import plan_search
from coalesce.runner.run import Begun, run
from coalesce.search.base import Search
from coalesce.search.space import Interval
from over_time_helpers import Keeper
from thorough import kept

TRAINER = check_trainer(
    {
        "width": 3,
        "every": 5,
        "evaluate_every": 5,
        "compile": False,
        "check": False,
        "monitor": "val/score",
        "weights": False,
    }
)
BASE: dict[str, Any] = {
    "task": {"_target_": "runner_helpers.ToyW", "blind": -1e300},
    "optimizer": {"name": "sgd", "momentum": 0.9},
    "schedule": "constant",
    "steps": 20,
    "batch_size": 1,
    "seed": 0,
}
#: The larger ones diverge.
PARAMS = {"optimizer.lr": Interval(1e-3, 1e20, log=True)}
SEARCHES: dict[str, dict[str, Any]] = {
    "asha": {"samples": 12, "factor": 2},
    "halving": {"samples": 12, "factor": 2},
    "pbt": {"samples": 5, "fraction": 0.4},
    "optuna": {"samples": 8},
    "random": {"samples": 8, "patience": 2},
}
PLANS: dict[str, Plan] = {}


def made(name: str, study: Path) -> tuple[Search, Plan]:
    """A new search, as a new process makes it, and its plan."""
    settings = check_search({"name": name, **SEARCHES[name]}, TRAINER)
    search, keys = make_search(BASE, PARAMS, settings=settings, trainer=TRAINER)
    search.keep(study, "study")
    if name not in PLANS:
        with patch.object(planning, "_check_traces"):
            PLANS[name] = plan_search("made_up", keys, search, rides, TRAINER)
    return search, PLANS[name]


def outcome(results: Sequence[Result]) -> dict[str, str]:
    return {r.experiment.id: str((r.status, r.steps, r.metrics, r.best, r.best_step, r.message)) for r in results}


@pytest.mark.parametrize("name", kept(SEARCHES, of=["asha", "pbt", "optuna"]))
def test_an_interrupted_search_ends_as_if_it_had_not_been(name: str, tmp_path: Path) -> None:
    search, plan = made(name, tmp_path / "plain.db")
    whole = Keeper()
    expected = outcome(run(plan, [whole], search=search, rides=rides))
    if name == "pbt":
        assert any("value/optimizer.lr" in values for _, _, values in whole.rows), "nothing was copied"
    else:
        assert len({text.split(",")[0] for text in expected.values()}) > 1, "one status alone shows little"
    # boundaries at which it is interrupted, and how many the last snapshot is older
    moments = [(2, 0), (whole.count // 2, 2), (whole.count - 1, 1)]
    for at, lag in moments if name != "optuna" else moments[1:]:
        study = tmp_path / f"{at}.db"
        search, plan = made(name, study)
        first = Keeper(at)
        with pytest.raises(KeyboardInterrupt):
            run(plan, [first], search=search, rides=rides)
        snapshot = first.snapshots[-1 - lag] if len(first.snapshots) > lag else None
        search, plan = made(name, study)
        results = run(plan, [Keeper()], search=search, begun=Begun(first.results, snapshot), rides=rides)
        assert outcome(results) == expected, (at, lag)
        ids = [result.experiment.id for result in results]
        assert len(ids) == len(set(ids))


def test_what_is_asked_for_later_is_in_the_plan_that_the_listeners_see(tmp_path: Path) -> None:
    search, plan = made("optuna", tmp_path / "study.db")
    seen: list[tuple[Experiment, ...]] = []

    class Watch(Keeper):
        def planned(self, plan: Plan) -> None:
            seen.append(plan.experiments)

    results = run(plan, [Watch()], search=search, rides=rides)
    assert [len(experiments) for experiments in seen] == [3, 6, 8]
    assert {e.id for e in seen[-1]} == {r.experiment.id for r in results}
