"""Experiments, plans and results made up for the tests of the store and of the reports."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from coalesce.experiment import Cohort, Experiment
from coalesce.runner.listener import Listener, Progress, Result
from coalesce.runner.plan import Plan, PlannedCohort, Trainer


def experiment(values: Mapping[str, Any]) -> Experiment:
    """An experiment with these swept values, everything else the same."""
    config: dict[str, Any] = {
        "task": {"_target_": "tasks.Made.Up", "hidden": 8},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "schedule": {"name": "constant"},
        "steps": 50,
        "batch_size": 4,
        "seed": 0,
    }
    for key, value in values.items():
        top, _, rest = key.partition(".")
        config[top] = {**config[top], rest: value} if rest else value
    return Experiment(config, dict(values))


def grid(**params: Sequence[Any]) -> list[Experiment]:
    """The product of the values; ``__`` in a name stands for the dot: ``grid(optimizer__lr=[0.1, 0.01])``."""
    keys = [name.replace("__", ".") for name in params]
    return [experiment(dict(zip(keys, values, strict=True))) for values in itertools.product(*params.values())]


def plan(experiments: Sequence[Experiment], cohorts: int = 1, **trainer: Any) -> Plan:
    """A plan of these experiments, dealt out to so many cohorts."""
    keys = tuple(experiments[0].values) if experiments else ()
    dealt = [Cohort(index, tuple(experiments[index::cohorts]), keys) for index in range(cohorts)]
    planned = tuple(PlannedCohort(c, min(len(c.experiments), 64), 13066, 180_000, 1_200_000) for c in dealt)
    return Plan("made_up", keys, tuple(experiments), planned, Trainer(**{"device": "cpu", "threads": 1, **trainer}))


def result(
    of: Experiment,
    accuracy: float = 0.9,
    best: float | None = None,
    *,
    status: str = "finished",
    steps: int | None = None,
    best_step: int | None = 40,
    message: str = "",
    weights: Mapping[str, Tensor] | None = None,
    seconds: float = 1.5,
) -> Result:
    """A result with the metrics ``train/loss`` and ``val/accuracy``; ``best`` is the last accuracy unless given."""
    return Result(
        experiment=of,
        status=status,
        steps=of.steps if steps is None else steps,
        metrics={"val/accuracy": accuracy, "train/loss": 0.1 + 0.2},
        best={"val/accuracy": accuracy if best is None else best},
        best_step=best_step,
        cohort=0,
        width=4,
        job=0,
        device="cpu",
        seconds=seconds,
        message=message,
        weights=weights,
    )


def progress(steps: int, total_steps: int, **changes: Any) -> Progress:
    """Where a run of 8 experiments in one cohort stands."""
    fields: dict[str, Any] = {
        "cohort": 0,
        "cohorts": 1,
        "lanes": 8,
        "width": 8,
        "steps": steps,
        "total_steps": total_steps,
        "experiments": 0,
        "total_experiments": 8,
        "monitor": "val/accuracy",
        "best": None,
        "elapsed_s": 5.0 + steps / 100,
        "training_s": steps / 100,
    }
    return Progress(**{**fields, **changes})


def drive(listener: Listener, of: Plan, results: Sequence[Result], every: int = 10) -> None:
    """Tell a listener a whole run: all lanes go on together, a metric every so many steps, all end together."""
    listener.started(of)
    listener.compiling(0, "step")
    listener.checking(0)
    steps = max((experiment.steps for experiment in of.experiments), default=0)
    total = sum(experiment.steps for experiment in of.experiments)
    for step in range(every, steps + 1, every):
        for index, one in enumerate(of.experiments):
            listener.metrics(one, step, {"val/accuracy": (index + 1) / step})
        if step + every > steps:
            for ended in results:
                listener.ended(ended)
        listener.advanced(progress(total * step // steps, total))
    listener.closed(None)
