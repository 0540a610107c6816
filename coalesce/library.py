"""The library surface: a sweep without files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coalesce.configuration import check_trainer, make_experiments, rides
from coalesce.errors import ConfigError, Problem
from coalesce.runner.plan import Trainer
from coalesce.runner.planning import make_plan
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
    settings = Trainer()
    try:
        settings = check_trainer(trainer)
    except ConfigError as error:
        problems = error.problems
    experiments, keys = make_experiments(base, params, zip, problems=problems, trainer=settings)
    plan = make_plan("sweep", keys, experiments, rides, settings)
    return results_frame(run(plan), keys, [experiment.id for experiment in experiments])
