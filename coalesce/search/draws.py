"""Random numbers of a search: each a pure function of the search's seed and of what it is for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def uniform(seed: int, *purpose: object) -> float:
    """A number from 0 up to, and without, 1.

    No generator with a state: so what is drawn for one sample does not depend on how many were drawn before, there is
    nothing to save, and the numbers are the same on every machine and under every version of Python.

    Args:
        purpose: numbers and text that tell this draw from all others.

    >>> uniform(0, "sample", 3) == uniform(0, "sample", 3) != uniform(1, "sample", 3)
    True
    """
    text = "\0".join(str(part) for part in ("coalesce.search", seed, *purpose))
    # the 53 bits that a float holds
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 11) / 2**53


def integer(seed: int, *purpose: object, below: int) -> int:
    """An integer from 0 up to, and without, ``below``."""
    return int(uniform(seed, *purpose) * below)


def job_seed(seed: int, number: int, jobs: int) -> int:
    """The seed of one job of a search that is divided among jobs: of its own, so that no two draw the same. A single
    job has the search's.

    >>> job_seed(3, 0, 1), job_seed(3, 0, 2) == job_seed(3, 1, 2)
    (3, False)
    """
    return seed if jobs == 1 else integer(seed, "job", number, below=2**53)


def evenly(count: int, parts: int) -> list[int]:
    """So many shared out over so many, the larger shares first.

    >>> evenly(53, 8)
    [7, 7, 7, 7, 7, 6, 6, 6]
    """
    return [count // parts + (number < count % parts) for number in range(parts)]


def shuffled(count: int, seed: int) -> Sequence[int]:
    """The numbers from 0 up to, and without, ``count``, in an order of their own."""
    return sorted(range(count), key=lambda number: (uniform(seed, "order", number), number))
