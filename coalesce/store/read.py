"""Reading a run folder. Nothing in it is executed or unpickled, so a folder from anybody can be read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from coalesce.errors import nearest
from coalesce.store.files import read_json, read_parquet, read_safetensors
from coalesce.store.frames import history_frame, raw_frame, sorted_history, with_values
from coalesce.store.paths import RunPaths


def load(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """The results of a run: one row per experiment that ended, in the sweep's order.

    A run that was broken off, or still goes on, gives what has ended so far.

    Args:
        folder: the run folder, ``runs/<sweep>/<time>``.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    paths, plan = _open(folder)
    return read_parquet(paths.results) if paths.results.exists() else assemble_results(paths, plan)


def load_history(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """Every recorded metric of a run, long: ``experiment``, ``step``, ``metric``, ``value``.

    With the hyperparameters beside each row: ``load_history(folder).merge(load(folder)[["experiment", *keys]])``.

    Args:
        folder: the run folder, ``runs/<sweep>/<time>``.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    paths, plan = _open(folder)
    return read_parquet(paths.history) if paths.history.exists() else assemble_history(paths, plan)


def load_weights(folder: str | os.PathLike[str], experiment: str) -> dict[str, Tensor]:
    """The final state_dict of one experiment, on the CPU.

    Args:
        folder: the run folder, ``runs/<sweep>/<time>``.
        experiment: its id, as in the column ``experiment``.

    Raises:
        FileNotFoundError: it is no run folder, or the experiment's weights were not kept.
        LookupError: the run has no such experiment.
    """
    paths, plan = _open(folder)
    ids = [entry["id"] for entry in plan["experiments"]]
    if experiment not in ids:
        near = nearest(experiment, ids)
        raise LookupError(
            f"experiment={experiment!r}: the run {paths.folder} has no such experiment among its {len(ids)}"
            + (f"; did you mean {near!r}?" if near else "")
            + " The column 'experiment' of coalesce.load lists them."
        )
    path = paths.weights(experiment)
    if not path.exists():
        raise FileNotFoundError(
            f"experiment {experiment} has no weights in {paths.weights_folder}: they are written when an experiment "
            "ends, and only with trainer.weights=true"
        )
    return read_safetensors(path)


def assemble_results(paths: RunPaths, plan: dict[str, Any]) -> pd.DataFrame:
    """The results from their parts and the values in the plan."""
    parts = [read_parquet(part) for part in paths.result_parts()]
    raw = pd.concat(parts, ignore_index=True) if parts else raw_frame([])
    values = {entry["id"]: entry["values"] for entry in plan["experiments"]}
    return with_values(raw, values, plan["keys"], list(values))


def assemble_history(paths: RunPaths, plan: dict[str, Any]) -> pd.DataFrame:
    """The history from its parts."""
    parts = [read_parquet(part) for part in paths.metric_parts()]
    history = pd.concat(parts, ignore_index=True) if parts else history_frame([])
    return sorted_history(history, [entry["id"] for entry in plan["experiments"]])


def _open(folder: str | os.PathLike[str]) -> tuple[RunPaths, dict[str, Any]]:
    paths = RunPaths(folder)
    if not paths.plan.is_file():
        raise FileNotFoundError(_no_run_folder(paths))
    return paths, read_json(paths.plan)


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
    runs = [Path(plan).parent for depth in ("*", "*/*") for plan in folder.glob(f"{depth}/{paths.plan.name}")]
    if runs:
        latest = max(runs, key=lambda run: run.stat().st_mtime)
        text += f"; it holds {len(runs)} of them, the latest is {str(latest)!r}"
    return text
