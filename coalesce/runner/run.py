"""Running a plan: what the search asks for is trained, cohort by cohort, and the search is told."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from coalesce import kernels
from coalesce.errors import RunFolderError, TaskError
from coalesce.experiment import Experiment, Rides
from coalesce.runner.cohort import CohortRun
from coalesce.runner.listener import Listener, Progress, Result
from coalesce.runner.plan import Plan, PlannedCohort
from coalesce.runner.planning import grown
from coalesce.runner.slot import Saved, Slot
from coalesce.runner.snapshot import Begun as Begun
from coalesce.runner.snapshot import Snapshot
from coalesce.search.base import Ending, Listed, Search, Trial


@dataclass
class Totals:
    """The whole run, for the progress display."""

    started_s: float = field(default_factory=time.monotonic)
    training_s: float = 0.0
    steps: int = 0
    before: int = 0
    undone: int = 0
    best: dict[str, tuple[float, Experiment]] = field(default_factory=dict)


def run(
    plan: Plan,
    listeners: Sequence[Listener] = (),
    job: int = 0,
    search: Search | None = None,
    begun: Begun | None = None,
    rides: Rides | None = None,
) -> list[Result]:
    """Run what a search asks for, in this process.

    Args:
        plan: from `make_plan`.
        listeners: told what happens, in their order.
        job: this process's number.
        search: which experiments, and what becomes of them; None: every experiment of the plan, to its end.
        begun: what is done already: it is not done again, and what had begun goes on.
        rides: see `group`; for a search that asks for experiments that the plan does not have.

    Returns:
        One result per experiment, in the order in which they ended; those that had ended before come first. Their
        weights are told to the listeners alone.

    Raises:
        TaskError: an experiment failed, and ``trainer.on_error`` is "stop".
        RunFolderError: ``begun`` is of another kind of search.
    """
    error: BaseException | None = None
    whole = Run(plan, listeners, job, search or Listed(plan.experiments), rides)
    with kernels.arithmetic(plan.trainer.threads, plan.trainer.matmul_precision):
        try:
            whole.go(begun or Begun())
        except BaseException as caught:
            error = caught
            raise
        finally:
            _close(listeners, error)
    return list(whole.ended.values())


def _close(listeners: Sequence[Listener], error: BaseException | None) -> None:
    """Tell every listener that the run is over, though one of them fails at it."""
    if listeners:
        try:
            listeners[0].closed(error)
        finally:
            _close(listeners[1:], error)


class Run:
    """What all cohorts of a run share.

    Args: as `run`.
    """

    def __init__(self, plan: Plan, listeners: Sequence[Listener], job: int, search: Search, rides: Rides | None):
        self.plan, self.trainer, self.listeners, self.job = plan, plan.trainer, listeners, job
        self.search, self.rides = search, rides
        self.totals = Totals()
        #: id → result, in the order in which they ended
        self.ended: dict[str, Result] = {}
        #: those that have begun, have not ended, and are in no lane
        self.saved: dict[str, Saved] = {}
        #: where each of the busy lanes was at the last snapshot
        self._latest: dict[str, Saved] = {}
        self._cohorts: dict[int, CohortRun] = {}
        self._current: CohortRun | None = None
        self._trials: Sequence[Trial] = ()
        #: see `Begun`
        self._attempts: Mapping[str, int] = {}

    def go(self, begun: Begun) -> None:
        """Ask and train until nothing is asked for any more."""
        # first, since the listeners write down what is to be done: what cannot be taken over leaves them as they were
        trials = self._go_on(begun)
        self.plan = replace(self.plan, search=self.search.kind)
        self.tell("started", self.plan)
        if self.ended:
            self.tell("resumed", list(self.ended.values()))
        for name, message in self.plan.failed.items():
            if name not in self.ended:
                experiment = next(e for e in self.plan.experiments if e.id == name)
                self.end(Slot(experiment), self._planned(name), "failed", message)
        if trials:
            self._train(trials)
        while trials := self._ask():
            self._train(trials)
        if all(experiment.id in self.ended for experiment in self.plan.experiments):
            # a search that decides by what it has seen needs that, should it be asked for more one day; what others
            # have to know stands in the results
            self._trials = ()
            self.tell("over", self.take if self.search.replays else None)

    def _ask(self) -> Sequence[Trial]:
        trials = self.search.ask(max((c.width for c in self.plan.cohorts), default=1))
        dropped = {name: stop.reason for name, stop in self.search.dropped().items() if name in self.saved}
        for planned in self.plan.cohorts:
            mine = [e for e in planned.cohort.experiments if e.id in dropped]
            if mine:
                with self._cohort(planned) as cohort:
                    cohort.retire([(e, dropped[e.id]) for e in mine])
        return trials

    def _go_on(self, begun: Begun) -> Sequence[Trial]:
        """Take over what was done before.

        Returns:
            What had been asked for last.
        """
        facts: Mapping[str, Any] = begun.snapshot.facts if begun.snapshot else {"ended": [], "slots": {}, "trials": []}
        kind = self.search.kind
        before = begun.kind or facts.get("kind", kind)
        if before != kind:
            raise RunFolderError(
                f"the run began with the search {before!r} and cannot go on with {kind!r}: take the search that it "
                "began with, or another folder"
            )
        self._attempts = begun.attempts
        # what the snapshot knows of these is of an earlier attempt
        anew = {n for n, count in begun.attempts.items() if count > facts.get("attempts", {}).get(n, 0)}
        known = set(facts["ended"]) - anew
        if begun.snapshot:
            self.search.load_state_dict(facts["search"])
            self._take_over(begun.snapshot)
            for name in anew:
                self.saved.pop(name, None)
                self._latest.pop(name, None)
                self.search.forget(name)
        for result in begun.results:
            name = result.experiment.id
            if self.search.replays and name not in known:
                # it ends once more, when the search has been told what led to it
                continue
            self.ended[name] = result
            self.saved.pop(name, None)
            if result.status in ("finished", "stopped"):
                self._note_best(result.experiment, result.best.get(self.trainer.monitor, math.nan))
            self.totals.steps += result.steps
            self.totals.undone += result.experiment.steps - result.steps
            if name not in known:
                self.search.ended(Ending(result.experiment, result.status, result.steps, result.metrics, result.best))
        experiments = {e.id: e for e in self.plan.experiments}
        for name, saved in self.saved.items():
            self.totals.steps += int(saved.facts["steps"])
            if name in experiments:
                self._note_best(experiments[name], float(saved.facts["best_value"]))
        self.totals.before = self.totals.steps
        trials = {name: Trial(experiments[name], until) for name, until in facts["trials"] if name in experiments}
        if begun.snapshot:
            # the search may have asked for them before what it asked for last; without a snapshot it asks for all
            missing = [n for n in experiments if n in begun.attempts and n not in trials and n not in self.ended]
            trials |= {name: Trial(experiments[name]) for name in missing}
        return list(trials.values())

    def _note_best(self, experiment: Experiment, value: float) -> None:
        if math.isfinite(value):
            self.totals.best[experiment.id] = value, experiment

    def _take_over(self, snapshot: Snapshot) -> None:
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in snapshot.facts["slots"]}
        for name, tensor in snapshot.tensors.items():
            experiment, _, rest = name.partition("/")
            tensors[experiment][rest] = tensor
        self.saved = {n: Saved(facts, tensors[n]) for n, facts in snapshot.facts["slots"].items()}
        self._latest = dict(self.saved)

    def _train(self, trials: Sequence[Trial]) -> None:
        """Train what was asked for together, one cohort after the other."""
        self._trials = trials
        self._grow([trial.experiment for trial in trials])
        todo = [(order, t) for order, t in enumerate(trials) if t.experiment.id not in self.ended]
        index_of = {e.id: c.cohort.index for c in self.plan.cohorts for e in c.cohort.experiments}
        for planned in self.plan.cohorts:
            index = planned.cohort.index
            mine = [(order, trial) for order, trial in todo if index_of[trial.experiment.id] == index]
            if mine:
                with self._cohort(planned) as cohort:
                    cohort.train(mine)

    @contextmanager
    def _cohort(self, planned: PlannedCohort) -> Iterator[CohortRun]:
        """The lanes of a cohort, which stay if they will be needed again."""
        index = planned.cohort.index
        if index not in self._cohorts:
            self._cohorts[index] = CohortRun(self, planned)
        self._current = self._cohorts[index]
        yield self._current
        if not self.search.asks_again:
            del self._cohorts[index]
        self._current = None

    def _grow(self, experiments: Iterable[Experiment]) -> None:
        known = {e.id for e in self.plan.experiments}
        new = [e for e in experiments if e.id not in known]
        if not new:
            return
        if self.rides is None:
            raise ValueError(f"the search asks for {new[0]}, which is not in the plan")
        self.plan = grown(self.plan, new, self.rides)
        self.tell("planned", self.plan)

    def take(self) -> Snapshot:
        """All that is needed to go on from here.

        Returns:
            ``facts``: ``kind`` and ``search`` (of the search: which, and its state), ``trials`` (id and ``until``, what
            was asked for last), ``ended`` (ids), ``slots`` (id → what the host knows of an experiment that has begun),
            and ``attempts`` (see `Begun`); ``tensors``.
        """
        saved = dict(self.saved)
        if self._current is not None:
            busy = self._current.busy
            states = self._current.lanes.save([lane for lane, _ in busy])
            saved |= {s.experiment.id: Saved(s.facts(), state) for (_, s), state in zip(busy, states, strict=True)}
        self._latest = saved
        facts = {
            "kind": self.search.kind,
            "search": self.search.state_dict(),
            "trials": [[trial.experiment.id, trial.until] for trial in self._trials],
            "ended": list(self.ended),
            "slots": {name: dict(one.facts) for name, one in saved.items()},
            "attempts": dict(self._attempts),
        }
        tensors = {f"{name}/{rest}": tensor for name, one in saved.items() for rest, tensor in one.tensors.items()}
        return Snapshot(facts, tensors)

    def go_back(self, slot: Slot) -> None:
        """Let an experiment that is in a lane go on from its last snapshot, or from its start."""
        saved = self._latest.get(slot.experiment.id)
        if saved is not None:
            self.saved[slot.experiment.id] = saved
        self.totals.steps -= slot.steps - (int(saved.facts["steps"]) if saved else 0)

    def narrowed(self, cohort: int, width: int, message: str) -> None:
        """A cohort goes on in fewer lanes."""
        # the width alone: the plan may have grown since the cohort's lanes were made
        cohorts = tuple(replace(c, width=width) if c.cohort.index == cohort else c for c in self.plan.cohorts)
        self.plan = replace(self.plan, cohorts=cohorts)
        self.tell("narrowed", cohort, width, message)
        self.tell("planned", self.plan)

    def end(
        self,
        slot: Slot,
        planned: PlannedCohort,
        status: str,
        message: str = "",
        weights: Mapping[str, Tensor] | None = None,
        best_weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """An experiment ended.

        Raises:
            TaskError: it failed, and the run is to stop at that.
        """
        if status in ("diverged", "failed"):
            # what broke never wins
            self.totals.best.pop(slot.experiment.id, None)
        # no longer to be done: were they counted as done, a diverged experiment would look like a burst of speed
        self.totals.undone += slot.experiment.steps - slot.steps
        result = Result(
            experiment=slot.experiment,
            status=status,
            steps=slot.steps,
            metrics=slot.metrics,
            best=slot.best,
            best_step=slot.best_step,
            cohort=planned.cohort.index,
            width=planned.width,
            job=self.job,
            device=self.trainer.device,
            seconds=slot.seconds_now,
            message=message,
            weights=weights,
            best_weights=best_weights,
        )
        self.saved.pop(slot.experiment.id, None)
        # the weights are the listeners' to keep
        self.ended[slot.experiment.id] = replace(result, weights=None, best_weights=None)
        self.tell("ended", result)
        self.search.ended(Ending(slot.experiment, status, slot.steps, slot.metrics, slot.best))
        if status == "failed" and self.trainer.on_error == "stop":
            raise TaskError(f"{slot.experiment} failed, and trainer.on_error=stop: {message}")

    def tell(self, what: str, *arguments: Any) -> None:
        """Tell all listeners."""
        for listener in self.listeners:
            getattr(listener, what)(*arguments)

    def offer_snapshot(self) -> None:
        """Let the listeners keep where the run stands."""
        self.tell("snapshot", self.take)

    def tell_progress(self, cohort: CohortRun) -> None:
        totals, plan = self.totals, self.plan
        values = totals.best.values()
        pick = max if self.trainer.mode == "max" else min
        known = sum(e.steps for e in plan.experiments)
        count = max(self.search.count, len(plan.experiments))
        # what a search has not asked for yet is thought to be as long as what it has
        expected = known * count // max(1, len(plan.experiments))
        self.tell(
            "advanced",
            Progress(
                cohort=cohort.planned.cohort.index,
                cohorts=len(plan.cohorts),
                lanes=len(cohort.busy),
                width=cohort.planned.width,
                steps=totals.steps,
                total_steps=expected - totals.undone,
                experiments=len(self.ended),
                total_experiments=count,
                monitor=self.trainer.monitor,
                best=pick(values, key=lambda entry: entry[0]) if values else None,
                elapsed_s=time.monotonic() - totals.started_s,
                training_s=totals.training_s,
                before=totals.before,
            ),
        )

    def _planned(self, name: str) -> PlannedCohort:
        return next(c for c in self.plan.cohorts if any(e.id == name for e in c.cohort.experiments))
