"""The process of one side: it takes commands as lines of JSON, and sleeps while the other sides have their turn.

Needs neither torch nor coalesce: a peer may live in an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


class Channel:
    """Commands from standard input, answers to what was standard output. What libraries print goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def read(self) -> dict[str, Any]:
        """The next command; waits asleep.

        Raises:
            SystemExit: there will be none.
        """
        line = sys.stdin.readline()
        command: dict[str, Any] = json.loads(line) if line else {"do": "quit"}
        if command["do"] == "quit":
            raise SystemExit(0)
        return command

    def reply(self, answer: Any) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    def serve(self, side: Any) -> None:
        """Obey by the methods of a side; never returns."""
        while True:
            command = self.read()
            try:
                answer = {"answer": getattr(side, command.pop("do"))(**command)}
            except Exception:
                # the parent raises it
                answer = {"error": traceback.format_exc()}
            self.reply(answer)


class Pace:
    """How far a process was at which time, to tell what it did within a window that all processes share.

    The processes of one side begin a little before the window and end behind it, so that within it all of them are
    busy. A call that reaches over an end of the window counts by its share.

    Args:
        start, end: of the window, by `time.monotonic`, which is one clock for all processes.
    """

    def __init__(self, start: float, end: float):
        self.start, self.end = start, end
        self._marks = [(time.monotonic(), time.process_time(), 0.0)]

    def mark(self, steps: int) -> bool:
        """So many experiment-steps more are done.

        Returns:
            Whether the window is over.
        """
        self._marks.append((time.monotonic(), time.process_time(), self._marks[-1][2] + steps))
        return self._marks[-1][0] >= self.end

    def result(self) -> dict[str, float]:
        """Experiment-steps within the window, and the processor seconds that they took."""
        first, last = self._at(self.start), self._at(self.end)
        return {"steps": last[1] - first[1], "processor_s": last[0] - first[0]}

    def _at(self, moment: float) -> tuple[float, float]:
        """Processor seconds and steps at a moment: straight lines between the marks."""
        before = self._marks[0]
        for mark in self._marks:
            if mark[0] >= moment:
                if mark[0] == before[0]:
                    return mark[1:]
                share = (moment - before[0]) / (mark[0] - before[0])
                return before[1] + share * (mark[1] - before[1]), before[2] + share * (mark[2] - before[2])
            before = mark
        return before[1:]


def work(step: Callable[[], object], steps: int, start: float, end: float) -> dict[str, float]:
    """Call something over and over until the end of a window.

    Args:
        step: one call.
        steps: experiment-steps that it takes.
    """
    pace = Pace(start, end)
    while True:
        step()
        if pace.mark(steps):
            return pace.result()


def rise(step: Callable[[], object], calls: int) -> int | None:
    """How far a process's memory rises above its rest during some calls, in bytes; None where nobody tells.

    As `coalesce.memory.measure.peak`, for processes without torch. The process must have been started with
    ``MALLOC_MMAP_THRESHOLD_`` set, see there.
    """

    def resident(key: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

    try:
        before = resident("VmRSS")
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
    except OSError:
        return None
    for _ in range(calls):
        step()
    return max(0, resident("VmHWM") - before)
