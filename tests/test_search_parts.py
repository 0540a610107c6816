"""Searches divided among jobs.

Oracle: the search of the whole, for the part of a single share; the search made of a share's experiments by hand, for
the parts of several; every experiment in one part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from coalesce.errors import ConfigError
from coalesce.experiment import Cohort, Experiment
from coalesce.launch.sharing import Shares, share_search
from coalesce.runner.plan import Plan, PlannedCohort, Trainer
from coalesce.search.base import Listed, Search
from coalesce.search.draws import job_seed
from coalesce.search.halving import Asha, Halving
from coalesce.search.metric import Metric
from coalesce.search.optuna import Optuna
from coalesce.search.population import Population
from coalesce.search.space import Axis, Interval, Space
from coalesce.search.stopping import Stopping
from search_helpers import METRIC, Driver, make

MAX = Metric(METRIC, "max")
EXPERIMENTS = [make({"seed": seed, "steps": 80, "optimizer.lr": 0.01 + seed / 1000}) for seed in range(24)]
AXES = {"optimizer.lr": Axis(("optimizer.lr",), interval=Interval(1e-3, 1e-1, log=True))}


def searches(experiments: Sequence[Experiment] = EXPERIMENTS, job: int = 0, jobs: int = 1) -> dict[str, Search]:
    """One of each, as it is made for one of several jobs."""
    seed = job_seed(5, job, jobs)
    return {
        "listed": Listed(experiments),
        "halving": Halving(experiments, MAX, 10, 2),
        "asha": Asha(experiments, MAX, 10, 2, seed),
        "population": Population(experiments, MAX, AXES, 20, seed=seed),
        "stopping": Stopping(Asha(experiments, MAX, 10, 2, seed), MAX, 3, 0.01, 0.95),
    }


def score(of: Experiment, step: int) -> float:
    return math.sin(of.seed * 7.3) * step / 100


def story(search: Search) -> list[Any]:
    """All that a search does."""
    driver = Driver(search, score, width=8).run()
    return [driver.asked, driver.verdicts, driver.steps, driver.status, driver.reasons, driver.values]


def dealt(jobs: int) -> list[list[str]]:
    return [[e.id for e in EXPERIMENTS[job::jobs]] for job in range(jobs)]


@pytest.mark.parametrize("name", searches())
def test_the_part_of_a_single_share_is_the_search(name: str) -> None:
    whole, part = searches()[name], searches()[name].part(0, dealt(1))
    assert type(part) is type(whole)
    assert (part.kind, part.replays, part.asks_again) == (whole.kind, whole.replays, whole.asks_again)
    assert story(part) == story(whole)


@pytest.mark.parametrize("name", searches())
@pytest.mark.parametrize("jobs", [2, 5])
def test_parts_cover_the_whole_and_search_their_share(name: str, jobs: int) -> None:
    found = []
    for job, ids in enumerate(dealt(jobs)):
        part = searches()[name].part(job, dealt(jobs))
        mine = [e for e in EXPERIMENTS if e.id in ids]
        assert list(part.known()) == mine
        assert part.count == len(mine)
        told = story(part)
        assert set(told[2]) == set(ids)
        assert told == story(searches(mine, job, jobs)[name])
        found += told[2]
    assert sorted(found) == sorted(e.id for e in EXPERIMENTS)


def test_the_order_of_a_share_is_the_sweeps() -> None:
    ids = [e.id for e in EXPERIMENTS[:6]]
    assert list(Listed(EXPERIMENTS).part(0, [ids[::-1]]).known()) == EXPERIMENTS[:6]


def test_jobs_draw_otherwise() -> None:
    # the same experiments in each share, so that only the seed differs
    ids = [e.id for e in EXPERIMENTS]
    for name in ("asha", "population", "stopping"):
        stories = [story(searches()[name].part(job, [ids, ids, ids])) for job in range(3)]
        assert stories[0] != stories[1] != stories[2] != stories[0], name
    assert len({job_seed(0, job, 100) for job in range(100)}) == 100


@pytest.mark.parametrize("name", searches())
def test_a_share_of_another_sweep(name: str) -> None:
    with pytest.raises(ValueError, match="the search has no experiments abc, xyz"):
        searches()[name].part(1, [[EXPERIMENTS[0].id, EXPERIMENTS[1].id], [EXPERIMENTS[2].id, "xyz", "abc"]])


def test_a_population_of_one() -> None:
    shares = [[e.id for e in EXPERIMENTS[:4]], [EXPERIMENTS[4].id]]
    five = Population(EXPERIMENTS[:5], MAX, AXES, 20)
    for job in range(2):
        with pytest.raises(ConfigError) as caught:
            Stopping(five, MAX, 3).part(job, shares)
        assert str(caught.value.problems[0]) == (
            "launcher.jobs=2: search=pbt: in each job its share is a population, which needs 2 experiments, not 1; "
            "valid: at most 2"
        )
    # alone it is what it always was
    assert Population(EXPERIMENTS[:1], MAX, AXES, 20).part(0, [[EXPERIMENTS[0].id]]).count == 1


def planned(*cohorts: Cohort) -> Plan:
    made = tuple(PlannedCohort(cohort, 4, 1000, 1, 1) for cohort in cohorts)
    return Plan("x", (), tuple(e for cohort in cohorts for e in cohort.experiments), made, Trainer())


def test_what_is_listed_is_shared_out_by_its_cost() -> None:
    long = [make({"seed": seed, "steps": 200}) for seed in range(2)]
    plan = planned(Cohort(0, tuple(EXPERIMENTS[:5]), ()), Cohort(1, tuple(long), ()))
    # five of 80 steps, two of 200
    shares = share_search(Listed([*EXPERIMENTS[:5], *long]), plan, 2)
    assert set(shares.jobs) == {tuple(e.id for e in EXPERIMENTS[:5]), tuple(e.id for e in long)}
    assert shares.lanes == {0: 5, 1: 2}


@pytest.mark.parametrize(
    ("samples", "seeds", "jobs", "most", "expected"),
    [
        (53, 1, 8, None, [7, 7, 7, 7, 7, 6, 6, 6]),
        (53, 1, 8, 6, [6, 6, 6, 6, 6, 6, 6, 6, 5]),
        (3, 2, 8, None, [2, 2, 2]),
        (10, 3, 2, 7, [6, 6, 6, 6, 6]),
        (10, 3, 2, 1, [3] * 10),
    ],
)
def test_trials_are_shared_out_evenly(
    samples: int, seeds: int, jobs: int, most: int | None, expected: list[int]
) -> None:
    space = Space({"optimizer.lr": Interval(0.1, 1), "seed": range(seeds)})
    search = Stopping(Optuna(space, make, [], MAX, samples, 0), MAX, 5)
    shares = share_search(search, planned(Cohort(3, (), (), probes=tuple(EXPERIMENTS[:2]))), jobs, most)
    assert shares == Shares(((),) * len(expected), {3: expected[0]})
    assert [search.part(job, shares.jobs).count for job in range(len(shares.jobs))] == expected
    with pytest.raises(ValueError, match="jobs must be at least 1, not 0"):
        share_search(search, planned(), 0)
