"""Metrics that are no averages: what a task computes from a whole split's output, on the host, for each experiment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coalesce.engine.rehearsal import check_summary, own_code
from coalesce.engine.template import Template, build, seeded
from coalesce.errors import TaskError
from coalesce.experiment import Experiment
from coalesce.task import Task

#: The samples from start to stop of a split, and name → (K, stop - start, …), on the CPU.
Part = tuple[int, int, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Evaluation:
    """A split seen through all lanes.

    Args:
        metrics: name → (K,), averaged over the split's samples.
        parts: what `Task.outputs` gave, in the split's order; empty where the task has none.
    """

    metrics: dict[str, list[float]]
    parts: Sequence[Part] = ()

    def outputs(self, lane: int, parts: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        """A lane's outputs of a whole split: name → (N, …).

        Args:
            parts: those that are the lane's own.
        """
        mine = [found for start, stop, found in self.parts if (start, stop) in parts]
        return {name: torch.cat([found[name][lane] for found in mine]) for name in mine[0]}


class Summaries:
    """Calls the tasks' ``summary``: a task of its own for each experiment, whose floats are plain floats.

    Args:
        template: of the cohort.
    """

    def __init__(self, template: Template):
        self.template = template
        self._tasks: dict[int, tuple[str, Task]] = {}

    def of(self, lane: int, experiment: Experiment, split: str, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        """The metrics of one experiment.

        Args:
            lane: whose task is kept for the next time.
            outputs: name → (N, …), on the CPU, as `Evaluation.outputs` gives them.

        Returns:
            name → value; NaN in all of them where an output is NaN, since few functions take it.

        Raises:
            TaskError: the user's code fails.
        """
        if any(torch.isnan(t).any() for t in outputs.values() if t.is_floating_point() or t.is_complex()):
            return dict.fromkeys(self.template.rehearsal.summaries, math.nan)
        if self._tasks.get(lane, ("", None))[0] != experiment.id:
            self._tasks[lane] = experiment.id, build(experiment)[0]
        task = self._tasks[lane][1]
        what = f"{type(task).__name__}.summary() of experiment {experiment} on {split}"
        # what it draws, for a bootstrap's interval, may not depend on the other lanes either
        with torch.no_grad(), seeded(experiment.seed), own_code(what):
            found = task.summary(plain(outputs), self.template.samples(experiment, split))
        numbers, names = check_summary(found, what), self.template.rehearsal.summaries
        if set(numbers) != set(names):
            raise TaskError(
                f"{what} returned {', '.join(numbers) or 'nothing'}, but {', '.join(names)} at the start: return the "
                f"same metrics each time, NaN where there is none"
            )
        return numbers


def plain(outputs: Mapping[str, Tensor]) -> Any:
    """Outputs as the task gave them: a dict, or the one tensor alone."""
    return outputs[""] if set(outputs) == {""} else dict(outputs)
