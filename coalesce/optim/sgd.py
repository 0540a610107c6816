"""Stochastic gradient descent, as `torch.optim.SGD`."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.errors import Problem
from coalesce.optim.base import Hyper, Optimizer, State
from coalesce.optim.common import OPTIONS, learning_rate, weight_decay, with_l2, zeros


class SGD(Optimizer):
    """SGD with momentum, dampening, Nesterov's form and an L2 term. State: ``momentum``, like the parameter.

    The momentum buffer is there for every lane, since momentum rides: a lane with momentum 0 carries it unused.
    """

    name: ClassVar[str] = "sgd"
    entrywise: ClassVar[bool] = True
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(0.1),
        "momentum": Hyper(0.0, low=0.0, text="share of the last update direction that is kept"),
        "dampening": Hyper(0.0, text="share of the gradient that is left out of the momentum"),
        "weight_decay": weight_decay(0.0),
        "nesterov": Hyper(False, text="look ahead along the momentum"),
        **OPTIONS,
    }

    @classmethod
    def check_together(cls, config: Mapping[str, Any], key: str) -> list[Problem]:
        if config["nesterov"] and (config["momentum"] <= 0 or config["dampening"] != 0):
            rule = f"needs {key}.momentum above 0 and {key}.dampening=0"
            return [Problem(f"{key}.nesterov", True, rule)]
        return []

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        return zeros(param, "momentum")

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        dtype = param.dtype
        momentum = hyper.momentum.to(dtype)
        grad = with_l2(grad, param, hyper.weight_decay)
        buffer = momentum * state["momentum"] + (1 - hyper.dampening).to(dtype) * grad
        buffer = torch.where(step == 1, grad, buffer)
        direction = grad + momentum * buffer if hyper.nesterov else buffer
        direction = torch.where(momentum == 0, grad, direction)
        return param - hyper.lr.to(dtype) * direction, {"momentum": buffer}
