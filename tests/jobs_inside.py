"""Jobs that are done in the test's own process, and killed where the test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from coalesce.launch.base import Launcher, Look, Submitted
from coalesce.runner.listener import Listener, Progress
from coalesce.store.beat import Beat


class Struck(BaseException):
    """The process is killed."""


class Strikes(Listener):
    """Kills the run it listens to, at a boundary."""

    def __init__(self, boundary: int):
        self.left = boundary

    def advanced(self, progress: Progress) -> None:
        self.left -= 1
        if self.left == 0:
            raise Struck


class Begins(Listener):
    """Notes how many steps were done before this process."""

    def __init__(self, noted: list[int]):
        self.noted, self.fresh = noted, True

    def advanced(self, progress: Progress) -> None:
        if self.fresh:
            self.fresh = False
            self.noted.append(progress.before)


class Inside(Launcher):
    """Does what a launcher of processes does, without processes.

    Args:
        strikes: number of a job → at which boundary it is killed, each time that it is started.
    """

    name = "local"

    def __init__(self, strikes: Mapping[int, Sequence[int]] | None = None):
        self.strikes = {number: list(boundaries) for number, boundaries in (strikes or {}).items()}
        self.backwards = False
        self.started: list[int] = []
        #: Of each that was started: the steps that were done before.
        self.before: list[int] = []

    def submit(self, works: Sequence[Any], folder: Path) -> Sequence[Submitted]:
        submitted: dict[int, Submitted] = {}
        for given in reversed(works) if self.backwards else works:
            # as it gets to another process: a search has a state of its own
            work = cloudpickle.loads(cloudpickle.dumps(given))
            self.started.append(work.number)
            name = f"p{len(self.started)}"
            strikes = self.strikes.get(work.number, [])
            try:
                if strikes:
                    # its last word is from before: nobody writes it down
                    work.train([Begins(self.before), Strikes(strikes.pop(0))])
                else:
                    work.train([Begins(self.before), Beat(work.paths, name)])
            except Struck:
                pass
            submitted[work.number] = Submitted(name, "its.log")
        return [submitted[work.number] for work in works]

    def look(self, ids: Sequence[str]) -> Mapping[str, Look]:
        return {name: Look("gone") for name in ids}

    def cancel(self, ids: Sequence[str]) -> None:
        raise AssertionError("nobody asked for it")
