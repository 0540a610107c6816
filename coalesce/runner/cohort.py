"""The lanes of one cohort over time: filled, advanced from one host boundary to the next, read out, filled again."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from coalesce.engine.check import check
from coalesce.engine.lanes import Lanes, Reading
from coalesce.engine.plain import Plain
from coalesce.engine.template import Template
from coalesce.errors import TaskError
from coalesce.experiment import Experiment
from coalesce.runner.memory import is_out_of_memory
from coalesce.runner.plan import PlannedCohort
from coalesce.runner.slot import Saved, Slot
from coalesce.search.base import Copy, Report, Stop, Trial

if TYPE_CHECKING:
    from coalesce.runner.run import Run

logger = logging.getLogger("coalesce")
T = TypeVar("T")

#: Seconds of steps after which the listeners are asked whether they want a boundary at once (a signal has come).
POLL_S = 0.5


class CohortRun:
    """The lanes of one cohort.

    An experiment is recorded, told of and evaluated by its own steps, at multiples of ``trainer.every`` and at its end:
    what becomes of it does not depend on when its lane was filled, or on how often the run was interrupted.

    Args:
        run: what all cohorts share.
        planned: which cohort, and how it runs.
    """

    def __init__(self, run: Run, planned: PlannedCohort):
        self.run, self.planned, self.trainer = run, planned, run.trainer
        self.template: Template = planned.template or Template(planned.cohort, audit=self.trainer.stack)
        self.splits = self.template.evaluated
        self.slots: list[Slot | None] = [None] * planned.width
        self.queue: deque[tuple[int, Trial]] = deque()
        self.step_s = math.nan
        #: lanes whose present state is the best so far
        self.better: list[int] = []
        self.lanes = self._guarded(self._build)

    @property
    def busy(self) -> list[tuple[int, Slot]]:
        """The lanes in which an experiment trains."""
        return [(lane, slot) for lane, slot in enumerate(self.slots) if slot is not None]

    def train(self, trials: Sequence[tuple[int, Trial]]) -> None:
        """Train experiments until each has ended or is put aside.

        Args:
            trials: with their places among all that were asked for together.
        """
        # those that have begun go on first: what is kept of them on the host can be let go
        self.queue = deque(sorted(trials, key=lambda entry: (entry[1].experiment.id not in self.run.saved, entry[0])))
        self._guarded(self._refill)
        while self.busy:
            self._guarded(self._round)
            self._guarded(self._refill)
            self.run.tell_progress(self)
            self._guarded(self.run.offer_snapshot)

    def retire(self, leaving: Sequence[tuple[Experiment, str]]) -> None:
        """End experiments that were put aside, and will not go on.

        Args:
            leaving: which, and why.
        """
        while any(experiment.id not in self.run.ended for experiment, _ in leaving):
            self._guarded(partial(self._retire_some, leaving))

    def _retire_some(self, leaving: Sequence[tuple[Experiment, str]]) -> None:
        """End a lane-full of those that have not ended."""
        left = [(experiment, reason) for experiment, reason in leaving if experiment.id not in self.run.ended]
        some = {experiment.id: (experiment, reason) for experiment, reason in left[: self.planned.width]}
        kept = {name: self.run.saved[name] for name in some}
        try:
            for lane, (experiment, _) in enumerate(some.values()):
                self.slots[lane] = self._fill(lane, lane, Trial(experiment))
            due = dict(self.busy)
            failed = self._test(due)
            for lane, slot in due.items():
                if lane in failed:
                    self._take_out(lane, slot, "failed", str(failed[lane]))
                else:
                    self._take_out(lane, slot, "stopped", some[slot.experiment.id][1])
        finally:
            # whatever happened: those that have not ended wait as they did, and not as they were at a snapshot
            self.slots = [None] * self.planned.width
            self.run.saved |= {name: saved for name, saved in kept.items() if name not in self.run.ended}

    def _round(self) -> None:
        if not self.busy:
            # what had to begin again could not be built
            return
        started_s = time.monotonic()
        taken, left = self._advance()
        reading = self.lanes.read()
        for lane, slot in self.busy:
            self.run.totals.steps += reading.steps[lane] - slot.steps
            slot.advanced(reading.steps[lane], taken, reading.alive[lane])
        if not left:
            self._boundary(reading)
        self.run.totals.training_s += time.monotonic() - started_s

    def _build(self) -> Lanes | Plain:
        trainer, planned = self.trainer, self.planned
        if not trainer.stack:
            return Plain(self.template, trainer.device, trainer.evaluate_batch_size)
        how = trainer.device, trainer.compile, trainer.evaluate_batch_size
        chosen = planned.pieces, planned.lowerings, planned.checkpoint
        lanes = Lanes(self.template, planned.width, *how, *chosen)
        self.run.tell("compiling", self.planned.cohort.index, "step")
        lanes.prepare_step()
        for split in self.splits:
            self.run.tell("compiling", self.planned.cohort.index, f"evaluation on {split}")
            lanes.prepare_evaluation(split)
        if trainer.check:
            self.run.tell("checking", self.planned.cohort.index)
            check(lanes, self.splits)
        return lanes

    def _guarded(self, action: Callable[[], T]) -> T:
        """Do something; where the device's memory does not suffice, do it in half as many lanes."""
        while True:
            try:
                return action()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not self.trainer.stack or self.planned.width == 1:
                    raise
                message = (str(error) or type(error).__name__).splitlines()[0]
            # not in the handler: the traceback holds the tensors of the step that failed
            self._narrow(message)

    def _narrow(self, message: str) -> None:
        """Go on in half as many lanes. What was in a lane goes back to its last snapshot, or starts again."""
        for lane, slot in self.busy:
            self.run.go_back(slot)
            trial = Trial(slot.experiment, slot.until)
            self.queue.append((slot.order, trial))
            self.slots[lane] = None
        self.queue = deque(sorted(self.queue, key=lambda entry: entry[0]))
        width = -(-self.planned.width // 2)
        self.planned = replace(self.planned, width=width)
        self.run.narrowed(self.planned.cohort.index, width, message)
        built = hasattr(self, "lanes")
        if built:
            del self.lanes
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.slots = [None] * width
        if built:
            self.lanes = self._guarded(self._build)
            self._guarded(self._refill)

    def _advance(self) -> tuple[int, int]:
        """Step to the next place at which some lane is due.

        Returns:
            The steps taken, and those that are left since a listener asked for stopping before it. Then nobody is due,
            not even a lane at its end: it would be filled earlier than without, and the search told of other
            experiments beside it.
        """
        every = self.trainer.every
        longest = max(slot.end - slot.clock for _, slot in self.busy)
        due = whole = min(longest, *(every - slot.clock % every for _, slot in self.busy))
        while due > 0:
            # by time, which decides nothing but when one is asked; the first step tells how long one takes
            some = 1 if math.isnan(self.step_s) else max(1, min(due, int(POLL_S / max(self.step_s, 1e-9))))
            started_s = time.monotonic()
            self.lanes.advance(some)
            if self.lanes.device.type == "cuda":
                torch.cuda.synchronize(self.lanes.device)
            self.step_s = (time.monotonic() - started_s) / some
            due -= some
            if any(listener.wants_boundary() for listener in self.run.listeners):
                break
        return whole - due, due

    def _refill(self) -> None:
        for lane, slot in enumerate(self.slots):
            while slot is None and self.queue:
                slot = self._fill(lane, *self.queue[0])
                # not before: it is the next one still where memory did not suffice
                self.queue.popleft()
            self.slots[lane] = slot

    def _fill(self, lane: int, order: int, trial: Trial) -> Slot | None:
        experiment = trial.experiment
        saved = self.run.saved.get(experiment.id)
        slot = Slot(experiment, order, trial.until)
        try:
            if saved is None:
                self.lanes.fill(lane, experiment)
            else:
                slot = replace(Slot.of(experiment, saved.facts), order=order, until=trial.until)
                if slot.aside and slot.steps >= slot.end:
                    # it was put aside where it is to be put aside
                    return None
                slot.aside = False
                try:
                    self.lanes.put(lane, experiment.varied(slot.floats), saved.tensors)
                except ValueError as error:
                    logger.warning("%s; it starts again", error)
                    slot = Slot(experiment, order, trial.until)
                    self.lanes.fill(lane, experiment)
        except TaskError as error:
            self.lanes.clear(lane)
            self.run.end(slot, self.planned, "failed", str(error))
            return None
        self.run.saved.pop(experiment.id, None)
        return slot

    def _boundary(self, reading: Reading) -> None:
        """Record what the lanes did that are due, hear the search, and take out those that ended."""
        every = self.trainer.every
        due: dict[int, Slot] = {}
        for lane, slot in self.busy:
            slot.fresh, done, slot.moved = {}, slot.moved, 0
            if not reading.alive[lane] or slot.steps >= slot.end or (done and slot.steps % every == 0):
                due[lane] = slot
                # a lane that broke at the first step since has nothing new to tell
                if done:
                    self._record(lane, slot, {f"train/{n}": values[lane] for n, values in reading.metrics.items()})
        broken = {lane for lane in due if not reading.alive[lane]}
        finished = {lane for lane, slot in due.items() if slot.steps >= slot.experiment.steps} - broken
        judged = {lane: slot for lane, slot in due.items() if lane not in finished | broken and slot.is_judged}
        asked = {lane for lane, slot in judged.items() if slot.monitored.startswith("val/")} | finished
        often = self.trainer.evaluate_every
        measured = {n: s for n, s in due.items() if n not in broken and (n in asked or s.steps % often == 0)}
        failed = self._evaluate("val", measured)
        if judged:
            self.lanes.observe({lane: slot.metrics.get(slot.monitored, math.nan) for lane, slot in judged.items()})
        self._keep_better()
        hoping = self._hoping(broken, due)
        told = {lane: slot for lane, slot in due.items() if lane not in failed}
        stopped, revived = self._hear(told, finished | (broken - hoping), hoping)
        hoping, broken = hoping - revived, broken - revived
        left = {lane: due[lane] for lane in (finished | stopped.keys()) - failed.keys() - broken}
        failed |= self._test(left)
        for lane, slot in due.items():
            if lane in failed:
                self._take_out(lane, slot, "failed", str(failed[lane]))
            elif lane in hoping:
                continue
            elif lane in broken:
                self._take_out(lane, slot, "diverged", slot.broke(bool(reading.finite) and reading.finite[lane]))
            elif lane in finished:
                self._take_out(lane, slot, "finished")
            elif lane in stopped:
                self._take_out(lane, slot, "stopped", stopped[lane])
            elif slot.steps >= slot.end:
                self._put_aside(lane, slot)

    def _hoping(self, broken: set[int], due: Mapping[int, Slot]) -> set[int]:
        """Of the lanes that broke those that stay, standing still, since the search may let them copy another one."""
        if not self.run.search.replaces_broken:
            return set()
        others = {slot.clock for lane, slot in self.busy if lane not in broken and slot.steps < slot.end}
        return {lane for lane in broken if due[lane].clock in others}

    def _hear(self, due: Mapping[int, Slot], over: set[int], broken: set[int]) -> tuple[dict[int, str], set[int]]:
        """Tell the search what was measured, and do what it says.

        Args:
            over: lanes that are at their end.
            broken: lanes that broke, and are not at their end.

        Returns:
            lane → why its experiment is stopped; and the lanes that are broken no more.
        """
        lanes = sorted(due, key=lambda lane: due[lane].order)
        lane_of = {due[lane].experiment.id: lane for lane in lanes}
        reports = [
            Report(s.experiment, s.clock, {}) if n in broken else Report(s.experiment, s.steps, s.fresh)
            for n, s in ((lane, due[lane]) for lane in lanes)
        ]
        verdicts = self.run.search.tell(reports)
        stopped: dict[int, str] = {}
        copies: list[tuple[int, Copy]] = []
        for name, verdict in verdicts.items():
            lane = lane_of[name]
            if lane in over:
                continue
            if isinstance(verdict, Stop):
                stopped[lane] = verdict.reason
            else:
                copies.append((lane, verdict))
        # all sources as they are now, also where one of them is a target
        sources = [self._source(copy, lane_of) for _, copy in copies]
        states = self.lanes.save(sources) if copies else []
        floats = [due[source].riding(self.planned.cohort.riding) for source in sources]
        for (lane, copy), state, values in zip(copies, states, floats, strict=True):
            slot, steps = due[lane], due[lane_of[copy.source]].steps
            if lane in broken:
                text = "%s broke after %d steps, and goes on as a copy of experiment %s at step %d"
                logger.warning(text, slot.experiment, slot.steps, copy.source, steps)
                self.run.totals.steps += steps - slot.steps
                slot.steps = slot.clock = steps
            slot.floats = {**values, **copy.values}
            self.lanes.go_on(lane, slot.experiment.varied(slot.floats), state)
            self._record(lane, slot, {f"value/{key}": value for key, value in slot.floats.items()})
        return stopped, broken & {lane for lane, _ in copies}

    def _source(self, copy: Copy, lane_of: Mapping[str, int]) -> int:
        if copy.source not in lane_of:
            raise LookupError(f"the search copies experiment {copy.source}, which is in no lane of this graph now")
        return lane_of[copy.source]

    def _evaluate(self, split: str, due: Mapping[int, Slot]) -> dict[int, TaskError]:
        """Record the metrics of a split, if there is one.

        Returns:
            lane → what its own summary raised.
        """
        found, failed = self._measured(split, due)
        for lane, values in found.items():
            self._record(lane, due[lane], values)
        return failed

    def _test(self, due: Mapping[int, Slot]) -> dict[int, TaskError]:
        """Record the metrics of the test split: of the last state, and beside the best ones those of the best."""
        failed = self._evaluate("test", due)
        well = {lane: slot for lane, slot in due.items() if lane not in failed and slot.best_step is not None}
        for slot in well.values():
            slot.best |= {n: v for n, v in slot.metrics.items() if n.startswith("test/")}
        earlier = {lane: slot for lane, slot in well.items() if slot.best_step != slot.steps}
        found, wrong = self._measured("test", earlier, best=True)
        for lane, values in found.items():
            earlier[lane].best |= values
        return failed | wrong

    def _measured(
        self, split: str, due: Mapping[int, Slot], best: bool = False
    ) -> tuple[dict[int, dict[str, float]], dict[int, TaskError]]:
        """lane → metrics of a split, if there is one; and lane → what its own summary raised."""
        values: dict[int, dict[str, float]] = {}
        failed: dict[int, TaskError] = {}
        if not due or split not in self.splits:
            return values, failed
        evaluation = self.lanes.measure(split, best)
        for lane in due:
            found = {n: metric[lane] for n, metric in evaluation.metrics.items()}
            try:
                found |= self.lanes.summary(lane, split, evaluation)
            except TaskError as error:
                failed[lane] = error
            values[lane] = {f"{split}/{n}": value for n, value in found.items()}
        return values, failed

    def _take_out(self, lane: int, slot: Slot, status: str, message: str = "") -> None:
        last = best = None
        if self.trainer.weights:
            last = self.lanes.state_dict(lane)
            best = self.lanes.state_dict(lane, best=True) if slot.best_step is not None else None
        self.run.end(slot, self.planned, status, message, last, best)
        self._empty(lane)

    def _put_aside(self, lane: int, slot: Slot) -> None:
        slot.aside = True
        (state,) = self.lanes.save([lane])
        self.run.saved[slot.experiment.id] = Saved(slot.facts(), state)
        self._empty(lane)

    def _empty(self, lane: int) -> None:
        self.lanes.clear(lane)
        self.slots[lane] = None

    def _record(self, lane: int, slot: Slot, values: Mapping[str, float]) -> None:
        """Keep metrics of one split and tell them; note whether the state is the best so far."""
        best = slot.note(values, self.trainer.monitor, self.trainer.mode)
        self.run.tell("metrics", slot.experiment, slot.steps, values)
        if best:
            self.run.totals.best[slot.experiment.id] = slot.best_value, slot.experiment
            self.better.append(lane)

    def _keep_better(self) -> None:
        """Keep the states that are the best so far, of all lanes at once; if anybody will ask for them."""
        if self.better and (self.trainer.weights or "test" in self.splits):
            self.lanes.keep(self.better)
        self.better = []
