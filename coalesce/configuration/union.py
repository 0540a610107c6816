"""What a run has and what a sweep adds to it, as one list of experiments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coalesce.errors import ConfigError, Problem, nearest
from coalesce.experiment import Experiment, leaves
from coalesce.runner.plan import Plan, Trainer
from coalesce.search.base import Search
from coalesce.store.merge import configured

#: The trainer's settings that may change when a run goes on. What the others say shows in the numbers, or in which of
#: them are there: then the run would not be the one that it would have been without the break.
FREE = ("width", "check", "show", "weights", "on_error", "snapshot_minutes")

OWN = "leave it out; or start a run of its own"

#: What is trained once more, if that is wanted: nothing else would end otherwise than it did.
RETRIED = ("failed", "diverged")


def read_retry(given: Any) -> tuple[str, ...]:
    """Check which experiments are to be trained once more.

    Args:
        given: a status, or a list of them; None: none.

    Raises:
        ConfigError: it is neither.
    """
    statuses = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    valid = f"{', '.join(RETRIED)}, or a list of them"
    rule = "only what has failed or diverged is trained once more"
    problems = [
        Problem("retry", one, rule, valid, nearest(str(one), RETRIED)) for one in statuses if one not in RETRIED
    ]
    if given is not None and not statuses:
        problems = [Problem("retry", given, "names no status", valid)]
    if problems:
        raise ConfigError(problems)
    return tuple(statuses)


def check_retry(statuses: Sequence[str], search: Search) -> None:
    """Refuse to train experiments once more where a search has decided about others by how they ended.

    Raises:
        ConfigError: it has.
    """
    if statuses and not search.retries:
        rule = "the run's search decides by what it has seen, so that none of its experiments can be trained once more"
        raise ConfigError([Problem("retry", ", ".join(statuses), rule, OWN)])


def unlike(stored: Trainer, now: Trainer) -> list[Problem]:
    """What of a trainer's settings a run that goes on cannot have otherwise.

    Args:
        stored: the run's, with device and threads resolved.
    """
    left_open = {name for name in ("device", "threads") if getattr(now, name) in ("auto", None)}
    names = [f.name for f in dataclasses.fields(Trainer) if f.name not in FREE and f.name not in left_open]
    return [
        Problem(
            f"trainer.{name}",
            getattr(now, name),
            f"the run began with {getattr(stored, name)!r}, which shows in its numbers, and goes on with it",
            "that value; or a folder of its own",
        )
        for name in names
        if getattr(now, name) != getattr(stored, name)
    ]


def united(
    plan: Plan, experiments: Iterable[Experiment], keys: Sequence[str]
) -> tuple[list[Experiment], tuple[str, ...]]:
    """The experiments of a plan and those that a sweep has now, each once.

    Args:
        plan: what the run has so far. Its experiments stay, though the sweep has them no more.
        experiments: of the sweep.
        keys: swept.

    Returns:
        Those that the sweep has no more, then the sweep's; each with a value for every key. And the keys: the sweep's,
        the plan's, and those that tell apart what would else look alike (``steps``, where the run gets longer ones).
    """
    new = list(experiments)
    ids = {experiment.id for experiment in new}
    every = [*(e for e in plan.experiments if e.id not in ids), *new]
    named = list(dict.fromkeys([*keys, *plan.keys]))
    values = {e.id: {key: _value(e, key) for key in named} for e in every}
    alike: dict[str, list[Experiment]] = {}
    for experiment in every:
        alike.setdefault(repr(values[experiment.id]), []).append(experiment)
    for first, *others in alike.values():
        for other in others:
            differ = [k for k in _different(first.config, other.config) if k not in named]
            named += differ
            # once it is a key, it tells the rest apart
    values = {e.id: {key: _value(e, key) for key in named} for e in every}
    return [dataclasses.replace(e, values=values[e.id]) for e in every], tuple(named)


def _value(experiment: Experiment, key: str) -> Any:
    return experiment.values[key] if key in experiment.values else configured(experiment.config, key)


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted keys that differ; a list is one value."""

    def flat(config: Mapping[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for key, value in leaves(config):
            name = ".".join(step for step in key.split(".") if not step.isdigit())
            found[name] = found.get(name, "") + f"{value!r},"
        return found

    left, right = flat(one), flat(other)
    return [key for key in dict.fromkeys([*left, *right]) if left.get(key) != right.get(key)]
