"""``python -m coalesce.results FOLDER --watch``: how a run is getting on, from wherever its folder can be read."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from coalesce.errors import LaunchError
from coalesce.launch.base import Look
from coalesce.launch.settings import LauncherSettings
from coalesce.launch.watch import JobView, standing_of
from coalesce.report import text
from coalesce.report.fitting import telling
from coalesce.report.jobs import JobsDisplay
from coalesce.report.standings import DONE, state_of
from coalesce.store.jobs import JobRecord, read_records, read_standing
from coalesce.store.merge import writer_of
from coalesce.store.paths import RunPaths
from coalesce.store.read import open_run

#: Seconds between two looks at the folder, and between two questions to a launcher, whom others ask as well.
POLL_S, ASK_S = 2.0, 10.0

#: Looks in a row that must find nobody at work. Jobs that died may be started again.
LOOKS = 5


def watch_run(
    folder: Path,
    console: Console,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> bool:
    """Show how a run is getting on until it is over. Nothing is written.

    Args:
        folder: the run folder.
        console: where to show it.
        sleep, clock: for tests.

    Returns:
        Whether it is over; else Ctrl-C has ended the watching.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    paths, plan = open_run(folder)
    names = _Names(paths, plan)
    jobs = _Jobs(paths, len(plan["experiments"]), clock)
    idle = 0
    try:
        with JobsDisplay(console, str(plan["trainer"]["mode"]), names, clock=clock) as display:
            while True:
                views, over = jobs.look()
                if views:
                    display.show(views)
                idle = idle + 1 if over else 0
                if jobs.finished or idle >= LOOKS:
                    break
                sleep(POLL_S)
    except KeyboardInterrupt:
        text.say(console, "No longer watching. The run goes on as it would have.")
        return False
    if views:
        text.say(console, display.summary())
    return True


class _Jobs:
    """What there is to be seen of a run's jobs, or of its one process."""

    def __init__(self, paths: RunPaths, count: int, clock: Callable[[], float]):
        self._paths, self._count, self._clock = paths, count, clock
        self._asked = float("-inf")
        self._ids: list[str] = []
        self._looks: Mapping[str, Look] = {}
        #: All has been done, or nobody is left who could: it need not be looked at again.
        self.finished = False

    def look(self) -> tuple[list[JobView], bool]:
        """What is known now; and whether nobody seems to be at work."""
        writer, own = writer_of(self._paths), read_standing(self._paths)
        records = read_records(self._paths)
        if own is not None and all(record.submitted < own.since for record in records):
            # it was begun in jobs, and goes on in one process
            records = []
        if not records:
            self.finished = writer is None
            if own is not None and writer is not None and (own.id, own.host) != (str(writer[0]), writer[1]):
                own = None  # that of a process before
            if own is None and writer is None:
                return [], True
            name = own.id if own is not None else str(writer[0]) if writer is not None else ""
            record = JobRecord(0, "process", name, 0, (), self._count, 0, 0.0)
            return [JobView(record, own, Look("running" if writer is not None else "gone"))], self.finished
        looks = self._ask(records)
        views = [JobView(record, standing_of(self._paths, record), looks[record.id]) for record in records]
        kinds = [state_of(view, self._clock()).kind for view in views]
        self.finished = writer is None and all(kind in ("ended", "broke") for kind in kinds)
        return views, writer is None and all(kind in DONE for kind in kinds)

    def _ask(self, records: Sequence[JobRecord]) -> Mapping[str, Look]:
        ids = [record.id for record in records]
        if ids != self._ids or self._clock() - self._asked >= ASK_S:
            self._ids, self._asked = ids, self._clock()
            self._looks = self._answers(records)
        return self._looks

    def _answers(self, records: Sequence[JobRecord]) -> Mapping[str, Look]:
        """What launchers say, as far as they can be asked from here."""
        ids, launcher = [record.id for record in records], records[0].launcher
        try:
            if launcher == "slurm":
                from coalesce.launch.slurm import Slurm

                return Slurm(LauncherSettings("slurm")).look(ids)
            if launcher == "local" and socket.gethostname() in self._hosts(records):
                from coalesce.launch.local import Local

                return Local(cuda=False).look(ids)
        except (ImportError, LaunchError):
            # no submitit, or no Slurm, on this machine: what the jobs write is what there is
            pass
        return {name: Look("unknown") for name in ids}

    def _hosts(self, records: Sequence[JobRecord]) -> set[str]:
        writer = writer_of(self._paths)
        found = {writer[1]} if writer is not None else set()
        standings = [standing_of(self._paths, record) for record in records]
        return found | {standing.host for standing in standings if standing is not None}


class _Names:
    """Says what is special about an experiment. A search may have asked for it since the plan was read."""

    def __init__(self, paths: RunPaths, plan: Mapping[str, Any]):
        self._paths = paths
        self._known = _described(plan)

    def __call__(self, name: str) -> str:
        if name not in self._known:
            self._known = {name: "", **_described(open_run(self._paths.folder)[1])}
        return self._known[name]


def _described(plan: Mapping[str, Any]) -> dict[str, str]:
    entries = plan["experiments"]
    keys = telling([entry["values"] for entry in entries], plan["keys"])
    return {e["id"]: text.values({k: e["values"][k] for k in keys if k in e["values"]}) for e in entries}
