"""The library surface: a sweep from Python, without files or in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coalesce.configuration import check_trainer, make_search, rides
from coalesce.configuration.search import ANY, check_search
from coalesce.configuration.union import check_retry, read_retry, united, unlike
from coalesce.errors import ConfigError, Problem, RunFolderError
from coalesce.experiment import Experiment
from coalesce.runner.listener import Latest, Listener
from coalesce.runner.plan import PlannedCohort, Trainer
from coalesce.runner.planning import make_plan, plan_search
from coalesce.runner.run import run
from coalesce.runner.snapshot import Begun
from coalesce.search.base import Search
from coalesce.store.beat import Beat
from coalesce.store.frames import results_frame
from coalesce.store.lock import RunLock
from coalesce.store.paths import RunPaths
from coalesce.store.read import load
from coalesce.store.resume import reopen
from coalesce.store.writer import RunWriter
from coalesce.task import Task

if TYPE_CHECKING:
    import pandas as pd


def sweep(
    task: type[Task] | Mapping[str, Any] | str,
    params: Mapping[str, Any] | None = None,
    *,
    optimizer: str | Mapping[str, Any] = "adamw",
    schedule: str | Mapping[str, Any] = "constant",
    steps: int = 1000,
    batch_size: int = 64,
    seed: int = 0,
    data: Mapping[str, Any] | None = None,
    precision: str = "float32",
    zip: Sequence[Sequence[str]] = (),
    search: str | Mapping[str, Any] = "grid",
    folder: str | os.PathLike[str] | None = None,
    retry: str | Sequence[str] | None = None,
    **trainer: Any,
) -> pd.DataFrame:
    """Train every experiment of a sweep and return one row for each.

    Args:
        task: the class, its dotted name, or a mapping with ``_target_`` and constructor arguments.
        params: nested or dotted key → its values: ``{"optimizer.lr": [0.1, 0.01], "seed": range(8)}``.
            ``task``, ``optimizer`` and ``schedule`` themselves take classes and names; a value that belongs to one of
            them is zipped with it, and is None where there is no such key.
        optimizer, schedule: a rule's name, or a mapping with ``name`` and hyperparameters.
        steps: updates per experiment.
        batch_size: B, samples per update.
        seed: of experiments whose seed is not swept.
        data: how the samples become batches: ``remainder``; and which ``fold`` they are of.
        precision: ``float32``, or ``bfloat16`` for `torch.autocast`.
        zip: groups of keys whose values run together instead of in all combinations.
        search: which experiments are trained, and how far: ``"grid"`` (all of them), ``"random"``, ``"halving"``,
            ``"asha"``, ``"pbt"`` or ``"optuna"``, or a mapping with ``name`` and its settings
            (``{"name": "asha", "min_steps": 50}``; ``conf/search/*.yaml`` has them all).
            Those that draw take `coalesce.Interval` as values.
        folder: a run folder, which gets everything that `python -m coalesce` writes; made if it is missing. If it is
            there, the run goes on: what has ended in it is read and not trained again, so that a notebook's cell may
            be run twice, or be interrupted, or ask for more. None: nothing is written.
        retry: ``"failed"``, ``"diverged"`` or both: of the experiments that are asked for, those that ended so in the
            folder are trained once more, from their start.
        **trainer: any field of `coalesce.runner.plan.Trainer`: ``width``, ``compile``, ``monitor``, …

    Returns:
        The results frame (see `coalesce.load`), in the sweep's order.

    Raises:
        ConfigError: with every problem found, before anything starts.
        TaskError: the task's own code fails.
        RunFolderError: another process writes the folder, or it cannot be gone on from.

    >>> import coalesce
    >>> from coalesce.tasks import Digits
    >>> frame = coalesce.sweep(Digits, {"optimizer.lr": [0.01, 0.1]}, steps=10, every=10, evaluate_every=10,
    ...                        compile=False)
    >>> list(frame["optimizer.lr"]), list(frame["steps"])
    ([0.01, 0.1], [10, 10])
    """
    base = {
        "task": dict(task) if isinstance(task, Mapping) else task,
        "optimizer": optimizer,
        "schedule": schedule,
        "steps": steps,
        "batch_size": batch_size,
        "seed": seed,
        "data": {} if data is None else data,
        "precision": precision,
    }
    problems: tuple[Problem, ...] = ()
    statuses: Sequence[str] = ()
    checked: Trainer | None = None
    settings = ANY
    try:
        checked = check_trainer(trainer)
    except ConfigError as error:
        problems = error.problems
    try:
        settings = check_search(search, checked)
    except ConfigError as error:
        problems += error.problems
    try:
        statuses = read_retry(retry)
        if statuses and folder is None:
            rule = "there is no run whose experiments could be trained once more"
            problems += (Problem("retry", retry, rule, "folder= beside it"),)
    except ConfigError as error:
        problems += error.problems
    how = checked or Trainer()
    found, keys = make_search(base, params, zip, problems=problems, trainer=how, settings=settings)
    if folder is not None:
        return _sweep_in(RunPaths(folder), found, keys, how, statuses)
    # there is no folder that weights and snapshots could be kept in
    plan = plan_search("sweep", keys, found, rides, replace(how, weights=False, snapshot_minutes=None))
    latest = Latest(plan)
    results = run(plan, [latest], search=found, rides=rides)
    return results_frame(results, keys, [experiment.id for experiment in latest.plan.experiments])


def _sweep_in(paths: RunPaths, search: Search, keys: Sequence[str], how: Trainer, retry: Sequence[str]) -> pd.DataFrame:
    """Train what is missing in a run folder, and read what was asked for."""
    paths.folder.mkdir(parents=True, exist_ok=True)
    if paths.jobs():
        raise RunFolderError(
            f"the run folder {str(paths.folder)!r} is that of a run in jobs, which goes on by python -m coalesce "
            f"resume={paths.folder}; coalesce.load reads it"
        )
    with RunLock(paths) as lock:
        back = reopen(paths) if paths.plan.is_file() else None
        name, begun, snapshots = paths.folder.absolute().name, Begun(), None
        again: Sequence[str] = ()
        asked = list(search.known()) if search.lists else []
        experiments: Sequence[Experiment] = asked
        decided: Sequence[PlannedCohort] = ()
        if back is not None:
            if problems := unlike(back.plan.trainer, how):
                raise ConfigError(problems)
            every, keys = united(back.plan, asked, keys)
            known = {experiment.id for experiment in back.plan.experiments}
            # in the order in which they came, so that cohorts keep their numbers
            experiments = [*(e for e in every if e.id in known), *(e for e in every if e.id not in known)]
            check_retry(retry, search)
            mine = {experiment.id for experiment in asked}
            back = back.retrying(retry, mine)
            # what somebody else has asked for, and is to be trained once more, is not asked for here
            begun = replace(back.begun, attempts={n: count for n, count in back.attempts.items() if n in mine})
            snapshots, decided, again = back.snapshots, back.plan.cohorts, back.again
        probes, count = ((), None) if search.lists else (search.known(), search.count)
        plan = make_plan(name, keys, experiments, rides, how, probes, count, decided, search.asks_again)
        search.keep(paths.study, name)
        latest = Latest(plan)
        writer = RunWriter(paths, lock=lock, snapshots=snapshots, again=again)
        listeners: list[Listener] = [writer, Beat(paths), latest]
        run(plan, listeners, search=search, begun=begun, rides=rides)
        frame = load(paths.folder)
    wanted = [experiment.id for experiment in (asked if search.lists else latest.plan.experiments)]
    # in the order of what was asked for
    return frame.set_index("experiment", drop=False).loc[wanted].reset_index(drop=True)
