"""Piecewise recomputation for a single model in a plain loop: `torch.utils.checkpoint`, placed piece by piece.

In a sweep the tape does it (`recompute`); the pieces are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from coalesce.engine.pieces import recomputed
from coalesce.errors import ConfigError, Problem, nearest


def checkpoint_pieces(model: nn.Module, pieces: str | int | Sequence[str] = "auto") -> nn.Module:
    """Let the backward pass compute a model's pieces again instead of keeping their activations.

    Of a piece its input is kept. What the backward pass needs beside it is computed again when the walk reaches the
    piece, and freed behind it: about one more forward pass, for the activations of one piece at a time. Losses and
    gradients are those of the model without it: dropout draws the same masks, and buffers (BatchNorm's statistics)
    change once. As one piece the whole model saves nothing, since the backward pass brings all of it back at once.

    The code of a piece runs twice. What it does beside its result happens twice as well, unless it is a buffer: a
    counter in Python (``self.calls += 1``), a draw from a `torch.Generator` of its own.

    Args:
        model: is changed in place: its modules, parameters and ``state_dict`` stay what they are.
        pieces: "auto": blocks that repeat (modules of one container with the same structure), or, if there are none,
            the largest modules that hold at most an eighth of the parameters; a number n: the largest that hold at
            most 1/n; or names of modules, or patterns of names: ``["blocks.*"]``. A piece inside another one is left
            out.

    Returns:
        The model.

    Raises:
        TypeError: the model is no module.
        ConfigError: a name that matches no module, a number below 1, or nothing that could be a piece.

    Example:
        >>> import coalesce, torch
        >>> from torch import nn
        >>> blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)]
        >>> model = coalesce.checkpoint_pieces(nn.Sequential(*blocks))
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> [type(block.forward).__name__ for block in model]
        ['Checkpointed', 'Checkpointed', 'Checkpointed', 'Checkpointed']

    Source:
        T. Chen et al., "Training deep nets with sublinear memory cost" (2016); `torch.utils.checkpoint`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"checkpoint_pieces takes an nn.Module, not a {type(model).__name__}")
    modules = dict(model.named_modules())
    for name in _chosen(model, pieces):
        if not isinstance(modules[name].forward, Checkpointed):
            # an attribute of the instance: nn.Module.__call__ finds it before the class's method, and hooks stay
            modules[name].forward = Checkpointed(modules[name], name)
    return model


#: What ``pieces`` may be, for messages.
_VALID = '"auto", a number of pieces, at least 1 (1: the whole model), or a list such as ["blocks.*"]'


def _chosen(model: nn.Module, pieces: Any) -> list[str]:
    """The names of the pieces, none inside another one."""
    names = [name for name, _ in model.named_modules() if name]
    given = [pieces] if isinstance(pieces, str) and pieces != "auto" else pieces
    problems = []
    if isinstance(given, list | tuple):
        if not given or not all(isinstance(p, str) for p in given):
            problems = [Problem("pieces", pieces, "must be names of modules", _VALID)]
        else:
            missing = [p for p in given if not recomputed(model, [p])]
            rule, valid = "matches no module of the model", ", ".join(names)
            problems = [Problem("pieces", p, rule, valid, nearest(p, names)) for p in missing]
    elif isinstance(given, bool) or not (given == "auto" or isinstance(given, int)):
        problems = [Problem("pieces", pieces, "must be auto, a number or names", _VALID)]
    elif isinstance(given, int) and given < 1:
        problems = [Problem("pieces", pieces, "must be at least 1", _VALID)]
    found = [] if problems else recomputed(model, given)
    if not problems and not found:
        problems = [Problem("pieces", pieces, "finds nothing in this model that could be a piece", _VALID)]
    if problems:
        raise ConfigError(problems)
    return [n for n in found if not any(o == "" or n.startswith(f"{o}.") for o in found if o != n)]


class Checkpointed:
    """What stands in the place of a module's ``forward``.

    Args:
        name: of the module, for messages.
    """

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        #: what somebody put in the place of the class's method before us
        self.replaced = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.replaced or type(self.module).forward.__get__(self.module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # what is compiled is a graph without side effects, in which buffers change once; it knows no contexts
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        given = [(t, t._version) for t in tree_leaves([args, kwargs]) if isinstance(t, Tensor)]
        # in evaluation as well: a module may count its calls there, and a part of it may be in training
        moment = _Moment(self.module)
        contexts = nullcontext(), moment
        returned = checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)
        if any(tensor._version != version for tensor, version in given):
            raise RuntimeError(
                f"{self.name or 'the model'} ({type(self.module).__name__}) writes into its input, from which the "
                f"backward pass would have to compute it again: leave it out of checkpoint_pieces(model, pieces), or "
                f"let it write into a tensor of its own (ReLU(inplace=False), x = x + ... instead of x += ...)"
            )
        moment.forget_what_stayed()
        return returned


class _Moment:
    """What a module's forward pass finds beside its input; as a context, it finds it again.

    A second pass must see what the first one saw (spectral norm's vectors decide the weight; `functional_call` lends
    other parameters; ``eval()`` may have been called since), and must leave nothing behind (BatchNorm's statistics
    would count the batch twice). Other buffers are put in their place meanwhile, since autograd would notice if these
    were written.
    """

    def __init__(self, module: nn.Module):
        self.modes = [(part, part.training) for part in module.modules()]
        self.parameters = [(part._parameters, dict(part._parameters)) for part in module.modules()]
        self.buffers = [
            (part._buffers, name, buffer.detach().clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._undo: list[Callable[[], object]] = []

    def forget_what_stayed(self) -> None:
        """Let go of the copies of what the forward pass did not write (masks, tables of positions).

        By their values: batch normalisation does not count its writes in a tensor's version. On other devices than the
        CPU one would have to wait for the values, and all copies stay.
        """
        self.buffers = [entry for entry in self.buffers if not _same(entry[0].get(entry[1]), entry[2])]

    def __enter__(self) -> None:
        for part, training in self.modes:
            self._undo.append(partial(setattr, part, "training", part.training))
            part.training = training
        for parameters, then in self.parameters:
            self._undo.append(partial(parameters.update, dict(parameters)))
            parameters.update(then)
        for buffers, name, copy in self.buffers:
            self._undo.append(partial(buffers.__setitem__, name, buffers.get(name)))
            # the pass may write into it, and may come again
            buffers[name] = copy.clone()

    def __exit__(self, *raised: object) -> None:
        while self._undo:
            self._undo.pop()()


def _same(now: Tensor | None, before: Tensor) -> bool:
    return now is not None and before.device.type == "cpu" and now.shape == before.shape and torch.equal(now, before)
