"""How fast a run is."""

from __future__ import annotations

from collections import deque

from coalesce.runner.listener import Progress

#: Seconds of training over which the speed is averaged.
WINDOW_S = 20.0


class Speed:
    """Experiment-steps per second of training, over the last while. Compiling is no training."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._before = 0

    def add(self, progress: Progress) -> None:
        """Take note of a host boundary."""
        self._before = progress.before
        self._seen.append((progress.training_s, progress.steps))
        while len(self._seen) > 2 and progress.training_s - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()

    @property
    def per_second(self) -> float:
        """The speed; 0.0 as long as nothing tells it."""
        if not self._seen:
            return 0.0
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if len(self._seen) == 1 or last_s <= first_s:
            return (last - self._before) / last_s if last_s > 0 else 0.0
        return (last - first) / (last_s - first_s)
