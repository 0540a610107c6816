"""Adagrad, as `torch.optim.Adagrad`.

Source: J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods for online learning and stochastic optimization"
(JMLR 12, 2011).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, Optimizer, State
from coalesce.optim.common import OPTIONS, epsilon, learning_rate, weight_decay, with_l2


class Adagrad(Optimizer):
    """Adagrad. State: ``sum``, like the parameter, of the squared gradients."""

    name: ClassVar[str] = "adagrad"
    entrywise: ClassVar[bool] = True
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(1e-2),
        "lr_decay": Hyper(0.0, low=0.0, text="the rate of step t is divided by 1 + (t - 1) times this"),
        "weight_decay": weight_decay(0.0),
        "initial_accumulator_value": Hyper(0.0, low=0.0, text="where the sum of squares starts"),
        "eps": epsilon(1e-10, "added to the root of the sum"),
        **OPTIONS,
    }

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        return {"sum": torch.full_like(param, hyper["initial_accumulator_value"])}

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        dtype = param.dtype
        grad = with_l2(grad, param, hyper.weight_decay)
        total = state["sum"] + grad * grad
        rate = hyper.lr / (1 + (step - 1) * hyper.lr_decay)
        return param - rate.to(dtype) * (grad / (torch.sqrt(total) + hyper.eps.to(dtype))), {"sum": total}
