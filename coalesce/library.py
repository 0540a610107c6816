"""The library surface: a sweep without files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coalesce.configuration import check_trainer, make_search, rides
from coalesce.configuration.search import ANY, check_search
from coalesce.errors import ConfigError, Problem
from coalesce.runner.listener import Latest
from coalesce.runner.plan import Trainer
from coalesce.runner.planning import plan_search
from coalesce.runner.run import run
from coalesce.store.frames import results_frame
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
        **trainer: any field of `coalesce.runner.plan.Trainer`: ``width``, ``compile``, ``monitor``, …

    Returns:
        The results frame (see `coalesce.load`), in the sweep's order.

    Raises:
        ConfigError: with every problem found, before anything starts.
        TaskError: the task's own code fails.

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
    how = checked or Trainer()
    found, keys = make_search(base, params, zip, problems=problems, trainer=how, settings=settings)
    # there is no folder that weights could be kept in
    plan = plan_search("sweep", keys, found, rides, replace(how, weights=False))
    latest = Latest(plan)
    results = run(plan, [latest], search=found, rides=rides)
    return results_frame(results, keys, [experiment.id for experiment in latest.plan.experiments])
