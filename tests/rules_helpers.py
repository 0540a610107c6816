"""A function of torch's called in three lanes at once, and lane by lane.

Lane by lane torch gets the Python float, in lanes a 0-d tensor; values and gradients must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from coalesce.engine.rules import Rules
from coalesce.random import key_of

LANES = torch.tensor([0.1, 0.2, 0.35], dtype=torch.float64)
KEYS = torch.stack([key_of(seed) for seed in (0, 1, 2)])
STEP = torch.tensor(5)

Function = Callable[[Tensor, Any], Tensor]


def hidden() -> Tensor:
    """(6, 3) in (-1, 1), none of them 0 and none of them a constant of a test."""
    return torch.linspace(-2, 2, 18, dtype=torch.float64).sin().view(6, 3)


def _weighted(result: Tensor) -> Tensor:
    return (result * torch.arange(1, result.numel() + 1, dtype=result.dtype).cos().view(result.shape)).sum()


def in_lanes(function: Function, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(3, …) values, and the gradients of a weighted sum of them with respect to x."""

    def lane(key: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        def weighted(h: Tensor) -> tuple[Tensor, Tensor]:
            with Rules(key, STEP, {"task.a": a, "task.b": LANES}, origins={"task.a": "task.a"}):
                result = function(h, a)
            return _weighted(result), result

        gradient, result = grad(weighted, has_aux=True)((hidden() if x is None else x) + 0 * a)
        return result, gradient

    return vmap(lane)(KEYS, LANES)


def one_by_one(function: Function, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same with a plain backward pass for each."""
    results, gradients = [], []
    for key, a in zip(KEYS, LANES.tolist(), strict=True):
        h = (hidden() if x is None else x).clone().requires_grad_()
        with Rules(key, STEP, {}):
            result = function(h, a)
        _weighted(result).backward()
        assert h.grad is not None
        results.append(result.detach())
        gradients.append(h.grad)
    return torch.stack(results), torch.stack(gradients)
