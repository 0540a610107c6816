"""The grid: every combination of the values, except that values which belong together run together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Grid:
    """The product of value lists, without writing it down: members are computed from their number.

    Keys in one zip group run together, as one axis of the product, which stands where its first key stands. The
    first axis varies slowest.

    Args:
        values: key → its values, in the order of the sweep. Any sequence will do, a `range` included.
        zip_groups: groups of keys whose values run together; a key belongs to one group at most.

    Raises:
        ValueError: a zip group names a key without values or a key of another group, or its lengths differ.

    >>> list(Grid({"lr": [0.1, 0.01], "seed": range(2)}))
    [{'lr': 0.1, 'seed': 0}, {'lr': 0.1, 'seed': 1}, {'lr': 0.01, 'seed': 0}, {'lr': 0.01, 'seed': 1}]
    >>> list(Grid({"lr": [0.1, 0.01], "warmup": [0, 10]}, [["lr", "warmup"]]))
    [{'lr': 0.1, 'warmup': 0}, {'lr': 0.01, 'warmup': 10}]
    >>> Grid({str(i): range(1000) for i in range(10)}).count == 10**30
    True
    """

    def __init__(self, values: Mapping[str, Sequence[Any]], zip_groups: Sequence[Sequence[str]] = ()):
        self.values = dict(values)
        group_of: dict[str, tuple[str, ...]] = {}
        for group in zip_groups:
            for key in group:
                if key not in self.values:
                    raise ValueError(f"zip names {key!r}, which has no values")
                if key in group_of:
                    raise ValueError(f"zip names {key!r} twice")
                group_of[key] = tuple(group)
            lengths = {key: len(self.values[key]) for key in group}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"zipped values must be equally many: {lengths}")
        # an axis is its keys; dict.fromkeys keeps the first place of a group and drops the others
        self.axes = tuple(dict.fromkeys(group_of.get(key, (key,)) for key in self.values))
        self.lengths = tuple(len(self.values[axis[0]]) for axis in self.axes)

    @property
    def count(self) -> int:
        """How many members there are. Not ``__len__``, which cannot exceed `sys.maxsize`."""
        return math.prod(self.lengths)

    def at(self, number: int) -> dict[str, Any]:
        """The member with this number, counted from 0; its keys stand in the order of the sweep."""
        if not 0 <= number < self.count:
            raise IndexError(f"the grid has {self.count} members, no number {number}")
        place: dict[tuple[str, ...], int] = {}
        for axis, length in zip(reversed(self.axes), reversed(self.lengths), strict=True):
            number, place[axis] = divmod(number, length)
        return self._member(place)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.at(number) for number in range(self.count))

    def diagonal(self, most: int) -> Iterator[dict[str, Any]]:
        """Members that show every value at least once, as far as ``most`` members can.

        Of a grid too large to write down, these are looked at to find what is wrong with its values.
        """
        if self.count:
            for step in range(min(max(self.lengths, default=1), most)):
                yield self._member({axis: step % length for axis, length in zip(self.axes, self.lengths, strict=True)})

    def _member(self, place: Mapping[tuple[str, ...], int]) -> dict[str, Any]:
        index = {key: step for axis, step in place.items() for key in axis}
        return {key: values[index[key]] for key, values in self.values.items()}
