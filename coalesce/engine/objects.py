"""Python attributes that differ between experiments: found, and replaced by a lane's own values while a graph runs.

A task's ``self.label_smoothing``, a dropout layer's ``p`` or a fixed random projection kept in a plain attribute are
state that `state_dict` does not know. A graph traced from one experiment would silently give every lane that
experiment's value. So one experiment per kind of difference is built and compared with the template: a float or a
tensor that differs becomes an input of the graph, anything else that differs is an error.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import contextmanager
from numbers import Number
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from coalesce.engine.rules import user_line
from coalesce.errors import TaskError

#: "closure" is a variable of the function before it: its place in ``__closure__`` and its name.
Step = tuple[Literal["attribute", "item", "closure"], Any]
Path = tuple[Step, ...]

# What every nn.Module has: parameters, buffers, submodules, hooks, the training flag.
_MODULE_INTERNALS = frozenset(vars(nn.Module()))

# Keys by which two builds of one thing agree; objects that are keys by their identity never do.
_KEYS = (str, bytes, int, float, bool, tuple, type, types.NoneType)


class Alias(NamedTuple):
    """Stands for a parameter or buffer of the model that something else refers to as well."""

    name: str


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


def spell(path: Path) -> str:
    """A path as the user would write it: ``model.0.p``, ``task.rates[1]``, ``model.act<slope>`` for a closure's."""
    text = ""
    for kind, name in path:
        if kind == "closure":
            text += f"<{name[1]}>"
        elif kind == "item" and text.endswith(("._parameters", "._buffers")):
            text = f"{text.rpartition('.')[0]}.{name}"
        else:
            text += f"[{name!r}]" if kind == "item" else (f".{name}" if text else str(name))
    return text


