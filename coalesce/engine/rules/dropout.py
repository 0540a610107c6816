"""Dropout from the lane's own stream, with a rate that may ride.

The mask differs by lane and step, and by nothing else; recomputing it gives the same one. torch's own dropout under
vmap either refuses or draws from the global generator, in an order that depends on the neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.draws import write
from coalesce.engine.rules.mode import Rate, Rules, carried, rule

__all__ = ["Rate", "carried", "drop"]


def never(p: float | Tensor) -> bool:
    """Whether nothing is dropped, in any lane: then nothing is drawn, which would cost as much as a layer does."""
    return not isinstance(p, Tensor) and p == 0


def drop(rules: Rules, x: Tensor, p: float | Tensor, shape: Sequence[int]) -> Tensor:
    """Zero the entries of x whose draw lies below p and divide the rest by 1 - p.

    Args:
        x: any shape.
        p: the rate; 1 drops everything.
        shape: of the mask; broadcasts against x.
    """
    p = carried(p)
    if never(p):
        return rules.pass_by(x)
    draw = rules.uniform(shape, x.dtype)
    if isinstance(p, Tensor):
        # at p = 1 nothing is kept, and 1 / 0 must not make a NaN of it
        scale = torch.where(p < 1, 1 / torch.where(p < 1, 1 - p, torch.ones_like(p)), torch.zeros_like(p)).to(x.dtype)
    else:
        scale = torch.tensor(1 / (1 - p) if p < 1 else 0.0, dtype=x.dtype)
    return x * ((draw >= p) * scale)


#: Of the SELU: what its lowest value is, which alpha dropout puts in the place of what it drops.
_ALPHA = 1.7580993408473766


def alpha_drop(rules: Rules, x: Tensor, p: float | Tensor, shape: Sequence[int]) -> Tensor:
    """Set the entries of x whose draw lies below p to the SELU's lowest value, and keep mean 0 and variance 1.

    G. Klambauer et al., "Self-normalizing neural networks" (2017), with the constants that ATen computes. At p = 1
    everything is zero, as in ATen.
    """
    p = carried(p)
    if never(p):
        return rules.pass_by(x)
    kept = rules.uniform(shape, x.dtype) >= p
    if isinstance(p, Tensor):
        inside = torch.where(p < 1, p, torch.zeros_like(p))
        a: Any = ((_ALPHA**2 * inside + 1) * (1 - inside)).rsqrt()
        a = torch.where(p < 1, a, torch.zeros_like(p)).to(x.dtype)
        p = p.to(x.dtype)
    else:
        a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    kept = kept.to(x.dtype)
    return x * (kept * a) + ((kept - 1) * (_ALPHA * a) + _ALPHA * a * p)


def _elements(x: Tensor) -> Sequence[int]:
    return x.shape


def _features(x: Tensor) -> Sequence[int]:
    """One draw per sample and channel."""
    return (*x.shape[:2], *[1] * (x.dim() - 2))


def _check(p: float | Tensor) -> None:
    if not isinstance(p, Tensor) and not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _register(name: str, dropped: Callable[..., Tensor], shape: Callable[[Tensor], Sequence[int]]) -> None:
    """The rules of ``torch.<name>`` and of its form in place."""

    @rule(getattr(torch, name))
    def out_of_place(rules: Rules, input: Tensor, p: float | Tensor, train: bool) -> Tensor:
        p = carried(p)
        _check(p)
        return dropped(rules, input, p, shape(input)) if train else input

    @rule(getattr(torch, f"{name}_"))
    def in_place(rules: Rules, input: Tensor, p: float | Tensor, train: bool) -> Tensor:
        p = carried(p)
        _check(p)
        # the product needs what stood there for its gradient
        return write(input, dropped(rules, input.clone(), p, shape(input))) if train else input


_register("dropout", drop, _elements)
_register("feature_dropout", drop, _features)
_register("alpha_dropout", alpha_drop, _elements)
_register("feature_alpha_dropout", alpha_drop, _features)


def _register_checked(function: Callable[..., Tensor]) -> None:
    """torch's own code sees to the shapes, but compares the rate with 0 and 1 first, which a `Rate` passes."""

    @rule(function, numbers=("p",))
    def checked(rules: Rules, input: Tensor, p: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return rules.open(function, input, Rate(p), *args, **kwargs)


for _function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout):
    _register_checked(_function)


@rule(torch.native_dropout)
def native_dropout(rules: Rules, input: Tensor, p: float | Tensor, train: bool) -> tuple[Tensor, Tensor]:
    if never(p) or not train:
        return (rules.pass_by(input) if train else input), torch.ones_like(input, dtype=torch.bool)
    kept = rules.uniform(input.shape, input.dtype) >= p
    scale = 1 / (1 - p) if isinstance(p, Tensor) or p < 1 else 0.0
    return torch.where(kept, input * scale, 0.0), kept
