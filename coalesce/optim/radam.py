"""RAdam, as `torch.optim.RAdam`.

Source: L. Liu et al., "On the variance of the adaptive learning rate and beyond" (ICLR 2020). As in torch, eps is
added to the root of the second moment before its bias correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, Optimizer, State
from coalesce.optim.common import (
    DECOUPLED,
    OPTIONS,
    betas,
    decayed,
    epsilon,
    learning_rate,
    moments,
    weight_decay,
    zeros,
)


class RAdam(Optimizer):
    """Adam that waits with its adaptive rates until the second moment's variance is known: the approximated length of
    its mean, rho, must exceed 5. State: ``exp_avg`` and ``exp_avg_sq``, like the parameter."""

    name: ClassVar[str] = "radam"
    entrywise: ClassVar[bool] = True
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(1e-3),
        "betas": betas(0.9, 0.999),
        "eps": epsilon(1e-8),
        "weight_decay": weight_decay(0.0),
        "decoupled_weight_decay": DECOUPLED,
        **OPTIONS,
    }

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        return zeros(param, "exp_avg", "exp_avg_sq")

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        dtype = param.dtype
        beta1, beta2 = hyper.betas
        param, grad = decayed(param, grad, hyper)
        new = moments(state, grad, hyper.betas)
        corrected = new["exp_avg"] / (1 - beta1**step).to(dtype)
        power = beta2**step
        rho_last = 2 / (1 - beta2) - 1
        rho = rho_last - 2 * step * power / (1 - power)
        adaptive = rho > 5
        # in a lane that is not there yet, numbers that make no NaN: rho never exceeds rho_last
        rho, rho_last = (torch.where(adaptive, r, 6.0) for r in (rho, rho_last))
        rectified = torch.sqrt((rho - 4) * (rho - 2) * rho_last / ((rho_last - 4) * (rho_last - 2) * rho))
        root = torch.sqrt(new["exp_avg_sq"]) + hyper.eps.to(dtype)
        # the direction is chosen, not a factor on it: the second moment may be 0 where it has no say
        scaled = corrected * (rectified * torch.sqrt(1 - power)).to(dtype) / root
        return param - hyper.lr.to(dtype) * torch.where(adaptive, scaled, corrected), new
