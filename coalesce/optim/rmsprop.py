"""RMSprop, as `torch.optim.RMSprop`.

Sources: G. Hinton, "Neural networks for machine learning", lecture 6 (2012); A. Graves, "Generating sequences with
recurrent neural networks" (arXiv:1308.0850) for the centred form. As in torch, eps is added after the root.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, Optimizer, State
from coalesce.optim.common import OPTIONS, epsilon, learning_rate, mean, mean_square, weight_decay, with_l2, zeros


class RMSprop(Optimizer):
    """RMSprop with momentum. State: ``square_avg``, ``momentum`` and, centred, ``grad_avg``, like the parameter.

    The momentum buffer is there for every lane, since momentum rides: a lane with momentum 0 carries it unused.
    """

    name: ClassVar[str] = "rmsprop"
    entrywise: ClassVar[bool] = True
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(1e-2),
        "alpha": Hyper(0.99, low=0.0, text="share of the mean square that is kept"),
        "eps": epsilon(1e-8, "added to the root of the mean square"),
        "weight_decay": weight_decay(0.0),
        "momentum": Hyper(0.0, low=0.0, text="share of the last update direction that is kept"),
        "centered": Hyper(False, text="divide by the gradient's deviation, not by its size"),
        **OPTIONS,
    }

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        names = ("square_avg", "momentum", "grad_avg")
        return zeros(param, *names[: 3 if hyper["centered"] else 2])

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        dtype = param.dtype
        grad = with_l2(grad, param, hyper.weight_decay)
        new = {"square_avg": mean_square(state["square_avg"], grad, hyper.alpha)}
        square = new["square_avg"]
        if hyper.centered:
            new["grad_avg"] = mean(state["grad_avg"], grad, hyper.alpha)
            square = square - new["grad_avg"] * new["grad_avg"]
        direction = grad / (torch.sqrt(square) + hyper.eps.to(dtype))
        new["momentum"] = hyper.momentum.to(dtype) * state["momentum"] + direction
        return param - hyper.lr.to(dtype) * new["momentum"], new
