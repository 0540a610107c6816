"""A trained experiment as a plain module."""

from __future__ import annotations

import os

from torch import nn

from coalesce.engine.template import build, task_class
from coalesce.errors import TaskError
from coalesce.store.plans import experiment_from_json
from coalesce.store.read import open_run, weights_of


def load_model(folder: str | os.PathLike[str], experiment: str = "best", which: str = "best") -> nn.Module:
    """The model of one experiment of a run, as its task builds it, with the weights that it was trained to.

    This imports the task that the folder names and runs its ``model()``: use it for folders that you trust. Reading
    results, metrics and weights (`coalesce.load`, `load_history`, `store.read.load_weights`) runs nothing.

    Args:
        folder: the run folder, ``runs/<sweep>/<time>``.
        experiment: its id, as in the column ``experiment``; or "best": the one that is best by the run's
            ``trainer.monitor`` and ``trainer.mode``.
        which: "best": the weights of the step ``best_step``, whose metrics the columns ``best/...`` have; "last": those
            of its end, whose metrics the other columns have.

    Returns:
        A plain module on the CPU, in evaluation mode, in which metrics are measured: ``model.train()`` to train on.

    Raises:
        FileNotFoundError: it is no run folder, or has no such weights.
        LookupError: the run has no such experiment, or none that is best.
        TaskError: the task cannot be imported, its own code fails, or it builds another model by now.
    """
    paths, plan = open_run(folder)
    name, weights = weights_of(paths, plan, experiment, which)
    (entry,) = (entry for entry in plan["experiments"] if entry["id"] == name)
    target = entry["config"]["task"]["_target_"]
    trained = experiment_from_json(entry)
    try:
        task_class(trained)
    except (ImportError, AttributeError) as error:
        raise TaskError(
            f"the task {target} of the run {paths.folder} cannot be imported: {error}. Its module must be found from "
            "here, as when the run was started: in the same folder, or with that folder in PYTHONPATH"
        ) from error
    _, model = build(trained)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise TaskError(f"{target} builds another model by now than the one that was trained: {error}") from error
    return model.eval()
