"""What stands in ``parameter.grad`` between ``backward()`` and ``step()``: a gradient that nobody can compute with."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

#: Said to whoever reads a gradient between backward() and step().
TOO_EARLY = (
    "this gradient does not exist yet. Under coalesce.BackProp a parameter's gradient is born inside optimizer.step(), "
    "used for the parameter's update, and freed; tensors that the optimizer does not have get none at all. What is "
    "usually done to all gradients between backward() and step() is an option: BackProp(..., clip_norm=1.0) in place "
    "of torch.nn.utils.clip_grad_norm_, clip_value= in place of clip_grad_value_, accumulate= for micro-batches. A "
    "GradScaler cannot be used: torch.autocast with bfloat16 needs none. To look at gradients, give the parameter a "
    "hook: parameter.register_hook(lambda gradient: ...)."
)

#: Said where backward() itself brings a parameter a gradient.
PAST_THE_OUTPUT = (
    "this loss depends on a parameter of the model{name} by another way than the model's output. Under "
    "coalesce.BackProp backward() ends at the output of `model(...)`. A hand-written L2 term is the optimizer's "
    "weight_decay; for any other term compute it in the model's forward (a model that returns its own loss is fine). A "
    "call of model.forward(...) or of another method or a submodule does not halt there either: call model(...)."
)


class Unborn(Tensor):
    """A gradient without memory that raises in every operation.

    Why not leave ``.grad`` at None: `torch.nn.utils.clip_grad_norm_` then finds nothing to clip and returns 0.0, and a
    second optimiser over the same parameters does nothing, both in silence.
    """

    # shape, dtype and device may be asked for; operations come to __torch_dispatch__
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Unborn:
        made: Unborn = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        # autograd adds the gradient of a hand-written term to what stands in .grad
        in_backward = torch._C._current_graph_task_id() != -1
        raise RuntimeError(PAST_THE_OUTPUT.format(name="") if in_backward else TOO_EARLY)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Unborn(shape={tuple(self.shape)}, dtype={self.dtype})"


@functools.lru_cache(maxsize=1024)
def _unborn(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Unborn:
    return Unborn(shape, dtype, device)


def mark(leaves: Iterable[Tensor]) -> None:
    """Put an unborn gradient wherever there is none."""
    for leaf in leaves:
        if leaf.grad is None:
            leaf.grad = _unborn(leaf.shape, leaf.grad_dtype or leaf.dtype, leaf.device)


def unmark(leaves: Iterable[Tensor]) -> None:
    """Take the unborn gradients away again."""
    for leaf in leaves:
        if isinstance(leaf.grad, Unborn):
            leaf.grad = None
