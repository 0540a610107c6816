"""Running parts: each in a process group of its own, within its time, its output in a log."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.parts import Part

#: Seconds between two looks; seconds that a part has to end when it is told to; seconds below which none is started.
POLL_S, GRACE_S, LEAST_S = 0.1, 3.0, 5.0

#: Lines of a failed part's log that are told.
LINES = 15


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Args:
        name: of the part.
        rc: its exit code; 124 if its time was up, or none was left.
        seconds: that it took.
        last_lines: of its log, where it failed.
    """

    name: str
    rc: int
    seconds: float
    last_lines: Sequence[str] = ()


def run(
    parts: Sequence[Part], out: Path, deadline: float, environment: Mapping[str, str], told: Callable[[Outcome], None]
) -> list[Outcome]:
    """Start some parts together, and wait for all of them.

    Args:
        parts: which.
        out: folder for ``<name>.json``, and for logs below ``logs``.
        deadline: by `time.monotonic`, for all of them.
        environment: of their processes.
        told: is told of each as it ends.
    """
    left = deadline - time.monotonic()
    if left < LEAST_S:
        outcomes = [Outcome(part.name, 124, 0.0, ["not started: no time was left"]) for part in parts]
        for late in outcomes:
            told(late)
        return outcomes
    (out / "logs").mkdir(parents=True, exist_ok=True)
    running = {part.name: _Running(part, out, min(part.limit_s, left), environment) for part in parts}
    found: dict[str, Outcome] = {}
    try:
        while len(found) < len(running):
            for name, one in running.items():
                if name not in found and (outcome := one.look()) is not None:
                    found[name] = outcome
                    told(outcome)
            time.sleep(POLL_S)
    finally:
        for name, one in running.items():
            if name not in found:
                one.signal(signal.SIGKILL)
    return [found[part.name] for part in parts]


class _Running:
    """A part that was started."""

    def __init__(self, part: Part, out: Path, limit_s: float, environment: Mapping[str, str]):
        self.part, self.limit_s = part, limit_s
        self.log = out / "logs" / f"{part.name}.log"
        self.began = time.monotonic()
        self.late = False
        with ExitStack() as files:
            log = files.enter_context(self.log.open("w"))
            printed = files.enter_context((out / f"{part.name}.json").open("w")) if part.prints else log
            self.process = subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=log,
                env=environment,
                # its processes can be ended together
                process_group=0,
            )

    def look(self) -> Outcome | None:
        """How it ended, if it has; it is ended where its time is up."""
        seconds = time.monotonic() - self.began
        rc = self.process.poll()
        if rc is None:
            if seconds > self.limit_s:
                self.signal(signal.SIGTERM if seconds < self.limit_s + GRACE_S else signal.SIGKILL)
                self.late = True
            return None
        # what it has left behind
        self.signal(signal.SIGKILL)
        rc = 124 if self.late else rc
        return Outcome(self.part.name, rc, round(seconds, 1), self._last_lines() if rc else ())

    def signal(self, number: int) -> None:
        # all may be gone
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _last_lines(self) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines()[-LINES:]
        return [*lines, f"ended: its {self.limit_s:.0f} s were up"] if self.late else lines
