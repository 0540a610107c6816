"""Experiments that show what rides, for a search that does not know beforehand what it will ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coalesce.errors import ConfigError, Problem
from coalesce.experiment import Experiment, group
from coalesce.search.grid import Grid
from coalesce.search.space import Axis, Space

#: The most graphs of a search that does not know beforehand what it will ask for: each is planned for.
MOST_GRAPHS = 64

Make = Callable[[Mapping[str, Any]], Experiment | None]
Rides = Callable[[Experiment, str, Any], bool]


def corners(space: Space) -> Iterator[dict[str, Any]]:
    """Members at the low and at the high end of every interval, to find what is wrong with the ends."""
    repeat = next(iter(space.repeats))
    for high in (False, True):
        ends: dict[str, Any] = {}
        for axis in space.axes:
            ends |= _ends(axis)[-1 if high else 0] if axis.interval else _ends(axis)[0]
        yield space.ordered({**ends, **repeat})


def probes(space: Space, make: Make, rides: Rides) -> Iterator[dict[str, Any]]:
    """Members that show every graph of a space, at least two for each, which differ in every float that rides.

    Args:
        space: what is drawn.
        make: an experiment from a member; None: it cannot be.
        rides: whether a leaf of the configuration may differ within a graph.

    Raises:
        ConfigError: there are too many graphs.
    """
    first = next(corners(space))
    riding: list[list[dict[str, Any]]] = [_differing(list(space.repeats.diagonal(2)))]
    fixed: dict[str, Sequence[dict[str, Any]]] = {}
    for axis in space.axes:
        made = [make({**first, **values}) for values in _ends(axis)]
        experiments = [experiment for experiment in made if experiment is not None]
        if len(experiments) == len(made) and len(group(experiments, rides)) == 1:
            riding.append(_differing(_ends(axis)))
        else:
            fixed[axis.name] = _Integers(axis) if axis.interval is not None else _ends(axis)
    graphs = Grid(fixed)
    if graphs.count > MOST_GRAPHS:
        counts = ", ".join(f"{name}: {len(values)}" for name, values in fixed.items())
        rule = f"the search may need {graphs.count} graphs, by what does not ride ({counts})"
        raise ConfigError([Problem("sweep.params", list(fixed), rule, f"values that need at most {MOST_GRAPHS}")])
    for chosen in graphs:
        for number in range(max(len(values) for values in riding)):
            moved = [values[number % len(values)] for values in riding]
            member = {k: v for values in (*chosen.values(), *moved) for k, v in values.items()}
            yield space.ordered(member)


class _Integers(Sequence[dict[str, Any]]):
    """The values of an interval of integers, which may be too many to write down."""

    def __init__(self, axis: Axis):
        assert axis.interval is not None
        self._key, self._numbers = axis.keys[0], range(int(axis.interval.low), int(axis.interval.high) + 1)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return {self._key: self._numbers[index]}


def _ends(axis: Axis) -> list[dict[str, Any]]:
    """The ends of an interval, or all members of a list."""
    if axis.interval is not None:
        return [{axis.keys[0]: end} for end in (axis.interval.low, axis.interval.high)]
    return [dict(zip(axis.keys, member, strict=True)) for member in axis.members]


def _differing(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of some values, and of each key the first other value."""
    others = [next((v for v in values if v[key] != values[0][key]), values[0]) for key in values[0]]
    return list({repr(value): value for value in [values[0], *others]}.values())
