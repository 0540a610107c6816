"""What a key may hold, and how a value that was written down becomes it."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin

from coalesce.errors import Problem, nearest
from coalesce.optim.base import Count, Factors, Hyper, Lengths, Patterns, Word

#: What a text must look like to be read as a number: YAML 1.2's decimal numbers.
NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
#: Text that stands for a number which no key takes; recognised so that the message can say so.
NOT_FINITE = re.compile(r"[+-]?\.?(inf|infinity|nan)", re.IGNORECASE)
#: ``010`` is 8 in YAML 1.1 and in C, 10 in YAML 1.2 and for most people: it is refused.
OCTAL = re.compile(r"[+-]?0[\d_]+")
#: What OmegaConf writes for a value that has to be given.
MISSING = "???"
NONE = ("None", "none", "null", "Null", "NULL", "~")
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NAMES = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a finite number",
    "number": "a finite number",
    "text": "text",
    "list": "a list",
    "mapping": "a mapping",
}


@dataclass(frozen=True)
class Kind:
    """What a key holds.

    Args:
        base: one of the keys of ``NAMES``; "choice"; "either", of several types; or "any": nothing is known about it.
        optional: whether None is a value.
        item: of a list of any length: the kind of its items. Of a mapping: the kind of its values.
        items: of a list of fixed length: the kinds of its items, one by one.
        fields: of a mapping with known keys: their kinds.
        choices: the only valid values, if they are listed.
        as_tuple: whether a list arrives as a tuple.
        hint: how the key could hold something else; stands at the end of a message.
    """

    base: str = "any"
    optional: bool = False
    item: Kind | None = None
    items: tuple[Kind, ...] | None = None
    fields: Mapping[str, Kind] | None = None
    choices: tuple[Any, ...] = ()
    as_tuple: bool = False
    hint: str = ""

    @property
    def valid(self) -> str:
        """The valid values, in words."""
        if self.choices:
            text = ", ".join(str(choice) for choice in self.choices)
        elif self.items is not None:
            text = f"a list of {len(self.items)}"
        else:
            text = NAMES.get(self.base, "")
        return f"{text}, or null" if text and self.optional else text


def kind_of_value(value: Any) -> Kind:
    """The kind of key that holds ``value`` now; None tells nothing but that None is a value."""
    if value is None:
        return Kind(optional=True)
    if isinstance(value, bool):
        return Kind("bool")
    if isinstance(value, int):
        return Kind("int")
    if isinstance(value, float):
        return Kind("float")
    if isinstance(value, str):
        return Kind("text")
    if isinstance(value, Mapping):
        return Kind("mapping", fields={str(k): kind_of_value(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        kinds = [kind_of_value(v) for v in value]
        same = kinds[0] if kinds and all(kind == kinds[0] for kind in kinds) else Kind()
        return Kind("list", item=same, as_tuple=isinstance(value, tuple))
    return Kind()


def floats_of(value: Any) -> Kind:
    """The kind that makes floats of what are floats in ``value``, and leaves the rest alone."""
    if isinstance(value, float):
        return Kind("float")
    if isinstance(value, Mapping):
        return Kind("mapping", fields={str(k): floats_of(v) for k, v in value.items()})
    if isinstance(value, list | tuple) and value and all(isinstance(v, float) for v in value):
        return Kind("list", item=Kind("float"))
    return Kind()


def kind_of_hyper(hyper: Hyper) -> Kind:
    """The kind of an optimiser's or a schedule's hyperparameter."""
    if isinstance(hyper, Patterns):
        return Kind("list", item=Kind("text"))
    if isinstance(hyper, Factors):
        return Kind("mapping", item=Kind("float"))
    if isinstance(hyper, Lengths):
        return Kind("list", item=Kind("int"))
    if isinstance(hyper, Word):
        return Kind("choice" if hyper.choices else "text", hyper.optional, choices=hyper.choices)
    if isinstance(hyper.default, tuple):
        return Kind("list", hyper.optional, items=(Kind("float"),) * len(hyper.default))
    if hyper.length or isinstance(hyper, Count):
        return Kind("int", hyper.optional)
    found = kind_of_value(hyper.default)
    # a hyperparameter that is off by default (clip_norm) is a number when it is on
    return Kind("float" if found.base in ("any", "int") else found.base, hyper.optional)


def kind_of_annotation(annotation: Any, default: Any = None, has_default: bool = False) -> Kind:
    """The kind of a constructor's argument.

    A float is what is annotated or has a default so; the annotation decides where both speak.
    """
    kind = _annotated(annotation)
    if not has_default:
        return kind
    if default is None:
        return replace(kind, optional=True)
    if kind.base == "any":
        kind = replace(kind_of_value(default), optional=kind.optional)
        hint = f"its default {default!r} is one; annotate it as float to change that" if kind.base == "int" else ""
        return replace(kind, hint=hint)
    if kind.base == "number" and isinstance(default, float):
        return replace(kind, base="float")
    return replace(kind, as_tuple=True) if isinstance(default, tuple) else kind


def _annotated(annotation: Any) -> Kind:
    simple = {bool: "bool", int: "int", float: "float", str: "text", dict: "mapping", Mapping: "mapping"}
    if isinstance(annotation, type) and annotation in simple:
        return Kind(simple[annotation])
    if annotation in (list, tuple, Sequence):
        return Kind("list", as_tuple=annotation is tuple)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _union([_annotated(arg) for arg in args if arg is not type(None)], type(None) in args)
    if origin is Literal:
        return Kind("choice", None in args, choices=tuple(arg for arg in args if arg is not None))
    if origin is tuple and args and args[-1] is not Ellipsis:
        return Kind("list", items=tuple(_annotated(arg) for arg in args), as_tuple=True)
    if origin in (list, tuple, Sequence) and args:
        return Kind("list", item=_annotated(args[0]), as_tuple=origin is tuple)
    if origin in (dict, Mapping) and len(args) == 2:
        return Kind("mapping", item=_annotated(args[1]))
    return Kind()


def _union(kinds: list[Kind], optional: bool) -> Kind:
    if len(kinds) == 1:
        return replace(kinds[0], optional=optional or kinds[0].optional)
    if {kind.base for kind in kinds} == {"int", "float"}:
        return Kind("number", optional)
    return Kind("either", optional)


def coerce(key: str, value: Any, kind: Kind) -> tuple[Any, list[Problem]]:
    """Turn a value as it was written into what the key holds.

    Text that can only mean a number, a boolean or None becomes it, where the key holds such; an integer becomes a
    float where the key holds floats, and a whole float an integer where it holds integers (``steps=1e4``).

    Args:
        key: dotted, for the messages.

    Returns:
        The value, as it was if anything is wrong with it; and what is wrong.
    """
    if isinstance(value, str) and value == MISSING:
        return value, [Problem(key, value, "is missing: it has no default", kind.valid)]
    if value is None or (kind.optional and isinstance(value, str) and value in NONE):
        if kind.optional or kind.base == "any":
            return None, []
        return value, [Problem(key, value, "must not be null", kind.valid)]
    if kind.base == "choice":
        return _choice(key, value, kind)
    if kind.base == "list":
        return _list(key, value, kind)
    if kind.base == "mapping":
        return _mapping(key, value, kind)
    if kind.base in ("any", "either"):
        return _any(key, value)
    if isinstance(value, Mapping):
        return value, [_problem(key, value, "not a mapping", kind)]
    if isinstance(value, list | tuple):
        sweep = f"to sweep it, write 'sweep.params={{{key}: {_yaml(value)}}}'"
        return value, [_problem(key, value, f"not a list; {sweep}", kind)]
    if kind.base == "bool":
        return _bool(key, value, kind)
    if kind.base == "text":
        if isinstance(value, str):
            return value, []
        return value, [_problem(key, value, "put it into quotes", kind)]
    return _number(key, value, kind)


def _problem(key: str, value: Any, more: str, kind: Kind) -> Problem:
    names = {"bool": "a boolean", "int": "one integer", "float": "one number", "number": "one number", "text": "text"}
    if not isinstance(value, list | tuple):
        names |= {"int": "an integer", "float": "a number", "number": "a number"}
    more = "; ".join(part for part in (more, kind.hint) if part)
    joined = f"must be {names[kind.base]}" + (", " if more.startswith("not a") else "; " if more else "") + more
    return Problem(key, value, joined, kind.valid)


def _bool(key: str, value: Any, kind: Kind) -> tuple[Any, list[Problem]]:
    if isinstance(value, bool):
        return value, []
    if isinstance(value, str) and value.lower() in BOOLEANS:
        return BOOLEANS[value.lower()], []
    return value, [_problem(key, value, "", kind)]


def _number(key: str, given: Any, kind: Kind) -> tuple[Any, list[Problem]]:
    value = given
    if isinstance(given, str):
        text = given.strip()
        if OCTAL.fullmatch(text):
            return given, [_problem(key, given, "a leading zero is octal to some readers; leave it out", kind)]
        if NUMBER.fullmatch(text):
            digits = text.replace("_", "")
            value = int(digits) if re.fullmatch(r"[+-]?\d+", digits) else float(digits)
        elif NOT_FINITE.fullmatch(text):
            value = math.nan
        else:
            return given, [_problem(key, given, "", kind)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return given, [_problem(key, given, "", kind)]
    # an integer may be too large for a float (10**400); isfinite would raise
    if isinstance(value, float) and not math.isfinite(value):
        return given, [Problem(key, given, "must be finite", kind.valid)]
    if kind.base == "int":
        if value != int(value):
            return given, [_problem(key, given, "", kind)]
        return int(value), []
    if kind.base == "number" and isinstance(value, int):
        return value, []
    try:
        return float(value), []
    except OverflowError:
        return given, [Problem(key, given, "must be finite", kind.valid)]


def _choice(key: str, value: Any, kind: Kind) -> tuple[Any, list[Problem]]:
    for choice in kind.choices:
        if choice == value and isinstance(choice, bool) == isinstance(value, bool):
            return choice, []
    near = nearest(value, [c for c in kind.choices if isinstance(c, str)]) if isinstance(value, str) else ""
    return value, [Problem(key, value, "not a valid choice", kind.valid, near)]


def _list(key: str, value: Any, kind: Kind) -> tuple[Any, list[Problem]]:
    if not isinstance(value, list | tuple):
        return value, [Problem(key, value, "must be a list", kind.valid)]
    if kind.items is not None and len(kind.items) != len(value):
        return value, [Problem(key, value, f"must be a list of {len(kind.items)}", kind.valid)]
    kinds = kind.items if kind.items is not None else (kind.item or Kind(),) * len(value)
    pairs = [coerce(f"{key}.{i}", v, k) for i, (v, k) in enumerate(zip(value, kinds, strict=True))]
    result = [v for v, _ in pairs]
    return tuple(result) if kind.as_tuple else result, [p for _, found in pairs for p in found]


def _mapping(key: str, value: Any, kind: Kind) -> tuple[Any, list[Problem]]:
    if not isinstance(value, Mapping):
        return value, [Problem(key, value, "must be a mapping", kind.valid)]
    fields = kind.fields or {}
    result, problems = {}, []
    for name, item in value.items():
        known = fields.get(str(name), kind.item or Kind())
        result[str(name)], found = coerce(f"{key}.{name}", item, known)
        problems += found
    return result, problems


def _any(key: str, value: Any) -> tuple[Any, list[Problem]]:
    if isinstance(value, float) and not math.isfinite(value):
        return value, [Problem(key, value, "must be finite", "a finite number")]
    if isinstance(value, bool | int | float | str):
        return value, []
    if isinstance(value, list | tuple):
        return _list(key, value, Kind("list", as_tuple=isinstance(value, tuple)))
    if isinstance(value, Mapping):
        return _mapping(key, value, Kind("mapping"))
    rule = f"is a {type(value).__name__}, which a configuration cannot hold"
    return value, [Problem(key, value, rule, "numbers, text, booleans, null, lists and mappings of these")]


def _yaml(value: Any) -> str:
    """A value as one writes it on the command line."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_yaml(v) for v in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def plain(value: Any) -> Any:
    """Lists, mappings and Python's own scalars from whatever a caller holds: NumPy, torch, ranges, tuples stay."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(v) for v in value)
    if isinstance(value, list | range):
        return [plain(v) for v in value]
    if hasattr(value, "tolist") and not isinstance(value, type):
        return plain(value.tolist())
    # NumPy's float64 is a float by inheritance; its text form is not that of one
    return float(value) if isinstance(value, float) else value
