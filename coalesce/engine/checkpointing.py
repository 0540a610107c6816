"""Piecewise recomputation for a single model in a plain loop: `torch.utils.checkpoint`, placed piece by piece.

In a sweep the tape does it (`recompute`); the pieces are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coalesce.engine.pieces import recomputed
from coalesce.errors import ConfigError, Problem, nearest


def checkpoint_pieces(model: nn.Module, pieces: str | int | Sequence[str] = "auto") -> nn.Module:
    """Let the backward pass compute a model's pieces again instead of keeping their activations.

    Of a piece its input is kept. What the backward pass needs beside it is computed again when the walk reaches the
    piece, and freed behind it: about one more forward pass, for the activations of one piece at a time. Losses and
    gradients are those of the model without it: dropout draws the same masks, and buffers (BatchNorm's statistics)
    change once. As one piece the whole model saves nothing, since the backward pass brings all of it back at once.

    Args:
        model: is changed in place: its modules, parameters and ``state_dict`` stay what they are.
        pieces: "auto": blocks that repeat (modules of one container with the same structure), or, if there are none,
            the largest modules that hold at most an eighth of the parameters; a number n: the largest that hold at
            most 1/n; or names of modules, or patterns of names: ``["blocks.*"]``. A piece inside another one is left
            out.

    Returns:
        The model.

    Raises:
        ConfigError: a name that matches no module, or a number below 1.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)]
        >>> model = coalesce.checkpoint_pieces(nn.Sequential(*blocks))
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> [type(block.forward).__name__ for block in model]
        ['Checkpointed', 'Checkpointed', 'Checkpointed', 'Checkpointed']

    Source:
        T. Chen et al., "Training deep nets with sublinear memory cost" (2016); `torch.utils.checkpoint`.
    """
    modules = dict(model.named_modules())
    names = recomputed(model, _checked(model, pieces))
    for name in names:
        inside = any(other == "" or name.startswith(f"{other}.") for other in names if other != name)
        if not inside and not isinstance(modules[name].forward, Checkpointed):
            # an attribute of the instance: nn.Module.__call__ finds it before the class's method, and hooks stay
            modules[name].forward = Checkpointed(modules[name])
    return model


def _checked(model: nn.Module, pieces: str | int | Sequence[str]) -> str | int | Sequence[str]:
    names = [name for name, _ in model.named_modules() if name]
    if isinstance(pieces, str):
        pieces = pieces if pieces == "auto" else [pieces]
    problems = []
    if isinstance(pieces, int):
        if pieces < 1:
            problems.append(Problem("pieces", pieces, "must be at least 1"))
    elif pieces != "auto":
        problems = [
            Problem("pieces", p, "matches no module of the model", ", ".join(names), nearest(p, names))
            for p in pieces
            if not recomputed(model, [p])
        ]
    if problems:
        raise ConfigError(problems)
    return pieces


class Checkpointed:
    """What stands in the place of a module's ``forward``."""

    def __init__(self, module: nn.Module):
        self.module = module
        #: what somebody put in the place of the class's method before us
        self.replaced = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.replaced or type(self.module).forward.__get__(self.module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # in evaluation as well: a module may count its calls there, and a part of it may be in training
        buffers = _Buffers(self.module)
        if not buffers.before:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        contexts = nullcontext(), buffers
        returned = checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)
        buffers.forget_what_stayed()
        return returned


class _Buffers:
    """A module's buffers as they stand before its forward pass; as a context, they stand so again.

    A second forward pass must see what the first one saw (spectral norm's vectors decide the weight), and must leave
    nothing behind (BatchNorm's statistics would count the batch twice). Other tensors are put in their place meanwhile,
    since autograd would notice if these were written.
    """

    def __init__(self, module: nn.Module):
        self.before = [
            (part._buffers, name, buffer.detach().clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._now: list[Tensor | None] = []

    def forget_what_stayed(self) -> None:
        """Let go of the copies of what the forward pass did not write (masks, tables of positions).

        By their values: batch normalisation does not count its writes in a tensor's version. On other devices than the
        CPU one would have to wait for the values, and all copies stay.
        """
        self.before = [entry for entry in self.before if not _same(entry[0].get(entry[1]), entry[2])]

    def __enter__(self) -> None:
        self._now = [kept.get(name) for kept, name, *_ in self.before]
        for kept, name, copy in self.before:
            # the pass may write into it, and may come again
            kept[name] = copy.clone()

    def __exit__(self, *raised: object) -> None:
        for (kept, name, *_), tensor in zip(self.before, self._now, strict=True):
            kept[name] = tensor
        self._now = []


def _same(now: Tensor | None, before: Tensor) -> bool:
    return now is not None and before.device.type == "cpu" and now.shape == before.shape and torch.equal(now, before)
