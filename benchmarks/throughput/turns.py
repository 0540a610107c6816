"""Commands on one machine that prepare side by side, and measure one after the other while nobody prepares.

Preparing is mostly compiling, which a machine of many cores does for many at once. A figure wants it for itself.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.1


class Turns:
    """One command's place among those that were given the same file; all of them prepare from here on.

    Args:
        path: of the file, which is made if it is not there. None: nobody else is there.
        patience_s: from now on; then the others' preparing is waited for no longer, as one of them may hang.
    """

    def __init__(self, path: Path | None, patience_s: float):
        self.path, self._deadline = path, time.monotonic() + patience_s
        #: Whether nobody prepared while this command measured; None: it has not measured, or nobody else is there.
        self.quiet: bool | None = None
        if path is not None:
            # kept open: it is the lock that says so
            self._preparing = path.open("a")
            fcntl.flock(self._preparing, fcntl.LOCK_SH)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """End preparing, and wait for this command's turn."""
        if self.path is None:
            yield
            return
        fcntl.flock(self._preparing, fcntl.LOCK_UN)
        with self.path.with_suffix(".turn").open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            self.quiet = self._nobody_prepares()
            try:
                yield
            finally:
                fcntl.flock(self._preparing, fcntl.LOCK_UN)

    def _nobody_prepares(self) -> bool:
        while True:
            try:
                fcntl.flock(self._preparing, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= self._deadline:
                    return False
                time.sleep(POLL_S)
