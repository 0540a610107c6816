"""Random search: members drawn from the sweep's values, each to its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coalesce.search.space import Space


def drawn(space: Space, samples: int, seed: int) -> Iterator[dict[str, Any]]:
    """Members of a random search, with their keys in the order of the sweep.

    A seed or a fold that is swept by a list or a range is not drawn: every sample runs with each of them, one after the
    other. So ``samples`` counts settings, not experiments, and each is judged as often as any other. (A seed that is
    zipped with another key, or given as an interval, is drawn.)

    The draws of one key depend on neither the other keys nor the number of samples: more samples of the same seed add
    to those that there are. No two samples are equal; where there are fewer different ones than asked for, all of them
    are made.

    >>> from coalesce.search.space import Interval
    >>> list(drawn(Space({"lr": Interval(0, 1), "seed": [0, 1]}), samples=1, seed=0))
    [{'lr': 0.693137336357, 'seed': 0}, {'lr': 0.693137336357, 'seed': 1}]
    """
    for sample in space.samples(samples, seed):
        yield from space.with_repeats(sample)
