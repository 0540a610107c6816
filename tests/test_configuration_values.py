"""Values coerced into what a key holds.

Oracle: Python's own types and `inspect`-able annotations; tables of what is unambiguous and what is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalesce.configuration import make_experiments
from coalesce.configuration.values import Kind, coerce, floats_of, kind_of_annotation, kind_of_value, plain


def resolved(name: str, like: dict[str, Any] | None = None, /, **arguments: Any) -> dict[str, Any]:
    """The task's arguments in an experiment that sweeps them over one value each."""
    target = {"_target_": f"tasks_for_tests.{name}", **(like or {})}
    base = {"task": target, "optimizer": "sgd", "schedule": "constant", "steps": 1, "batch_size": 1, "seed": 0}
    (experiment,) = make_experiments(base, {f"task.{key}": [value] for key, value in arguments.items()})[0]
    return {key: value for key, value in experiment.config["task"].items() if key != "_target_"}


def same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def test_defaults_are_filled_in() -> None:
    assert resolved("Toy") == {
        "hidden": 33,
        "dropout": 0.0,
        "clip": None,
        "scale": 1.0,
        "activation": "relu",
        "name": "toy",
        "bias": True,
        "sizes": (16, 32),
        "weights": None,
        # the class's own business, where a value that was written down would be refused
        "bound": math.inf,
    }


@pytest.mark.parametrize(
    ("key", "given", "right"),
    [
        ("hidden", "64", 64),
        ("hidden", 64.0, 64),
        ("hidden", "1e2", 100),
        ("hidden", "1_000", 1000),
        ("dropout", 1, 1.0),
        ("dropout", "1e-3", 0.001),
        ("dropout", " .5 ", 0.5),
        ("dropout", "-3", -3.0),
        ("clip", "None", None),
        ("clip", "null", None),
        ("clip", None, None),
        ("clip", 1, 1.0),
        ("scale", 2, 2.0),
        ("name", "None", "None"),
        ("name", "1e-3", "1e-3"),
        ("bias", "no", False),
        ("bias", "On", True),
        ("sizes", [1, "2", 3.0], (1, 2, 3)),
        ("sizes", [], ()),
        ("weights", {"a": 1, "b": "2"}, {"a": 1.0, "b": 2.0}),
        ("bound", math.inf, math.inf),
        ("activation", "tanh", "tanh"),
    ],
)
def test_arguments_arrive_in_their_type(key: str, given: Any, right: Any) -> None:
    value = resolved("Toy", **{key: given})[key]
    assert same(value, right)


def test_without_annotation_the_default_tells() -> None:
    got = resolved("Bare", rate="1e-3", count="4", power=3, extra="None")
    # nothing is known of `rate`: text stays text; `extra` is None by default, so None is a value
    assert got == {"rate": "1e-3", "count": 4, "power": 3.0, "extra": None}
    assert type(got["power"]) is float


@pytest.mark.parametrize(
    ("like", "given", "right"),
    [
        (0.5, 1, 1.0),
        (0.5, "1e-3", 0.001),
        (5, 1, 1),
        ([0.5, 0.1], [1, 2], [1.0, 2.0]),
        ([0.5, 0.1], 3, 3),
        ([1, 2], [0.5], [0.5]),
        ({"a": 0.5, "b": 1}, {"a": 1, "b": 2.5}, {"a": 1.0, "b": 2.5}),
    ],
)
def test_without_annotation_and_default_floats_are_what_the_base_has_as_floats(
    like: Any, given: Any, right: Any
) -> None:
    # law 3: an integer literal given for a key whose base value is a float is a float
    value = resolved("Bare", {"rate": like}, rate=given)["rate"]
    assert repr(value) == repr(right)


def test_open_tasks_take_any_name() -> None:
    assert resolved("Open", {"a": 0.5}, a=1, b="text", c=[1, {"x": None}]) == {
        "a": 1.0,
        "b": "text",
        "c": [1, {"x": None}],
    }


@pytest.mark.parametrize(
    ("annotation", "default", "kind"),
    [
        (float, 1, Kind("float")),
        (int, None, Kind("int", optional=True)),
        (float | None, 0.1, Kind("float", optional=True)),
        (Optional[int], 3, Kind("int", optional=True)),  # noqa: UP045 (what a user writes)
        (Union[int, float], 3, Kind("number")),  # noqa: UP007
        (int | float, 0.5, Kind("float")),
        (int | str, 3, Kind("either")),
        (float | str | None, 0.5, Kind("either", optional=True)),
        (Any, 3, Kind("int", hint="its default 3 is one; annotate it as float to change that")),
        (list[float], [1.0], Kind("list", item=Kind("float"))),
        (Sequence[int], (1,), Kind("list", item=Kind("int"), as_tuple=True)),
        (tuple[float, int], (1.0, 2), Kind("list", items=(Kind("float"), Kind("int")), as_tuple=True)),
        (dict[str, float], {}, Kind("mapping", item=Kind("float"))),
        (Literal["a", 1, None], "a", Kind("choice", optional=True, choices=("a", 1))),
        (Any, 0.5, Kind("float")),
        (Any, None, Kind(optional=True)),
        (bool, True, Kind("bool")),
        (str, "x", Kind("text")),
    ],
)
def test_kinds(annotation: Any, default: Any, kind: Kind) -> None:
    assert kind_of_annotation(annotation, default, True) == kind


@pytest.mark.parametrize(("given", "right"), [("auto", "auto"), (1, 1.0), (0.5, 0.5), (True, True), ("1", "1")])
def test_a_union_takes_what_either_takes(given: Any, right: Any) -> None:
    # an integer is still a float where the default is one
    assert same(resolved("Either", width=given)["width"], right)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_survives_its_own_text(number: float) -> None:
    assert coerce("k", repr(number), Kind("float")) == (number, [])
    assert coerce("k", number, Kind("float")) == (number, [])


@given(st.integers(-(10**30), 10**30))
def test_an_integer_survives_its_own_text(number: int) -> None:
    value, problems = coerce("k", str(number), Kind("int"))
    assert (value, problems) == (number, [])
    assert type(value) is int


@given(st.text())
def test_no_text_becomes_a_number_that_python_does_not_see(text: str) -> None:
    value, problems = coerce("k", text, Kind("float"))
    if not problems:
        assert math.isfinite(value)
        assert value == float(text)
    else:
        assert value == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=8,
)


@given(JSON.filter(lambda v: "???" not in repr(v)))
def test_what_nothing_is_known_about_stays_as_it_is(value: Any) -> None:
    assert coerce("k", value, Kind()) == (value, [])
    assert plain(value) == value


@given(JSON.filter(lambda v: "???" not in repr(v) and v is not None))
def test_a_value_fits_the_kind_that_it_has(value: Any) -> None:
    for kind in (kind_of_value(value), floats_of(value)):
        got, problems = coerce("k", value, kind)
        assert problems == []
        assert got == value
