"""Pieces of a model: where the trace of a step is cut into segments.

A cut has two uses. What is born behind it lives until the segment that needs it last, so that one piece's gradients
are gone before the next one's are born; and pieces that look alike compile once. It costs a call, and the compiler
fuses nothing across it, so that small models stay whole.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coalesce.engine.trace import cut_here, label, latest

#: Stacked parameters (bytes of all lanes) from which memory is worth a cut.
LARGE_BYTES = 32 * 2**20

#: The share of them that a piece has at most, where the model's layers allow it.
SHARE = 1 / 8


def choose(model: nn.Module, width: int) -> tuple[str, ...]:
    """The names of a model's pieces.

    Blocks that repeat are pieces: modules of one container with the same structure and at least two layers that have
    parameters. Of a model with many parameters, so are the largest modules that hold at most `SHARE` of them.

    Args:
        width: lanes.
    """
    total = _bytes(model)
    most = total * SHARE if total * width >= LARGE_BYTES else total
    return tuple(_descend("", model, most))


def matching(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """The names of the modules that a user's patterns name (`fnmatch`, on the dotted name)."""
    return tuple(n for n, _ in model.named_modules() if n and any(fnmatchcase(n, p) for p in patterns))


def piece_of(name: str, pieces: Sequence[str]) -> str:
    """The innermost piece that a parameter belongs to, or nothing."""
    return max((p for p in pieces if name.startswith(f"{p}.")), key=len, default="")


def recomputed(model: nn.Module, setting: str | int | Sequence[str] | None) -> tuple[str, ...]:
    """The names of the pieces that the backward pass computes again.

    Args:
        setting: "auto": blocks that repeat, or, if there are none, the largest modules that hold at most `SHARE` of the
            parameters; a number n: the largest modules that hold at most 1/n of them, the whole model for 1; or
            patterns of names; None: no piece.
    """
    if setting is None:
        return ()
    if isinstance(setting, int):
        return tuple(_descend("", model, _bytes(model) / setting)) if setting > 1 else ("",)
    if setting == "auto":
        return tuple(_descend("", model, _bytes(model))) or tuple(_descend("", model, _bytes(model) * SHARE))
    return matching(model, setting)


@contextmanager
def cut_at(model: nn.Module, pieces: Sequence[str], again: Sequence[str] = ()) -> Iterator[None]:
    """Cut what is traced meanwhile where a piece begins and ends, on the way forward and on the way back.

    No operation marks the place: hooks note how far the trace has come. So a cut cannot change what is computed, and
    any place is a sound one.

    Args:
        pieces: names of modules.
        again: names of those that the backward pass is to compute again, which are pieces as well.
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for name in dict.fromkeys([*again, *pieces]):
            region = Region() if name in again else None
            before = modules[name].register_forward_pre_hook(partial(_enter, region), with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(modules[name].register_forward_hook(partial(_leave, region)).remove)
        yield


class Region:
    """A part of the forward pass that the backward pass computes again. Of nested ones the outermost counts."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._begun: list[Any] = []

    def begin(self, values: Any) -> None:
        """Args: values: what enters it, any structure of tensors."""
        cut(values)
        self._begun.append(latest())

    def end(self, values: Any) -> None:
        """Args: values: what leaves it."""
        label(self._begun.pop(), region=next(self._numbers))
        cut(values)


def _enter(region: Region | None, module: nn.Module, args: Any, kwargs: Any) -> None:
    (cut if region is None else region.begin)([args, kwargs])


def _leave(region: Region | None, module: nn.Module, args: Any, output: Any) -> None:
    (cut if region is None else region.end)(output)


def cut(values: Any) -> None:
    """Cut the trace here, and on the way back where these values' gradients are whole."""
    cut_here()
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.requires_grad:
            # called when the gradient is whole: the piece behind this place is through
            value.register_hook(lambda _: cut_here())


def _descend(name: str, module: nn.Module, most: float) -> Iterator[str]:
    """The pieces below a module that is none itself."""
    children = [(f"{name}.{n}" if name else n, child) for n, child in module.named_children()]
    repeated: Counter[Any] = Counter()
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        repeated = Counter(_structure(child) for _, child in children)
    for path, child in children:
        size = _bytes(child)
        if size == 0:
            continue
        block = repeated[_structure(child)] > 1 and _layers(child) > 1
        if size > most and any(True for _ in child.children()):
            yield from _descend(path, child, most)
        elif block or most < _bytes(module):
            yield path
        else:
            yield from _descend(path, child, most)


def _structure(module: nn.Module) -> Any:
    return type(module), tuple((n, tuple(p.shape), p.dtype) for n, p in module.named_parameters())


def _layers(module: nn.Module) -> int:
    return sum(any(True for _ in m.parameters(recurse=False)) for m in module.modules())


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())
