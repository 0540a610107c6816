"""What a launcher is: it starts jobs, says where they are, and ends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Work(Protocol):
    """What a job does. Where it is done by another process, it gets there pickled."""

    @property
    def number(self) -> int:
        """The job's number in its run."""

    def within(self, environment: Mapping[str, str]) -> Work:
        """The same with variables that its process sets first."""

    def __call__(self) -> Any:
        """Do it."""


@dataclass(frozen=True)
class Look:
    """What a launcher says of a job. What the job itself has written says more, and counts first.

    Args:
        state: "waiting", "running", "gone", or "unknown": the launcher could not be asked.
        reason: why it waits, or what became of it: "Resources", "NODE_FAIL", "exit code 1".
        cancelled: it is gone because somebody cancelled it.
        well: it is gone, and its process ended without an error. What it wrote last may only not be seen yet.
    """

    state: str
    reason: str = ""
    cancelled: bool = False
    well: bool = False


@dataclass(frozen=True)
class Submitted:
    """A job that was started.

    Args:
        id: the launcher's own name for it.
        log: the file that gets what its process prints.
    """

    id: str
    log: str = ""


class Launcher:
    """Base of all launchers."""

    #: Its name in the configuration.
    name = ""

    def submit(self, works: Sequence[Work], folder: Path) -> Sequence[Submitted]:
        """Start jobs.

        Args:
            works: what they do.
            folder: for what is handed to their processes, and for what these print; made if it is missing. Whatever
                machine a job runs on must see it.

        Returns:
            What was started, in the order of ``works``; it may have ended already.

        Raises:
            LaunchError: they cannot be started; none of them was.
        """
        raise NotImplementedError

    def look(self, ids: Sequence[str]) -> Mapping[str, Look]:
        """Where jobs are, by their ids; asked again and again while the run goes on."""
        raise NotImplementedError

    def cancel(self, ids: Sequence[str]) -> None:
        """End jobs. Each is told by SIGTERM, and saves itself; those that are gone are left alone."""
        raise NotImplementedError

    def close(self, ids: Sequence[str]) -> None:
        """Nothing more is asked of jobs, which have said that they are at their ends. Those that are processes of this
        machine are waited for."""


class ThisProcess(Launcher):
    """Does jobs in this process, one after the other: `submit` comes back when all are done. What a job raises ends
    them all."""

    name = "process"

    def submit(self, works: Sequence[Work], folder: Path) -> Sequence[Submitted]:
        for work in works:
            work()
        return [Submitted(str(work.number)) for work in works]

    def look(self, ids: Sequence[str]) -> Mapping[str, Look]:
        return {name: Look("gone") for name in ids}

    def cancel(self, ids: Sequence[str]) -> None:
        pass
