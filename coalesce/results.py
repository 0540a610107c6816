"""``python -m coalesce.results FOLDER...``: the results of runs as a table, and as a file."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coalesce.errors import ConfigError, Problem, nearest
from coalesce.launch.watch import standing_of
from coalesce.report import text
from coalesce.report.fitting import header, print_fitting
from coalesce.report.groups import plain
from coalesce.report.summary import NAMED, print_best, print_broken
from coalesce.report.watching import watch_run
from coalesce.store.files import write_csv, write_parquet
from coalesce.store.jobs import OVER, read_records
from coalesce.store.merge import Run, find_runs, labels, merged, read_run

#: Exit codes.
DONE, REFUSED = 0, 2
#: So many experiments are printed unless --limit says otherwise.
ROWS = 30
#: Where what is printed goes to a file or another program: wide enough for most tables.
WIDTH = 200

_EPILOG = """\
examples:
  python -m coalesce.results runs/lr_grid                         # its latest run
  python -m coalesce.results runs/a/2026-11-29_16-03-37 runs/b --csv both.csv
  python -m coalesce.results runs/lr_grid --watch                 # how it is getting on, until it is over
  python -m coalesce.results runs/lr_grid --all --monitor test/accuracy --mode max --limit 5
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; by default this process's.

    Returns:
        The exit code: 0, whatever became of the experiments; 2 if there is nothing to read or something is misspelt.
    """
    parser = argparse.ArgumentParser(
        prog="python -m coalesce.results",
        description="Print the results of runs, the best experiments first, and export them. Nothing in the folders "
        "is executed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a run folder; or one above: its latest run")
    parser.add_argument("--all", action="store_true", help="of a folder above, all runs instead of the latest")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all rows, in the order of the sweep")
    parser.add_argument("--parquet", type=Path, metavar="FILE", help="the same, with the types kept")
    parser.add_argument("--monitor", metavar="METRIC", help="what is best by its last value; by default the run's")
    parser.add_argument("--mode", choices=("max", "min"), help="which of its values are best; by default the run's")
    parser.add_argument("--limit", type=_limit, default=ROWS, metavar="N", help=f"rows; {ROWS} by default; 0: all")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show how one run is getting on, until it is over; Ctrl-C ends the watching",
    )
    options = parser.parse_args(arguments)
    if options.watch and (options.all or len(options.folders) > 1):
        parser.error("--watch shows one run: it takes one FOLDER, and no --all")
    try:
        return _run(options, Console(width=None if sys.stdout.isatty() else WIDTH))
    # ValueError: what is no JSON, and what is no Parquet
    except (OSError, LookupError, ValueError) as error:
        print(f"coalesce.results: {error}", file=sys.stderr)
        return REFUSED


def _limit(value: str) -> int:
    count = int(value)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{value} rows: must be at least 0, which is all")
    return count


def _run(options: argparse.Namespace, console: Console) -> int:
    found = [run for folder in options.folders for run in find_runs(folder, options.all)]
    if options.watch and not watch_run(found[0], console):
        return DONE
    # the same folder twice is one run
    runs = [read_run(folder) for folder in {folder.resolve(): folder for folder in found}.values()]
    frame, keys = merged(runs)
    if len(runs) == 1:
        frame = frame.drop(columns="run")
    monitor, mode = options.monitor or runs[0].monitor, options.mode or runs[0].mode
    if options.monitor is not None:
        names = [str(name) for name in frame if pd.api.types.is_float_dtype(frame[name])]
        if monitor not in names:
            valid = ", ".join(names)
            raise ConfigError([Problem("--monitor", monitor, "no such metric", valid, nearest(monitor, names))])
    for run, label in zip(runs, labels(runs), strict=True):
        text.say(console, _state(run, label if len(runs) > 1 else str(run.paths.folder), options.watch), wrap=False)
    _say_what_differs(runs, monitor, mode, options, console)
    if frame.empty:
        text.say(console, "No experiment has ended so far.")
    else:
        # by the metric that a run looked at the best value counts; of another there is only the last that is known
        shown = frame if options.monitor is None else frame.drop(columns=f"best/{monitor}", errors="ignore")
        _print_rows(shown, keys, monitor, mode, options.limit, console)
        named = [*(["run"] if len(runs) > 1 else []), *keys]
        print_best(shown, named, monitor, mode, console)
        for status in ("diverged", "failed"):
            print_broken(shown, named, status, console)
        _say_twice(frame, console)
    for path, write in ((options.csv, write_csv), (options.parquet, write_parquet)):
        if path is not None:
            write(path, frame)
            text.say(console, f"Wrote {text.count(len(frame), 'row')} to {path}", wrap=False)
    return DONE


def _state(run: Run, label: str, watched: bool) -> str:
    """A run in one line: how many of its experiments have ended, how, and whether it is over.

    Args:
        watched: until its jobs were gone.
    """
    counts = run.frame["status"].value_counts().to_dict()
    how = ", ".join(f"{count} {status}" for status, count in counts.items())
    line = f"{label}: {len(run.frame)} of {text.count(run.planned, 'experiment')} ended" + (f" ({how})" if how else "")
    writer = run.writer()
    if writer:
        return f"{line}; it is being written by {writer}"
    if len(run.frame) == run.planned:
        return line
    standings = [standing_of(run.paths, job) for job in read_records(run.paths)]
    at_work = sum(standing is None or standing.state not in OVER for standing in standings)
    if at_work and not watched:
        jobs = f"{text.count(at_work, 'job')} may be waiting or at work"
        return f"{line}; {jobs}. To watch: python -m coalesce.results {run.paths.folder} --watch"
    return f"{line}; it broke off. To go on: python -m coalesce resume={run.paths.folder}"


def _say_what_differs(
    runs: Sequence[Run], monitor: str, mode: str, options: argparse.Namespace, console: Console
) -> None:
    others = {(run.monitor, run.mode) for run in runs}
    if len(others) > 1 and (options.monitor is None or options.mode is None):
        named = ", ".join(f"{name} ({kind})" for name, kind in sorted(others))
        text.say(
            console,
            f"The runs look at {named}: here it is {monitor} ({mode}). --monitor and --mode name another",
        )


def _print_rows(
    frame: pd.DataFrame, keys: Sequence[str], monitor: str, mode: str, limit: int, console: Console
) -> None:
    by = f"best/{monitor}" if f"best/{monitor}" in frame else monitor
    rows = frame.to_dict("records")
    sign = -1 if mode == "max" else 1

    def place(row: dict[Any, Any]) -> tuple[int, float]:
        value = row.get(by, math.nan)
        broken = row["status"] in ("diverged", "failed")
        finite = math.isfinite(value)
        return (2 if broken else 0 if finite else 1, sign * value if finite else 0.0)

    rows.sort(key=place)  # stable: equal ones stay in the sweep's order
    shown = rows[: limit or None]
    axes = [*(["run"] if "run" in frame else []), *keys]
    steps = "steps_done" if "steps" in keys else "steps"
    metrics = [name for name in (by, monitor) if name in frame]
    metrics = list(dict.fromkeys(metrics))
    statuses = any(row["status"] != "finished" for row in rows)

    def build(kept: Sequence[str], broken: bool) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("experiment", no_wrap=True, vertical="bottom")
        for key in kept:
            table.add_column(header(key, broken), justify="right", overflow="fold", vertical="bottom")
        for name in (*(("status",) if statuses else ()), steps, *metrics, *(("best_step",) if by != monitor else ())):
            table.add_column(Text(name.replace("/", "/\n", 1)), justify="right", no_wrap=True, vertical="bottom")
        columns = [text.distinct(plain(row[key]) for row in shown) for key in kept]
        for index, row in enumerate(shown):
            cells = [row["experiment"], *(column[index] for column in columns)]
            cells += [row["status"]] if statuses else []
            cells.append(f"{row[steps]:,}")
            cells += ["-" if math.isnan(row[name]) else text.metric(row[name]) for name in metrics]
            if by != monitor:
                cells.append("-" if pd.isna(row["best_step"]) else f"{row['best_step']:,}")
            table.add_row(*map(Text, cells))
        return table

    values = [{key: plain(row[key]) for key in axes} for row in rows]
    order = f"the best by {by} ({mode}) first" if metrics else f"no {monitor} was measured"
    count = text.count(len(rows), "experiment")
    text.say(console, f"\n{count}, {order}" + (f"; the first {len(shown)}" if len(shown) < len(rows) else ""))
    print_fitting(build, values, axes, console)


def _say_twice(frame: pd.DataFrame, console: Console) -> None:
    """Say of experiments that several runs have trained, and whether they came out alike."""
    if "run" not in frame:
        return
    twice = frame[frame.duplicated("experiment", keep=False)]
    if twice.empty:
        return
    where = ("run", "cohort", "width", "job", "device", "seconds", "message")
    measured = twice[[name for name in twice if name not in where]]
    groups = dict(iter(measured.groupby("experiment", sort=False)))
    differ = [str(name) for name, rows in groups.items() if len(rows.drop_duplicates()) > 1]
    line = f"{text.count(len(groups), 'experiment')} stand in more than one run, with a row for each"
    if differ:
        more = "" if len(differ) <= NAMED else f", {text.ellipsis(console)}"
        line += f"; the results of {len(differ)} differ: {', '.join(differ[:NAMED])}{more}"
    else:
        line += "; their results are equal"
    text.say(console, line)


if __name__ == "__main__":
    sys.exit(main())
