"""What the runner tells while it runs. The run folder and the progress display listen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from coalesce.experiment import Experiment

if TYPE_CHECKING:
    from coalesce.runner.plan import Plan
    from coalesce.runner.snapshot import Snapshot


@dataclass(frozen=True)
class Result:
    """How one experiment ended.

    Args:
        experiment: which.
        status: "finished", "stopped", "diverged" or "failed".
        steps: updates done. A diverged experiment broke at its step ``steps + 1``.
        metrics: last value of each metric: "train/loss", "val/accuracy", "test/accuracy", …
        best: the value of each validation metric at ``best_step``, and of each of the test split in that state.
        best_step: the step at which the monitored metric was best; None if it was never measured finite.
        cohort, width, job, device: where it ran.
        seconds: wall time from the filling of its lane to the end, shared with the other lanes.
        message: what went wrong, if anything did.
        weights: the final state_dict (parameters and buffers), where weights are asked for.
        best_weights: the same at ``best_step``, if there is one.
    """

    experiment: Experiment
    status: str
    steps: int
    metrics: Mapping[str, float]
    best: Mapping[str, float]
    best_step: int | None
    cohort: int
    width: int
    job: int
    device: str
    seconds: float
    message: str = ""
    weights: Mapping[str, Tensor] | None = field(default=None, repr=False)
    best_weights: Mapping[str, Tensor] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Progress:
    """Where the run stands at a host boundary.

    Args:
        cohort, cohorts: the number of the running cohort, from 0, and how many there are.
        lanes, width: busy lanes, and all lanes of the running graph.
        steps, total_steps: experiment-steps done (all experiments together), and to do in all, without those that
            experiments which broke left undone.
        experiments, total_experiments: ended, and in all.
        monitor: the name of the monitored metric.
        best: its best value so far and whose it is, or None.
        elapsed_s: seconds since the run started, compiling included.
        training_s: seconds of these spent training and evaluating.
        before: experiment-steps that an earlier process did.
    """

    cohort: int
    cohorts: int
    lanes: int
    width: int
    steps: int
    total_steps: int
    experiments: int
    total_experiments: int
    monitor: str
    best: tuple[float, Experiment] | None
    elapsed_s: float
    training_s: float
    before: int = 0


class Listener:
    """Base of all listeners; each method does nothing until overridden. They are called in this process, in order."""

    def started(self, plan: Plan) -> None:
        """The run begins."""

    def resumed(self, results: Sequence[Result]) -> None:
        """The run goes on, and these experiments had ended before. Told behind ``started``."""

    def compiling(self, cohort: int, what: str) -> None:
        """A graph of a cohort is about to be traced and compiled; ``what`` says which: "step", "evaluation on val"."""

    def checking(self, cohort: int) -> None:
        """The graphs of a cohort are about to be compared with plain PyTorch, before it trains."""

    def metrics(self, experiment: Experiment, step: int, values: Mapping[str, Any]) -> None:
        """Metrics of one experiment after ``step`` updates."""

    def ended(self, result: Result) -> None:
        """One experiment ended."""

    def advanced(self, progress: Progress) -> None:
        """A host boundary was reached."""

    def planned(self, plan: Plan) -> None:
        """The plan has changed: a search asked for more experiments, or memory did not suffice for a cohort's width."""

    def narrowed(self, cohort: int, width: int, message: str) -> None:
        """The device's memory did not suffice; the cohort goes on in ``width`` lanes."""

    def snapshot(self, take: Callable[[], Snapshot]) -> None:
        """A host boundary was reached, and everything told. A listener that wants to keep where the run stands calls
        ``take``, which copies the lanes to the host. What it raises ends the run here."""

    def over(self, take: Callable[[], Snapshot] | None) -> None:
        """Every experiment of the plan has ended, and the search asks for no more.

        Args:
            take: gives what the search has to know should it be asked for more one day; None: nothing.
        """

    def wants_boundary(self) -> bool:
        """Whether the next host boundary is to come now. Asked every half a second."""
        return False

    def closed(self, error: BaseException | None) -> None:
        """The run is over; ``error`` says why, if it broke off."""


class Latest(Listener):
    """Knows the plan as it is now."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def planned(self, plan: Plan) -> None:
        self.plan = plan
