"""Population-based training.

Oracle: the rule of the paper as laws: the worst part copies the best, floats move by a factor or are drawn anew and
stay within their bounds, nothing else is copied; and a search that is saved and loaded at every boundary decides the
same.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalesce.experiment import Experiment
from coalesce.search.base import Copy, Report
from coalesce.search.metric import Metric
from coalesce.search.population import Population, perturbed
from coalesce.search.random import drawn
from coalesce.search.space import Axis, Interval, Space
from search_helpers import METRIC, Driver, make, many

SPACE = Space({"optimizer.lr": Interval(1e-3, 1e-1, log=True), "task.dropout": [0.0, 0.25, 0.5], "task.hidden": [8]})
POPULATION = [make({**m, "steps": 60}) for m in drawn(SPACE, 20, seed=1)]
AXES = perturbed(SPACE, POPULATION, lambda experiment, key, value: True)


def population(experiments: list[Experiment] = POPULATION, mode: str = "max", **options: Any) -> Population:
    settings: dict[str, Any] = {"interval": 20, "resample": 0.0, "seed": 3, **options}
    return Population(experiments, Metric(METRIC, mode), AXES, **settings)


def reports(values: list[float], step: int = 20) -> list[Report]:
    return [Report(e, step, {METRIC: v}) for e, v in zip(POPULATION, values, strict=False)]


VALUES = st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, math.nan, math.inf]), min_size=1, max_size=20)


def test_what_is_perturbed() -> None:
    assert list(AXES) == ["optimizer.lr", "task.dropout"]
    assert AXES["task.dropout"].members == ((0.0,), (0.25,), (0.5,))
    space = Space(
        {
            "task.a": [1.0, 2.0],
            "task.b": [1.0, 2.0],
            "task.c": Interval(1, 9, integer=True),
            "task.d": [0.5],
            "task.e": [1.0, None],
            "task.f": [1.0, 2.0],
            "task.g": Interval(1, 2),
        },
        [["task.a", "task.b"]],
    )
    members = [make(m) for m in drawn(space, 20, 0)]
    # zipped; integers; one value; not always a float; does not ride
    assert list(perturbed(space, members, lambda e, key, value: key != "task.f")) == ["task.g"]
    # numbers are what the experiments have, however they were written
    written = Space({"task.a": ["1e-3", 1]})
    found = perturbed(written, [make({"task.a": 1e-3}), make({"task.a": 1.0})], lambda *_: True)
    assert found == {"task.a": Axis(("task.a",), ((1e-3,), (1.0,)))}


@given(VALUES, st.floats(0.01, 0.5), st.sampled_from(["max", "min"]))
def test_the_worst_copy_the_best(values: list[float], fraction: float, mode: str) -> None:
    verdicts = population(mode=mode, fraction=fraction).tell(reports(values))
    of = {e.id: v for e, v in zip(POPULATION, values, strict=False)}
    finite = sorted((v for v in values if math.isfinite(v)), reverse=mode == "max")
    count = min(max(1, int(len(values) * fraction)), len(values) // 2)
    assert all(isinstance(v, Copy) for v in verdicts.values())
    sources = {v.source for v in verdicts.values() if isinstance(v, Copy)}
    assert not sources & set(verdicts)
    if len(values) == 1 or not finite:
        assert verdicts == {}
        return
    assert all(of[s] in finite[:count] for s in sources)
    lost = [name for name, v in of.items() if not math.isfinite(v)]
    assert set(lost) <= set(verdicts)
    assert len(verdicts) == max(count, len(lost)) or len(finite) < 2 * count
    # nobody who stays is worse than one who copies
    sign = 1 if mode == "max" else -1
    stay = [sign * of[n] for n in of if n not in verdicts]
    assert all(sign * of[n] <= min(stay) for n in verdicts if n not in lost)


def test_floats_move_by_a_factor_and_stay_within_their_bounds() -> None:
    verdicts = population(fraction=0.5).tell(reports([float(n) for n in range(20)]))
    assert len(verdicts) == 10
    by_id = {e.id: e for e in POPULATION}
    factors = set()
    for verdict in verdicts.values():
        assert isinstance(verdict, Copy)
        source = by_id[verdict.source].values
        assert set(verdict.values) == {"optimizer.lr", "task.dropout"}
        rate, dropout = verdict.values["optimizer.lr"], verdict.values["task.dropout"]
        possible = {min(max(source["optimizer.lr"] * f, 1e-3), 1e-1) for f in (0.8, 1.2)}
        assert any(rate == pytest.approx(p, rel=1e-11) for p in possible)
        assert any(dropout == pytest.approx(min(0.5, source["task.dropout"] * f)) for f in (0.8, 1.2))
        factors.add(round(rate / source["optimizer.lr"], 6))
    assert {0.8, 1.2} <= factors


def test_resampled_floats_are_drawn_from_the_space() -> None:
    verdicts = population(fraction=0.5, resample=1.0).tell(reports([float(n) for n in range(20)]))
    rates = [v.values["optimizer.lr"] for v in verdicts.values() if isinstance(v, Copy)]
    assert len(set(rates)) == 10
    assert all(1e-3 <= rate <= 1e-1 for rate in rates)
    assert {v.values["task.dropout"] for v in verdicts.values() if isinstance(v, Copy)} <= {0.0, 0.25, 0.5}


def test_a_copy_of_a_copy_goes_on_from_its_present_values() -> None:
    search = population(fraction=0.25, factors=(1.2,))
    two = POPULATION[:2]
    (first,) = search.tell([Report(e, 20, {METRIC: v}) for e, v in zip(two, (1.0, 0.0), strict=True)]).values()
    (second,) = search.tell([Report(e, 40, {METRIC: v}) for e, v in zip(two, (0.0, 1.0), strict=True)]).values()
    assert isinstance(first, Copy)
    assert isinstance(second, Copy)
    assert (first.source, second.source) == (two[0].id, two[1].id)
    rate = two[0].values["optimizer.lr"]
    assert first.values["optimizer.lr"] == pytest.approx(min(0.1, rate * 1.2))
    assert second.values["optimizer.lr"] == pytest.approx(min(0.1, rate * 1.2 * 1.2))


def test_after_going_back_it_says_the_same_again() -> None:
    search = population(POPULATION[:6], resample=0.3)
    scores = {20: [0, 1, 2, 3, 4, 5.0], 40: [5, 4, 3, 2, 1, 0.0]}

    def tell(step: int) -> Any:
        return search.tell([Report(e, step, {METRIC: v}) for e, v in zip(POPULATION, scores[step], strict=False)])

    first = [tell(20), tell(40)]
    assert first == [tell(20), tell(40)]
    assert first[0] != first[1]


def test_only_at_its_interval_and_before_the_end_and_among_equals() -> None:
    values = [float(n) for n in range(20)]
    assert population().tell(reports(values, step=10)) == {}
    assert population().tell(reports(values, step=60)) == {}
    assert population().tell([]) == {}
    # two lane-fulls that stand at other steps are two populations
    mixed = reports(values[:10], 20) + [
        Report(e, 40, {METRIC: v}) for e, v in zip(POPULATION[10:], values, strict=False)
    ]
    first = {e.id for e in POPULATION[:10]}
    for name, verdict in population().tell(mixed).items():
        assert isinstance(verdict, Copy)
        assert (name in first) == (verdict.source in first)


@given(VALUES, st.integers(2, 20), st.integers(0, 5))
def test_the_same_seed_decides_the_same_saved_and_loaded(values: list[float], width: int, seed: int) -> None:
    experiments = POPULATION[: len(values)]
    of = {e.id: v for e, v in zip(experiments, values, strict=True)}

    def curve(experiment: Experiment, step: int) -> float:
        return of[experiment.id] * math.cos(step)

    def search() -> Population:
        return population(experiments, seed=seed, resample=0.3)

    plain = Driver(search(), curve, width).run()
    loaded = Driver(search(), curve, width, reload=search).run()
    assert loaded.verdicts == plain.verdicts
    assert set(plain.status.values()) == {"finished"}
    assert set(plain.steps.values()) == {60}


def test_another_seed_decides_otherwise() -> None:
    values = [float(n) for n in range(20)]
    first, second = (population(seed=seed, fraction=0.5).tell(reports(values)) for seed in (0, 1))
    assert set(first) == set(second)
    assert first != second


def test_one_alone_is_left_alone() -> None:
    driver = Driver(Population(many(1), Metric(METRIC, "max"), {}, 20), lambda e, step: 0.5).run()
    assert driver.verdicts == []
