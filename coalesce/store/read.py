"""Reading a run folder. Nothing in it is executed or unpickled, so a folder from anybody can be read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from coalesce.errors import nearest
from coalesce.experiment import Experiment
from coalesce.runner.listener import Result
from coalesce.store.files import read_json, read_parquet, read_safetensors
from coalesce.store.frames import best_experiment, history_frame, metric_columns, raw_frame, sorted_history, with_values
from coalesce.store.paths import WHICH, RunPaths
from coalesce.store.retries import read_retries


def load(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """The results of a run: one row per experiment that ended, in the sweep's order.

    A run that was broken off, or still goes on, gives what has ended so far.

    Args:
        folder: the run folder, ``runs/<sweep>/<time>``.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    paths, plan = open_run(folder)
    return read_parquet(paths.results) if paths.results.exists() else assemble_results(paths, plan)


def load_history(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """Every recorded metric of a run, long: ``experiment``, ``step``, ``metric``, ``value``.

    With the hyperparameters beside each row: ``load_history(folder).merge(load(folder)[["experiment", *keys]])``.

    Args:
        folder: the run folder, ``runs/<sweep>/<time>``.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    paths, plan = open_run(folder)
    return read_parquet(paths.history) if paths.history.exists() else assemble_history(paths, plan)


def load_weights(folder: str | os.PathLike[str], experiment: str = "best", which: str = "best") -> dict[str, Tensor]:
    """The state_dict of one experiment, on the CPU.

    Args:
        folder: the run folder, ``runs/<sweep>/<time>``.
        experiment: its id, as in the column ``experiment``; or "best": the one that is best by the run's
            ``trainer.monitor`` and ``trainer.mode``.
        which: "best": the weights of the step ``best_step``; "last": those of its end.

    Raises:
        FileNotFoundError: it is no run folder, or has no such weights.
        LookupError: the run has no such experiment, or none that is best.
        ValueError: ``which`` is neither.
    """
    return weights_of(*open_run(folder), experiment, which)[1]


def weights_of(paths: RunPaths, plan: Mapping[str, Any], experiment: str, which: str) -> tuple[str, dict[str, Tensor]]:
    """An experiment's id and weights, see `load_weights`."""
    if which not in WHICH:
        raise ValueError(f"which={which!r}: must be one of {', '.join(map(repr, WHICH))}")
    ids = [entry["id"] for entry in plan["experiments"]]
    if experiment == "best":
        experiment = _best(paths, plan)
    elif experiment not in ids:
        near = nearest(experiment, [*ids, "best"])
        raise LookupError(
            f"experiment={experiment!r}: the run {paths.folder} has no such experiment among its {len(ids)}"
            + (f"; did you mean {near!r}?" if near else "")
            + " The column 'experiment' of coalesce.load lists them."
        )
    path = paths.weights(experiment, which)
    if not path.exists():
        text = f"experiment {experiment} has no {which} weights in {paths.weights_folder}: "
        (other,) = (each for each in WHICH if each != which)
        if paths.weights(experiment, other).exists():
            text += f"its {plan['trainer']['monitor']} was never finite; which={other!r} reads those of its end"
        else:
            text += "they are written when an experiment ends, and only with trainer.weights=true"
        raise FileNotFoundError(text)
    return experiment, read_safetensors(path)


def _best(paths: RunPaths, plan: Mapping[str, Any]) -> str:
    monitor, mode = plan["trainer"]["monitor"], plan["trainer"]["mode"]
    frame = load(paths.folder)
    best = best_experiment(frame, monitor, mode)
    if best is None:
        raise LookupError(
            f"experiment='best': of the {len(frame)} experiments of {paths.folder} that have ended, none that ended "
            f"well has a finite {monitor}. Name one by its id, from the column 'experiment' of coalesce.load"
        )
    return str(best["experiment"])


def assemble_results(paths: RunPaths, plan: Mapping[str, Any]) -> pd.DataFrame:
    """The results from their parts and the values in the plan."""
    raw = _raw(paths)
    values = {entry["id"]: entry["values"] for entry in plan["experiments"]}
    return with_values(raw, values, plan["keys"], list(values))


def ended(paths: RunPaths, experiments: Sequence[Experiment]) -> list[Result]:
    """How experiments of a run ended, from the parts, in the order in which they did; weights stay on disk.

    Args:
        paths: the run folder.
        experiments: of which to look.
    """
    known = {experiment.id: experiment for experiment in experiments}
    found: dict[str, Result] = {}
    retries = read_retries(paths)
    for part in paths.result_parts():
        frame = retries.counted(part, read_parquet(part))
        metrics = [name for name in metric_columns(frame) if not name.startswith("best/")]
        bests = [name for name in metric_columns(frame) if name.startswith("best/")]
        for row in frame.to_dict("records"):
            if row["experiment"] in known:
                # what was measured again after a break counts, in the place where it ended first
                found[row["experiment"]] = Result(
                    experiment=known[row["experiment"]],
                    status=row["status"],
                    steps=int(row["steps"]),
                    # before the first step nothing was measured; a part has columns for all that ended together
                    metrics={name: row[name] for name in metrics} if row["steps"] else {},
                    best={} if pd.isna(row["best_step"]) else {n.removeprefix("best/"): row[n] for n in bests},
                    best_step=None if pd.isna(row["best_step"]) else int(row["best_step"]),
                    cohort=int(row["cohort"]),
                    width=int(row["width"]),
                    job=int(row["job"]),
                    device=row["device"],
                    seconds=float(row["seconds"]),
                    message=row["message"],
                )
    return list(found.values())


def _raw(paths: RunPaths) -> pd.DataFrame:
    return _joined(paths, paths.result_parts(), raw_frame([]))


def _joined(paths: RunPaths, parts: Sequence[Path], empty: pd.DataFrame) -> pd.DataFrame:
    """What counts of the rows of parts."""
    retries = read_retries(paths)
    frames = [retries.counted(part, read_parquet(part)) for part in parts]
    # a part of which nothing counts has columns that nobody else may have
    frames = [frame for frame in frames if len(frame)]
    return pd.concat(frames, ignore_index=True) if frames else empty


def assemble_history(paths: RunPaths, plan: Mapping[str, Any]) -> pd.DataFrame:
    """The history from its parts."""
    history = _joined(paths, paths.metric_parts(), history_frame([]))
    return sorted_history(history, [entry["id"] for entry in plan["experiments"]])


def open_run(folder: str | os.PathLike[str]) -> tuple[RunPaths, dict[str, Any]]:
    """A run folder and its plan, as `plan_json` makes it; with what a search has asked for in each of its jobs.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    paths = RunPaths(folder)
    if not paths.plan.is_file():
        raise FileNotFoundError(_no_run_folder(paths))
    plan = read_json(paths.plan)
    known = {entry["id"] for entry in plan["experiments"]}
    cohorts = {cohort["index"]: cohort for cohort in plan["cohorts"]}
    for job in paths.jobs():
        own = RunPaths(folder, job).plan
        for entry in read_json(own)["experiments"] if own.is_file() else ():
            if entry["id"] not in known:
                known.add(entry["id"])
                plan["experiments"].append(entry)
                cohorts[entry["cohort"]]["experiments"].append(entry["id"])
    return paths, plan


def _no_run_folder(paths: RunPaths) -> str:
    folder = paths.folder
    if not folder.exists():
        siblings = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        near = nearest(folder.name, siblings)
        hint = f"; did you mean {str(folder.parent / near)!r}?" if near else ""
        return f"folder={str(folder)!r} does not exist{hint}"
    if folder.is_file():
        return f"folder={str(folder)!r} is a file; give the run folder that it lies in: {str(folder.parent)!r}"
    text = f"folder={str(folder)!r} is no run folder: it has no {paths.plan.name}"
    runs = runs_below(folder)
    if runs:
        text += f"; it holds {len(runs)} of them, the latest is {str(runs[-1])!r}"
    return text


def runs_below(folder: Path) -> list[Path]:
    """The run folders in a sweep's folder, or in that of all sweeps;
    the one that was begun or resumed last stands last."""
    plans = [plan for depth in ("*", "*/*") for plan in folder.glob(f"{depth}/{RunPaths(folder).plan.name}")]
    return [plan.parent for plan in sorted(plans, key=lambda plan: (plan.stat().st_mtime, plan))]
