"""Experiments shared out over jobs, by law.

Oracle: all ways to share out, one after the other, for the best makespan of small cases; Graham's own bound for large
ones; CASES 35 by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coalesce.experiment import Cohort, Experiment
from coalesce.launch.sharing import LEAST_PARAMETERS, ROUNDING, Shares, estimated_costs, share
from coalesce.runner.plan import Plan, PlannedCohort, Trainer
from run_fakes import experiment


def dealt(kinds: Sequence[int]) -> list[Cohort]:
    """Experiments of these cohorts, in the sweep's order."""
    made = [(kind, Experiment({"seed": seed})) for seed, kind in enumerate(kinds)]
    return [Cohort(kind, tuple(e for k, e in made if k == kind), ()) for kind in sorted(set(kinds))]


def priced(cohorts: Sequence[Cohort], costs: Sequence[float]) -> dict[str, float]:
    return {e.id: costs[e.seed] for cohort in cohorts for e in cohort.experiments}


def loads(shares: Shares, cost: Mapping[str, float]) -> list[float]:
    return [math.fsum(cost[name] for name in job) for job in shares.jobs]


def best_makespan(costs: Sequence[float], jobs: int, cap: int) -> float:
    """Of all ways to share out."""
    best = math.fsum(costs)
    load, count = [0.0] * jobs, [0] * jobs

    def place(number: int) -> None:
        nonlocal best
        if number == len(costs):
            best = min(best, max(load))
            return
        for job in {(load[j], count[j]): j for j in range(jobs)}.values():
            if count[job] < cap and load[job] + costs[number] < best:
                load[job], count[job] = load[job] + costs[number], count[job] + 1
                place(number + 1)
                load[job], count[job] = load[job] - costs[number], count[job] - 1

    if len(costs) <= jobs * cap and cap < len(costs):
        best = math.inf
    place(0)
    return best


CASES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=8)


@given(CASES, st.integers(1, 4), st.none() | st.integers(1, 8))
@settings(max_examples=400)
@example([(0, 5), (0, 3), (0, 3), (0, 3), (0, 5), (0, 5), (0, 4), (0, 4)], 4, 2)
@example([(0, 2), (1, 2), (0, 2), (1, 3), (0, 3)], 2, None)
def test_small_cases(drawn: list[tuple[int, int]], jobs: int, most: int | None) -> None:
    cohorts = dealt([kind for kind, _ in drawn])
    cost = priced(cohorts, [float(value) for _, value in drawn])
    shares = share(cohorts, cost, jobs, most)
    laws(shares, cohorts, cost, jobs, most)
    cap = most or len(drawn)
    best = best_makespan([float(value) for _, value in drawn], max(jobs, math.ceil(len(drawn) / cap)), cap)
    assert max(loads(shares, cost)) <= best * 4 / 3 + ROUNDING
    assert share(cohorts, cost, jobs, most) == shares


def laws(
    shares: Shares, cohorts: Sequence[Cohort], cost: Mapping[str, float], jobs: int, most: int | None = None
) -> None:
    """What holds of any shares."""
    kind = {e.id: cohort.index for cohort in cohorts for e in cohort.experiments}
    cap = most or len(kind)
    assert sorted(name for job in shares.jobs for name in job) == sorted(kind)
    assert all(1 <= len(job) <= cap for job in shares.jobs)
    assert len(shares.jobs) <= max(jobs, math.ceil(len(kind) / cap))
    order = {name: place for place, name in enumerate(kind)}
    assert all(list(job) == sorted(job, key=order.__getitem__) for job in shares.jobs)
    parts = {
        (number, cohort.index): [name for name in job if kind[name] == cohort.index]
        for number, job in enumerate(shares.jobs)
        for cohort in cohorts
    }
    assert shares.lanes == {c.index: max(len(p) for (_, k), p in parts.items() if k == c.index) for c in cohorts}
    # no share of a cohort has a place in another job of this cohort
    load = loads(shares, cost)
    for (number, cohort), part in parts.items():
        for other in range(len(shares.jobs)):
            if other != number and part and parts[other, cohort] and len(shares.jobs[other]) + len(part) <= cap:
                assert load[other] + math.fsum(cost[name] for name in part) > max(load)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1e3, 3e3, 1e4, 2.5e4])), min_size=1, max_size=200),
    st.integers(1, 20),
    st.integers(1, 40),
)
@settings(max_examples=50)
def test_large_cases(drawn: list[tuple[int, float]], jobs: int, most: int) -> None:
    cohorts = dealt([kind for kind, _ in drawn])
    cost = priced(cohorts, [value for _, value in drawn])
    laws(share(cohorts, cost, jobs, most), cohorts, cost, jobs, most)
    shares = share(cohorts, cost, jobs)
    laws(shares, cohorts, cost, jobs)
    # any list schedule keeps this one
    bound = math.fsum(cost.values()) / jobs + max(cost.values()) * (1 - 1 / jobs)
    assert max(loads(shares, cost)) <= bound * (1 + ROUNDING)


