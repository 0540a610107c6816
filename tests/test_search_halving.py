"""Successive halving and ASHA.

Oracle: for ASHA a simulation in a dozen lines that keeps a list of results per rung; laws for both: every experiment is
asked for once, the best of a rung goes on, the budget is bounded, and a search that is saved and loaded at every
boundary decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalesce.experiment import Experiment
from coalesce.search.base import Report, Search, Stop
from coalesce.search.halving import Asha, Halving, rungs
from coalesce.search.metric import Metric
from search_helpers import METRIC, Curve, Driver, many

MAX = Metric(METRIC, "max")

#: Final scores: few different ones, so that there are ties, and NaN.
SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.75, 1.0, math.nan, math.inf]), min_size=1, max_size=20)


def curve_of(scores: list[float], broken: frozenset[int] = frozenset()) -> Curve:
    """A score grows with the steps; an experiment whose number is in ``broken`` diverges at step 15."""

    def curve(experiment: Experiment, step: int) -> float | None:
        if experiment.seed in broken and step >= 15:
            return None
        return scores[experiment.seed] * (1 + step / 1000)

    return curve


def asha(experiments: list[Experiment], factor: int = 2, seed: int = 0, mode: str = "max") -> Asha:
    return Asha(experiments, Metric(METRIC, mode), 10, factor, seed)


def halving(experiments: list[Experiment], factor: int = 2) -> Halving:
    return Halving(experiments, MAX, 10, factor)


SEARCHES = pytest.mark.parametrize("search", [asha, halving])
Make = Callable[..., Search]


def test_rungs_are_below_the_end() -> None:
    assert rungs(40, 10, 2) == [10, 20]
    assert rungs(41, 10, 2) == [10, 20, 40]
    assert rungs(10, 10, 2) == []


@SEARCHES
@given(SCORES, st.integers(1, 8), st.integers(2, 4), st.sets(st.integers(0, 19)))
def test_every_experiment_is_asked_for_and_the_budget_is_kept(
    search: Make, scores: list[float], width: int, factor: int, broken: set[int]
) -> None:
    experiments = many(len(scores), 80)
    driver = Driver(search(experiments, factor), curve_of(scores, frozenset(broken)), width).run()
    assert set(driver.steps) == {e.id for e in experiments}
    assert sorted(driver.asked[0]) == sorted(e.id for e in experiments)
    # who was measured at a rung and how: only the best part went past it, and at least one
    bounds = [*rungs(80, 10, factor), 80]
    for rung in bounds[:-1]:
        came = [e for e in experiments if driver.steps[e.id] >= rung]
        numbers = [e for e in came if math.isfinite(scores[e.seed])]
        passed = [e for e in came if driver.steps[e.id] > rung]
        assert all(math.isfinite(scores[e.seed]) for e in passed) or len(came) == 1
        if numbers:
            best = max(scores[e.seed] for e in numbers)
            went_on = [e for e in passed if scores[e.seed] == best]
            # one that went on past 10 may break at 15
            assert went_on, rung
    assert all(driver.status.get(e.id) != "finished" or driver.steps[e.id] == 80 for e in experiments)


@given(st.permutations(range(16)), st.integers(1, 16))
def test_halving_keeps_exactly_the_best_part(order: list[int], width: int) -> None:
    scores = [score / 16 for score in order]
    experiments = many(16, 80)
    driver = Driver(halving(experiments), curve_of(scores), width).run()
    # 16 to step 10, 8 to 20, 4 to 40, 2 to 80
    expected = {e.id: 10 if order[e.seed] < 8 else 20 if order[e.seed] < 12 else 40 for e in experiments}
    expected |= {e.id: 80 for e in experiments if order[e.seed] >= 14}
    assert driver.steps == expected
    assert sum(driver.steps.values()) == 16 * 10 + 8 * 10 + 4 * 20 + 2 * 40
    assert {n for n, status in driver.status.items() if status == "stopped"} == {
        n for n in expected if expected[n] < 80
    }
    worst = next(e.id for e in experiments if order[e.seed] == 0)
    assert driver.reasons[worst] == "not among the best 8 of 16 at step 10: val/score=0"
    assert [len(asked) for asked in driver.asked] == [16, 8, 4, 2]


def test_one_left_in_halving_runs_to_its_end() -> None:
    experiments = many(4, 80)
    driver = Driver(halving(experiments, 4), curve_of([0.1, 0.2, 0.3, 0.4])).run()
    assert [len(asked) for asked in driver.asked] == [4, 1]
    assert driver.steps[experiments[3].id] == 80
    alone = Driver(halving(many(1, 80)), curve_of([math.nan])).run()
    assert list(alone.steps.values()) == [80]


def test_experiments_that_end_before_a_rung_take_no_part() -> None:
    experiments = many(4, [10, 5, 80, 80])
    driver = Driver(halving(experiments), curve_of([0.9, 0.9, 0.1, 0.2])).run()
    assert driver.steps == dict(zip([e.id for e in experiments], [10, 5, 10, 80], strict=True))


def oracle(arrivals: list[list[tuple[str, int, float]]], factor: int) -> dict[str, int]:
    """ASHA's stopping rule: experiment → the rung at which it is stopped. Each inner list is one boundary's."""
    results: dict[int, list[tuple[float, int, str]]] = {}
    stopped: dict[str, int] = {}
    count = 0
    for boundary in arrivals:
        for name, rung, value in boundary:
            count += 1
            results.setdefault(rung, []).append((-value if math.isfinite(value) else math.inf, count, name))
        for name, rung, value in boundary:
            top = sorted(results[rung])[: max(1, len(results[rung]) // factor)]
            if not math.isfinite(value) or name not in [n for _, _, n in top]:
                stopped[name] = rung
    return stopped


@given(SCORES, st.integers(1, 6), st.integers(2, 4), st.integers(0, 5))
def test_asha_is_the_stopping_rule(scores: list[float], width: int, factor: int, seed: int) -> None:
    experiments = many(len(scores), 80)
    search = asha(experiments, factor, seed)
    boundaries: list[list[tuple[str, int, float]]] = []
    tell = search.tell

    def listening(reports: Any) -> Any:
        at = rungs(80, 10, factor)
        boundaries.append([(r.experiment.id, r.step, r.metrics[METRIC]) for r in reports if r.step in at])
        return tell(reports)

    search.tell = listening  # type: ignore[method-assign]
    driver = Driver(search, curve_of(scores), width).run()
    assert {n: s for n, s, v in driver.verdicts if isinstance(v, Stop)} == oracle(boundaries, factor)
    assert {n for n, status in driver.status.items() if status == "stopped"} == set(oracle(boundaries, factor))


@SEARCHES
@given(SCORES, st.integers(1, 6), st.sets(st.integers(0, 19)))
def test_saved_and_loaded_at_every_boundary_it_decides_the_same(
    search: Make, scores: list[float], width: int, broken: set[int]
) -> None:
    experiments = many(len(scores), 80)
    curve = curve_of(scores, frozenset(broken))
    plain = Driver(search(experiments), curve, width).run()
    loaded = Driver(search(experiments), curve, width, reload=lambda: search(experiments)).run()
    assert (loaded.asked, loaded.steps, loaded.status) == (plain.asked, plain.steps, plain.status)


@SEARCHES
def test_all_nan_wins_nothing(search: Make) -> None:
    driver = Driver(search(many(6, 80)), curve_of([math.nan] * 6)).run()
    assert set(driver.steps.values()) == {10}


@SEARCHES
def test_equal_ones_are_kept_by_their_order(search: Make) -> None:
    experiments = many(4, 20)
    driver = Driver(search(experiments), curve_of([0.5] * 4), width=4).run()
    first = set(driver.asked[0][:2]) if search is asha else {e.id for e in experiments[:2]}
    assert {name for name, steps in driver.steps.items() if steps == 20} == first


def test_min_keeps_the_least() -> None:
    experiments = many(2, 20)
    driver = Driver(asha(experiments, mode="min"), curve_of([0.5, 0.1]), width=2).run()
    assert [driver.steps[e.id] for e in experiments] == [10, 20]


def test_the_order_is_shuffled_by_the_seed() -> None:
    experiments = many(50)
    orders = [[t.experiment.id for t in asha(experiments, seed=seed).ask(4)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != [e.id for e in experiments]
    assert [e.id for e in asha(experiments).known()] == [e.id for e in experiments]


def test_a_reason_tells_the_place_and_the_value() -> None:
    experiments = many(4, 20)
    reports = [Report(e, 10, {METRIC: float(e.seed)}) for e in experiments]
    verdicts = asha(experiments).tell(reports)
    assert verdicts == {
        experiments[0].id: Stop("not among the best 2 of 4 at step 10: val/score=0"),
        experiments[1].id: Stop("not among the best 2 of 4 at step 10: val/score=1"),
    }
    # a report of the same step changes nothing: it came there once
    search = asha(experiments)
    search.tell(reports[3:])
    assert search.tell(reports[3:]) == {}
