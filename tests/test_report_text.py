"""Numbers and values as text.

Oracle: the number that the text says, read back by Python; hand-written texts for what should look how.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coalesce.report import text

# at the very end of the range four digits round to infinity
FINITE = st.floats(-1e300, 1e300)


@given(FINITE)
def test_a_number_says_what_it_is(value: float) -> None:
    assert float(text.number(value)) == pytest.approx(value, rel=5.1e-4)
    assert float(text.number(value, 17)) == value
    assert float(text.metric(value)) == pytest.approx(value, rel=5.1e-4)
    assert len(text.number(value)) <= len("-1.2345e-300")


@given(st.lists(FINITE, min_size=1, max_size=5))
def test_distinct_texts_are_distinct(values: list[float]) -> None:
    texts = text.distinct(values)
    assert len(set(texts)) == len({repr(value) for value in values})
    assert [float(item) for item in texts] == pytest.approx(values, rel=5.1e-4)


def test_learning_rates_and_betas() -> None:
    rates = [1e-4, 1.2e-4, 10 ** (-25 / 7), 0.001, 10 ** (-16 / 7), 0.1, 1.0, 10.0, 1e6]
    betas = [0.999, 0.9999, 0.99999, -0.99999, 0.0]
    assert [text.number(value) for value in rates + betas] == [
        *("1e-4", "1.2e-4", "2.683e-4", "0.001", "0.005179", "0.1", "1", "10", "1e6"),
        *("0.999", "0.9999", "0.99999", "-0.99999", "0"),
    ]
    assert [text.number(value) for value in (math.nan, math.inf)] == ["nan", "inf"]


def test_a_column_of_metrics_lines_up() -> None:
    texts = [text.metric(value) for value in (0.97, 0.9, 0.96543, 0.5)]
    assert texts == ["0.9700", "0.9000", "0.9654", "0.5000"]


def test_brackets_and_paths_stay_whole() -> None:
    console = Console(width=20, record=True, force_terminal=True, file=None)
    with console.capture() as capture:
        text.say(console, "[bold] /a/very/long/path/that/must/be/copied", wrap=False)
    assert capture.get() == "[bold] /a/very/long/path/that/must/be/copied\n"
