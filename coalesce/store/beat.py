"""The listener that tells where a run stands, for whoever watches it from elsewhere."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from coalesce.errors import ConfigError, RunFolderError, TaskError
from coalesce.runner.listener import Listener, Progress, Result
from coalesce.runner.plan import Plan
from coalesce.store.environment import device_name
from coalesce.store.jobs import OVER, Standing, write_standing
from coalesce.store.paths import RunPaths
from coalesce.store.signals import ended_by
from coalesce.store.speed import Speed

logger = logging.getLogger("coalesce")

#: Characters of what ended a run; the log has all of it.
MESSAGE = 2000


class Beat(Listener):
    """Writes a `Standing` at every change of state, and at most every two seconds while nothing changes.

    It comes behind `RunWriter` in the list of listeners: nobody writes where a run stands without its lock, and a run
    has ended when its results are on disk. A standing that cannot be written is no reason to end a run: it is logged,
    and what the run is for is written by others, who tell the same of a full disk.

    Args:
        paths: the run folder, or a job's part of it.
        id: the launcher's own name for the job; None: this process's number.
        every_s: seconds between two of them.
        clock: seconds since 1970, for tests.
    """

    def __init__(
        self,
        paths: RunPaths,
        id: str | None = None,
        *,
        every_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ):
        self.paths = paths
        self.every_s = every_s
        self.clock = clock
        self._id = str(os.getpid()) if id is None else id
        self._since = clock()
        self._began = self._told = False
        self._written = 0.0
        self._state = ""
        self._device = ""
        self._counts = (0, 0)
        self._ended = self._failed = 0
        self._progress: Progress | None = None
        self._speed = Speed()

    def planning(self) -> None:
        """Say that a plan is being made. For jobs, which own their file before they have a plan."""
        self._begin()
        self._say("planning")

    def started(self, plan: Plan) -> None:
        self._begin()
        self._device = f"{plan.trainer.device} {device_name(plan.trainer.device)}"
        self._counts = (plan.count, sum(experiment.steps for experiment in plan.experiments))
        self._say("planning")

    def resumed(self, results: Sequence[Result]) -> None:
        for result in results:
            self.ended(result)

    def compiling(self, cohort: int, what: str) -> None:
        self._say("compiling")

    def checking(self, cohort: int) -> None:
        self._say("compiling")

    def ended(self, result: Result) -> None:
        self._ended += 1
        self._failed += result.status == "failed"

    def advanced(self, progress: Progress) -> None:
        self._progress = progress
        self._speed.add(progress)
        self._say("training")

    def wants_boundary(self) -> bool:
        """Never; but being asked often, it can say that the run is alive between boundaries that lie far apart."""
        self._say("training")
        return False

    def closed(self, error: BaseException | None) -> None:
        if not self._began:
            # it is somebody else's folder
            return
        if error is None:
            self._say("ended")
        elif (how := ended_by(error)) != "broke off":
            self._say("interrupted", how)
        elif isinstance(error, TaskError | RunFolderError | ConfigError):
            # whose texts are sentences for users
            self._say("broke", str(error))
        else:
            self._say("broke", f"{type(error).__name__}: {error}")

    def _begin(self) -> None:
        if not self._began:
            self._began = True
            # what a process leaves that is killed while it writes; where that can't go, it does no harm
            with suppress(OSError):
                for left in self.paths.standing.parent.glob(f".{self.paths.standing.name}.*.tmp"):
                    left.unlink()

    def _say(self, state: str, message: str = "") -> None:
        now = self.clock()
        # a clock that was put back must not silence it
        if state == self._state and 0 <= now - self._written < self.every_s:
            return
        self._state, self._written = state, now
        try:
            write_standing(self.paths, self._standing(state, message, now))
        except OSError as error:
            if not self._told:
                self._told = True
                logger.warning("where the run stands cannot be written: %s", error)

    def _standing(self, state: str, message: str, now: float) -> Standing:
        count, steps = self._counts
        standing = Standing(
            state=state,
            id=self._id,
            host=socket.gethostname(),
            device=self._device,
            visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            since=self._since,
            written=now,
            message=message[:MESSAGE],
            total_steps=steps,
            experiments=self._ended,
            total_experiments=count,
            failed=self._failed,
        )
        if (progress := self._progress) is None:
            return standing
        best, over = progress.best, state in OVER
        return replace(
            standing,
            lanes=0 if over else progress.lanes,
            width=progress.width,
            steps=progress.steps,
            total_steps=progress.total_steps,
            total_experiments=progress.total_experiments,
            monitor=progress.monitor,
            best=None if best is None else best[0],
            best_id="" if best is None else best[1].id,
            speed=0.0 if over else self._speed.per_second,
        )