def attributes(roots: Mapping[str, object]) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf that hangs on some objects by attributes, lists, tuples, dicts, closures and partials.

    Args:
        roots: name → object. The parameters and buffers of ``roots["model"]`` are left out where they are
            registered, and are an `Alias` elsewhere. What is reached twice is yielded once.
    """
    names, seen = _state_names(roots), set[int]()

    def visit(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        if _is_leaf(value):
            yield path, names.get(id(value), value)
        elif id(value) not in seen:
            seen.add(id(value))
            for step, child in _children(value, names):
                yield from visit((*path, *step), child)

    for name, root in roots.items():
        yield from visit((("attribute", name),), root)


def differing(left: Mapping[str, object], right: Mapping[str, object]) -> list[tuple[Path, Any, Any]]:
    """The leaves at which two sets of roots differ: (path, left value, right value); a missing one reads MISSING.

    Where the kind of an object differs, its two classes are the values.
    """
    names, seen = (_state_names(left), _state_names(right)), set[tuple[int, int]]()

    def visit(path: Path, a: Any, b: Any) -> Iterator[tuple[Path, Any, Any]]:
        # the same object, a logger or a cached function, holds the same
        if a is b or (id(a), id(b)) in seen:
            return
        if _is_leaf(a) or _is_leaf(b):
            a, b = names[0].get(id(a), a), names[1].get(id(b), b)
            if not _equal(a, b):
                yield path, a, b
            return
        seen.add((id(a), id(b)))
        if _kind(a) != _kind(b):
            yield path, type(a), type(b)
            return
        mine, yours = dict(_children(a, names[0])), dict(_children(b, names[1]))
        for step in [*mine, *(s for s in yours if s not in mine)]:
            yield from visit((*path, *step), mine.get(step, MISSING), yours.get(step, MISSING))

    return [found for name in left for found in visit((("attribute", name),), left[name], right[name])]


def lookup(roots: Mapping[str, object], path: Path) -> Any:
    """The value at a path."""
    value: Any = roots[path[0][1]]
    for kind, name in path[1:]:
        if kind == "closure":
            value = value.__closure__[name[0]].cell_contents
        else:
            value = getattr(value, name) if kind == "attribute" else value[name]
    return value


@contextmanager
def installed(roots: Mapping[str, object], values: Mapping[Path, Any]) -> Iterator[None]:
    """Put values at paths for the time of a ``with`` block.

    Raises:
        TaskError: a path leads through an object that cannot be changed.
    """
    undo: list[Callable[[], None]] = []
    try:
        for path, value in values.items():
            undo.append(_put(roots, path, value))
        yield
    finally:
        for step in reversed(undo):
            step()


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Tensor | Number | str | bytes | type | None | set | frozenset | _Missing):
        return True
    # NumPy's arrays and scalars, without importing it; functions in C, which hold nothing
    return _is_array(value) or isinstance(value, types.BuiltinFunctionType)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "dtype")


def _kind(value: Any) -> Any:
    """What must be equal for two objects to be compared part by part. Classes made anew at each build are alike."""
    code = getattr(value, "__code__", None) if isinstance(value, types.FunctionType) else None
    return type(value).__module__, type(value).__qualname__, code


def _children(value: Any, names: Mapping[int, Alias]) -> Iterator[tuple[Path, Any]]:
    """What an object holds: (the steps to it, it)."""
    if isinstance(value, nn.Module):
        for name, child in vars(value).items():
            if name not in _MODULE_INTERNALS:
                yield (("attribute", name),), child
        for name, module in value._modules.items():
            if module is not None:
                yield (("attribute", name),), module
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(value, kind).items():
                # a module that the model does not hold: a teacher in the task, layers in a plain list
                if tensor is not None and id(tensor) not in names:
                    yield (("attribute", kind), ("item", name)), tensor
    elif isinstance(value, Mapping):
        yield from (((("item", key),), item) for key, item in value.items() if isinstance(key, _KEYS))
    elif isinstance(value, list | tuple | deque):
        yield from (((("item", index),), item) for index, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (((("attribute", name),), getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield from (((("attribute", name),), getattr(value, name)) for name in ("__self__", "__func__"))
    elif isinstance(value, types.FunctionType):
        for index, (cell, name) in enumerate(zip(value.__closure__ or (), value.__code__.co_freevars, strict=True)):
            try:
                yield (("closure", (index, name)),), cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(value, name):
                yield (("attribute", name),), getattr(value, name)
    elif not isinstance(value, types.ModuleType):
        for name, child in getattr(value, "__dict__", {}).items():
            yield (("attribute", name),), child
        for name in _slots(type(value)):
            if hasattr(value, name):
                yield (("attribute", name),), getattr(value, name)


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield name


def _state_names(roots: Mapping[str, object]) -> dict[int, Alias]:
    """id of each of the model's own parameters and buffers → its name."""
    model = roots.get("model")
    if not isinstance(model, nn.Module):
        return {}
    return {id(t): Alias(n) for n, t in [*model.named_parameters(), *model.named_buffers()]}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        # bit for bit, NaN included
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and bool(((a == b) | ((a != a) & (b != b))).all())
    if type(a) is not type(b):
        return False
    if _is_array(a):
        return bool(a.dtype == b.dtype and a.shape == b.shape and ((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b) or (isinstance(a, float) and a != a and b != b)


def _put(roots: Mapping[str, object], path: Path, value: Any) -> Callable[[], None]:
    """Put a value at a path. Returns what takes it back."""
    parent, (kind, name) = lookup(roots, path[:-1]), path[-1]
    before = lookup({"": parent}, (("attribute", ""), path[-1]))
    if kind == "item" and isinstance(parent, tuple):
        # a tuple cannot be changed: another one takes its place
        items = [*parent[:name], value, *parent[name + 1 :]]
        make = getattr(type(parent), "_make", type(parent))
        return _put(roots, path[:-1], make(items))
    _assign(parent, kind, name, value, path)
    return lambda: _assign(parent, kind, name, before, path)


def _assign(parent: Any, kind: str, name: Any, value: Any, path: Path) -> None:
    if kind == "closure":
        parent.__closure__[name[0]].cell_contents = value
    elif kind == "item" and isinstance(parent, MutableMapping | MutableSequence):
        parent[name] = value
    elif kind == "item":
        raise TaskError(
            f"{spell(path)} differs between lanes, but a {type(parent).__name__} cannot be changed: use a dict"
        )
    elif isinstance(parent, functools.partial):
        state = {k: getattr(parent, k) for k in ("func", "args", "keywords")} | {name: value}
        parent.__setstate__((*state.values(), vars(parent) or None))  # type: ignore[attr-defined]
    elif name in getattr(parent, "__dict__", ()):
        # the instance's dict, past nn.Module.__setattr__ and past frozen dataclasses
        vars(parent)[name] = value
    else:
        object.__setattr__(parent, name, value)


class _Forbidden:
    """Stands where a value stood that must not be read."""

    def __init__(self, message: str):
        vars(self)["message"] = message


def forbidden(message: str) -> Any:
    """An object that raises `TaskError` with a message, and the user's line, whatever is done with it."""
    return _Forbidden(message)


def _refuse(self: _Forbidden, *args: Any, **kwargs: Any) -> Any:
    raise TaskError(f"{vars(self)['message']}\n{user_line()}")


# whatever can be asked of a number, a tensor or a container
_USES = (
    "abs add and array bool call ceil complex contains eq float floor floordiv format ge getattr getitem gt hash index "
    "int invert iter le len lt matmul mod mul ne neg next or pos pow radd rand repr rfloordiv rmatmul rmod rmul ror "
    "round rpow rsub rtruediv rxor setitem str sub truediv trunc xor"
)
for _use in _USES.split():
    setattr(_Forbidden, f"__{_use}__", _refuse)
