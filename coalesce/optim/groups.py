"""Parameter groups: what an optimiser's hyperparameters are for one parameter, told by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import torch

from coalesce.errors import Problem
from coalesce.optim.base import Factors, Optimizer, Patterns

#: A parameter's names: dotted, as `named_parameters` gives them; a tied one has several.
Names = Sequence[str]


def matches(pattern: str, names: Names) -> bool:
    """Whether a pattern fits one of a parameter's names: ``*`` any text, dots included, ``?`` one character, ``[ab]``
    one of these."""
    return any(fnmatchcase(name, pattern) for name in names)


def config_of(rule: type[Optimizer], config: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """An optimiser's configuration for one parameter: a list of patterns becomes whether the parameter matches one, a
    mapping of patterns is left with those that it matches."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        spec = rule.hyper.get(name)
        if isinstance(spec, Patterns):
            found[name] = any(matches(pattern, names) for pattern in value)
        elif isinstance(spec, Factors):
            found[name] = {pattern: factor for pattern, factor in value.items() if matches(pattern, names)}
        else:
            found[name] = value
    return found


def group_of(rule: type[Optimizer], config: Mapping[str, Any], names: Names) -> tuple[Any, ...]:
    """Which group a parameter is in: equal for two that are updated alike."""
    mine = config_of(rule, config, names)
    kinds = [mine[name] for name, spec in rule.hyper.items() if isinstance(spec, Patterns | Factors)]
    return tuple(tuple(kind) if isinstance(kind, Mapping) else kind for kind in kinds)


def hyper_of(rule: type[Optimizer], hyper: SimpleNamespace, names: Names) -> SimpleNamespace:
    """The hyperparameters of one parameter in one lane.

    Args:
        hyper: the lane's, as `Optimizer.update` describes them, with patterns as they stand in the configuration.
    """
    values = config_of(rule, vars(hyper), names)
    # several factors that match are multiplied, so that their order says nothing
    for factor in values.get("lr_factors", {}).values():
        values |= {rate: values[rate] * factor for rate in rule.rates}
    if values.get("no_decay"):
        values |= {decay: torch.zeros_like(values[decay]) for decay in rule.decays}
    return SimpleNamespace(**values)


def unmatched(rule: type[Optimizer], config: Mapping[str, Any], known: Iterable[Names]) -> list[Problem]:
    """A problem for each pattern that fits no parameter.

    Args:
        config: the optimiser's.
        known: each parameter's names.
    """
    every = list(known)
    flat = [name for names in every for name in names]
    problems = []
    for key, spec in rule.hyper.items():
        if not isinstance(spec, Patterns | Factors):
            continue
        for pattern in config[key]:
            if not any(matches(pattern, names) for names in every):
                near = ", ".join(get_close_matches(pattern, flat, n=5, cutoff=0.0))
                valid = f"a name or pattern of the model's {len(every)} parameters; the nearest names: {near}"
                problems.append(Problem(f"optimizer.{key}", pattern, "matches no parameter", valid))
    return problems
