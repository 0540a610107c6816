"""Python attributes that differ between experiments: found, and replaced by a lane's own tensors while a graph runs.

A task's ``self.label_smoothing``, a dropout layer's ``p`` or a fixed random projection kept in a plain attribute are
state that `state_dict` does not know. A graph traced from one experiment would silently give every lane that
experiment's value. So one experiment per kind of difference is built and compared with the template: a float or a
tensor that differs becomes an input of the graph, anything else that differs is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

Step = tuple[Literal["attribute", "item"], Any]
Path = tuple[Step, ...]

# What every nn.Module has: parameters, buffers, submodules, hooks, the training flag.
_MODULE_INTERNALS = frozenset(vars(nn.Module()))


def spell(path: Path) -> str:
    """A path as the user would write it: ``model.0.p``, ``task.rates[1]``."""
    text = ""
    for kind, name in path:
        text += f"[{name!r}]" if kind == "item" else (f".{name}" if text else str(name))
    return text


def attributes(roots: Mapping[str, object]) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf that hangs on some objects by attributes, lists, tuples and dicts.

    Args:
        roots: name → object. Parameters, buffers and the internals of modules are left out; what is reached twice
            is yielded once.
    """
    seen: set[int] = set()
    for name, root in roots.items():
        yield from _walk(root, (("attribute", name),), seen)


def _walk(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Tensor | int | float | str | bytes | type | None):
        yield path, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        inside = {k: v for k, v in vars(value).items() if k not in _MODULE_INTERNALS}
        for name, child in [*inside.items(), *value.named_children()]:
            yield from _walk(child, (*path, ("attribute", name)), seen)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, (*path, ("item", key)), seen)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, ("item", index)), seen)
    elif hasattr(value, "__dict__") and not callable(value):
        for name, item in vars(value).items():
            yield from _walk(item, (*path, ("attribute", name)), seen)


def lookup(roots: Mapping[str, object], path: Path) -> Any:
    """The value at a path."""
    value: Any = roots[path[0][1]]
    for kind, name in path[1:]:
        value = getattr(value, name) if kind == "attribute" else value[name]
    return value


def differing(left: Mapping[str, object], right: Mapping[str, object]) -> list[tuple[Path, Any, Any]]:
    """The leaves at which two sets of roots differ: (path, left value, right value); a missing one reads MISSING."""
    mine, yours = dict(attributes(left)), dict(attributes(right))
    paths = [*mine, *(p for p in yours if p not in mine)]
    found = ((path, mine.get(path, MISSING), yours.get(path, MISSING)) for path in paths)
    return [(path, a, b) for path, a, b in found if not _equal(a, b)]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    return bool(a == b) or (isinstance(a, float) and a != a and b != b)


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


@contextmanager
def installed(roots: Mapping[str, object], values: Mapping[Path, Any]) -> Iterator[None]:
    """Put values at paths for the time of a ``with`` block.

    Raises:
        TypeError: a path leads through a tuple or another object that cannot be changed.
    """
    undo = []
    try:
        for path, value in values.items():
            parent = lookup(roots, path[:-1])
            kind, name = path[-1]
            undo.append((parent, kind, name, lookup(roots, path)))
            _put(parent, kind, name, value, path)
        yield
    finally:
        for parent, kind, name, value in reversed(undo):
            _put(parent, kind, name, value, ())


def _put(parent: Any, kind: str, name: Any, value: Any, path: Path) -> None:
    if kind == "attribute":
        # the instance's dict, past nn.Module.__setattr__ and past frozen dataclasses
        vars(parent)[name] = value
    elif isinstance(parent, MutableMapping | MutableSequence):
        parent[name] = value
    else:
        raise TypeError(f"{spell(path)} lies in a {type(parent).__name__}, which cannot be changed: use a list")
