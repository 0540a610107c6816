"""What the arguments of the ready tasks must be; whatever is wrong is reported together."""

from __future__ import annotations

from coalesce.errors import Problem


def check_sizes(**sizes: int) -> list[Problem]:
    """The arguments that count something and are below 1."""
    return [Problem(f"task.{name}", n, "must be at least 1") for name, n in sizes.items() if n < 1]


def check_shares(**shares: float) -> list[Problem]:
    """The arguments that are a share or a probability and lie outside of 0 to 1."""
    return [Problem(f"task.{name}", p, "must lie in 0 to 1") for name, p in shares.items() if not 0 <= p <= 1]
