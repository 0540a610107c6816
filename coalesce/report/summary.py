"""What came out of a run: a table over the swept values, the best experiment, and where the results lie."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from coalesce.report import text
from coalesce.report.groups import Group, best_group, grouped, mean, plain, print_table
from coalesce.store.frames import best_experiment

#: Diverged and failed experiments that are named one by one, each.
NAMED = 5


def print_way_on(folder: Path) -> None:
    """Where a run was broken off: what is there, and how to go on."""
    print(f"What was recorded so far lies in {folder}\nTo go on: python -m coalesce resume={folder}", file=sys.stderr)


def print_summary(
    frame: pd.DataFrame,
    keys: Sequence[str],
    monitor: str,
    mode: str,
    folder: str | os.PathLike[str] | None,
    console: Console,
    show: Sequence[str] = (),
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
        show: more metrics to sum up likewise; none of them says what is best.
    """
    if frame.empty:
        text.say(console, "No experiment has ended, so there is nothing to sum up.")
    else:
        show = [name for name in dict.fromkeys(show) if name != monitor]
        groups = grouped(frame, keys, monitor, show)
        axes = [key for key in keys if key != "seed"]
        if keys:
            print_table(groups, axes, "seed" in keys, (monitor, *show), mode, console)
        _print_best_mean(groups, axes, "seed" in keys, (monitor, *show), mode, console)
        print_best(frame, keys, monitor, mode, console)
        print_broken(frame, keys, "diverged", console)
        print_broken(frame, keys, "failed", console)
    if folder is not None:
        folder = Path(folder)
        text.say(console, f"\nRun folder: {folder}\nResults:    {folder / 'results.parquet'} and .csv", wrap=False)
        text.say(console, f"Read them:  coalesce.load({json.dumps(str(folder), ensure_ascii=False)})", wrap=False)


def _print_best_mean(
    groups: list[Group], keys: list[str], seeds: bool, metrics: Sequence[str], mode: str, console: Console
) -> None:
    best = best_group(groups, mode)
    if best is None or not seeds or not keys:
        return
    swept = text.values(dict(zip(keys, best.values, strict=True)))
    spread = f", standard deviation {text.metric(best.std, 2)}" if len(best.numbers) > 1 else ""
    over = text.count(len(best.numbers), "seed")
    more = "".join(f"; {name} {text.metric(mean(n))}" for name, n in zip(metrics[1:], best.shown, strict=True))
    text.say(console, f"Best mean: {swept}: {metrics[0]} {text.metric(best.mean)} over {over}{spread}{more}")


def print_best(frame: pd.DataFrame, keys: Sequence[str], monitor: str, mode: str, console: Console) -> None:
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


def print_broken(frame: pd.DataFrame, keys: Sequence[str], status: str, console: Console) -> None:
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


def _named(row: Mapping[Any, Any], keys: Sequence[str]) -> str:
    swept = text.values({key: plain(row[key]) for key in keys})
    return f"{row['experiment']} ({swept})" if swept else str(row["experiment"])
