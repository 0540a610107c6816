"""How a sweep is searched: the settings, checked; and the search that they mean."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from coalesce.configuration.values import Kind, coerce
from coalesce.errors import ConfigError, Problem, nearest
from coalesce.runner.plan import Trainer

INT, NUMBER, TEXT = Kind("int"), Kind("float"), Kind("text", optional=True)
NO_INT, NO_NUMBER = replace(INT, optional=True), replace(NUMBER, optional=True)


@dataclass(frozen=True)
class Setting:
    """One key of a search.

    Args:
        default: its default.
        kind: what it holds.
        low, high: the bounds.
        open_low: whether the lower bound itself is excluded.
        measured: a number of steps at which the metric is measured.
    """

    default: Any
    kind: Kind
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    measured: bool = False

    @property
    def valid(self) -> str:
        """The valid values, in words."""
        bounds = [f"{'above' if self.open_low else 'at least'} {self.low:g}"] if self.low > -math.inf else []
        bounds += [f"at most {self.high:g}"] if self.high < math.inf else []
        kind = replace(self.kind, optional=False).valid
        return ", ".join([kind, *bounds]) + (", or null" if self.kind.optional else "")


SAMPLES = Setting(None, NO_INT, 1)
SEED = Setting(0, INT, 0, 2**63 - 1)
MIN_STEPS = Setting(None, NO_INT, 1, measured=True)
FACTOR = Setting(4, INT, 2)

#: Keys that every search has.
COMMON: Mapping[str, Setting] = {
    "patience": Setting(None, NO_INT, 1),
    "min_delta": Setting(0.0, NUMBER, 0),
    "target": Setting(None, NO_NUMBER),
}
#: The searches and their own keys.
SEARCHES: Mapping[str, Mapping[str, Setting]] = {
    "grid": {},
    "random": {"samples": Setting(64, INT, 1), "seed": SEED},
    "halving": {"samples": SAMPLES, "seed": SEED, "min_steps": MIN_STEPS, "factor": FACTOR},
    "asha": {"samples": SAMPLES, "seed": SEED, "min_steps": MIN_STEPS, "factor": FACTOR},
    "pbt": {
        "samples": SAMPLES,
        "seed": SEED,
        "interval": Setting(None, NO_INT, 1, measured=True),
        "fraction": Setting(0.2, NUMBER, 0, 0.5, open_low=True),
        "factors": Setting((0.8, 1.2), Kind("list", item=NUMBER)),
        "resample": Setting(0.25, NUMBER, 0, 1),
    },
    "optuna": {
        "samples": Setting(64, INT, 1),
        "seed": SEED,
        "sampler": Setting("tpe", Kind()),
        "storage": Setting(None, TEXT),
        "study": Setting(None, TEXT),
    },
}
#: Optuna's samplers with a name, and the package that one of them needs.
SAMPLERS: Mapping[str, str] = {"tpe": "optuna", "random": "optuna", "cmaes": "cmaes"}
OPTUNA = "pip install 'coalesce[optuna]'"


@dataclass(frozen=True)
class SearchSettings:
    """A search as it was asked for, checked. Settings that it does not have stand at their defaults.

    Args:
        name: one of `SEARCHES`.
        samples: how many settings are drawn; None: every combination.
        seed: of the search: of draws, of the order, of samplers.
        min_steps, factor: the rungs of halving.
        interval, fraction, factors, resample: see `coalesce.search.population.Population`.
        sampler: makes one of Optuna's samplers of a seed; None: the default.
        storage, study: Optuna's.
        patience, min_delta, target: see `coalesce.search.stopping.Stopping`.
    """

    name: str = "grid"
    samples: int | None = None
    seed: int = 0
    min_steps: int = 1
    factor: int = 4
    interval: int = 1
    fraction: float = 0.2
    factors: tuple[float, ...] = (0.8, 1.2)
    resample: float = 0.25
    sampler: Callable[[int], Any] | None = None
    storage: str | None = None
    study: str | None = None
    patience: int | None = None
    min_delta: float = 0.0
    target: float | None = None

    @property
    def draws(self) -> bool:
        """Whether values are drawn, so that an interval has a meaning."""
        return self.samples is not None


#: Stands in for a search that is wrong itself: it takes any values, so that none is found wrong because of it.
ANY = SearchSettings("random", samples=1)


def check_search(settings: str | Mapping[str, Any] | None, trainer: Trainer | None = None) -> SearchSettings:
    """Check a search's settings and fill in the defaults.

    Args:
        settings: a search's name, or a mapping with ``name`` and any of its keys; None: the grid.
        trainer: whose steps between two measurements the search's own must be multiples of; None: it is wrong itself.

    Raises:
        ConfigError: with every problem found.
    """
    given = {"name": settings} if isinstance(settings, str) else {} if settings is None else settings
    if not isinstance(given, Mapping):
        raise ConfigError([Problem("search", settings, "must be a name or a mapping", ", ".join(SEARCHES))])
    name = given.get("name", "grid")
    if not isinstance(name, str) or name not in SEARCHES:
        near = nearest(str(name), SEARCHES)
        raise ConfigError([Problem("search.name", name, "unknown search", ", ".join(SEARCHES), near)])
    keys = {**SEARCHES[name], **COMMON}
    problems: list[Problem] = []
    for key in (key for key in given if key not in keys and key != "name"):
        valid = ", ".join(["name", *keys])
        rule = f"unknown key for search={name}"
        others = [other for other, theirs in SEARCHES.items() if key in theirs]
        rule += f" (it is one of {', '.join(others)})" if others else ""
        problems.append(Problem(f"search.{key}", given[key], rule, valid, nearest(str(key), keys)))
    checked: dict[str, Any] = {"name": name}
    for key, setting in keys.items():
        if key == "sampler":
            checked[key] = _sampler(given.get(key, setting.default), problems)
            continue
        value, found = checked_setting(f"search.{key}", given.get(key, setting.default), setting)
        if not found and setting.measured and trainer is not None:
            value, found = _measured(f"search.{key}", value, trainer)
        checked[key] = value
        problems += found
    if trainer is None:
        checked = {key: value for key, value in checked.items() if key == "name" or not keys[key].measured}
    if name == "pbt":
        problems += _factors(checked)
    if name == "optuna" and not _has("optuna"):
        problems.append(Problem("search.name", name, "needs the package optuna, which is not installed", OPTUNA))
    if problems:
        raise ConfigError(problems)
    return SearchSettings(**checked)


def checked_setting(key: str, given: Any, setting: Setting) -> tuple[Any, list[Problem]]:
    """A setting's value, and what is wrong with it."""
    value, problems = coerce(key, given, setting.kind)
    if problems or value is None or not isinstance(value, int | float):
        return value, [replace(problem, valid=setting.valid) for problem in problems]
    low = value <= setting.low if setting.open_low else value < setting.low
    if low or value > setting.high:
        return value, [Problem(key, given, "out of range", setting.valid)]
    return value, []


