"""What one experiment is: its configuration, its identity, and which experiments can share a graph."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

#: The keys of an experiment's configuration: everything that determines its result, and nothing else.
KEYS = ("task", "optimizer", "schedule", "steps", "batch_size", "seed", "data", "precision")

#: The key ``data``, which batches are made of: its keys, the defaults that they were introduced with, and the words of
#: ``remainder``. They are younger than the rest: a configuration may leave them out.
DATA: Mapping[str, Any] = {"remainder": "straddle", "fold": None}
REMAINDERS = ("straddle", "drop", "short")

#: Other keys that are younger than the first version and may be left out, and the defaults that they came with.
YOUNGER = {"precision": "float32"}

#: The values of ``precision``: all in the model's own dtype, or `torch.autocast` with bfloat16.
PRECISIONS = ("float32", "bfloat16")

#: Those of them of which whole options are swept: ``optimizer: [sgd, adamw]``.
GROUPS = ("task", "optimizer", "schedule")

#: Version of the id rule. It changes only if every id must change.
ID_RULE = "coalesce-1"


def leaves(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted key, value)`` for every leaf; the items of lists count as keys (``betas.0``)."""
    if isinstance(config, Mapping) and config:
        for name, value in config.items():
            yield from leaves(value, _join(key, name))
    elif isinstance(config, Sequence) and not isinstance(config, str | bytes) and config:
        for index, value in enumerate(config):
            yield from leaves(value, _join(key, index))
    else:
        yield key, config


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    if isinstance(value, bool) or value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        # -0.0 trains exactly as 0.0 does, so the two are one experiment
        return {"float": repr(float(value) + 0.0)}
    raise TypeError(
        f"a configuration holds numbers, text, booleans, None, lists and mappings, not {type(value).__name__}"
    )


