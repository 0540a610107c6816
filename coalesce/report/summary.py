"""What came out of a run: a table over the swept values, the best experiment, and where the results lie."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coalesce.report import text

#: Rows of the table; of more groups only the best are shown.
ROWS = 30
#: Diverged and failed experiments that are named one by one, each.
NAMED = 5


@dataclass
class Group:
    """Experiments that differ in their seed alone.

    Args:
        values: of the swept keys other than the seed, None where missing.
        numbers: the monitored metric's last value of each experiment that ended well and whose value is finite.
        diverged, failed: how many did not end well.
    """

    values: tuple[Any, ...]
    numbers: list[float]
    diverged: int = 0
    failed: int = 0

    @property
    def mean(self) -> float:
        return float(np.mean(self.numbers)) if self.numbers else math.nan

    @property
    def std(self) -> float:
        """Over the seeds, with n - 1."""
        return float(np.std(self.numbers, ddof=1)) if len(self.numbers) > 1 else math.nan


def print_summary(
    frame: pd.DataFrame,
    keys: Sequence[str],
    monitor: str,
    mode: str,
    folder: str | os.PathLike[str] | None,
    console: Console,
) -> None:
    """Print mean, standard deviation and number of the monitored metric per setting, the best, and the folder.

    The table takes each experiment's last value: a mean over best values would favour metrics that jump about. The
    best experiment is the one with the best value at any evaluation (``best/<monitor>``; the last value where that
    column is missing). A diverged or failed experiment neither counts in a mean nor is the best; it is counted in
    a column of its own and named below the table. NaN and infinite values are left out likewise.

    Args:
        frame: as `results_frame` or `load` give it.
        keys: the swept keys; all but ``seed`` make the table's rows.
        monitor: the metric to sum up, a column of ``frame``.
        mode: "max" or "min": which of its values are good.
        folder: the run folder, or None if nothing was written.
        console: where to print; the table keeps to its width.
    """
    if frame.empty:
        text.say(console, "No experiment has ended, so there is nothing to sum up.")
    else:
        groups = grouped(frame, keys, monitor)
        shown = [key for key in keys if key != "seed"]
        if keys:
            _print_table(groups, shown, "seed" in keys, monitor, mode, console)
        _print_best_mean(groups, shown, "seed" in keys, monitor, mode, console)
        _print_best(frame, keys, monitor, mode, console)
        _print_broken(frame, keys, "diverged", console)
        _print_broken(frame, keys, "failed", console)
    if folder is not None:
        folder = Path(folder)
        text.say(console, f"\nRun folder: {folder}\nResults:    {folder / 'results.parquet'} and .csv", wrap=False)
        text.say(console, f"Read them:  coalesce.load({json.dumps(str(folder), ensure_ascii=False)})", wrap=False)


def grouped(frame: pd.DataFrame, keys: Sequence[str], monitor: str) -> list[Group]:
    """The experiments by every swept key except the seed, in the sweep's order."""
    groups: dict[str, Group] = {}
    for row in frame.to_dict("records"):
        values = tuple(_plain(row[key]) for key in keys if key != "seed")
        group = groups.setdefault(repr(values), Group(values, []))
        number = row.get(monitor, math.nan)
        if row["status"] == "diverged":
            group.diverged += 1
        elif row["status"] == "failed":
            group.failed += 1
        elif math.isfinite(number):
            group.numbers.append(number)
    return list(groups.values())


def best_experiment(frame: pd.DataFrame, monitor: str, mode: str) -> dict[str, Any] | None:
    """The row of the best experiment with its best value and the step of it under ``value`` and ``step``.

    Returns:
        None if no experiment that ended well has a finite value.
    """
    column = next((name for name in (f"best/{monitor}", monitor) if name in frame), None)
    if column is None:
        return None
    well = frame[~frame["status"].isin(["diverged", "failed"]) & np.isfinite(frame[column])]
    if well.empty:
        return None
    row = well.loc[well[column].idxmax() if mode == "max" else well[column].idxmin()]
    step = row["best_step"] if column != monitor else row.get("steps_done", row["steps"])
    return {**row.to_dict(), "value": float(row[column]), "step": int(step)}


