"""Adam and AdamW, as `torch.optim.Adam` and `torch.optim.AdamW`.

Sources: D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization" (ICLR 2015); I. Loshchilov, F. Hutter,
"Decoupled weight decay regularization" (ICLR 2019). As in torch, eps is added after the bias correction of the
second moment's root.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, Optimizer, State
from coalesce.optim.common import CLIP_NORM, learning_rate, weight_decay


class Adam(Optimizer):
    """Adam with an L2 term. State: ``exp_avg`` and ``exp_avg_sq``, like the parameter."""

    name: ClassVar[str] = "adam"
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(1e-3),
        "betas": Hyper((0.9, 0.999), low=0.0, high=1.0, open_high=True, text="decay of the two moments"),
        "eps": Hyper(1e-8, low=0.0, text="added to the root of the second moment"),
        "weight_decay": weight_decay(0.0, "L2 term added to the gradient"),
        "clip_norm": CLIP_NORM,
    }

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        return {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        grad = grad + hyper.weight_decay.to(param.dtype) * param
        return _moments(param, grad, state, hyper, step)


class AdamW(Adam):
    """Adam with decoupled weight decay. State: as Adam's."""

    name: ClassVar[str] = "adamw"
    hyper: ClassVar[dict[str, Hyper]] = {
        **Adam.hyper,
        "weight_decay": weight_decay(1e-2, "share of the parameter, times the learning rate, taken off each step"),
    }

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        param = param * (1 - hyper.lr * hyper.weight_decay).to(param.dtype)
        return _moments(param, grad, state, hyper, step)


def _moments(param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor) -> tuple[Tensor, State]:
    dtype = param.dtype
    beta1, beta2 = hyper.betas
    first = torch.lerp(state["exp_avg"], grad, (1 - beta1).to(dtype))
    second = beta2.to(dtype) * state["exp_avg_sq"] + (1 - beta2).to(dtype) * grad * grad
    step_size = hyper.lr / (1 - beta1**step)
    root = torch.sqrt(1 - beta2**step)
    denominator = torch.sqrt(second) / root.to(dtype) + hyper.eps.to(dtype)
    param = param - step_size.to(dtype) * (first / denominator)
    return param, {"exp_avg": first, "exp_avg_sq": second}
