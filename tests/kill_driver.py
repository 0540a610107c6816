"""Runs a sweep in processes that are ended at given moments, and goes on in the next one, until it is over.

One process imports everything and forks off the others, so that each of them takes no seconds to start. It is told on
its standard input what to do: ``<signal> <seconds> <which> <folder>``, and answers with the exit code, and the seconds
from the signal to the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import coalesce
from coalesce.configuration import rides
from coalesce.runner import planning
from coalesce.runner.listener import Listener
from coalesce.runner.planning import make_plan
from coalesce.runner.run import Begun, run
from coalesce.runner.snapshot import Snapshot
from coalesce.store.lock import RunLock
from coalesce.store.paths import RunPaths
from coalesce.store.resume import reopen
from coalesce.store.signals import Interrupted
from coalesce.store.writer import RunWriter
from runner_helpers import Net, planned

ROOT = Path(coalesce.__file__).parent.parent

#: Ten experiments of unequal lengths through four lanes; one of them diverges.
PARAMS = {"steps": [40, 90, 65], "optimizer.lr": [0.1, 0.01, 1e30], "seed": [0]}
SETTINGS: dict[str, Any] = {
    "arguments": {"dropout": 0.25, "norm": True, "splits": "train val test"},
    "optimizer": "adam",
    "schedule": {"name": "cosine", "warmup": 5},
    "width": 4,
    "check": False,
    "snapshot_minutes": 0.0,
}

#: Two experiments that would train for hours, with no host boundary before.
ENDLESS: dict[str, Any] = {
    **SETTINGS,
    "steps": 10**8,
    "every": 10**8,
    "evaluate_every": 10**8,
    "snapshot_minutes": None,
}


class Tell(Listener):
    """Tells another process of the first host boundary.

    Args:
        pipe: its file descriptor.
    """

    def __init__(self, pipe: int):
        self.pipe = pipe

    def snapshot(self, take: Callable[[], Snapshot]) -> None:
        if self.pipe >= 0:
            os.write(self.pipe, b"x")
            self.pipe = -1


class TellSoon(Tell):
    """Tells it when steps are taken, boundary or not."""

    def wants_boundary(self) -> bool:
        self.snapshot(lambda: Snapshot({}, {}))
        return False


def go_on(folder: Path, pipe: int, which: str) -> None:
    """Begin a run, or go on with the one that the folder holds."""
    paths = RunPaths(folder)
    if which == "endless":
        run(planned(Net, {"seed": [0, 1]}, **ENDLESS), [TellSoon(pipe), RunWriter(paths, "made: up\n")])
    if not paths.plan.exists():
        run(planned(Net, PARAMS, **SETTINGS), [Tell(pipe), RunWriter(paths, "made: up\n")])
        return
    with RunLock(paths) as lock:
        back = reopen(paths)
        plan = back.plan
        plan = make_plan(plan.name, plan.keys, plan.experiments, rides, plan.trainer, decided=plan.cohorts)
        writer = RunWriter(paths, back.configuration, lock=lock, snapshots=back.snapshots)
        run(plan, [Tell(pipe), writer], begun=Begun(back.results, back.snapshot))


class Driver:
    """The process that forks off the others."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
        command = [sys.executable, __file__]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def __call__(self, name: str, seconds: float, folder: Path) -> int:
        """Run until the end, or until a signal.

        Args:
            name: the signal.
            seconds: until it is sent, from the first host boundary; if negative, from the very beginning.
            folder: the run folder.

        Returns:
            The exit code; -9 for SIGKILL.
        """
        return self._told(name, seconds, "usual", folder)[0]

    def endless(self, name: str, folder: Path) -> tuple[int, float]:
        """Send a signal while a run is far from its next boundary.

        Returns:
            The exit code, and the seconds from the signal to the end of the process.
        """
        return self._told(name, 0.3, "endless", folder)

    def _told(self, name: str, seconds: float, which: str, folder: Path) -> tuple[int, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(name, seconds, which, folder, file=self.process.stdin, flush=True)
        code, took_s = self.process.stdout.readline().split()
        return int(code), float(took_s)


HERE = Path(__file__).parent


@contextmanager
def driver() -> Iterator[Driver]:
    """A driver, and its end."""
    started = Driver()
    try:
        yield started
    finally:
        assert started.process.stdin is not None
        # reads what is left, closes the pipes, and waits
        started.process.communicate(timeout=60)


def _serve() -> None:
    # the run traces what the plan would
    planning._check_traces = lambda templates: None
    # what is imported and cached at a first trace is there in all that are forked off
    run(planned(Net, {"seed": [0]}, **{**SETTINGS, "steps": 5}))
    for line in sys.stdin:
        name, seconds, which, folder = line.split(maxsplit=3)
        ready, pipe = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ready)
            code = 1
            try:
                go_on(Path(folder.rstrip("\n")), pipe, which)
                code = 0
            except Interrupted as interrupted:
                code = interrupted.code
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(pipe)
        if float(seconds) >= 0:
            os.read(ready, 1)  # or nothing, if it is over before
        ends = time.monotonic() + abs(float(seconds))
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < ends:
            time.sleep(0.002)
        sent = time.monotonic()
        if done[0] == 0:
            os.kill(child, getattr(signal, name))
            done = os.waitpid(child, 0)
        os.close(ready)
        print(os.waitstatus_to_exitcode(done[1]), time.monotonic() - sent, flush=True)


if __name__ == "__main__":
    _serve()
