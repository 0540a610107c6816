"""When a line is due, where lines cannot be redrawn."""

from __future__ import annotations

from collections.abc import Callable


class Pace:
    """Says when the next line about a run is due: at every tenth of what is to be done, or every ten seconds; in a long
    run more seldom.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Let the run begin now."""
        self._began = self._clock()
        self._at, self._done = self._began, 0.0

    @property
    def passed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    def due(self, done: float) -> bool:
        """Whether a line is due; if so, it counts as written.

        Args:
            done: what part of the run is, 0 to 1.
        """
        now = self._clock()
        # a fiftieth of the time that has passed: a run of days is no log of ten thousand lines
        interval = max(10.0, (now - self._began) / 50)
        # 0.3 - 0.2 is less than 0.1
        if done - self._done >= 0.1 - 1e-9 or done == 1.0 > self._done or now - self._at >= interval:
            self._at, self._done = now, done
            return True
        return False
