"""Adam and AdamW, as `torch.optim.Adam` and `torch.optim.AdamW`.

Sources: D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization" (ICLR 2015); I. Loshchilov, F. Hutter,
"Decoupled weight decay regularization" (ICLR 2019); S. J. Reddi, S. Kale, S. Kumar, "On the convergence of Adam and
beyond" (ICLR 2018) for AMSGrad.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor

from coalesce.optim.base import Hyper, Optimizer, State
from coalesce.optim.common import (
    OPTIONS,
    adam_step,
    betas,
    epsilon,
    learning_rate,
    shrunk,
    weight_decay,
    with_l2,
    zeros,
)


class Adam(Optimizer):
    """Adam with an L2 term. State: ``exp_avg`` and ``exp_avg_sq``, with AMSGrad ``max_exp_avg_sq``, like the
    parameter."""

    name: ClassVar[str] = "adam"
    entrywise: ClassVar[bool] = True
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(1e-3),
        "betas": betas(0.9, 0.999),
        "eps": epsilon(1e-8),
        "weight_decay": weight_decay(0.0),
        "amsgrad": Hyper(False, text="divide by the largest second moment so far"),
        **OPTIONS,
    }
    introduced: ClassVar[dict[str, Any]] = {**Optimizer.introduced, "amsgrad": False}

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return zeros(param, *names[: 3 if hyper["amsgrad"] else 2])

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        grad = with_l2(grad, param, hyper.weight_decay)
        return adam_step(param, grad, state, hyper.lr, hyper.betas, hyper.eps, step)


class AdamW(Adam):
    """Adam with decoupled weight decay. State: as Adam's."""

    name: ClassVar[str] = "adamw"
    entrywise: ClassVar[bool] = True
    hyper: ClassVar[dict[str, Hyper]] = {
        **Adam.hyper,
        "weight_decay": weight_decay(1e-2, "share of the parameter, times the learning rate, taken off each step"),
    }

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        param = shrunk(param, hyper.lr, hyper.weight_decay)
        return adam_step(param, grad, state, hyper.lr, hyper.betas, hyper.eps, step)
