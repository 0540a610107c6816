"""The grid.

Oracle: `itertools.product`, and laws: every combination once, in order, counted without being written down.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalesce.search.grid import Grid

LISTS = st.dictionaries(st.text("abcdefg", min_size=1, max_size=3), st.lists(st.integers(0, 9), max_size=4), max_size=4)


@given(LISTS)
def test_is_the_product(values: dict[str, list[int]]) -> None:
    grid = Grid(values)
    expected = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    assert list(grid) == expected
    assert grid.count == len(expected)


@given(LISTS, st.integers(1, 4), st.data())
def test_zipped_keys_run_together(others: dict[str, list[int]], length: int, data: st.DataObject) -> None:
    # the zipped keys stand at any place among the others
    names = data.draw(st.permutations([*others, "Z1", "Z2"]))
    zipped = {"Z1": list(range(length)), "Z2": [10 * i for i in range(length)]}
    values = {name: (zipped | others)[name] for name in names}
    members = list(Grid(values, [["Z2", "Z1"]]))
    # oracle: the members of the whole product whose two numbers belong together
    product = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    belonging = [m for m in product if m["Z2"] == 10 * m["Z1"]]
    key = repr
    assert sorted(members, key=key) == sorted(belonging, key=key)
    assert all(list(m) == names for m in members)


def test_a_zip_group_stands_where_its_first_key_stands() -> None:
    grid = Grid({"lr": [1, 2], "seed": [0, 1], "warmup": [10, 20]}, [["warmup", "lr"]])
    assert [tuple(m.values()) for m in grid] == [(1, 0, 10), (1, 1, 10), (2, 0, 20), (2, 1, 20)]


def test_counts_without_expanding() -> None:
    grid = Grid({str(i): range(10**6) for i in range(20)})
    assert grid.count == 10**120
    assert grid.at(10**120 - 1) == {str(i): 10**6 - 1 for i in range(20)}


@given(LISTS)
def test_the_diagonal_shows_every_value_of_real_members(values: dict[str, list[int]]) -> None:
    grid = Grid(values)
    shown = list(grid.diagonal(most=100))
    assert all(member in list(grid) for member in shown)
    if grid.count:
        assert all({m[key] for m in shown} == set(values[key]) for key in values)
    else:
        assert shown == []


def test_the_diagonal_ends() -> None:
    assert len(list(Grid({"a": range(10**12)}).diagonal(most=7))) == 7


@pytest.mark.parametrize(
    ("values", "zips", "message"),
    [
        ({"a": [1]}, [["b"]], "no values"),
        ({"a": [1], "b": [1]}, [["a", "b"], ["a"]], "twice"),
        ({"a": [1], "b": [1, 2]}, [["a", "b"]], "equally many"),
    ],
)
def test_refuses_wrong_zips(values: dict[str, list[int]], zips: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(values, zips)


@pytest.mark.parametrize("number", [-1, 4])
def test_has_no_other_members(number: int) -> None:
    with pytest.raises(IndexError, match="4 members"):
        Grid({"a": [1, 2], "b": [3, 4]}).at(number)
