"""The numbers in Python attributes that a trace bakes in: watched, so that a change makes another graph."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

from torch import Tensor, nn

from coalesce.engine.objects import attributes, lookup, spell

Read = Callable[[], Any]

_KINDS = bool | Number | str | None
_LEAVES = _KINDS | Tensor


class Numbers:
    """What a model and a loss function hold of numbers and words.

    Of the model every attribute, as deep as lists, dicts and objects go. Of the function only what its code names:
    variables around it and attributes of these, so that a trainer's own counters are of no account.

    Args:
        model: the user's.
        function: the loss.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any]):
        found = {**_of_model(model), **_of_function(function)}
        numbers = {n: read for n, read in found.items() if isinstance(read(), _KINDS)}
        self._tensors = [read for n, read in found.items() if n not in numbers]
        self.names = list(numbers)
        self._reads = list(numbers.values())

    def values(self) -> tuple[Any, ...]:
        """As they stand now; what is no number any more is told by its identity."""
        return tuple([v if isinstance(v, _KINDS) else id(v) for v in [read() for read in self._reads]])

    def holding(self, tensors: Sequence[Tensor]) -> list[tuple[Read, Tensor]]:
        """Where some tensors are kept, and they as they are kept there."""
        wanted = {t.data_ptr() for t in tensors}
        found = [(read, read()) for read in self._tensors]
        return [(read, t) for read, t in found if isinstance(t, Tensor) and t.data_ptr() in wanted]

    def named(self) -> dict[str, Any]:
        """`values` by name."""
        return dict(zip(self.names, self.values(), strict=True))


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Which differ between two readings, in words."""
    missing = object()
    return [
        f"{name} from {before.get(name, 'nothing')!r} to {new!r}"
        for name, new in after.items()
        if (old := before.get(name, missing)) is not new and old != new
    ]


def _of_model(model: nn.Module) -> dict[str, Read]:
    roots: dict[str, object] = {"model": model}
    found: dict[str, Read] = {}
    for path, value in attributes(roots):
        if not isinstance(value, _LEAVES):
            continue
        parent, (kind, name) = lookup(roots, path[:-1]), path[-1]
        if kind == "closure":
            found[spell(path)] = _cell(parent.__closure__[name[0]])
        elif kind == "item" and isinstance(parent, Mapping):
            found[spell(path)] = functools.partial(parent.get, name)
        elif kind == "item" and isinstance(parent, list):
            found[spell(path)] = functools.partial(_item, parent, name)
        elif kind == "attribute":
            found[spell(path)] = functools.partial(getattr, parent, name, None)
    return found


def _of_function(function: Any) -> dict[str, Read]:
    found: dict[str, Read] = {}
    if isinstance(function, functools.partial):
        given = {n: functools.partial(function.keywords.get, n) for n in function.keywords}
        return {**{n: read for n, read in given.items() if isinstance(read(), _LEAVES)}, **_of_function(function.func)}
    if not isinstance(function, types.FunctionType | types.MethodType):
        function = function.__call__
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return found
    mentioned = set(function.__code__.co_names)

    def look(name: str, read: Read) -> None:
        value = read()
        if isinstance(value, _LEAVES):
            found[name] = read
        elif not isinstance(value, nn.Module | types.ModuleType | type | types.FunctionType):
            held = getattr(value, "__dict__", {})
            found.update(
                {
                    f"{name}.{inner}": functools.partial(getattr, value, inner, None)
                    for inner in mentioned & held.keys()
                    if isinstance(held[inner], _LEAVES)
                }
            )

    if owner is not None:
        look(function.__code__.co_varnames[0], lambda: owner)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        look(name, _cell(cell))
    for name in mentioned & function.__globals__.keys():
        look(name, functools.partial(function.__globals__.get, name))
    return found


def _cell(cell: types.CellType) -> Read:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # a variable that has no value yet
            return None

    return read


def _item(items: list[Any], index: int) -> Any:
    return items[index] if index < len(items) else None
