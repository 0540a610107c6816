"""The metric that a search goes by: which value is better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """The monitored metric.

    Args:
        name: "val/accuracy", …
        mode: "max" or "min": which of its values is best.
    """

    name: str
    mode: str

    def of(self, metrics: Mapping[str, float]) -> float:
        """Its value among others; NaN where it was not measured."""
        return float(metrics.get(self.name, math.nan))

    def is_better(self, new: float, old: float, by: float = 0.0) -> bool:
        """Whether ``new`` is better by more than ``by``. What is not finite is better than nothing; any number is
        better than it."""
        if not math.isfinite(new):
            return False
        if not math.isfinite(old):
            return True
        return new > old + by if self.mode == "max" else new < old - by

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as the target."""
        return math.isfinite(value) and (value >= target if self.mode == "max" else value <= target)

    def ranked(self, values: Mapping[str, float]) -> list[str]:
        """The names of the values, best first; of equal ones the earlier first; without those that are not finite."""
        finite = [name for name, value in values.items() if math.isfinite(value)]
        sign = -1 if self.mode == "max" else 1
        # the sort is stable
        return sorted(finite, key=lambda name: sign * values[name])


def best_of(count: int, factor: int) -> int:
    """How many of so many are kept where one in ``factor`` is: at least one."""
    return max(1, count // factor)