def experiment_id(config: Mapping[str, Any], introduced: Mapping[str, Any] | None = None) -> str:
    """The id of the experiment with this resolved configuration: 12 hexadecimal digits.

    The rule: the configuration as canonical JSON (keys sorted; a float written as its shortest ``repr``, so that
    ``1`` and ``1.0`` differ and ``1e-3`` and ``0.001`` do not), hashed with SHA-256 together with ``ID_RULE``.
    A key that a later version introduced is left out while it stands at the default it was introduced with, so
    that the ids of older experiments survive.

    Args:
        config: the keys of ``KEYS``.
        introduced: dotted key → the default that it was introduced with, for keys younger than the first version.
    """
    younger = {f"data.{name}": default for name, default in DATA.items()} | dict(introduced or {})
    text = _text([ID_RULE, _without(config, younger)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _text(value: Any) -> str:
    return json.dumps(_canonical(value), separators=(",", ":"), sort_keys=True)


def _without(config: Mapping[str, Any], introduced: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """The configuration without the younger keys that stand at their first default, and without a mapping in which
    nothing else stands: the mapping is as young as they are."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        dotted = _join(key, name)
        if dotted in introduced and _same(value, introduced[dotted]):
            continue
        if isinstance(value, Mapping):
            inside = _without(value, introduced, dotted)
            if inside or not value:
                kept[name] = inside
        else:
            kept[name] = value
    return kept


def _same(value: Any, default: Any) -> bool:
    """Whether a value is a default as its author may have written it: 1 for 1.0, a tuple for a list."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (value, default))
    return _text(value) == _text(default) or (numbers and bool(value == default))


@dataclass(frozen=True)
class Experiment:
    """One resolved configuration and its seed.

    Args:
        config: exactly the keys of ``KEYS``; ``task`` and ``optimizer`` and ``schedule`` are mappings with every
            argument in them, defaults filled in. ``data`` and those of ``YOUNGER`` may be left out.
        values: the swept keys of this experiment, dotted, in the order of the sweep.
        introduced: see ``experiment_id``.
    """

    config: Mapping[str, Any]
    values: Mapping[str, Any] = field(default_factory=dict)
    introduced: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def id(self) -> str:
        return experiment_id(self.config, self.introduced)

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def steps(self) -> int:
        return int(self.config["steps"])

    @property
    def batch_size(self) -> int:
        return int(self.config["batch_size"])

    @property
    def remainder(self) -> str:
        """What becomes of the samples that fill no batch at an epoch's end: one of ``REMAINDERS``."""
        return str({**DATA, **self.config.get("data", {})}["remainder"])

    @property
    def fold(self) -> int | None:
        """Which fold of a cross-validation it trains on; None: on all of the training split."""
        fold = self.config.get("data", {}).get("fold")
        return None if fold is None else int(fold)

    @property
    def precision(self) -> str:
        """One of ``PRECISIONS``."""
        return str(self.config.get("precision", YOUNGER["precision"]))

    def varied(self, values: Mapping[str, float]) -> Experiment:
        """The same with other floats.

        Args:
            values: dotted key of the configuration → its new value.

        Raises:
            KeyError: there is no such key.
        """
        config = dict(self.config)
        for key, value in values.items():
            config = _put(config, key.split("."), value)
        return replace(self, config=config)

    def __str__(self) -> str:
        values = ", ".join(f"{k}={v}" for k, v in self.values.items())
        return f"{self.id} ({values})" if values else self.id


def _put(config: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of a configuration with one leaf replaced; what it shares with the first one is not copied."""
    if not path:
        return value
    name: Any = int(path[0]) if isinstance(config, list | tuple) else path[0]
    if isinstance(config, list | tuple):
        return [_put(v, path[1:], value) if i == name else v for i, v in enumerate(config)]
    return {**config, name: _put(config[name], path[1:], value)}


@dataclass(frozen=True)
class Cohort:
    """Experiments that share one graph.

    Args:
        index: its number in the plan.
        experiments: in the order of the sweep.
        riding: the dotted keys that differ within the cohort and are inputs of its graph.
        shape: a hash of what its experiments have in common, and which of their keys might ride.
        probes: experiments that are not to be trained, and show what may differ: those of a search that makes its
            experiments as it goes.
    """

    index: int
    experiments: tuple[Experiment, ...]
    riding: tuple[str, ...]
    shape: str = ""
    probes: tuple[Experiment, ...] = ()

    @property
    def members(self) -> tuple[Experiment, ...]:
        """Experiments and probes; at least one."""
        return (*self.experiments, *self.probes)


#: Says whether a leaf may differ within a graph: experiment, dotted key, value.
Rides: TypeAlias = Callable[[Experiment, str, Any], bool]


def group(experiments: Iterable[Experiment], rides: Rides, probes: Iterable[Experiment] = ()) -> list[Cohort]:
    """Split experiments into cohorts by the law "floats ride, the rest splits".

    Args:
        experiments: in any order; cohorts keep it, and are numbered by their first experiment.
        rides: ``rides(experiment, dotted key, value)`` says whether the leaf may differ within a graph. What
            rides must still ride everywhere: a float in one experiment and None in another splits.
        probes: see `Cohort`.

    Raises:
        TypeError: a configuration holds what has no place in one.
    """
    cohorts: dict[str, list[tuple[Experiment, bool, dict[str, Any]]]] = {}
    for given, is_probe in ((experiments, False), (probes, True)):
        for experiment in given:
            shape, riding = _shape(experiment, rides)
            cohorts.setdefault(shape, []).append((experiment, is_probe, riding))
    result = []
    for index, (shape, members) in enumerate(cohorts.items()):
        first = members[0][2]
        differs = tuple(k for k in first if any(riding[k] != first[k] for _, _, riding in members[1:]))
        tested = [tuple(e for e, is_probe, _ in members if is_probe is wanted) for wanted in (False, True)]
        result.append(Cohort(index, tested[0], differs, shape, tested[1]))
    return result


def shape_of(experiment: Experiment, rides: Rides) -> str:
    """The `Cohort.shape` of the cohort that an experiment belongs to."""
    return _shape(experiment, rides)[0]


def _shape(experiment: Experiment, rides: Rides) -> tuple[str, dict[str, Any]]:
    riding = {key: value for key, value in leaves(experiment.config) if rides(experiment, key, value)}
    text = _text([_fixed(experiment.config, riding), sorted(riding)])
    return hashlib.sha256(text.encode()).hexdigest()[:12], riding


def _fixed(config: Any, riding: Mapping[str, Any], key: str = "") -> Any:
    """The configuration with None in place of every leaf that rides. A list and a mapping of its items differ."""
    if key in riding:
        return None
    if isinstance(config, Mapping):
        return {name: _fixed(value, riding, _join(key, name)) for name, value in config.items()}
    if isinstance(config, list | tuple):
        return [_fixed(value, riding, _join(key, index)) for index, value in enumerate(config)]
    return config
