"""Patience and targets around any search.

Oracle: the rule, run over each experiment's whole curve by itself.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalesce.experiment import Experiment
from coalesce.search.base import Copy, Listed, Report, Search, Stop
from coalesce.search.halving import Asha, Halving
from coalesce.search.metric import Metric
from coalesce.search.stopping import Stopping
from search_helpers import METRIC, Driver, make, many

MAX = Metric(METRIC, "max")
CURVES = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.15, 0.2, 0.3, math.nan]), min_size=10, max_size=10), min_size=1, max_size=6
)


def end(curve: list[float], patience: int | None, min_delta: float, target: float | None) -> int:
    """Measurements until a curve's experiment ends."""
    best, since = -math.inf, 0
    for number, value in enumerate(curve, 1):
        improved = not math.isnan(value) and value > best + min_delta
        best, since = (value, 0) if improved else (best, since + 1)
        reached = target is not None and value >= target
        if number < len(curve) and (reached or (patience is not None and since >= patience)):
            return number
    return len(curve)


@given(
    CURVES,
    st.none() | st.integers(1, 5),
    st.sampled_from([0.0, 0.1]),
    st.none() | st.sampled_from([0.2, 0.3]),
    st.integers(1, 6),
    st.sampled_from([10, 5, 2]),
)
def test_each_is_judged_by_its_own_curve(
    curves: list[list[float]], patience: int | None, min_delta: float, target: float | None, width: int, every: int
) -> None:
    experiments = many(len(curves), 100)

    def curve(experiment: Experiment, step: int) -> float:
        return curves[experiment.seed][math.ceil(step / 10) - 1]

    def search() -> Search:
        return Stopping(Listed(experiments), MAX, patience, min_delta, target)

    driver = Driver(search(), curve, width, every=every, reload=search).run()
    expected = [10 * end(values, patience, min_delta, target) for values in curves]
    assert [driver.steps[e.id] for e in experiments] == expected
    assert [driver.status[e.id] for e in experiments] == ["stopped" if n < 100 else "finished" for n in expected]


def test_a_target_for_a_loss() -> None:
    (experiment,) = many(1)
    search = Stopping(Listed([experiment]), Metric(METRIC, "min"), None, target=0.1)
    told = [search.tell([Report(experiment, step, {METRIC: v})]) for step, v in ((10, 0.2), (20, math.nan), (30, 0.1))]
    assert told == [{}, {}, {experiment.id: Stop("val/score=0.1 reached the target of 0.1")}]


def test_reasons() -> None:
    (experiment,) = many(1)
    for patience, delta, text in ((1, 0.0, "in one measurement"), (2, 0.5, "by more than 0.5 in 2 measurements")):
        search = Stopping(Listed([experiment]), MAX, patience, delta)
        found: list[Any] = [search.tell([Report(experiment, s, {METRIC: 0.3})]).get(experiment.id) for s in (1, 2, 3)]
        assert found[:patience] == [None] * patience
        assert found[patience].reason.endswith(text)


def test_what_is_told_again_after_going_back_does_not_count_again() -> None:
    (experiment,) = many(1)
    search = Stopping(Listed([experiment]), MAX, 3)
    steps = [10, 20, 30, 20, 30, 40]
    told = [search.tell([Report(experiment, step, {METRIC: 0.5})]) for step in steps]
    assert told[:5] == [{}] * 5
    assert set(told[5]) == {experiment.id}


def test_a_boundary_without_a_measurement_does_not_count() -> None:
    (experiment,) = many(1)
    search = Stopping(Listed([experiment]), MAX, 1)
    search.tell([Report(experiment, 10, {METRIC: 0.5})])
    assert all(search.tell([Report(experiment, step, {"train/loss": 1.0})]) == {} for step in range(20, 90, 10))


@pytest.mark.parametrize("inner", [Halving, Asha])
def test_around_another_search(inner: Any) -> None:
    experiments = many(8, 80)
    arguments = (experiments, MAX, 10, 2, *([0] if inner is Asha else []))
    search = Stopping(inner(*arguments), MAX, patience=3)
    assert (search.replays, search.lists, search.count) == (True, True, 8)
    assert list(search.known()) == experiments
    driver = Driver(search, lambda e, step: e.seed / 10).run()
    # no curve moves: who passes the rungs at 10 and 20 is out of patience at 40
    assert max(driver.steps.values()) == 40
    assert set(driver.status.values()) == {"stopped"}
    assert not any(driver.asked[1:]) or inner is Halving


class Copying(Listed):
    """Lets the first of two copy the second at step 30."""

    def tell(self, reports: Any) -> Any:
        names = [report.experiment.id for report in reports]
        return {names[0]: Copy(names[1])} if len(names) == 2 and reports[0].step == 30 else {}


def test_a_copy_starts_its_patience_anew() -> None:
    experiments = [make({"seed": n, "steps": 100}) for n in range(2)]
    driver = Driver(Stopping(Copying(experiments), MAX, 3), lambda e, step: 0.5 + (step if e.seed else 0), 2).run()
    # flat: out of patience at 40, but anew at 40, the first measurement after the copy: three more
    assert driver.reasons == {experiments[0].id: "val/score has not improved in 3 measurements"}
    assert driver.steps[experiments[0].id] == 70
    assert driver.steps[experiments[1].id] == 100
