"""Experiments that differ in their seed alone, and the table that sums them up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coalesce.report import text
from coalesce.report.fitting import header, print_fitting

#: Rows of the table; of more groups only the best are shown.
ROWS = 30

#: What the table counts beside what was measured: divergence always, the others where there are any.
ENDS = ("stopped", "diverged", "failed")


@dataclass
class Group:
    """Experiments that differ in their seed alone.

    Args:
        values: of the swept keys other than the seed, None where missing.
        numbers: the monitored metric's last value of each experiment that ended well and whose value is finite.
        shown: the same of further metrics.
        ends: status → how many ended so.
    """

    values: tuple[Any, ...]
    numbers: list[float]
    shown: tuple[list[float], ...] = ()
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def mean(self) -> float:
        return mean(self.numbers)

    @property
    def std(self) -> float:
        return std(self.numbers)


def mean(numbers: Sequence[float]) -> float:
    return float(np.mean(numbers)) if numbers else math.nan


def std(numbers: Sequence[float]) -> float:
    """Over the seeds, with n - 1."""
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else math.nan


def grouped(frame: pd.DataFrame, keys: Sequence[str], monitor: str, show: Sequence[str] = ()) -> list[Group]:
    """The experiments by every swept key except the seed, in the sweep's order."""
    groups: dict[str, Group] = {}
    for row in frame.to_dict("records"):
        values = tuple(plain(row[key]) for key in keys if key != "seed")
        group = groups.setdefault(repr(values), Group(values, [], tuple([] for _ in show)))
        group.ends[row["status"]] += 1
        if row["status"] not in ("diverged", "failed"):
            for name, numbers in zip((monitor, *show), (group.numbers, *group.shown), strict=True):
                if math.isfinite(row.get(name, math.nan)):
                    numbers.append(row[name])
    return list(groups.values())


def best_group(groups: list[Group], mode: str) -> Group | None:
    measured = [group for group in groups if group.numbers]
    if not measured:
        return None
    return max(measured, key=lambda g: g.mean) if mode == "max" else min(measured, key=lambda g: g.mean)


def print_table(
    groups: list[Group], keys: Sequence[str], seeds: bool, metrics: Sequence[str], mode: str, console: Console
) -> None:
    """Print one row per group.

    Args:
        groups: in the order of the sweep.
        keys: of their values.
        seeds: whether the experiments of a group differ in their seed: mean, standard deviation and number are shown.
        metrics: the monitored one, and those of the groups' ``shown``.
        mode: "max" or "min" of the monitored one is best.
        console: where to print, see `print_fitting`.
    """
    order = "in the order of the sweep"
    rows = groups
    if len(groups) > ROWS:
        sign = -1 if mode == "max" else 1
        rows = sorted(groups, key=lambda g: (not g.numbers, sign * g.mean if g.numbers else 0.0))[:ROWS]
        order = f"the best {ROWS} of {len(groups):,} settings first"
    what = "last value, mean and standard deviation over the seeds" if seeds else "last value"
    better = "higher" if mode == "max" else "lower"
    more = f" and {', '.join(metrics[1:])}" if metrics[1:] else ""
    text.say(console, f"\n{metrics[0]} ({better} is better){more}: {what}; {order}")
    best = best_group(groups, mode)
    ends = [name for name in ENDS if name == "diverged" or any(group.ends[name] for group in rows)]
    values = [dict(zip(keys, group.values, strict=True)) for group in groups]

    def build(kept: Sequence[str], broken: bool) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        for key in kept:
            table.add_column(header(key, broken), justify="right", overflow="fold", vertical="bottom")
        _add_columns(table, metrics, seeds, ends)
        columns = [text.distinct(group.values[keys.index(key)] for group in rows) for key in kept]
        for index, group in enumerate(rows):
            cells = (Text(column[index]) for column in columns)
            table.add_row(*cells, *_cells(group, seeds, ends), style="bold green" if group is best else None)
        return table

    print_fitting(build, values, keys, console)


def _add_columns(table: Table, metrics: Sequence[str], seeds: bool, ends: Sequence[str]) -> None:
    several = len(metrics) > 1
    names = []
    for metric in metrics:
        # of several, each has its name at its column, the split above it to save width
        name = metric.replace("/", "/\n") if several else metric
        names += [f"{name}\nmean" if several else "mean", "std"] if seeds else [name]
    names += ["n"] if seeds else []
    for name in (*names, *ends):
        table.add_column(Text(name), justify="right", no_wrap=True, vertical="bottom")


def _cells(group: Group, seeds: bool, ends: Sequence[str]) -> Iterator[str]:
    for numbers in (group.numbers, *group.shown):
        middle = text.metric(mean(numbers)) if numbers else "-"
        # n is the number of the monitored metric's values; a metric that was not finite everywhere says so
        yield middle if len(numbers) == len(group.numbers) else f"{middle} (n={len(numbers)})"
        if seeds:
            yield text.metric(std(numbers), 2) if len(numbers) > 1 else "-"
    if seeds:
        yield str(len(group.numbers))
    yield from (str(group.ends[name]) for name in ends)


def plain(value: Any) -> Any:
    """A frame's cell as a configuration value: missing ones None, numpy's scalars and arrays Python's."""
    if isinstance(value, np.ndarray | list | tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, np.generic):
        value = value.item()
    return None if pd.isna(value) else value