@pytest.mark.parametrize(
    ("count", "jobs", "most", "expected"),
    [
        (53, 8, None, [7, 7, 7, 7, 7, 6, 6, 6]),
        (53, 8, 6, [6, 6, 6, 6, 6, 6, 6, 6, 5]),
        (64, 8, None, [8] * 8),
        (3, 8, None, [1, 1, 1]),
        # the longest job has two, so five jobs are as fast as eight
        (9, 8, None, [2, 2, 2, 2, 1]),
        (9, 8, 1, [1] * 9),
        (5, 1, None, [5]),
        (5, 1, 5, [5]),
        (0, 3, 2, []),
    ],
)
def test_equal_experiments(count: int, jobs: int, most: int | None, expected: list[int]) -> None:
    cohorts = dealt([0] * count)
    shares = share(cohorts, priced(cohorts, [0.1] * count), jobs, most)
    assert [len(job) for job in shares.jobs] == expected
    assert shares.lanes == ({0: expected[0]} if expected else {})


def test_a_cohort_stays_together_where_it_can() -> None:
    # two long ones of a cohort, and short ones that fill up
    cohorts = dealt([0] * 4 + [1] * 8 + [2] * 4)
    shares = share(cohorts, priced(cohorts, [2.0] * 4 + [1.0] * 8 + [2.0] * 4), 3)
    kinds = {e.id: c.index for c in cohorts for e in c.experiments}
    assert sorted({kinds[name] for name in job} for job in shares.jobs) == [{0}, {1}, {2}]
    assert shares.lanes == {0: 4, 1: 8, 2: 4}


def test_neighbours_of_the_grid_are_parted() -> None:
    # a search that compares within a job should not compare experiments of one learning rate alone
    cohorts = dealt([0] * 64)
    shares = share(cohorts, priced(cohorts, [1.0] * 64), 8)
    seed = {e.id: e.seed for e in cohorts[0].experiments}
    for job in shares.jobs:
        assert len({seed[name] // 8 for name in job}) > 2
        assert len({seed[name] % 8 for name in job}) > 2


@pytest.mark.parametrize(
    ("cost", "jobs", "most", "message"),
    [
        ([1.0, 1.0], 0, None, "jobs must be at least 1, not 0"),
        ([1.0, 1.0], 2, 0, "most must be at least 1, not 0"),
        ([1.0, -1.0], 2, None, r"is -1\.0; it must be finite and not below 0"),
        ([math.nan, 1.0], 2, None, "is nan; it must be finite"),
    ],
)
def test_what_makes_no_sense(cost: list[float], jobs: int, most: int | None, message: str) -> None:
    cohorts = dealt([0, 1])
    with pytest.raises(ValueError, match=message):
        share(cohorts, priced(cohorts, cost), jobs, most)


def test_an_experiment_without_a_cost_or_in_two_cohorts() -> None:
    (cohort,) = dealt([0, 0])
    with pytest.raises(KeyError, match=cohort.experiments[1].id):
        share([cohort], {cohort.experiments[0].id: 1.0}, 2)
    with pytest.raises(ValueError, match="named twice"):
        share([cohort, cohort], priced([cohort], [1.0, 1.0]), 2)


def test_estimated_costs() -> None:
    short, long, wide = (
        experiment({"steps": steps, "batch_size": size}) for steps, size in ((10, 4), (30, 4), (10, 8))
    )
    cohorts = [Cohort(0, (short, long), ()), Cohort(1, (wide,), ())]
    planned = tuple(PlannedCohort(c, 2, p, 1, 1) for c, p in zip(cohorts, (50_000, 7), strict=True))
    plan = Plan("x", (), (short, long, wide), planned, Trainer())
    assert estimated_costs(plan) == {
        short.id: 10 * 4 * 50_000,
        long.id: 30 * 4 * 50_000,
        wide.id: 10 * 8 * LEAST_PARAMETERS,
    }
