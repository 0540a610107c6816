"""A chi-square statistic in standard deviations, for the tests of random numbers."""

from __future__ import annotations

import math

from torch import Tensor


def deviation(observed: Tensor, expected: float, freedom: int, scale: float = 1.0) -> float:
    """How many standard deviations a chi-square statistic is off its mean. Above 0: too uneven; below: too even.

    Args:
        observed: counts of any shape.
        expected: the count expected in each cell.
        freedom: degrees of freedom; 30 and more, so that the statistic is near a normal one.
        scale: of the statistic.
    """
    statistic = scale * ((observed.double() - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


def limit(freedom: int) -> float:
    """What a chi-square statistic exceeds once in ten thousand times, by Wilson and Hilferty's cube (1931)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.719 * math.sqrt(part)) ** 3
