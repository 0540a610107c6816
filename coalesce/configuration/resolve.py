"""One experiment: every key checked, every default filled in, every value of its right type."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from coalesce.configuration.tasks import TaskClass, find_task, static_of
from coalesce.configuration.values import Kind, coerce, floats_of, kind_of_hyper
from coalesce.errors import Problem, nearest
from coalesce.experiment import DATA, KEYS, PRECISIONS, REMAINDERS, YOUNGER, Experiment
from coalesce.optim import OPTIMIZERS, SCHEDULES
from coalesce.optim.base import Rule
from coalesce.runner.plan import Trainer
from coalesce.task import Task

#: Which rules a section names.
RULES: dict[str, Mapping[str, type[Rule]]] = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}
#: The integers of a configuration and their bounds.
BOUNDS = {"steps": (1, 2**63 - 1), "batch_size": (1, 2**63 - 1), "seed": (0, 2**63 - 1)}
#: What the keys of ``data`` hold.
DATA_KINDS = {"remainder": Kind("choice", choices=REMAINDERS), "fold": Kind("int", optional=True)}

Section = tuple[Any, dict[str, Any], list[Problem]]


class Resolver:
    """Resolves the experiments of one base configuration.

    Sections are remembered: the experiments of a sweep share most of theirs, and looking a class up is slow.

    Args:
        base: the configuration that the experiments vary. A task argument that has neither annotation nor default
            holds what it holds here.
        trainer: whose settings stand in for what follows them, see `Hyper.follows`.
    """

    def __init__(self, base: Mapping[str, Any], trainer: Trainer):
        self._base = base
        self._trainer = trainer
        self._sections: dict[tuple[str, str], Section] = {}
        self._tasks: dict[Any, tuple[TaskClass | None, list[Problem]]] = {}

    @cached_property
    def base_resolved(self) -> Mapping[str, Any]:
        """The base with its defaults filled in, as far as it is right."""
        return self.resolve(self._base)[0]

    def names(self, section: str) -> Collection[str] | None:
        """The keys that a section of the base may have.

        Args:
            section: "task", "optimizer" or "schedule".

        Returns:
            None where any name may be one, or where the section itself is wrong, which `resolve` tells.
        """
        value = self._base.get(section)
        if section in RULES:
            name = value.get("name") if isinstance(value, Mapping) else value
            rule = RULES[section].get(name) if isinstance(name, str) else None
            return None if rule is None else ("name", *rule.hyper)
        task, problems = self._find(value.get("_target_") if isinstance(value, Mapping) else value)
        return None if task is None or problems or task.open else ("_target_", *task.kinds)

    def resolve(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Problem]]:
        """Resolve one configuration.

        Args:
            config: the keys of ``KEYS``; ``task``, ``optimizer`` and ``schedule`` may leave out what has a default, and
                ``data`` may be missing.

        Returns:
            The resolved configuration, what of it was introduced later (see `experiment_id`), and what is wrong.
        """
        resolved: dict[str, Any] = {}
        introduced: dict[str, Any] = {}
        problems: list[Problem] = []
        for key in KEYS:
            if key not in config and key not in ("data", *YOUNGER):
                problems.append(Problem(key, None, "is missing", "an experiment's keys are " + ", ".join(KEYS)))
                continue
            value = config.get(key)
            remembered = (key, repr(value))
            if remembered not in self._sections:
                self._sections[remembered] = self._section(key, value)
            resolved[key], later, found = self._sections[remembered]
            introduced |= later
            problems += found
        if not problems:
            problems += _check_micro_batches(resolved)
        problems += [
            Problem(key, value, "unknown key", ", ".join(KEYS), nearest(str(key), KEYS))
            for key, value in config.items()
            if key not in KEYS
        ]
        if not any(problem.key.split(".")[0] in RULES for problem in problems):
            problems += _beside(resolved)
        return resolved, introduced, problems

    def _section(self, key: str, value: Any) -> Section:
        if key in BOUNDS:
            value, problems = _bounded(key, value)
            return value, {}, problems
        if key in RULES:
            return resolve_rule(key, value, RULES[key], self._trainer)
        if key == "data":
            return resolve_data(value)
        if key == "precision":
            return _precision(value)
        return self._task(value)

    def _task(self, config: Any) -> Section:
        config = {"_target_": config} if isinstance(config, str | type) else config
        if not isinstance(config, Mapping) or "_target_" not in config:
            rule = "must name the task class under _target_"
            if isinstance(config, Task):
                rule = "is an object; give the class, and its arguments in a mapping"
            return config, {}, [Problem("task", config, rule, "a mapping of _target_ and the constructor's arguments")]
        target = config["_target_"]
        task, problems = self._find(target)
        if task is None or problems:
            return config, {}, problems
        base = self._base.get("task")
        like = base if isinstance(base, Mapping) and base.get("_target_") == target else {}
        arguments, problems = resolve_arguments(task, config, like)
        introduced = {f"task.{name}": value for name, value in task.cls.introduced.items()}
        return {"_target_": task.target, **arguments}, introduced, problems

    def _find(self, target: Any) -> tuple[TaskClass | None, list[Problem]]:
        if target not in self._tasks:
            self._tasks[target] = find_task(target)
        return self._tasks[target]


def _precision(value: Any) -> Section:
    value = YOUNGER["precision"] if value is None else value
    near = nearest(str(value), PRECISIONS)
    problems = [Problem("precision", value, "unknown precision", ", ".join(PRECISIONS), near)]
    return value, {"precision": YOUNGER["precision"]}, [] if value in PRECISIONS else problems


def resolve_arguments(
    task: TaskClass, config: Mapping[str, Any], like: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """Fill in and check the arguments of a task's constructor.

    Args:
        config: ``_target_`` and the arguments given.
        like: arguments of the base configuration: they tell the kind where nothing else does.

    Returns:
        Every argument in the constructor's order, and what is wrong.
    """
    arguments: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, kind in task.kinds.items():
        key = f"task.{name}"
        if name in config:
            value, given = config[name], True
        elif name in task.defaults:
            value, given = task.defaults[name], False
        else:
            problems.append(Problem(key, None, f"is missing: {task.target} needs it"))
            continue
        arguments[name], found = coerce(key, value, _known(kind, value, like.get(name, task.defaults.get(name))))
        # a default is the class's own business, as long as a configuration can hold it: it may be infinite
        if given and name in task.defaults and _same(value, task.defaults[name]):
            given = False
        problems += found if given else [p for p in found if "cannot hold" in p.rule]
    for name, value in config.items():
        if name == "_target_" or name in task.kinds:
            continue
        key = f"task.{name}"
        if task.open:
            arguments[str(name)], found = coerce(key, value, _known(Kind(), value, like.get(name)))
            problems += found
        else:
            rule = f"unknown argument of {task.target}"
            problems.append(Problem(key, value, rule, ", ".join(task.kinds), nearest(str(name), task.kinds)))
    return arguments, problems


def _known(kind: Kind, value: Any, like: Any) -> Kind:
    """The kind; where it says nothing, floats are what are floats in the base configuration (law 3)."""
    if kind.base == "either":
        number = isinstance(value, int) and not isinstance(value, bool)
        return Kind("float", kind.optional) if number and isinstance(like, float) else kind
    if kind.base not in ("any", "number"):
        return kind
    held = floats_of(like)
    container = {"list": list | tuple, "mapping": Mapping}.get(held.base, object)
    return replace(held, optional=kind.optional) if held.base != "any" and isinstance(value, container) else kind


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _beside(resolved: Mapping[str, Any]) -> list[Problem]:
    """What is wrong between a schedule and an optimiser that are right by themselves."""
    if "optimizer" not in resolved or "schedule" not in resolved:
        return []
    optimizer, schedule = OPTIMIZERS[resolved["optimizer"]["name"]], resolved["schedule"]
    return SCHEDULES[schedule["name"]].check_beside(schedule, optimizer, "schedule")


def resolve_rule(section: str, config: Any, rules: Mapping[str, type[Rule]], trainer: Trainer) -> Section:
    """Fill in and check an optimiser or a schedule.

    Args:
        section: "optimizer" or "schedule".
        config: its name, or a mapping of ``name`` and hyperparameters.
        trainer: see `Resolver`.
    """
    config = {"name": config} if isinstance(config, str) else config
    key, valid = f"{section}.name", ", ".join(rules)
    if not isinstance(config, Mapping) or "name" not in config:
        return config, {}, [Problem(section, config, "must have a name", valid)]
    name = config["name"]
    if name not in rules:
        return config, {}, [Problem(key, name, f"unknown {section}", valid, nearest(str(name), rules))]
    rule = rules[name]
    coerced: dict[str, Any] = {}
    mine: list[Problem] = []
    for option, value in config.items():
        if option in rule.hyper:
            coerced[option], found = coerce(f"{section}.{option}", value, kind_of_hyper(rule.hyper[option]))
            valid = rule.hyper[option].valid()
            mine += [replace(p, valid=valid) for p in found]
        else:
            coerced[option] = value
    for option, hyper in rule.hyper.items():
        if hyper.follows and coerced.get(option) is None:
            coerced[option] = getattr(trainer, hyper.follows)
    resolved, theirs = rule.check(coerced, section)
    # what is no number here is none there either, and is to be said once: in the words that tell the way out
    said = {problem.key for problem in mine}
    problems = mine + [p for p in theirs if p.key not in said]
    introduced = {f"{section}.{option}": value for option, value in rule.introduced.items()}
    return resolved, introduced, problems


def _check_micro_batches(config: Mapping[str, Any]) -> list[Problem]:
    """A batch that is processed in micro-batches must fall into equal ones."""
    size, count = config["batch_size"], config["optimizer"]["accumulate"]
    if size % count == 0:
        return []
    near = [n for n in range(1, min(size, 4096) + 1) if size % n == 0]
    valid = ", ".join(str(n) for n in sorted(near, key=lambda n: abs(n - count))[:4])
    return [Problem("optimizer.accumulate", count, f"must divide batch_size={size} into equal micro-batches", valid)]


def resolve_data(config: Any) -> Section:
    """Fill in and check ``data``: how the samples become batches."""
    config = {} if config is None else config
    if not isinstance(config, Mapping):
        return config, {}, [Problem("data", config, "must be a mapping", ", ".join(DATA))]
    resolved: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, default in DATA.items():
        resolved[name], found = coerce(f"data.{name}", config.get(name, default), DATA_KINDS[name])
        problems += found
    fold = resolved["fold"]
    if isinstance(fold, int) and not isinstance(fold, bool) and fold < 0:
        problems.append(Problem("data.fold", fold, "must be at least 0", "an integer, at least 0, or null: no fold"))
    problems += [
        Problem(f"data.{name}", value, "unknown key", ", ".join(DATA), nearest(str(name), DATA))
        for name, value in config.items()
        if name not in DATA
    ]
    return resolved, {}, problems


def _bounded(key: str, given: Any) -> tuple[Any, list[Problem]]:
    low, high = BOUNDS[key]
    valid = f"an integer from {low} to {high}" if key == "seed" else f"an integer, at least {low}"
    value, problems = coerce(key, given, Kind("int"))
    if problems:
        return value, [replace(problem, valid=valid) for problem in problems]
    if not low <= value <= high:
        return value, [Problem(key, given, f"must be {valid}", valid)]
    return value, []


def rides(experiment: Experiment, key: str, value: Any) -> bool:
    """Whether a leaf of an experiment's configuration may differ within one graph (law 3: floats ride).

    What rides: the seed, the number of steps, hyperparameters that count steps (``schedule.warmup``), the number of a
    fold, which only picks samples of shared data, and floats, except those that the task class names in ``static``.

    Args:
        key: dotted; the items of lists count as keys (``optimizer.betas.0``).
    """
    if key in ("seed", "steps"):
        return True
    if key == "data.fold":
        return value is not None
    section, _, name = key.partition(".")
    is_float = isinstance(value, float)
    top = name.partition(".")[0]
    if section in RULES:
        hyper = RULES[section][experiment.config[section]["name"]].hyper.get(top)
        return is_float or (hyper is not None and hyper.length and value is not None)
    if section == "task" and is_float:
        static = static_of(experiment.config["task"]["_target_"])
        return not any(name == held or name.startswith(held + ".") for held in static)
    return False
