"""Running a plan: lanes are filled, advanced from one host boundary to the next, read out and filled again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from coalesce import kernels
from coalesce.engine.check import check
from coalesce.engine.lanes import Lanes, Reading
from coalesce.engine.plain import Plain
from coalesce.engine.template import Template
from coalesce.errors import TaskError
from coalesce.experiment import Experiment
from coalesce.optim import SCHEDULES
from coalesce.runner.listener import Listener, Progress, Result
from coalesce.runner.plan import Plan, PlannedCohort, Trainer

#: What is said of an experiment whose loss was finite when it broke.
_UPDATE_BROKE = (
    "the loss was finite, so it is a gradient or the update. A torch.where gives a NaN gradient if the branch that it "
    "did not take is infinite or NaN, or has such a slope: give that branch an argument that is safe"
)


@dataclass
class Slot:
    """An experiment in its lane: what has been measured so far."""

    experiment: Experiment
    started_s: float
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    best_value: float = math.nan
    best_step: int | None = None


@dataclass
class Totals:
    """The whole run, for the progress display."""

    plan: Plan
    started_s: float = field(default_factory=time.monotonic)
    training_s: float = 0.0
    steps: int = 0
    undone: int = 0
    ended: int = 0
    best: dict[str, tuple[float, Experiment]] = field(default_factory=dict)


def run(plan: Plan, listeners: Sequence[Listener] = (), job: int = 0) -> list[Result]:
    """Run every experiment of a plan in this process.

    Args:
        plan: from `make_plan`.
        listeners: told what happens, in their order.
        job: this process's number.

    Returns:
        One result per experiment, in the order in which they ended.
    """
    error: BaseException | None = None
    results: list[Result] = []
    totals = Totals(plan)
    with kernels.threads(plan.trainer.threads):
        try:
            for listener in listeners:
                listener.started(plan)
            for index, planned in enumerate(plan.cohorts):
                results += _CohortRun(index, planned, plan.trainer, listeners, totals, job).run()
        except BaseException as caught:
            error = caught
            raise
        finally:
            _close(listeners, error)
    return results


def _close(listeners: Sequence[Listener], error: BaseException | None) -> None:
    """Tell every listener that the run is over, though one of them fails at it."""
    if listeners:
        try:
            listeners[0].closed(error)
        finally:
            _close(listeners[1:], error)


class _CohortRun:
    def __init__(
        self,
        index: int,
        planned: PlannedCohort,
        trainer: Trainer,
        listeners: Sequence[Listener],
        totals: Totals,
        job: int,
    ):
        self.index, self.planned, self.trainer = index, planned, trainer
        self.listeners, self.totals, self.job = listeners, totals, job
        self.template: Template = planned.template or Template(planned.cohort, audit=trainer.stack)
        self.lanes: Lanes | Plain
        if trainer.stack:
            how = trainer.device, trainer.compile, trainer.evaluate_batch_size
            chosen = planned.pieces, planned.lowerings, planned.checkpoint
            self.lanes = Lanes(self.template, planned.width, *how, *chosen)
        else:
            self.lanes = Plain(self.template, trainer.device, trainer.evaluate_batch_size)
        self.splits = self.template.evaluated
        self.queue = deque(planned.cohort.experiments)
        self.slots: list[Slot | None] = [None] * planned.width
        self.results: list[Result] = []

    def run(self) -> list[Result]:
        self._tell_compiling("step")
        self.lanes.prepare_step()
        for split in self.splits:
            self._tell_compiling(f"evaluation on {split}")
            self.lanes.prepare_evaluation(split)
        if self.trainer.check and isinstance(self.lanes, Lanes):
            for listener in self.listeners:
                listener.checking(self.index)
            check(self.lanes, self.splits)
        self._refill()
        while any(self.slots):
            started_s = time.monotonic()
            self.lanes.advance(min(self.trainer.every, max(s.experiment.steps - s.steps for s in self.slots if s)))
            self._boundary(self.lanes.read())
            self.totals.training_s += time.monotonic() - started_s
            self._refill()
            self._tell_progress()
        return self.results

    def _tell_compiling(self, what: str) -> None:
        if self.trainer.stack:
            for listener in self.listeners:
                listener.compiling(self.index, what)

    def _refill(self) -> None:
        for lane, slot in enumerate(self.slots):
            while slot is None and self.queue:
                slot = self._fill(lane, self.queue.popleft())
            self.slots[lane] = slot

    def _fill(self, lane: int, experiment: Experiment) -> Slot | None:
        slot = Slot(experiment, time.monotonic())
        try:
            self.lanes.fill(lane, experiment)
        except TaskError as error:
            self.lanes.clear(lane)
            self._end(slot, "failed", message=str(error))
            return None
        return slot

    def _boundary(self, reading: Reading) -> None:
        """Record what the lanes did since the last boundary, and take out those that ended."""
        busy = [(lane, slot) for lane, slot in enumerate(self.slots) if slot is not None]
        for lane, slot in busy:
            done = reading.steps[lane] - slot.steps
            self.totals.steps += done
            slot.steps += done
            # a lane that broke at the first step since has nothing new to tell
            if done:
                self._record(slot, {f"train/{n}": values[lane] for n, values in reading.metrics.items()})
        ended = {lane for lane, slot in busy if not reading.alive[lane] or slot.steps >= slot.experiment.steps}
        judged = {lane: slot for lane, slot in busy if lane not in ended and self._is_judged(slot)}
        asked = {lane for lane, slot in judged.items() if _monitored(slot).startswith("val/")}
        due = [
            (lane, slot)
            for lane, slot in busy
            if reading.alive[lane] and (lane in ended or lane in asked or slot.steps % self.trainer.evaluate_every == 0)
        ]
        failed = self._evaluate("val", due)
        if judged:
            self.lanes.observe({lane: slot.metrics.get(_monitored(slot), math.nan) for lane, slot in judged.items()})
        failed |= self._evaluate("test", [(n, slot) for n, slot in due if n in ended and n not in failed])
        for lane, slot in busy:
            if lane in failed:
                self._end(slot, "failed", lane, str(failed[lane]))
                self._empty(lane)
            elif lane in ended:
                self._take_out(lane, slot, reading)

    def _is_judged(self, slot: Slot) -> bool:
        """Whether the schedule looks at a metric of this experiment now, by its own steps."""
        schedule = slot.experiment.config["schedule"]
        return SCHEDULES[schedule["name"]].judges and slot.steps % schedule["every"] == 0

    def _evaluate(self, split: str, due: Sequence[tuple[int, Slot]]) -> dict[int, TaskError]:
        """Record the metrics of a split, if there is one.

        Returns:
            lane → what its own summary raised.
        """
        failed: dict[int, TaskError] = {}
        if not due or split not in self.splits:
            return failed
        evaluation = self.lanes.measure(split)
        for lane, slot in due:
            found = {n: values[lane] for n, values in evaluation.metrics.items()}
            try:
                found |= self.lanes.summary(lane, split, evaluation)
            except TaskError as error:
                failed[lane] = error
            self._record(slot, {f"{split}/{n}": value for n, value in found.items()})
        return failed

    def _take_out(self, lane: int, slot: Slot, reading: Reading) -> None:
        message, alive = "", reading.alive[lane]
        if not alive:
            message = f"the loss or a parameter turned infinite or NaN at step {slot.steps + 1}"
            if reading.finite and reading.finite[lane]:
                message += f"; {_UPDATE_BROKE}"
        self._end(slot, "finished" if alive else "diverged", lane, message)
        self._empty(lane)

    def _empty(self, lane: int) -> None:
        self.lanes.clear(lane)
        self.slots[lane] = None

    def _record(self, slot: Slot, values: dict[str, float]) -> None:
        """Keep metrics of one split and tell them; see whether the monitored one is the best so far."""
        slot.metrics |= values
        for listener in self.listeners:
            listener.metrics(slot.experiment, slot.steps, values)
        value = values.get(self.trainer.monitor, math.nan)
        if math.isfinite(value) and (math.isnan(slot.best_value) or self._better(value, slot.best_value)):
            slot.best_value, slot.best_step = value, slot.steps
            slot.best = dict(values)
            self.totals.best[slot.experiment.id] = (value, slot.experiment)

    def _better(self, new: float, old: float) -> bool:
        return new > old if self.trainer.mode == "max" else new < old

    def _end(self, slot: Slot, status: str, lane: int | None = None, message: str = "") -> None:
        if status != "finished":
            # what broke never wins
            self.totals.best.pop(slot.experiment.id, None)
        self.totals.ended += 1
        # no longer to be done: were they counted as done, a diverged experiment would look like a burst of speed
        self.totals.undone += slot.experiment.steps - slot.steps
        keep = self.trainer.weights and lane is not None
        result = Result(
            experiment=slot.experiment,
            status=status,
            steps=slot.steps,
            metrics=slot.metrics,
            best=slot.best,
            best_step=slot.best_step,
            cohort=self.planned.cohort.index,
            width=self.planned.width,
            job=self.job,
            device=self.trainer.device,
            seconds=time.monotonic() - slot.started_s,
            message=message,
            weights=self.lanes.state_dict(lane) if keep and lane is not None else None,
        )
        self.results.append(result)
        for listener in self.listeners:
            listener.ended(result)

    def _tell_progress(self) -> None:
        totals, plan = self.totals, self.totals.plan
        values = totals.best.values()
        pick = max if self.trainer.mode == "max" else min
        progress = Progress(
            cohort=self.index,
            cohorts=len(plan.cohorts),
            lanes=sum(s is not None for s in self.slots),
            width=self.planned.width,
            steps=totals.steps,
            total_steps=sum(e.steps for e in plan.experiments) - totals.undone,
            experiments=totals.ended,
            total_experiments=len(plan.experiments),
            monitor=self.trainer.monitor,
            best=pick(values, key=lambda entry: entry[0]) if values else None,
            elapsed_s=time.monotonic() - totals.started_s,
            training_s=totals.training_s,
        )
        for listener in self.listeners:
            listener.advanced(progress)


def _monitored(slot: Slot) -> str:
    return str(slot.experiment.config["schedule"]["monitor"])
