"""Adamax, as `torch.optim.Adamax`.

Source: D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization" (ICLR 2015), section 7.1. As in torch, eps is
added to the gradient's size before the largest is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, Optimizer, State
from coalesce.optim.common import OPTIONS, betas, epsilon, learning_rate, mean, weight_decay, with_l2, zeros


class Adamax(Optimizer):
    """Adam by the infinity norm. State: ``exp_avg`` and ``exp_inf``, like the parameter."""

    name: ClassVar[str] = "adamax"
    entrywise: ClassVar[bool] = True
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(2e-3),
        "betas": betas(0.9, 0.999),
        "eps": epsilon(1e-8, "added to the gradient's size"),
        "weight_decay": weight_decay(0.0),
        **OPTIONS,
    }

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        return zeros(param, "exp_avg", "exp_inf")

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        dtype = param.dtype
        beta1, beta2 = hyper.betas
        grad = with_l2(grad, param, hyper.weight_decay)
        first = mean(state["exp_avg"], grad, beta1)
        largest = torch.maximum(beta2.to(dtype) * state["exp_inf"], grad.abs() + hyper.eps.to(dtype))
        step_size = hyper.lr / (1 - beta1**step)
        return param - step_size.to(dtype) * (first / largest), {"exp_avg": first, "exp_inf": largest}
