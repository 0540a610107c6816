"""Groups whose options are swept: ``task: [mnist1d_mlp, mnist1d_cnn]``, and keys that only some of the options have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coalesce.configuration.resolve import RULES, Resolver
from coalesce.errors import Problem, nearest
from coalesce.experiment import GROUPS

#: Composes the base configuration anew with other group options: {"optimizer": "sgd"} → configuration.
Compose = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def check_options(
    values: Mapping[str, Sequence[Any]], options: Callable[[str], Sequence[str]]
) -> tuple[set[tuple[str, str]], list[Problem]]:
    """Find the unknown options of swept groups, so that nothing tries to compose them.

    Returns:
        The unknown ones, as `options_of` names them, and what is wrong with them.
    """
    bad, problems = set(), []
    for group in GROUPS:
        known = options(group) if group in values else ()
        for value in values.get(group, ()):
            if isinstance(value, type) or (isinstance(value, str) and (value in known or not known)):
                continue
            near = nearest(value, known) if isinstance(value, str) else ""
            rule = f"unknown option of {group}"
            if not isinstance(value, str):
                rule = f"must be the name of an option of {group}; to sweep one of its keys, name it: {group}.<key>"
            problems.append(Problem(group, value, rule, ", ".join(known), near))
            bad.add((group, repr(value)))
    return bad, problems


def options_of(member: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The options that a member of the grid chooses: pairs of the group and the option's text."""
    return {(key, repr(value)) for key, value in member.items() if key in GROUPS}


def option_name(option: Any) -> Any:
    """An option as the frame shows it: its name, or the dotted name of a class."""
    return f"{option.__module__}.{option.__qualname__}" if isinstance(option, type) else option


def rule_names(group: str) -> Sequence[str]:
    """The options of a group where no configuration files are: the rules."""
    return list(RULES.get(group, ()))


def rule_defaults(base: Mapping[str, Any]) -> Compose:
    """Make a composer for where no configuration files are."""

    def compose(chosen: Mapping[str, Any]) -> Mapping[str, Any]:
        # a task is its class or the class's dotted name, a rule its name: the resolver fills in the defaults
        return {**base, **chosen}

    return compose


class Lacking:
    """Swept keys that some options of a swept group do not have.

    Such a key is swept in a zip group with its group, and null stands where the option has no such key: null is the
    only value that cannot be meant for it. A key that no option has is misspelt, even where all of its values are null.
    """

    def __init__(self) -> None:
        self._has: set[str] = set()
        # key → option → the first value that was meant for it, None included
        self._lacks: dict[str, dict[str, Any]] = {}
        self._names: dict[str, dict[str, None]] = {}

    def leaves_out(self, key: str, value: Any, chosen: Mapping[str, Any], resolver: Resolver) -> bool:
        """Whether a member's value has no place in the options that it chooses."""
        group, _, rest = key.partition(".")
        if group not in chosen or not rest:
            return False
        names = resolver.names(group)
        if names is None or rest.partition(".")[0] in names:
            self._has.add(key)
            return False
        values = self._lacks.setdefault(key, {})
        option = str(option_name(chosen[group]))
        if values.get(option) is None:
            values[option] = value
        self._names.setdefault(key, {}).update(dict.fromkeys(names))
        return True

    def problems(self, complete: bool) -> list[Problem]:
        """What is wrong: values that have no place, and keys that no option has.

        Args:
            complete: whether every option was looked at, so that a key that none of these has is unknown.
        """
        found = []
        for key, values in self._lacks.items():
            given = {option: value for option, value in values.items() if value is not None}
            known = key in self._has
            if not given and (known or not complete):
                continue
            listed = list(given or values)
            has = " and ".join([", ".join(listed[:-1]), listed[-1]] if listed[1:] else listed)
            has += " has no such key" if len(listed) == 1 else " have no such key"
            group, _, rest = key.partition(".")
            value = next(iter((given or values).values()))
            if known:
                rule = f"{has}: give null there, zipped with {group}: sweep.zip=[[{group}, {key}]]"
                found.append(Problem(key, value, rule, "null where the option has no such key"))
            else:
                names = list(self._names[key])
                found.append(Problem(key, value, f"unknown key: {has}", ", ".join(names), nearest(rest, names)))
        return found
