"""How experiments are run: the trainer's settings, checked."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from coalesce.configuration.values import Kind, coerce, kind_of_annotation
from coalesce.engine.measure import CHOICES
from coalesce.errors import ConfigError, Problem, nearest
from coalesce.kernels import PRECISIONS
from coalesce.runner.plan import Trainer

#: Settings that take one of a few words.
WORDS = {
    "mode": ("max", "min"),
    "device": ("auto", "cpu", "cuda"),
    "on_error": ("continue", "stop"),
    "convolution": CHOICES,
    "matmul_precision": PRECISIONS,
}
#: Settings that are counts, and so at least 1.
COUNTS = ("width", "every", "evaluate_every", "evaluate_batch_size", "threads")


def check_trainer(settings: Mapping[str, Any]) -> Trainer:
    """Check the trainer's settings and fill in the defaults.

    Args:
        settings: any of the fields of `Trainer`.

    Raises:
        ConfigError: with every problem found.
    """
    hints = typing.get_type_hints(Trainer)
    fields = {field.name: field for field in dataclasses.fields(Trainer)}
    checked: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in settings.items():
        key = f"trainer.{name}"
        if name not in fields:
            problems.append(Problem(key, value, "unknown key", ", ".join(fields), nearest(str(name), fields)))
            continue
        if name in ("pieces", "checkpoint"):
            checked[name], found = _check_pieces(key, value)
            problems += found
            continue
        if name == "width":
            kind, valid = Kind("int"), 'an integer, at least 1, or "auto"'
        else:
            kind = kind_of_annotation(hints[name], fields[name].default, True)
            valid = kind.valid
        if name in COUNTS and name != "width":
            valid = "an integer, at least 1" + (", or null" if kind.optional or name == "every" else "")
        if name in WORDS:
            kind = Kind("choice", choices=WORDS[name])
            valid = kind.valid
        if name == "width" and value == "auto":
            checked[name] = value
            continue
        if name == "every" and value in (None, "null"):
            # as if it were left out
            continue
        if name == "show" and isinstance(value, str):
            value = [value]
        checked[name], found = coerce(key, value, kind)
        if not found and name in COUNTS and checked[name] is not None and checked[name] < 1:
            found = [Problem(key, value, "must be at least 1")]
        if name == "snapshot_minutes":
            valid = "a number, at least 0, or null"
            if not found and checked[name] is not None and not 0 <= checked[name] < math.inf:
                found = [Problem(key, value, "must be finite and at least 0")]
        if name == "memory_gib":
            valid = "a number above 0, or null for all that is free"
            if not found and checked[name] is not None and not 0 < checked[name] < math.inf:
                found = [Problem(key, value, "must be finite and above 0")]
        if not found and name == "monitor" and not value.strip():
            found = [Problem(key, value, "must name a metric", "val/accuracy, or any other that the task returns")]
        problems += [dataclasses.replace(p, valid=p.valid if name == "monitor" else valid) for p in found]
    if not any(p.key in ("trainer.every", "trainer.evaluate_every") for p in problems):
        every, evaluate_every = (checked.get(name, fields[name].default) for name in ("every", "evaluate_every"))
        if "every" not in checked:
            # an evaluation needs a boundary
            checked["every"] = every = min(every, evaluate_every)
        if evaluate_every % every:
            rule = f"must be a multiple of trainer.every, which is {every}"
            way = f"or trainer.every={math.gcd(every, evaluate_every)} beside it"
            valid = f"{every}, {2 * every}, {3 * every}, …; {way}"
            problems.append(Problem("trainer.evaluate_every", evaluate_every, rule, valid))
    if problems:
        raise ConfigError(problems)
    return Trainer(**checked)


def _check_pieces(key: str, value: Any) -> tuple[Any, list[Problem]]:
    """Where a model is cut, or, as ``trainer.checkpoint``, what of it is computed again."""
    checkpoint = key == "trainer.checkpoint"
    if value == "auto" or (checkpoint and value is None):
        return value, []
    if checkpoint and isinstance(value, int) and not isinstance(value, bool):
        return value, [] if value >= 1 else [Problem(key, value, "must be at least 1 piece")]
    if isinstance(value, list | tuple) and all(isinstance(v, str) and v.strip() for v in value):
        return tuple(value), []
    if checkpoint:
        valid = 'null, auto, a number such as 8, or a list such as ["blocks.*"]'
        return value, [Problem(key, value, "must be null, auto, a number of pieces, or patterns", valid)]
    return value, [Problem(key, value, "must be auto or patterns", 'auto, or a list such as ["blocks.*"]')]
