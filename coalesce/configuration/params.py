"""What a sweep varies: parameters and zip groups as they were written, checked and flattened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from coalesce.configuration.values import plain
from coalesce.errors import ConfigError, Problem, nearest
from coalesce.experiment import GROUPS, KEYS
from coalesce.search.space import Interval, Values

#: Reads a text in a sweep language into values; raises ConfigError. Arguments: the swept key and the text.
Read = Callable[[str, str], Values]

LISTS = "a list of values: [0.1, 0.01]"


def unique(
    params: Mapping[str, Any], preferred: Collection[tuple[str, ...]] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Parameters as dotted key → what is written there, in the order written.

    Args:
        params: nested or dotted keys, mixed at will.
        preferred: paths of keys that win over others of the same dotted key (the command line wins over a file,
            whether it says ``{optimizer: {lr: ..}}`` or ``{optimizer.lr: ..}``).
    """
    found: dict[str, Any] = {}
    strong: set[str] = set()
    problems = []
    for path, value in _paths(params):
        key = ".".join(path)
        if key not in found or (path in preferred and key not in strong):
            found[key] = value
        elif path in preferred or key not in strong:
            problems.append(Problem(key, value, "is swept twice", "once, as a nested or as a dotted key"))
        strong |= {key} if path in preferred else set()
    return found, problems


def _paths(params: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in params.items():
        path = (*above, str(name))
        if isinstance(value, Mapping):
            yield from _paths(value, path)
        else:
            yield path, value


def flatten(params: Mapping[str, Any], read: Read | None) -> tuple[dict[str, Values], list[Problem]]:
    """Parameters as dotted key → values.

    Args:
        params: nested or dotted keys; at the end of each a list, any other sequence, an interval, a text for
            ``read``, or None: the key is not swept after all.
        read: what reads a text; without it, a text is a problem.

    Returns:
        What can be used of it, and what is wrong with the rest.
    """
    raws, problems = unique(params)
    values: dict[str, Values] = {}
    for key, raw in raws.items():
        if raw is None:
            continue
        try:
            found = _values(key, raw, read)
        except ConfigError as error:
            problems += error.problems
            continue
        if isinstance(found, Interval) or len(found):
            values[key] = found
        else:
            problems.append(Problem(key, raw, "has no values to sweep", f"{LISTS}, of at least one value"))
    problems += _overlaps(values)
    return values, problems


def _values(key: str, raw: Any, read: Read | None) -> Values:
    if isinstance(raw, str) and read is not None:
        return read(key, raw)
    if isinstance(raw, range | Interval):
        return raw
    if isinstance(raw, str | bytes) or not (isinstance(raw, list | tuple) or hasattr(raw, "tolist")):
        raise ConfigError([Problem(key, raw, "must be a list of the values to sweep", LISTS)])
    found = plain(raw)
    if not isinstance(found, list | tuple):
        raise ConfigError([Problem(key, raw, "must be a list of the values to sweep", LISTS)])
    return found


def _overlaps(values: Iterable[str]) -> list[Problem]:
    """Keys of which one holds the other (``task.sizes`` and ``task.sizes.0``): which of them counts is unclear."""
    keys = list(values)
    rule = "is swept together with {}, which is a part of it"
    return [
        Problem(outer, inner, rule.format(inner), "one of the two")
        for outer in keys
        for inner in keys
        if inner.startswith(outer + ".") and outer not in GROUPS
    ]


def known_keys(values: Mapping[str, Values], known: Sequence[str]) -> tuple[dict[str, Values], list[Problem]]:
    """Keep the keys that can belong to an experiment.

    Args:
        known: the dotted keys of the base configuration, from which the nearest name is taken.
    """
    kept, problems = {}, []
    for key, found in values.items():
        top, _, rest = key.partition(".")
        if top in KEYS and (rest if top == "data" else top in GROUPS or not rest):
            kept[key] = found
            continue
        inside = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
        near = inside[0] if inside else nearest(key, [*known, *GROUPS])
        valid = (
            "keys of task, optimizer, schedule and data (optimizer.lr); task, optimizer and schedule themselves; "
            "steps, batch_size, seed"
        )
        shown = str(found) if isinstance(found, Interval) else list(found[:3])
        problems.append(Problem(key, shown, "unknown key: no part of an experiment", valid, near))
    return kept, problems


def zip_axes(
    zip_groups: Any, values: Mapping[str, Values], mentioned: Iterable[str]
) -> tuple[list[list[str]], dict[str, Values], list[Problem]]:
    """Check zip groups.

    Args:
        zip_groups: a list of lists of keys; a plain list of keys is one group.
        values: the swept keys.
        mentioned: keys that were to be swept and are known to be wrong, so that one fault is reported once.

    Returns:
        The groups; the values, cut to the shortest of their group where lengths differ; and what is wrong.
    """
    groups: list[Any] = plain(zip_groups) if isinstance(zip_groups, list | tuple) else [zip_groups]
    if groups and all(isinstance(key, str) for key in groups):
        groups = [groups]
    rest = dict(values)
    kept: list[list[str]] = []
    problems = []
    taken: set[str] = set()
    lists = {key: found for key, found in values.items() if not isinstance(found, Interval)}
    for group in groups:
        if not isinstance(group, list | tuple) or not all(isinstance(key, str) for key in group):
            valid = "a list of lists of swept keys: [[optimizer.lr, schedule.warmup]]"
            problems.append(Problem("sweep.zip", group, "must be a list of keys", valid))
            continue
        usable = []
        for key in group:
            if key in taken:
                problems.append(Problem("sweep.zip", key, "is zipped twice", "each key in one group, once"))
            elif key in lists:
                usable.append(key)
            elif key in values:
                rule = "has an interval, which cannot belong to other values"
                problems.append(Problem("sweep.zip", key, rule, "keys with lists of equally many values"))
            elif key not in mentioned:
                rule = "names a key that is not swept"
                problems.append(Problem("sweep.zip", key, rule, ", ".join(values), nearest(key, values)))
            taken.add(key)
        lengths = {key: len(lists[key]) for key in usable}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{key} has {length}" for key, length in lengths.items())
            problems.append(Problem("sweep.zip", list(group), f"its keys must have equally many values, but {listed}"))
            rest |= {key: lists[key][: min(lengths.values())] for key in usable}
        kept += [usable] if usable else []
    return kept, rest, problems
