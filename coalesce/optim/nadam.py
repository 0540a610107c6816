"""NAdam, as `torch.optim.NAdam`.

Source: T. Dozat, "Incorporating Nesterov momentum into Adam" (ICLR workshop 2016).
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


class NAdam(Optimizer):
    """Adam with Nesterov's momentum. State: ``exp_avg`` and ``exp_avg_sq``, like the parameter, and ``mu_product``,
    0-d, the product of the momenta so far.

    The product has no closed form, so it is state. It is float64 whatever the parameter is, as every scalar here;
    torch keeps it in its default dtype, float32, which is 1e-7 off.
    """

    name: ClassVar[str] = "nadam"
    entrywise: ClassVar[bool] = True
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(2e-3),
        "betas": betas(0.9, 0.999),
        "eps": epsilon(1e-8),
        "weight_decay": weight_decay(0.0),
        "momentum_decay": Hyper(4e-3, low=0.0, text="how fast the momentum rises to its full value"),
        "decoupled_weight_decay": DECOUPLED,
        **OPTIONS,
    }

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        product = torch.ones((), dtype=torch.float64, device=param.device)
        return {**zeros(param, "exp_avg", "exp_avg_sq"), "mu_product": product}

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        dtype = param.dtype
        beta1, beta2 = hyper.betas
        param, grad = decayed(param, grad, hyper)
        mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (n * hyper.momentum_decay)) for n in (step, step + 1))
        product = state["mu_product"] * mu
        new = moments(state, grad, hyper.betas)
        root = torch.sqrt(new["exp_avg_sq"] / (1 - beta2**step).to(dtype))
        denominator = root + hyper.eps.to(dtype)
        of_gradient = hyper.lr * (1 - mu) / (1 - product)
        of_mean = hyper.lr * mu_next / (1 - product * mu_next)
        param = param - of_gradient.to(dtype) * (grad / denominator)
        param = param - of_mean.to(dtype) * (new["exp_avg"] / denominator)
        return param, {**new, "mu_product": product}
