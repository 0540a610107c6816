"""Gradients that a task takes itself by `torch.autograd.grad`: of a penalty on the slope, of a differential equation's
terms; and weights that stand still for a part of the loss, as a GAN's discriminator while its generator is judged."""

from __future__ import annotations

import torch
from torch import Tensor

from coalesce.engine.rules.mode import Rules, rule


def require_grad(tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """``tensor.requires_grad_()``, in a lane as well.

    torch refuses it inside its functional transforms, since a tensor from outside takes part in no gradient there; but
    `torch.func.grad` wraps all that a lane is given, as if it were inside. The permission is asked for at each call,
    since a backward pass takes it back.
    """
    functorch = torch._C._functorch
    before = functorch.get_inplace_requires_grad_allowed()
    functorch.set_inplace_requires_grad_allowed(True)
    try:
        return tensor.requires_grad_(requires_grad)
    finally:
        functorch.set_inplace_requires_grad_allowed(before)


@rule(Tensor.requires_grad_)
def requires_grad_(rules: Rules, self: Tensor, requires_grad: bool = True) -> Tensor:
    # stacked: a task's own transform of one experiment keeps torch's error
    return require_grad(self, requires_grad) if rules.stacked else self.requires_grad_(requires_grad)
