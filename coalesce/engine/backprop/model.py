"""The model that is handed back: the same object in all but what a call returns."""

from __future__ import annotations

import copy
import types
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coalesce.engine.backprop.walk import Walk

Model = TypeVar("Model", bound=nn.Module)


class Halting(nn.Module):
    """What a call of the model does under `BackProp`. The class of the model is the other parent of the one in use."""

    _walk: Walk

    def __init_subclass__(cls, **_: Any) -> None:
        """A register of subclasses that the user's class keeps must not hear of this one."""

    # torch.compile of this module compiles what the plain model does, and nothing around it
    @torch.compiler.disable(
        recursive=False,
        reason="coalesce.BackProp halts backward() between the model and the loss; with fullgraph=True compile the "
        "plain model and give that to BackProp",
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        walk = self._walk
        # no graph is made; or a checkpoint computes a piece of one again; or the model calls itself
        if not torch.is_grad_enabled() or walk.stage != "idle" or walk.in_forward:
            return super().__call__(*args, **kwargs)
        _refuse_trained_inputs((args, kwargs), walk)
        walk.begin()
        walk.in_forward = True
        try:
            output = super().__call__(*args, **kwargs)
        finally:
            walk.in_forward = False
            walk.end()
        return walk.halt(output)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As that of the optimiser."""
        _refuse_zeros(set_to_none)
        self._walk.drop()

    def __deepcopy__(self, memo: Any) -> nn.Module:
        """A plain model, of parameters that no optimiser has: what keeps averages of weights beside the model wants."""
        copied: nn.Module = copy.deepcopy(self._walk.model, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a model under coalesce.BackProp cannot be pickled, nor copied by copy.copy(): its parameters are tied to "
            "its optimizer. Save model.state_dict(), which is that of the plain model; copy.deepcopy(model) gives a "
            "plain model"
        )


def halting(model: Model, walk: Walk) -> Model:
    """A module that shares everything with a model, its attributes too, but halts backward() at the output of a call.

    A subclass of the model's class, so that its own methods, `train()` and `isinstance` go on to hold. A wrapper that
    delegates would put a prefix before the names of parameters, or would have to repeat every method of `nn.Module`.
    """
    kind = type(model)
    body = {"__slots__": ("_walk",), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made = types.new_class(kind.__name__, (Halting, kind), exec_body=lambda namespace: namespace.update(body))
    handed: Model = object.__new__(made)
    object.__setattr__(handed, "__dict__", vars(model))
    object.__setattr__(handed, "_walk", walk)
    return handed


def _refuse_zeros(set_to_none: bool) -> None:
    if not set_to_none:
        raise ValueError(
            "zero_grad(set_to_none=False): under coalesce.BackProp there are no gradients to fill with zeros; leave "
            "out set_to_none"
        )


@torch.compiler.disable
def _refuse_trained_inputs(inputs: Any, walk: Walk) -> None:
    for entry in tree_leaves(inputs):
        if isinstance(entry, Tensor) and entry.requires_grad and entry not in walk.groups:
            raise ValueError(
                f"an input of shape {tuple(entry.shape)} requires grad; coalesce.BackProp computes gradients inside "
                "step(), and of the optimizer's parameters alone. Detach the input; where another model made it and "
                "is trained too, put both into one nn.Module; for the gradient of an input call the plain model"
            )
