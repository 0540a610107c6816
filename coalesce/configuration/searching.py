"""From settings, a sweep's values and its experiments to the search that they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from coalesce.configuration.probes import Make, Rides, corners, probes
from coalesce.configuration.search import SearchSettings
from coalesce.errors import Problem
from coalesce.experiment import Experiment, group
from coalesce.runner.plan import Trainer
from coalesce.search.base import Listed, Search
from coalesce.search.grid import Grid
from coalesce.search.halving import Asha, Halving
from coalesce.search.metric import Metric
from coalesce.search.population import Population, perturbed
from coalesce.search.random import drawn
from coalesce.search.space import Space
from coalesce.search.stopping import Stopping


def count(settings: SearchSettings, grid: Grid, space: Space) -> int:
    """How many experiments there will be, at most."""
    if settings.samples is None:
        return grid.count
    samples = settings.samples if settings.name == "optuna" else int(min(settings.samples, space.choices))
    return samples * space.repeats.count


def members(settings: SearchSettings, grid: Grid, space: Space, make: Make, rides: Rides) -> Iterator[dict[str, Any]]:
    """The members whose experiments the search knows beforehand, see `Search.known`."""
    if settings.samples is None:
        return iter(grid)
    if settings.name == "optuna":
        return probes(space, make, rides)
    return drawn(space, settings.samples, settings.seed)


def looked_at(settings: SearchSettings, grid: Grid, space: Space, most: int) -> Iterator[dict[str, Any]]:
    """Members that show what is wrong with a sweep that is refused anyway; each is a real one."""
    if settings.samples is None:
        return grid.diagonal(most)
    return chain(corners(space), drawn(space, min(settings.samples, most), settings.seed))


def check_beside(
    settings: SearchSettings, trainer: Trainer, experiments: Sequence[Experiment], space: Space, rides: Rides
) -> list[Problem]:
    """What is wrong between settings and experiments that are right by themselves."""
    name = settings.name
    longest = max((experiment.steps for experiment in experiments), default=0)
    key = {"asha": "min_steps", "halving": "min_steps", "pbt": "interval"}.get(name)
    problems = []
    if key is not None and experiments and getattr(settings, key) >= longest:
        rule = f"{name} never looks at an experiment before its end: the longest has {longest} steps"
        problems.append(Problem(f"search.{key}", getattr(settings, key), rule, f"a number below {longest}"))
    if name == "optuna" and not space.axes:
        rule = "optuna has nothing to draw: no key but seeds and folds is swept"
        problems.append(Problem("search.name", name, rule, "values in sweep.params, or another search"))
    if name == "pbt":
        problems += _check_population(trainer, experiments, space, rides)
    return problems


def _check_population(trainer: Trainer, experiments: Sequence[Experiment], space: Space, rides: Rides) -> list[Problem]:
    problems = []
    name, rule = "pbt", "a population trains in lanes of one graph, which copy each other"
    if not trainer.stack:
        problems.append(Problem("trainer.stack", False, f"search=pbt: {rule}", "true, or another search"))
    lengths = list(dict.fromkeys(experiment.steps for experiment in experiments))
    if len(lengths) > 1:
        problems.append(Problem("search.name", name, f"needs experiments of equally many steps, not {lengths[:4]}"))
    cohorts = group(experiments, rides)
    if len(cohorts) > 1:
        one, two = (cohort.experiments[0] for cohort in cohorts[:2])
        differ = [key for key, value in one.values.items() if two.values.get(key) != value]
        differ = [key for key in differ if not _all_ride(experiments, key, rides)]
        rule = f"{rule}; this sweep has {len(cohorts)}, by {', '.join(differ)}"
        problems.append(Problem("search.name", name, rule, "a sweep over floats and seeds alone"))
    elif experiments and not perturbed(space, experiments, rides):
        rule = "has nothing to change: no float is swept by an interval or by a list of its own (not in a zip group)"
        problems.append(Problem("search.name", name, rule, "a sweep over a float such as optimizer.lr"))
    return problems


def _all_ride(experiments: Sequence[Experiment], key: str, rides: Rides) -> bool:
    return all(rides(experiment, key, experiment.values[key]) for experiment in experiments)


def build(
    settings: SearchSettings,
    trainer: Trainer,
    experiments: Sequence[Experiment],
    space: Space,
    make: Callable[[Mapping[str, Any]], Experiment],
    rides: Rides,
) -> Search:
    """Make the search.

    Args:
        experiments: of `members`.
        space: what is drawn.
        make: an experiment from the values of the swept keys, for searches that find out later what they ask for.
    """
    metric = Metric(trainer.monitor, trainer.mode)
    search: Search
    if settings.name == "halving":
        search = Halving(experiments, metric, settings.min_steps, settings.factor)
    elif settings.name == "asha":
        search = Asha(experiments, metric, settings.min_steps, settings.factor, settings.seed)
    elif settings.name == "pbt":
        how = settings.interval, settings.fraction, settings.factors, settings.resample, settings.seed
        search = Population(experiments, metric, perturbed(space, experiments, rides), *how)
    elif settings.name == "optuna":
        # an optional dependency
        from coalesce.search.optuna import SAMPLERS, Optuna

        assert settings.samples is not None
        sampler = settings.sampler or SAMPLERS["tpe"]
        how_many = settings.samples, settings.seed
        search = Optuna(space, make, experiments, metric, *how_many, sampler, settings.storage, settings.study)
    else:
        search = Listed(experiments)
    if settings.patience is None and settings.target is None:
        return search
    return Stopping(search, metric, settings.patience, settings.min_delta, settings.target)
