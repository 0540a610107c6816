"""Hyperparameters and steps of the arithmetic that several rules share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from coalesce.optim.base import Count, Factors, Hyper, Patterns, State

#: What every optimiser takes beside its own hyperparameters. The engine carries these out, not the rules.
OPTIONS: dict[str, Hyper] = {
    "clip_norm": Hyper(None, low=0.0, open_low=True, optional=True, text="clip a lane's global gradient norm to this"),
    "clip_value": Hyper(None, low=0.0, open_low=True, optional=True, text="clip each entry of a gradient to this size"),
    "no_decay": Patterns((), text="names of parameters without weight decay"),
    "lr_factors": Factors({}, low=0.0, text="factors on the learning rates of parameters, by name"),
    "ema": Hyper(
        None, low=0.0, high=1.0, open_high=True, optional=True, text="share of the weights' moving average that is kept"
    ),
    "accumulate": Count(1, low=1, text="micro-batches that a batch is processed in"),
}


def learning_rate(default: float) -> Hyper:
    return Hyper(default, low=0.0, text="learning rate, before the schedule's factor")


def weight_decay(default: float, text: str = "L2 term added to the gradient") -> Hyper:
    return Hyper(default, low=0.0, text=text)


def betas(first: float, second: float) -> Hyper:
    return Hyper((first, second), low=0.0, high=1.0, open_high=True, text="decay of the two moments")


def epsilon(default: float, text: str = "added to the root of the second moment") -> Hyper:
    return Hyper(default, low=0.0, text=text)


DECOUPLED = Hyper(False, text="take the weight decay off the parameter, as AdamW does, not into the gradient")


def with_l2(grad: Tensor, param: Tensor, decay: Tensor) -> Tensor:
    """The gradient and an L2 term. Where the decay is 0 it is the gradient itself, to the bit."""
    return grad + decay.to(param.dtype) * param


def shrunk(param: Tensor, rate: Tensor, decay: Tensor) -> Tensor:
    """The parameter after decoupled weight decay."""
    return param * (1 - rate * decay).to(param.dtype)


def decayed(param: Tensor, grad: Tensor, hyper: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Parameter and gradient after the weight decay of a rule that offers both kinds (`DECOUPLED`)."""
    if hyper.decoupled_weight_decay:
        return shrunk(param, hyper.lr, hyper.weight_decay), grad
    return param, with_l2(grad, param, hyper.weight_decay)


def mean(old: Tensor, new: Tensor, beta: Tensor) -> Tensor:
    """A running mean of which the share ``beta`` is kept."""
    return torch.lerp(old, new, (1 - beta).to(old.dtype))


def mean_square(old: Tensor, grad: Tensor, beta: Tensor) -> Tensor:
    """A running mean of squares of which the share ``beta`` is kept."""
    return beta.to(old.dtype) * old + (1 - beta).to(old.dtype) * grad * grad


def moments(state: State, grad: Tensor, betas: tuple[Tensor, Tensor]) -> State:
    """The two moments of Adam and its relatives after a gradient: ``exp_avg`` and ``exp_avg_sq``."""
    return {
        "exp_avg": mean(state["exp_avg"], grad, betas[0]),
        "exp_avg_sq": mean_square(state["exp_avg_sq"], grad, betas[1]),
    }


def zeros(param: Tensor, *names: str) -> State:
    """State like the parameter, 0 at the start."""
    return {name: torch.zeros_like(param) for name in names}


def adam_step(
    param: Tensor, grad: Tensor, state: State, rate: Tensor, betas: Any, eps: Tensor, step: Tensor
) -> tuple[Tensor, State]:
    """A step of Adam without weight decay. With ``max_exp_avg_sq`` in the state it is AMSGrad's.

    As in torch, eps is added after the bias correction of the second moment's root.
    """
    dtype = param.dtype
    new = moments(state, grad, betas)
    second = new["exp_avg_sq"]
    if "max_exp_avg_sq" in state:
        second = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], second)
    step_size = rate / (1 - betas[0] ** step)
    root = torch.sqrt(1 - betas[1] ** step)
    denominator = torch.sqrt(second) / root.to(dtype) + eps.to(dtype)
    return param - step_size.to(dtype) * (new["exp_avg"] / denominator), new
