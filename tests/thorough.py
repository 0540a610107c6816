"""Rows of a parametrised test that are of a kind which another row stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def kept(rows: Iterable[Any], *, of: Collection[Any]) -> list[Any]:
    """All rows; those that are not among ``of`` are marked thorough.

    Args:
        rows: the values of each; a tuple where a test takes several.
        of: the rows that stand for the others, one of each kind.

    Example:
        >>> [row.values[0] for row in kept(["sgd", "adam", "adamw"], of=["adamw"]) if row.marks]
        ['sgd', 'adam']
    """
    rows = list(rows)
    missing = [row for row in of if row not in rows]
    assert not missing, f"no such rows: {missing}"
    return [_param(row, [] if row in of else [pytest.mark.thorough]) for row in rows]


def _param(row: Any, marks: list[Any]) -> Any:
    return pytest.param(*row, marks=marks) if isinstance(row, tuple) else pytest.param(row, marks=marks)
