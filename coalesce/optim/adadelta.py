"""Adadelta, as `torch.optim.Adadelta`.

Source: M. D. Zeiler, "ADADELTA: an adaptive learning rate method" (arXiv:1212.5701).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, Optimizer, State
from coalesce.optim.common import OPTIONS, epsilon, learning_rate, mean_square, weight_decay, with_l2, zeros


class Adadelta(Optimizer):
    """Adadelta. State: ``square_avg`` of the gradients and ``acc_delta`` of the updates, like the parameter."""

    name: ClassVar[str] = "adadelta"
    entrywise: ClassVar[bool] = True
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(1.0),
        "rho": Hyper(0.9, low=0.0, high=1.0, text="share of the two mean squares that is kept"),
        "eps": epsilon(1e-6, "added to both mean squares"),
        "weight_decay": weight_decay(0.0),
        **OPTIONS,
    }

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        return zeros(param, "square_avg", "acc_delta")

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        dtype = param.dtype
        eps = hyper.eps.to(dtype)
        grad = with_l2(grad, param, hyper.weight_decay)
        square = mean_square(state["square_avg"], grad, hyper.rho)
        delta = torch.sqrt(state["acc_delta"] + eps) / torch.sqrt(square + eps) * grad
        new = {"square_avg": square, "acc_delta": mean_square(state["acc_delta"], delta, hyper.rho)}
        return param - hyper.lr.to(dtype) * delta, new