def _measured(key: str, value: int | None, trainer: Trainer) -> tuple[int, list[Problem]]:
    """Steps at which the monitored metric is measured; None: the first."""
    often = trainer.monitor.startswith("train/")
    name, every = ("every", trainer.every) if often else ("evaluate_every", trainer.evaluate_every)
    if value is None:
        return every, []
    if value % every == 0:
        return value, []
    rule = f"{trainer.monitor} is not measured there: must be a multiple of trainer.{name}, which is {every}"
    return value, [Problem(key, value, rule, f"{every}, {2 * every}, {3 * every}, …, or null: {every}")]


def _factors(checked: dict[str, Any]) -> list[Problem]:
    given = checked["factors"]
    if not isinstance(given, list | tuple) or not all(isinstance(f, float) for f in given):
        return []  # reported before
    checked["factors"] = tuple(given)
    valid = "a list of numbers above 0, such as [0.8, 1.2]"
    if not given:
        return [Problem("search.factors", given, "must not be empty", valid)]
    return [Problem("search.factors", f, "must be above 0", valid) for f in given if f <= 0]


def _sampler(given: Any, problems: list[Problem]) -> Callable[[int], Any] | None:
    """What makes a sampler of a seed; None where that cannot be said, and a problem tells why."""
    key = "search.sampler"
    way = f"{', '.join(SAMPLERS)}, or a mapping of _target_ (a class of optuna.samplers) and its arguments"
    if not _has("optuna"):
        return None
    from coalesce.search.optuna import SAMPLERS as NAMED
    from coalesce.search.optuna import sampler_of

    if isinstance(given, str):
        if given not in NAMED:
            problems.append(Problem(key, given, "unknown sampler", way, nearest(given, NAMED)))
            return None
        if not _has(SAMPLERS[given]):
            package = SAMPLERS[given]
            problems.append(Problem(key, given, f"needs the package {package}, which is not installed", OPTUNA))
            return None
        return NAMED[given]
    if not isinstance(given, Mapping) or not isinstance(given.get("_target_"), str):
        problems.append(Problem(key, given, "must be a name or a mapping with _target_", way))
        return None
    from optuna.samplers import BaseSampler

    module, _, name = given["_target_"].rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
        if not (isinstance(cls, type) and issubclass(cls, BaseSampler)):
            raise TypeError("it is no subclass of optuna.samplers.BaseSampler")
        made = sampler_of(cls, {str(k): v for k, v in given.items() if k != "_target_"})
        made(0)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        problems.append(Problem(key, dict(given), f"makes no sampler: {error}", way))
        return None
    return made


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
