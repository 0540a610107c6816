"""Lion.

Source: X. Chen et al., "Symbolic discovery of optimization algorithms" (NeurIPS 2023), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, Optimizer, State
from coalesce.optim.common import OPTIONS, learning_rate, mean, shrunk, weight_decay, zeros


class Lion(Optimizer):
    """The sign of an interpolated momentum, with decoupled weight decay. State: ``exp_avg``, like the parameter."""

    name: ClassVar[str] = "lion"
    entrywise: ClassVar[bool] = True
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(1e-4),
        "betas": Hyper(
            (0.9, 0.99), low=0.0, high=1.0, open_high=True, text="share of the momentum in the update; its decay"
        ),
        "weight_decay": weight_decay(0.0, "share of the parameter, times the learning rate, taken off each step"),
        **OPTIONS,
    }

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        return zeros(param, "exp_avg")

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        beta1, beta2 = hyper.betas
        direction = torch.sign(mean(state["exp_avg"], grad, beta1))
        param = shrunk(param, hyper.lr, hyper.weight_decay) - hyper.lr.to(param.dtype) * direction
        return param, {"exp_avg": mean(state["exp_avg"], grad, beta2)}
