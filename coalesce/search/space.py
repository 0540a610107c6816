"""What a sweep's parameters mean for a search that draws: lists to choose from, and intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from coalesce.search.draws import integer, uniform
from coalesce.search.grid import Grid

#: Keys whose values repeat a sample instead of being drawn: a seed and a fold tell how sure a result is, and are no
#: part of what is looked for.
REPEATED = ("seed", "data.fold")
#: What is drawn is rounded to so many digits: the same on every machine, whatever its mathematical library does in the
#: last bit, and with it the experiment's id.
DIGITS = 12


def rounded(value: float) -> float:
    """To `DIGITS` digits.

    >>> rounded(0.1 + 0.2)
    0.3
    """
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True)
class Interval:
    """All values from ``low`` to ``high``, both included, for a search that draws (``search="random"``).

    Args:
        low, high: the ends.
        log: drawn equally often per order of magnitude, as suits a learning rate; both ends are above 0.
        integer: whole numbers only.

    Raises:
        ValueError: the ends make no interval.

    >>> Interval(1e-4, 1e-1, log=True)
    Interval(low=0.0001, high=0.1, log=True, integer=False)
    """

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def __post_init__(self) -> None:
        for value in (self.low, self.high):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"an interval has two finite ends, not {value!r}")
            if self.integer and value != int(value):
                raise ValueError(f"an interval of integers has integers at its ends, not {value!r}")
        if not self.low < self.high:
            raise ValueError(
                f"an interval's low end is below its high end, but {self.low!r} is not below {self.high!r}"
            )
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic interval is above 0, but its low end is {self.low!r}")
        kind = int if self.integer else float
        object.__setattr__(self, "low", kind(self.low))
        object.__setattr__(self, "high", kind(self.high))

    def at(self, share: float) -> float:
        """The value below which lies this share, from 0 to 1, of what is drawn."""
        # an integer has the numbers that round to it, as many as any other has
        low, high = (self.low - 0.5, self.high + 0.5) if self.integer else (self.low, self.high)
        if self.log:
            start, stop = math.log10(low), math.log10(high)
            value = 10 ** (start + (stop - start) * share)
        else:
            value = low + (high - low) * share
        if self.integer:
            return self.clipped(math.floor(rounded(value) + 0.5))
        return self.clipped(rounded(value))

    def clipped(self, value: float) -> float:
        """The value of the interval nearest to ``value``."""
        return min(max(value, self.low), self.high)

    def __str__(self) -> str:
        """As Hydra's sweep syntax writes it."""
        ends = f"interval({self.low}, {self.high})"
        ends = f"int({ends})" if self.integer else ends
        return f"tag(log, {ends})" if self.log else ends


Values: TypeAlias = "Sequence[Any] | Interval"


@dataclass(frozen=True)
class Axis:
    """What is drawn together: one key with an interval, or one or more keys whose values belong together.

    Args:
        keys: in the order of the sweep.
        members: the values of the keys, tuple by tuple, each once; empty for an interval.
        interval: of the only key.
    """

    keys: tuple[str, ...]
    members: tuple[tuple[Any, ...], ...] = ()
    interval: Interval | None = None

    @property
    def name(self) -> str:
        return "+".join(self.keys)

    def draw(self, seed: int, *purpose: object) -> dict[str, Any]:
        """One value of each key."""
        if self.interval is not None:
            return {self.keys[0]: self.interval.at(uniform(seed, *purpose, self.name))}
        chosen = self.members[integer(seed, *purpose, self.name, below=len(self.members))]
        return dict(zip(self.keys, chosen, strict=True))


class Space:
    """The values of a sweep, as a search draws from them.

    Args:
        values: key → a list, or an interval, in the order of the sweep.
        zip_groups: groups of keys with lists whose values belong together, and are drawn together.

    >>> space = Space({"optimizer.lr": Interval(1e-4, 1e-1, log=True), "task.depth": [1, 2], "seed": range(3)})
    >>> [axis.name for axis in space.axes], space.repeats.count
    (['optimizer.lr', 'task.depth'], 3)
    """

    def __init__(self, values: Mapping[str, Values], zip_groups: Sequence[Sequence[str]] = ()):
        self.keys = tuple(values)
        lists = {key: given for key, given in values.items() if not isinstance(given, Interval)}
        grid = Grid(lists, zip_groups)
        #: What every sample is repeated with.
        repeated = [axis for axis in grid.axes if all(key in REPEATED for key in axis)]
        named = [key for axis in repeated for key in axis]
        self.repeats = Grid({k: lists[k] for k in lists if k in named}, [axis for axis in repeated if axis[1:]])
        axis_of = {axis[0]: axis for axis in grid.axes if axis not in repeated}
        self.axes: list[Axis] = []
        for key, given in values.items():
            if isinstance(given, Interval):
                self.axes.append(Axis((key,), interval=given))
            elif key in axis_of:
                keys = axis_of[key]
                members = zip(*(lists[k] for k in keys), strict=True)
                self.axes.append(Axis(keys, tuple({repr(member): member for member in members}.values())))

    @property
    def intervals(self) -> dict[str, Interval]:
        return {axis.keys[0]: axis.interval for axis in self.axes if axis.interval is not None}

    @property
    def choices(self) -> float:
        """How many different samples there are; infinite where anything is an interval."""
        return math.inf if self.intervals else math.prod(len(axis.members) for axis in self.axes)

    def ordered(self, member: Mapping[str, Any]) -> dict[str, Any]:
        """A member with its keys in the order of the sweep."""
        return {key: member[key] for key in self.keys if key in member}

    def with_repeats(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The members of a sample: one for each seed and fold, or one alone."""
        return [self.ordered({**sample, **repeat}) for repeat in self.repeats]

    def samples(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """``count`` different samples, without the keys of `repeats`; all of them where there are no more.

        More samples of the same seed begin with the same ones.
        """
        found: set[str] = set()
        number = 0
        while len(found) < min(count, self.choices):
            sample = {key: value for axis in self.axes for key, value in axis.draw(seed, "sample", number).items()}
            number += 1
            if repr(sample) not in found:
                found.add(repr(sample))
                yield sample
