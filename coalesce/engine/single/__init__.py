"""One plain model's training step, compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from coalesce.engine.single.step import CompiledStep
from coalesce.task import Loss

__all__ = ["CompiledStep", "compile_step"]


def compile_step(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Loss],
    optimizer: torch.optim.Optimizer,
    *,
    seed: int = 0,
    clip_norm: float | None = None,
    pieces: Literal["auto"] | Sequence[str] = "auto",
    checkpoint: Literal["auto"] | int | Sequence[str] | None = None,
    compile: bool = True,
) -> CompiledStep:
    """Compile one model's whole training step: forward, backward, and each parameter's update where its gradient is
    born.

    It is the engine of the sweeps with one lane: the same trace, the same segments, the same update rules. The model
    and the optimiser stay the plain ones, and after every step they hold the trained weights and their state.

    >>> import coalesce, torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> step = coalesce.compile_step(model, loss_fn, optimizer, compile=False)
    >>> batch = torch.ones(5, 4), torch.zeros(5, 1)
    >>> for _ in range(100):
    ...     loss = step(batch)
    >>> loss.item() < 1e-3
    True

    What stays as it was: parameter groups and their settings, which are read at every call, so that schedulers of
    `torch.optim.lr_scheduler` compile nothing; ``state_dict`` of both, which load into the plain model and optimiser
    and back, also between steps; BatchNorm's buffers; tied, frozen and unused parameters; ``model.train()`` and
    ``model.eval()``, as they are at the call; ``torch.autocast`` around the call or in ``loss_fn``. A loss that is NaN
    makes the weights NaN, as in a plain loop (in a sweep such a lane would be frozen).

    What differs:

    - Nothing calls ``backward()`` or ``optimizer.step()``, and ``.grad`` stays what it was. So an ``optimizer.step()``
      by mistake does nothing, unless there are gradients of your own: then it is one more plain step, upon the same
      state.
    - Random numbers inside the model (dropout) come from a stream of their own, keyed by ``seed`` and ``step.count``:
      the same at every run, but not those that `torch.manual_seed` would give.
    - Parameters that the optimiser does not have get no gradient.
    - The first call with a batch of new shapes takes one plain step for inspection, traces and compiles. So does a
      number that changes in an attribute of the model, or in a variable that ``loss_fn`` names; what changes at every
      step belongs into the batch, as a tensor. Python code in the model runs at no other call.
    - No value decides what is computed: no ``if loss > 1``, no ``x[mask]``. Errors name the line.

    Args:
        model: any `nn.Module` of real parameters.
        loss_fn: ``loss_fn(model, batch)``, plain PyTorch, returns a scalar, or a scalar and a dict of more scalars.
        optimizer: over parameters of the model; an instance of SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop,
            Adagrad, Adadelta or Adafactor of `torch.optim`.
        seed: of the random numbers inside the step, in [0, 2**63).
        clip_norm: clip the gradients' global norm to it, as `torch.nn.utils.clip_grad_norm_` does; every gradient is
            then alive at once.
        pieces: patterns (`fnmatch`) of the dotted names of modules at which the graph is cut into segments, or
            ``"auto"``: blocks that repeat, and large layers of a large model. The gradients of two segments are never
            alive together.
        checkpoint: what the backward pass computes again instead of keeping it: patterns of names; a number n, the
            largest modules that hold at most 1/n of the parameters; ``"auto"``, blocks that repeat; or nothing.
        compile: compile the segments, or run the same operations one by one.

    Returns:
        the step, to be called with a batch.

    Raises:
        TypeError: an argument is of the wrong kind, or an optimiser of one that has no rule.
        ValueError: the model and the optimiser do not belong together, or a setting is out of range.
    """
    return CompiledStep(model, loss_fn, optimizer, seed, clip_norm, pieces, checkpoint, compile)
