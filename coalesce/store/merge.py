"""Several runs as one results frame."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from coalesce.experiment import GROUPS
from coalesce.store.files import read_json
from coalesce.store.frames import column, metric_columns, ordered_metrics
from coalesce.store.paths import RunPaths
from coalesce.store.read import load, open_run, runs_below

#: The columns of a results frame that stand behind the metrics.
_LAST = ("best_step", "cohort", "width", "job", "device", "seconds", "message")


@dataclass(frozen=True)
class Run:
    """A run and its results.

    Args:
        paths: its folder.
        plan: as `plan_json` makes it.
        frame: as `load` gives it.
    """

    paths: RunPaths
    plan: Mapping[str, Any] = field(repr=False)
    frame: pd.DataFrame = field(repr=False)

    @property
    def monitor(self) -> str:
        return str(self.plan["trainer"]["monitor"])

    @property
    def mode(self) -> str:
        return str(self.plan["trainer"]["mode"])

    @property
    def planned(self) -> int:
        """Experiments in all."""
        return len(self.plan["experiments"])

    def writer(self) -> str:
        """Which process writes the run now: "process 17 on host a"; or "" if none does, as far as can be seen."""
        found = writer_of(self.paths)
        return "" if found is None else f"process {found[0]} on host {found[1]}"


def writer_of(paths: RunPaths) -> tuple[int, str] | None:
    """The number and the host of the process that writes a run now; None if none does, as far as can be seen."""
    owner: Any = None
    with suppress(OSError, ValueError):
        owner = read_json(paths.lock_owner)
    if owner is None:
        return None
    if owner["host"] == socket.gethostname():
        try:
            os.kill(owner["pid"], 0)
        except ProcessLookupError:
            return None  # it was killed
        except PermissionError:
            pass  # it is somebody else's
    return int(owner["pid"]), str(owner["host"])


def find_runs(folder: str | os.PathLike[str], every: bool = False) -> list[Path]:
    """The run folders that a folder stands for: itself; or, where it holds runs (``runs/lr_grid``), the latest.

    Args:
        folder: a run folder, or one above.
        every: all of those below, oldest first, instead of the latest.

    Raises:
        FileNotFoundError: it neither is nor holds a run folder.
    """
    paths = RunPaths(folder)
    if not paths.plan.is_file():
        below = runs_below(paths.folder)
        if below:
            return below if every else below[-1:]
        open_run(folder)  # which says what is wrong with it
    return [paths.folder]


def read_run(folder: str | os.PathLike[str]) -> Run:
    """A run and its results.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    paths, plan = open_run(folder)
    return Run(paths, plan, load(folder))


def labels(runs: Sequence[Run]) -> list[str]:
    """What tells runs apart: ``lr_grid/2026-11-29_16-03-37``, or the whole folder where that is not enough."""
    short = ["/".join(run.paths.folder.resolve().parts[-2:]) for run in runs]
    return [text if short.count(text) == 1 else str(run.paths.folder) for text, run in zip(short, runs, strict=True)]


def merged(runs: Sequence[Run]) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The results of several runs below each other, with a column ``run`` in front, and the swept keys of all of them.

    A key that only some of the runs sweep has, in the others, the value of their configuration. An experiment that is
    in two runs has two rows.
    """
    keys = tuple(dict.fromkeys(key for run in runs for key in run.plan["keys"]))
    parts = []
    swept: dict[str, list[Any]] = {key: [] for key in keys}
    for run, label in zip(runs, labels(runs), strict=True):
        own = run.plan["keys"]
        raw = run.frame.drop(columns=[key for key in own if key in run.frame])
        raw = raw.rename(columns={"steps_done": "steps"})
        raw.insert(0, "run", pd.Series([label] * len(raw), index=raw.index, dtype="string"))
        parts.append(raw)
        entries = {entry["id"]: entry for entry in run.plan["experiments"]}
        for name in raw["experiment"]:
            for key in keys:
                values, config = entries[name]["values"], entries[name]["config"]
                swept[key].append(values[key] if key in values else configured(config, key))
    # a run in which nothing has ended has no metrics, and must not change the types of the others
    whole = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    metrics = [name for name in metric_columns(whole) if name != "run"]
    last = ordered_metrics(name for name in metrics if not name.startswith("best/"))
    best = ordered_metrics(name.removeprefix("best/") for name in metrics if name.startswith("best/"))
    steps = "steps_done" if "steps" in keys else "steps"
    columns = [*last, *(f"best/{name}" for name in best), *_LAST]
    frame = pd.DataFrame(
        {
            "run": whole["run"],
            "experiment": whole["experiment"],
            **{key: column(values) for key, values in swept.items()},
            "status": whole["status"],
            steps: whole["steps"],
            **{name: whole[name] for name in columns},
        }
    )
    return frame, keys


def configured(config: Mapping[str, Any], key: str) -> Any:
    """What an experiment's configuration has at a dotted key, as a sweep over the key would have it; None: nothing."""
    found: Any = config
    for step in key.split("."):
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    if key in GROUPS and isinstance(found, Mapping):
        # the name of an option, as a sweep over the group has it
        return found.get("name", str(found.get("_target_", "")).rpartition(".")[2])
    return found
