"""Dropout from the lane's own stream, with a rate that may ride.

The mask differs by lane and step, and by nothing else; recomputing it gives the same one. torch's own dropout under
vmap either refuses or draws from the global generator, in an order that depends on the neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.mode import Rules, rule


class Rate(float):
    """A rate that rides, for code of torch's that compares it with 0 before it passes it on."""

    tensor: Tensor

    def __new__(cls, tensor: Tensor) -> Rate:
        rate = super().__new__(cls, 0.5)
        rate.tensor = tensor
        return rate


def carried(p: float | Tensor) -> float | Tensor:
    """The tensor that a `Rate` carries; anything else as it is."""
    return p.tensor if isinstance(p, Rate) else p


def drop(rules: Rules, x: Tensor, p: float | Tensor, shape: Sequence[int]) -> Tensor:
    """Zero the entries of x whose draw lies below p and divide the rest by 1 - p.

    Args:
        x: any shape.
        p: the rate; 1 drops everything.
        shape: of the mask; broadcasts against x.
    """
    p = carried(p)
    draw = rules.uniform(shape, x.dtype)
    if isinstance(p, Tensor):
        # at p = 1 nothing is kept, and 1 / 0 must not make a NaN of it
        scale = torch.where(p < 1, 1 / torch.where(p < 1, 1 - p, torch.ones_like(p)), torch.zeros_like(p)).to(x.dtype)
    else:
        scale = torch.tensor(1 / (1 - p) if p < 1 else 0.0, dtype=x.dtype)
    return x * ((draw >= p) * scale)


def _check(p: float | Tensor) -> None:
    if not isinstance(p, Tensor) and not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


@rule(F.dropout, torch.dropout)
def dropout(
    rules: Rules, input: Tensor, p: float | Tensor = 0.5, training: bool = True, inplace: bool = False, **kw: bool
) -> Tensor:
    _check(p)
    training = kw.get("train", training)  # torch.dropout's name for it
    return drop(rules, input, p, input.shape) if training else input


@rule(F.dropout1d, F.dropout2d, F.dropout3d)
def dropout_channels(
    rules: Rules, input: Tensor, p: float | Tensor = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    _check(p)
    shape = (*input.shape[:2], *[1] * (input.dim() - 2))
    return drop(rules, input, p, shape) if training else input
