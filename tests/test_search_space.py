"""Drawing: intervals, lists, zip groups, repetitions.

Oracle: the interval's own formula, evaluated with exact fractions or logarithms; `coalesce.search.grid.Grid`; and laws:
the same seed draws the same, more samples add to those that there are, what is zipped stays together. Recorded draws
hold ids still.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalesce.search.draws import integer, shuffled, uniform
from coalesce.search.grid import Grid
from coalesce.search.random import drawn
from coalesce.search.space import Interval, Space

ENDS = st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)).filter(lambda ends: ends[0] < ends[1])
SHARES = st.floats(0, 1, exclude_max=True)


@given(ENDS, SHARES)
def test_a_value_lies_where_its_share_says(ends: tuple[float, float], share: float) -> None:
    interval = Interval(*ends)
    low, high = (Fraction(end) for end in ends)
    exact = low + (high - low) * Fraction(share)
    value = interval.at(share)
    assert ends[0] <= value <= ends[1]
    # 12 digits of the value, and rounding of the ends' difference
    assert abs(Fraction(value) - exact) <= Fraction(1, 10**11) * max(abs(low), abs(high))


@given(st.floats(1e-9, 1e9), st.floats(1.001, 1e6), SHARES)
def test_a_logarithmic_value_lies_where_its_share_says(low: float, ratio: float, share: float) -> None:
    value = Interval(low, low * ratio, log=True).at(share)
    assert low <= value <= low * ratio
    assert math.log(value / low) == pytest.approx(share * math.log(low * ratio / low), abs=1e-9)


def test_what_is_drawn_is_rounded() -> None:
    values = [Interval(0, 1).at(random.random()) for _ in range(50)]
    assert all(len(repr(value).lstrip("0.")) <= 12 for value in values if value > 1e-4)


@pytest.mark.parametrize("log", [False, True])
def test_integers_include_both_ends(log: bool) -> None:
    interval = Interval(1, 4, log=log, integer=True)
    counts = Counter(interval.at(uniform(0, number)) for number in range(4000))
    assert set(counts) == {1, 2, 3, 4}
    assert {type(value) for value in counts} == {int}
    # each number has what rounds to it, from 0.5 to 4.5
    expected = {n: math.log((n + 0.5) / (n - 0.5)) / math.log(9) if log else 0.25 for n in range(1, 5)}
    assert all(abs(counts[n] / 4000 - expected[n]) < 0.03 for n in expected)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((1.0, 1.0), "is not below 1.0"),
        ((2, 1), "is not below 1"),
        ((math.nan, 1), "two finite ends"),
        ((0, math.inf), "two finite ends"),
        (("0", 1), "two finite ends, not '0'"),
        ((True, 2), "two finite ends, not True"),
        ((0, 1, True), "above 0"),
        ((1.5, 3, False, True), "integers at its ends, not 1.5"),
    ],
)
def test_what_is_no_interval(arguments: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Interval(*arguments)


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(0, 0.7), "interval(0.0, 0.7)"),
        (Interval(1e-4, 0.1, log=True), "tag(log, interval(0.0001, 0.1))"),
        (Interval(1, 8, integer=True), "int(interval(1, 8))"),
        (Interval(1, 8, log=True, integer=True), "tag(log, int(interval(1, 8)))"),
    ],
)
def test_an_interval_is_written_as_hydra_does(interval: Interval, text: str) -> None:
    assert str(interval) == text


SPACE = Space(
    {
        "optimizer.lr": Interval(1e-4, 1e-1, log=True),
        "task.hidden": Interval(8, 64, integer=True),
        "optimizer": ["sgd", "adam"],
        "seed": range(2),
        "optimizer.momentum": [0.9, None],
    },
    [["optimizer.momentum", "optimizer"]],
)


def test_draws_are_what_they_were() -> None:
    # recorded when the rule was made; if this fails, a search with a seed makes other experiments than it did
    assert list(drawn(SPACE, 2, seed=7))[::2] == RECORDED


RECORDED: list[dict[str, Any]] = [
    {"optimizer.lr": 0.0917993999624, "task.hidden": 14, "optimizer": "sgd", "seed": 0, "optimizer.momentum": 0.9},
    {"optimizer.lr": 0.0031033741624, "task.hidden": 54, "optimizer": "adam", "seed": 0, "optimizer.momentum": None},
]


@given(st.integers(0, 2**63), st.integers(1, 12))
def test_draws_of_a_seed(seed: int, count: int) -> None:
    members = list(drawn(SPACE, count, seed))
    assert members == list(drawn(SPACE, count, seed))
    # each sample with each seed, one after the other
    assert [m["seed"] for m in members] == [0, 1] * count
    assert all({**a, "seed": 1} == b for a, b in zip(members[::2], members[1::2], strict=True))
    assert all(tuple(m) == SPACE.keys for m in members)
    assert {(m["optimizer"], m["optimizer.momentum"]) for m in members} <= {("sgd", 0.9), ("adam", None)}
    # more samples add
    assert list(drawn(SPACE, count + 3, seed))[: len(members)] == members
    assert list(drawn(SPACE, count, seed + 1)) != members


def test_a_key_is_drawn_alike_whatever_stands_beside_it() -> None:
    alone = Space({"optimizer.lr": Interval(0, 1)})
    beside = Space({"task.a": [1, 2, 3], "optimizer.lr": Interval(0, 1)})
    assert [m["optimizer.lr"] for m in drawn(beside, 9, 3)] == [m["optimizer.lr"] for m in drawn(alone, 9, 3)]


@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))
def test_samples_differ_and_a_small_space_is_used_up(seed: int, count: int, a: int, b: int) -> None:
    values = {"task.a": [*range(a), 0], "task.b": list(range(b))}
    members = [tuple(m.values()) for m in drawn(Space(values), count, seed)]
    assert len(members) == len(set(members)) == min(count, a * b)
    assert set(members) <= {tuple(m.values()) for m in Grid(values)}


def test_choices_are_drawn_equally_often() -> None:
    counts = Counter(integer(5, n, below=4) for n in range(8000))
    # chi-square with 3 degrees of freedom: beyond 16.3 once in a thousand; the seed is fixed
    assert sum((counts[k] - 2000) ** 2 / 2000 for k in range(4)) < 16.3


def test_what_repeats_and_what_is_drawn() -> None:
    folds = Space({"task.a": [1, 2], "seed": [5, 6], "data.fold": range(3)})
    assert folds.repeats.count == 6
    zipped = Space({"seed": [5, 6], "data.fold": [0, 1]}, [["seed", "data.fold"]])
    assert (zipped.repeats.count, zipped.choices) == (2, 1)
    assert len(list(drawn(zipped, 5, 0))) == 2
    # a seed that belongs to another key, or comes from an interval, is a value like any other
    assert Space({"seed": [5, 6], "task.a": [1, 2]}, [["seed", "task.a"]]).repeats.count == 1
    assert Space({"seed": Interval(0, 99, integer=True)}).repeats.count == 1


def test_a_shuffle_is_a_permutation() -> None:
    assert sorted(shuffled(100, 1)) == list(range(100))
    assert shuffled(100, 1) == shuffled(100, 1) != shuffled(100, 2)
    assert shuffled(0, 1) == []