def _print_table(groups: list[Group], keys: list[str], seeds: bool, monitor: str, mode: str, console: Console) -> None:
    order = "in the order of the sweep"
    best = _best_group(groups, mode)
    rows = groups
    if len(groups) > ROWS:
        sign = -1 if mode == "max" else 1
        rows = sorted(groups, key=lambda g: (not g.numbers, sign * g.mean if g.numbers else 0.0))[:ROWS]
        order = f"the best {ROWS} of {len(groups):,} settings first"
    what = "last value, mean and standard deviation over the seeds" if seeds else "last value"
    text.say(console, f"\n{monitor} ({'higher' if mode == 'max' else 'lower'} is better): {what}; {order}")
    table = Table(box=box.SIMPLE_HEAD)
    for key in keys:
        table.add_column(text.header(key, keys, console), justify="right", overflow="fold")
    for name in ("mean", "std", "n") if seeds else (monitor,):
        table.add_column(Text(name), justify="right", no_wrap=True)
    failed = any(group.failed for group in groups)
    for name in ("diverged", *(("failed",) if failed else ())):
        table.add_column(name, justify="right", no_wrap=True)
    columns = [text.distinct(group.values[index] for group in rows) for index in range(len(keys))]
    for index, group in enumerate(rows):
        mean = text.metric(group.mean) if group.numbers else "-"
        std = text.metric(group.std, 2) if len(group.numbers) > 1 else "-"
        table.add_row(
            *(Text(column[index]) for column in columns),
            *((mean, std, str(len(group.numbers))) if seeds else (mean,)),
            str(group.diverged),
            *((str(group.failed),) if failed else ()),
            style="bold green" if group is best else None,
        )
    console.print(table)


def _print_best_mean(
    groups: list[Group], keys: list[str], seeds: bool, monitor: str, mode: str, console: Console
) -> None:
    best = _best_group(groups, mode)
    if best is None or not seeds or not keys:
        return
    swept = text.values(dict(zip(keys, best.values, strict=True)))
    spread = f", standard deviation {text.metric(best.std, 2)}" if len(best.numbers) > 1 else ""
    over = text.count(len(best.numbers), "seed")
    text.say(console, f"Best mean: {swept}: {monitor} {text.metric(best.mean)} over {over}{spread}")


def _print_best(frame: pd.DataFrame, keys: Sequence[str], monitor: str, mode: str, console: Console) -> None:
    best = best_experiment(frame, monitor, mode)
    if best is None:
        measured = f"no finite {monitor}" if monitor in frame or f"best/{monitor}" in frame else f"no {monitor} at all"
        text.say(console, f"No experiment is best: {measured} was measured in one that ended well.")
        return
    text.say(
        console,
        f"Best experiment: {_named(best, keys)}: {monitor} {text.metric(best['value'])} at step {best['step']:,}, "
        f"{text.metric(float(best.get(monitor, math.nan)))} at its end",
    )


def _print_broken(frame: pd.DataFrame, keys: Sequence[str], status: str, console: Console) -> None:
    rows = frame[frame["status"] == status].to_dict("records")
    if not rows:
        return
    text.say(console, f"{status.capitalize()}: {len(rows):,} of {text.count(len(frame), 'experiment')}")
    for row in rows[:NAMED]:
        steps = text.count(int(row.get("steps_done", row["steps"])), "step")
        message = "" if pd.isna(row["message"]) or not row["message"] else f": {row['message']}"
        text.say(console, f"  {_named(row, keys)} after {steps}{message}")
    if len(rows) > NAMED:
        text.say(
            console, f"  {text.ellipsis(console)} and {len(rows) - NAMED:,} more, with status {status!r} in the results"
        )


def _best_group(groups: list[Group], mode: str) -> Group | None:
    measured = [group for group in groups if group.numbers]
    if not measured:
        return None
    return max(measured, key=lambda g: g.mean) if mode == "max" else min(measured, key=lambda g: g.mean)


def _named(row: Mapping[Any, Any], keys: Sequence[str]) -> str:
    swept = text.values({key: _plain(row[key]) for key in keys})
    return f"{row['experiment']} ({swept})" if swept else str(row["experiment"])


def _plain(value: Any) -> Any:
    """A frame's cell as a configuration value: missing ones None, numpy's scalars and arrays Python's."""
    if isinstance(value, np.ndarray | list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, np.generic):
        value = value.item()
    return None if pd.isna(value) else value
