"""Signals that ask a run to end: they are noted, and the run ends at its next host boundary, where it can be saved."""

from __future__ import annotations

import os
import signal
import threading
from bdb import BdbQuit
from types import FrameType
from typing import Any

#: The signals, and the exit code of a run that one of them has ended. SIGUSR1 and SIGUSR2 are what a cluster sends
#: before a job's time is up (`sbatch --signal=USR1@60`); their code, EX_TEMPFAIL of sysexits.h, asks for the job to be
#: queued again.
AGAIN = 75
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": AGAIN, "SIGUSR2": AGAIN}

_SAVING = b"\ncoalesce: saving at the next boundary; Ctrl-C once more ends at once\n"


class Interrupted(KeyboardInterrupt):
    """A signal has ended the run; what was done is saved.

    Args:
        name: of the signal.
    """

    def __init__(self, name: str):
        super().__init__(f"{name} has ended the run")
        self.signal = name

    @property
    def code(self) -> int:
        """The process's exit code."""
        return EXIT_CODES[self.signal]


def ended_by(error: BaseException) -> str:
    """What ended a run before it was over, in words: somebody's will, or "broke off".

    >>> ended_by(Interrupted("SIGTERM")), ended_by(ValueError())
    ('ended by SIGTERM', 'broke off')
    """
    if isinstance(error, Interrupted):
        return f"ended by {error.signal}"
    if isinstance(error, KeyboardInterrupt):
        return "ended by Ctrl-C"
    if isinstance(error, BdbQuit):
        return "ended at a breakpoint"
    if isinstance(error, SystemExit):
        return f"ended by sys.exit({error.code!r})"
    return "broke off"


class Signals:
    """Notes signals from `install` to `restore`.

    Attributes:
        seen: the name of the first signal that came, or None.
        at_once: whether a signal may end the run where it stands, since nothing would be lost: while it compiles.
    """

    def __init__(self) -> None:
        self.seen: str | None = None
        self.at_once = False
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def install(self) -> None:
        """Take over the signals, if this is the main thread: no other may. Those that the process ignores, it goes on
        ignoring."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        for name in EXIT_CODES:
            number = getattr(signal, name, None)  # there is no SIGUSR1 on Windows
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Give the signals back to whom they belonged."""
        for number, handler in self._before.items():
            # None: a handler that was not installed from Python, and cannot be put back from it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # a process that was forked off: there is no run in it that could end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        again = self.seen is not None
        self.seen = self.seen or name
        if self.at_once:
            self.at_once = False
            raise Interrupted(self.seen)
        if name == "SIGINT":
            if again:
                raise KeyboardInterrupt
            # not print: the signal may have come in the middle of one
            os.write(2, _SAVING)
