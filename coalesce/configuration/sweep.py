"""A base configuration and the values that vary, expanded into experiments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coalesce.configuration.options import (
    Compose,
    Lacking,
    check_options,
    option_name,
    options_of,
    rule_defaults,
    rule_names,
)
from coalesce.configuration.params import Read, flatten, known_keys, unique, zip_axes
from coalesce.configuration.probes import corners
from coalesce.configuration.resolve import Resolver, rides
from coalesce.configuration.search import SearchSettings
from coalesce.configuration.searching import build, check_beside, count, looked_at, members
from coalesce.errors import ConfigError, Problem
from coalesce.experiment import GROUPS, Experiment, leaves
from coalesce.runner.plan import Trainer
from coalesce.search.base import Search
from coalesce.search.grid import Grid
from coalesce.search.space import REPEATED, Interval, Space, Values

#: How many members of a sweep that is refused anyway are looked at, to find what else is wrong.
LOOKED_AT = 1000


class DuplicateExperimentWarning(UserWarning):
    """A sweep names an experiment more than once; it runs once."""


def make_experiments(
    base: Mapping[str, Any],
    params: Mapping[str, Any] | None = None,
    zip_groups: Sequence[Sequence[str]] = (),
    limit: int = 10_000,
    **how: Any,
) -> tuple[list[Experiment], tuple[str, ...]]:
    """Expand a sweep into its experiments: those that its search knows beforehand, by default the grid's.

    Arguments and what is raised are `make_search`'s.

    Returns:
        The experiments in the sweep's order, each once; and the swept keys, dotted.
    """
    search, keys = make_search(base, params, zip_groups, limit, **how)
    return list(search.known()), keys


def make_search(
    base: Mapping[str, Any],
    params: Mapping[str, Any] | None = None,
    zip_groups: Sequence[Sequence[str]] = (),
    limit: int = 10_000,
    *,
    compose: Compose | None = None,
    options: Callable[[str], Sequence[str]] | None = None,
    read: Read | None = None,
    source: Callable[[str], str] | None = None,
    problems: Iterable[Problem] = (),
    trainer: Trainer | None = None,
    settings: SearchSettings | None = None,
) -> tuple[Search, tuple[str, ...]]:
    """Expand a sweep.

    The experiments are every combination of the values, the first key varying slowest; keys of a zip group run
    together. A search that draws takes some of the combinations, and values of intervals. ``optimizer``, ``task`` and
    ``schedule`` themselves are swept by the names of their options; null, given with an option that has no such key,
    leaves the key out (see `Lacking`).

    Args:
        base: ``task`` (``_target_`` and arguments, or the class), ``optimizer`` and ``schedule`` (``name`` and
            hyperparameters, or the name), ``steps``, ``batch_size``, ``seed``; ``data`` may be left out.
        params: nested or dotted key → its values.
        zip_groups: lists of swept keys whose values belong together.
        limit: the most experiments allowed; they are counted before they are written down.
        compose: makes the base for other options of groups. By default an option is a rule's name with the rule's
            defaults, or a task's class.
        options: the options of a group. By default the rules' names.
        read: reads the text of a sweep language into values.
        source: key → where its value stands ("command line", a file); a swept key is asked for as
            ``sweep.params.<key>``.
        problems: what was found wrong before; reported together with what is found here.
        trainer: how the experiments will be run; its settings stand in for what follows them, see `Hyper.follows`, and
            it names the metric that a search goes by.
        settings: of the search; by default the grid.

    Returns:
        The search, whose `Search.known` are the experiments, each once; and the swept keys, dotted.

    Raises:
        ConfigError: with every problem found.

    Warns:
        DuplicateExperimentWarning: once, if combinations make the same experiment.
    """
    found = list(problems)
    written = list(unique(params or {})[0])
    given, wrong = flatten(params or {}, read)
    found += wrong
    trainer, settings = trainer or Trainer(), settings or SearchSettings()
    resolved, _, _ = Resolver(base, trainer).resolve(base)
    values, wrong = known_keys(given, [key for key, _ in leaves(resolved)])
    found += wrong
    # a key that is reported above is not reported again where a zip group names it
    zips, values, wrong = zip_axes(zip_groups, values, set(written))
    found += wrong
    keys = tuple(values)
    values, wrong = usable_values(values, settings, limit, options or rule_names)
    found += wrong
    lists = {key: given for key, given in values.items() if not isinstance(given, Interval)}
    bad, wrong = check_options(lists, options or rule_names)
    found += wrong
    grid = Grid(lists, zips)
    # a grid that is too large is not written down
    space = Space(values, zips) if settings.draws or grid.count <= limit else Space({})
    if count(settings, grid, space) > limit:
        many = count(settings, grid, space)
        counts = " x ".join(str(length) for length in grid.lengths)
        rule = f"the sweep has {many} experiments" + (f" ({counts})" if settings.samples is None else "")
        found.append(Problem("sweep.limit", limit, rule, "fewer values, or a higher sweep.limit"))
    make = _Members(base, compose or rule_defaults(base), trainer)
    if space.intervals and not found:
        for member in corners(space):
            make.make(member)
        found += make.problems
        make.problems = []
    # what is refused is looked at all the same, to report everything at once; each member looked at is a real one
    chosen: Iterator[dict[str, Any]]
    if found:
        chosen = (m for m in looked_at(settings, grid, space, LOOKED_AT) if not bad & options_of(m))
    else:
        chosen = members(settings, grid, space, make.tried, rides)
    experiments = []
    try:
        experiments = [experiment for member in chosen if (experiment := make.make(member)) is not None]
    except ConfigError as error:
        found += error.problems
    # of what is drawn, an option may be missing
    found += make.problems + make.lacking.problems(complete=not bad and not settings.draws)
    if not found:
        found += check_beside(settings, trainer, experiments, space, rides)
    if found:
        raise ConfigError(_once(found, written, source, space.intervals))
    if settings.name == "optuna":
        make.compose(lists, zips)
    alike = _without_duplicates(experiments) if settings.name != "optuna" else experiments
    return build(settings, trainer, alike, space, make.experiment, rides), keys


def usable_values(
    values: Mapping[str, Values], settings: SearchSettings, limit: int, options: Callable[[str], Sequence[str]]
) -> tuple[dict[str, Values], list[Problem]]:
    """Keep the values that the search can take: the grid no intervals, one that draws no list without an end."""
    kept, problems = dict(values), []
    for key, given in values.items():
        if isinstance(given, Interval) and key in GROUPS:
            rule = f"has options; an interval is of numbers. To sweep one of its keys, name it: {key}.<key>"
            problems.append(Problem(key, str(given), rule, ", ".join(options(key))))
            del kept[key]
        elif isinstance(given, Interval) and not settings.draws:
            drawing = "which search=random or search=optuna draw"
            if settings.name != "grid":
                drawing = f"which search={settings.name} draws from if it has search.samples"
            ends = f"{given.low:g},{given.high:g},8"
            valid = f"a list, ${{linspace:{ends}}} or ${{logspace:{ends}}}"
            rule = f"is a continuous range, {drawing}; search={settings.name} needs values"
            problems.append(Problem(key, str(given), rule, valid))
            del kept[key]
        elif not isinstance(given, Interval) and settings.draws and key not in REPEATED and len(given) > limit:
            rule = f"has {len(given)} values, more than sweep.limit={limit}"
            problems.append(Problem(key, list(given[:3]), rule, "fewer, or an interval: int(interval(low, high))"))
    if any(problem.rule.endswith(f"sweep.limit={limit}") for problem in problems):
        # what is zipped stays equally long
        kept = {key: given if isinstance(given, Interval) else given[:1] for key, given in kept.items()}
    return kept, problems


class _Members:
    """Makes experiments out of members of the grid, and collects what is wrong with them."""

    def __init__(self, base: Mapping[str, Any], compose: Compose, trainer: Trainer):
        self.problems: list[Problem] = []
        self.lacking = Lacking()
        self._trainer = trainer
        self._compose = compose
        self._bases: dict[str, tuple[Mapping[str, Any], Resolver] | None] = {}
        self._base = base

    def make(self, member: Mapping[str, Any]) -> Experiment | None:
        chosen = {key: value for key, value in member.items() if key in GROUPS}
        entry = self._based_on(chosen)
        if entry is None:
            return None
        base, resolver = entry
        config = dict(base)
        out = {key for key, value in member.items() if self.lacking.leaves_out(key, value, chosen, resolver)}
        for key, value in member.items():
            if key not in chosen and key not in out:
                problem = _put(config, key, value, resolver)
                if problem:
                    self.problems.append(problem)
                    return None
        resolved, introduced, problems = resolver.resolve(config)
        self.problems += problems
        if problems:
            return None
        if any(member[key] is not None for key in out):
            return None
        values = {
            key: option_name(value) if key in chosen else None if key in out else _get(resolved, key)
            for key, value in member.items()
        }
        return Experiment(resolved, values, introduced)

    def compose(self, values: Mapping[str, Sequence[Any]], zips: Sequence[Sequence[str]]) -> None:
        """Compose every base that a member may need, so that later members need no composer: a job in another process
        has none."""
        before = list(self.problems)
        groups = {key: given for key, given in values.items() if key in GROUPS}
        for chosen in Grid(groups, [[key for key in axis if key in groups] for axis in zips]):
            self._based_on(chosen)
        self.problems = before

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compose": _not_composed}

    def tried(self, member: Mapping[str, Any]) -> Experiment | None:
        """The same for one that nobody asked for: what is wrong with it does not count."""
        before = list(self.problems)
        made = self.make(member)
        self.problems = before
        return made

    def experiment(self, member: Mapping[str, Any]) -> Experiment:
        """The same for one that is asked for later.

        Raises:
            ConfigError: it cannot be made.
        """
        self.problems = []
        made = self.make(member)
        if made is None:
            raise ConfigError(_once(self.problems + self.lacking.problems(complete=False), (), None))
        return made

    def _based_on(self, chosen: Mapping[str, Any]) -> tuple[Mapping[str, Any], Resolver] | None:
        name = repr(chosen)
        if name not in self._bases:
            try:
                base = self._compose(chosen) if chosen else self._base
                self._bases[name] = base, Resolver(base, self._trainer)
            except ConfigError as error:
                self.problems += error.problems
                self._bases[name] = None
        return self._bases[name]


def _not_composed(chosen: Mapping[str, Any]) -> Mapping[str, Any]:
    raise KeyError(f"the options {dict(chosen)} were not composed before the search was sent to another process")


def _put(config: dict[str, Any], key: str, value: Any, resolver: Resolver) -> Problem | None:
    """Set a dotted key; what lies on the way is copied, since experiments share their base."""
    *way, last = key.split(".")
    if not way:
        config[key] = value
        return None
    here: Any = config
    full: Any = resolver.base_resolved
    for step in way:
        index: Any = int(step) if isinstance(here, list) and step.isdigit() else step
        below = _item(here, index, _item(full, index, None))
        full = _item(full, index, None)
        if isinstance(below, str | type) and step in GROUPS and here is config:
            # short for a mapping: "adamw", or a task's class
            below = {"_target_" if step == "task" else "name": below}
        if below is None:
            below = {}
        if not isinstance(below, Mapping | list | tuple):
            return Problem(key, value, f"unknown key: {step} is {below!r}, not a mapping")
        below = dict(below) if isinstance(below, Mapping) else list(below)
        here[index] = below
        here = below
    if isinstance(here, list):
        if not last.isdigit() or int(last) >= len(here):
            return Problem(key, value, f"unknown key: {'.'.join(way)} is a list of {len(here)}")
        here[int(last)] = value
    else:
        here[last] = value
    return None


def _item(container: Any, key: Any, default: Any) -> Any:
    if isinstance(container, Mapping):
        return container.get(key, default)
    if isinstance(container, list | tuple) and isinstance(key, int) and key < len(container):
        return container[key]
    return default


def _get(config: Any, key: str) -> Any:
    for step in key.split("."):
        config = config[int(step)] if isinstance(config, list | tuple) else config[step]
    return _listed(config)


def _listed(value: Any) -> Any:
    """Tuples as lists, as they are in every file."""
    if isinstance(value, list | tuple):
        return [_listed(v) for v in value]
    return {k: _listed(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _once(
    problems: list[Problem],
    swept: Iterable[str],
    source: Callable[[str], str] | None,
    intervals: Mapping[str, Interval] | None = None,
) -> list[Problem]:
    """Each problem once, though many experiments have it, with its source."""
    result = {}
    for problem in problems:
        interval = (intervals or {}).get(problem.key)
        # an unknown key is unknown whatever its value, and one drawn from an interval stands for all
        value = None if problem.rule.startswith("unknown key") or interval else repr(problem.value)
        if interval is not None and "integer" in problem.rule and not interval.integer:
            problem = replace(problem, value=str(interval), valid=f"whole numbers: int({interval})")
        same = (problem.key, problem.rule, value)
        if same in result:
            continue
        if source is not None and not problem.source:
            varied = [key for key in swept if problem.key == key or problem.key.startswith(key + ".")]
            problem = replace(problem, source=source(f"sweep.params.{varied[0]}" if varied else problem.key))
        result[same] = problem
    return list(result.values())


def _without_duplicates(experiments: list[Experiment]) -> list[Experiment]:
    unique: dict[str, Experiment] = {}
    again: list[Experiment] = []
    for experiment in experiments:
        if unique.setdefault(experiment.id, experiment) is not experiment:
            again.append(unique[experiment.id])
    if again:
        again = list({experiment.id: experiment for experiment in again}.values())
        names = "; ".join(str(experiment) for experiment in again[:3])
        more = f" and {len(again) - 3} more" if len(again) > 3 else ""
        warnings.warn(
            f"the sweep names {len(again)} experiment{'s' if len(again) > 1 else ''} more than once; "
            f"each runs once: {names}{more}",
            DuplicateExperimentWarning,
            stacklevel=4,
        )
    return list(unique.values())
