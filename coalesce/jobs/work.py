"""What a job of a run does: its share of the experiments, in a process of its own on a device of its own."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coalesce.configuration import rides
from coalesce.errors import RunFolderError
from coalesce.runner.listener import Listener
from coalesce.runner.plan import Plan, PlannedCohort
from coalesce.runner.planning import Place, make_plan
from coalesce.runner.run import run
from coalesce.runner.snapshot import Begun, Snapshot
from coalesce.search.base import Listed, Search
from coalesce.store.beat import Beat
from coalesce.store.decisions import agreed, decided
from coalesce.store.jobs import read_standing, write_standing
from coalesce.store.paths import RunPaths
from coalesce.store.resume import reopen
from coalesce.store.retries import read_retries
from coalesce.store.signals import AGAIN, Interrupted
from coalesce.store.snapshots import Snapshots
from coalesce.store.writer import RunWriter

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission


@dataclass(frozen=True)
class JobWork:
    """A job, as it is handed to its process: pickled, by submitit, in a folder of submitit's.

    Args:
        folder: the run folder, absolute.
        number: the job's number in its run.
        plan: of the whole run, without templates: its cohorts tell what rides, whoever trains what.
        share: ids of the job's experiments; none where its search makes them as it goes.
        search: the job's part of the search.
        lanes: number of a cohort → the lanes that its graph has at the most in each of its jobs.
        cwd, path: where the user's own modules are found: the working folder, and ``sys.path``.
        environment: variables that are set before anything else is done.
        beside: processes that share the device's memory, this one included.
        retries: how often it may be cut off by its time limit without having got on since.
        done, idle: experiment-steps at the last such time, and how often it did not get on.
    """

    folder: str
    number: int
    plan: Plan = field(repr=False)
    share: tuple[str, ...] = field(repr=False)
    search: Search = field(repr=False)
    lanes: Mapping[int, int] = field(repr=False)
    cwd: str
    path: tuple[str, ...] = field(repr=False)
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: int = 1
    retries: int = 2
    done: int = 0
    idle: int = 0

    def within(self, environment: Mapping[str, str]) -> JobWork:
        """The same with variables that its process sets first."""
        return replace(self, environment={**self.environment, **environment})

    @property
    def paths(self) -> RunPaths:
        """The job's files."""
        return RunPaths(self.folder, self.number)

    def __call__(self) -> None:
        """Do it, in a process that has nothing else to do.

        Raises:
            SystemExit: a signal has ended it; it is saved.
        """
        os.environ.update(self.environment)
        sys.path.extend(entry for entry in self.path if entry not in sys.path)
        if not self.paths.jobs_folder.is_dir():
            raise RunFolderError(f"the run folder {self.folder!r} is not there on {socket.gethostname()}")
        os.chdir(self.cwd)
        beat = Beat(self.paths, own_id())
        try:
            beat.planning()
            self.train([beat])
        except Interrupted as stop:
            beat.closed(stop)
            if stop.code == AGAIN:
                # to submitit, whose handler is back: it calls `checkpoint`, queues the job again, and ends the process
                signal.raise_signal(_preempted())
            raise SystemExit(stop.code) from None
        except BaseException as error:
            # the run tells its listeners of its end, but not of what ended it before it began
            beat.closed(error)
            raise

    def train(self, listeners: Sequence[Listener]) -> None:
        """Train what of its share has not ended yet.

        Args:
            listeners: told what happens, behind what writes the run folder.
        """
        paths = self.paths
        whole = self.plan
        share, others = set(self.share), []
        experiments = {e.id: e for e in whole.experiments if e.id in share}
        begun, snapshots, trainer = Begun(), Snapshots(paths), whole.trainer
        if paths.plan.is_file():
            back = reopen(paths)
            begun, snapshots = back.begun, back.snapshots
            # what a search asked for before; and whatever this process finds: it goes on in as many threads as it began
            experiments |= {e.id: e for e in back.plan.experiments}
            trainer = replace(trainer, threads=back.plan.trainer.threads)
        else:
            begun = Begun((), self._inherited(experiments), attempts=read_retries(paths).attempts)
        places = {c.cohort.shape: Place(c.cohort.index, self.lanes[c.cohort.index]) for c in self._cohorts()}
        if self.search.lists:
            others = [e for c in self._cohorts() for e in c.cohort.experiments if e.id not in experiments]
        else:
            others = list(self.search.known())
        plan = make_plan(
            whole.name,
            whole.keys,
            experiments.values(),
            rides,
            trainer,
            probes=others,
            count=None if self.search.lists else self.search.count,
            decided=decided(paths, places),
            together=self.search.asks_again,
            places=places,
            beside=self.beside,
        )
        plan = agreed(paths, plan)
        self.search.keep(paths.journal, f"{whole.name}/{paths.folder.name}")
        writer = RunWriter(paths, snapshots=snapshots)
        run(plan, [writer, *listeners], self.number, self.search, begun, rides)

    def _inherited(self, experiments: Collection[str]) -> Snapshot | None:
        """Where experiments stand that one process had begun before the run went on in jobs."""
        whole = Snapshots(RunPaths(self.folder)).newest() if type(self.search) is Listed else None
        if whole is None:
            return None
        slots = {name: facts for name, facts in whole.facts["slots"].items() if name in experiments}
        tensors = {name: tensor for name, tensor in whole.tensors.items() if name.partition("/")[0] in slots}
        search = Listed(()).state_dict()
        facts = {"kind": self.search.kind, "search": search, "trials": [], "ended": [], "slots": slots}
        facts["attempts"] = whole.facts.get("attempts", {})
        return Snapshot(facts, tensors)

    def _cohorts(self) -> list[PlannedCohort]:
        """Those that the share has a part of."""
        share = set(self.share)
        if not self.search.lists:
            return list(self.plan.cohorts)
        return [c for c in self.plan.cohorts if any(e.id in share for e in c.cohort.experiments)]

    def checkpoint(self) -> DelayedSubmission | None:
        """What to queue again when the job's time is up: submitit asks. None: it does not get on within its time."""
        from submitit.helpers import DelayedSubmission

        standing = read_standing(self.paths)
        steps = standing.steps if standing is not None else 0
        idle = 0 if steps > self.done else self.idle + 1
        if idle > self.retries:
            message = f"its time was up {idle} times in a row before it got on: it needs a longer launcher.time"
            if standing is not None:
                write_standing(self.paths, replace(standing, state="broke", message=message))
            return None
        return DelayedSubmission(replace(self, done=steps, idle=idle))


def own_id() -> str:
    """What the launcher that started this process calls it."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return str(os.getpid())
    from submitit import JobEnvironment

    return str(JobEnvironment().job_id)


def _preempted() -> signal.Signals:
    """The signal that tells submitit that a job's time is up."""
    from submitit import JobEnvironment

    return signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
