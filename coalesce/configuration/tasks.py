"""A task class found by its name, and what its constructor takes."""

from __future__ import annotations

import importlib
import inspect
import traceback
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coalesce.configuration.values import MISSING, Kind, kind_of_annotation
from coalesce.errors import Problem, nearest
from coalesce.task import METHODS, Task, missing_methods

KEY = "task._target_"
WAY = "a class by its dotted name: 'my_module.MyTask', in this folder or in an installed package"


@dataclass(frozen=True)
class TaskClass:
    """A task class and the arguments of its constructor.

    Args:
        target: the dotted name that imports it.
        kinds: argument → what it holds, in the constructor's order.
        defaults: the arguments that have one.
        open: whether it also takes arguments of any other name.
    """

    target: str
    cls: type[Task]
    kinds: Mapping[str, Kind]
    defaults: Mapping[str, Any]
    open: bool


def find_task(target: Any) -> tuple[TaskClass | None, list[Problem]]:
    """Import a task class and look at its constructor; or say what is wrong with it.

    Args:
        target: the dotted name, or the class itself.
    """
    if isinstance(target, type):
        found: Any = target
        target = f"{target.__module__}.{target.__qualname__}"
        if "<locals>" in target:
            rule = "is defined inside a function, where it cannot be imported; define it at the top of a module"
            return None, [Problem(KEY, target, rule, WAY)]
    elif target == MISSING:
        return None, [Problem(KEY, target, "is missing", WAY)]
    elif not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        return None, [Problem(KEY, target, "must name a class", WAY)]
    else:
        found, problem = _locate(target)
        if problem:
            return None, [problem]
    if not isinstance(found, type):
        return None, [Problem(KEY, target, f"is a {type(found).__name__}, not a class", WAY)]
    if not issubclass(found, Task):
        return None, [Problem(KEY, target, "is not a subclass of coalesce.Task", WAY)]
    lacking = missing_methods(found)
    if lacking:
        return None, [Problem(KEY, target, f"lacks the method {METHODS[name]}") for name in lacking]
    return _inspect(target, found)


def static_of(target: str) -> tuple[str, ...]:
    """The floats of an already resolved task class that must not ride."""
    found, _ = _locate(target)
    return tuple(getattr(found, "static", ()))


def _locate(target: str) -> tuple[Any, Problem | None]:
    """Import the longest part of a dotted name that is a module, and look the rest up in it."""
    parts = target.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # only the module that was asked for may be missing; one that it imports itself is the user's error
            if error.name and (name == error.name or name.startswith(error.name + ".")):
                continue
            return None, _import_failed(target, error)
        except Exception as error:  # importing runs the user's module, which may raise anything
            return None, _import_failed(target, error)
        return _attribute(target, found, parts[end:])
    rule = f"cannot be imported: no module named {parts[0]!r}" if len(parts) > 1 else "names no module"
    return None, Problem(KEY, target, rule, WAY)


def _attribute(target: str, module: Any, names: list[str]) -> tuple[Any, Problem | None]:
    found = module
    for name in names:
        if not hasattr(found, name):
            tasks = [
                k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task) and v is not Task
            ]
            rule = f"cannot be imported: {module.__name__} has no {name!r}"
            return None, Problem(KEY, target, rule, ", ".join(tasks), nearest(name, tasks))
        found = getattr(found, name)
    return found, None


def _import_failed(target: str, error: Exception) -> Problem:
    where = ""
    if isinstance(error, SyntaxError):
        where = f" ({error.filename}, line {error.lineno})"
    elif error.__traceback__ is not None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if "importlib" not in last.filename:
            where = f" ({last.filename}, line {last.lineno})"
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return Problem(KEY, target, f"cannot be imported: {type(error).__name__}: {message}{where}", WAY)


def _inspect(target: str, cls: type[Task]) -> tuple[TaskClass, list[Problem]]:
    try:
        hints = typing.get_type_hints(cls.__init__)
    except (NameError, TypeError, AttributeError):
        # annotations that only a type checker can read say nothing here; the defaults still do
        hints = {}
    kinds, defaults, problems, is_open = {}, {}, [], False
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            rule = f"its constructor takes {name!r} by position only; configuration passes arguments by name"
            problems.append(Problem(KEY, target, rule))
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            has_default = parameter.default is not parameter.empty
            kinds[name] = kind_of_annotation(hints.get(name), parameter.default, has_default)
            if has_default:
                defaults[name] = parameter.default
    problems += _check_static(target, cls, kinds, is_open)
    return TaskClass(target, cls, kinds, defaults, is_open), problems


def _check_static(target: str, cls: type[Task], kinds: Mapping[str, Kind], is_open: bool) -> list[Problem]:
    static: Any = cls.static
    if isinstance(static, str) or not all(isinstance(name, str) for name in static):
        return [Problem(KEY, target, f"its attribute static is {static!r}", "a tuple of names: ('threshold',)")]
    # a mapping's items are named by their path: "weights.a"
    unknown = [name for name in static if name.partition(".")[0] not in kinds] if not is_open else []
    rule = "its attribute static names {!r}, which is no argument of its constructor"
    return [Problem(KEY, target, rule.format(name), ", ".join(kinds), nearest(name, kinds)) for name in unknown]
