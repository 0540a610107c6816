"""Activations whose constants ride: the formulas written out. And RReLU, whose slopes are drawn.

Where a constant is a Python number, torch's own function is called. The formulas have ATen's gradients, at the kinks
too, and no branch that is not taken can make a NaN of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.draws import random, write
from coalesce.engine.rules.mode import Rules, rule


def leaky_relu(x: Tensor, negative_slope: Any = 0.01) -> Tensor:
    return torch.where(x > 0, x, x * negative_slope)


def elu(x: Tensor, alpha: Any = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * x.clamp(max=0).expm1())


def celu(x: Tensor, alpha: Any = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * (x.clamp(max=0) / alpha).expm1())


def threshold(x: Tensor, threshold: Any, value: Any) -> Tensor:
    return torch.where(x <= threshold, torch.as_tensor(value, dtype=x.dtype), x)


def hardtanh(x: Tensor, min_val: Any = -1.0, max_val: Any = 1.0) -> Tensor:
    low, high = (torch.as_tensor(v, dtype=x.dtype) for v in (min_val, max_val))
    return torch.where(x <= low, low, torch.where(x >= high, high, x))


def _register(name: str, formula: Callable[..., Tensor], *numbers: str) -> None:
    """The rules of ``F.<name>`` with its argument ``inplace``, and of its form with an underscore."""

    def called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        if len(args) > len(numbers):
            return args[: len(numbers)], kwargs, bool(args[len(numbers)])
        return args, {k: v for k, v in kwargs.items() if k != "inplace"}, bool(kwargs.get("inplace"))

    def out(rules: Rules, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs, in_place = called(args, kwargs)
        if in_place:
            return write(input, formula(input.clone(), *args, **kwargs))
        return formula(input, *args, **kwargs)

    def underscore(rules: Rules, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return write(input, formula(input.clone(), *args, **kwargs))

    places = [(i + 1, n) for i, n in enumerate(numbers)]
    rule(getattr(F, name), places=places)(out)
    rule(getattr(F, f"{name}_"), places=places)(underscore)


_register("leaky_relu", leaky_relu, "negative_slope")
_register("elu", elu, "alpha")
_register("celu", celu, "alpha")
_register("threshold", threshold, "threshold", "value")
_register("hardtanh", hardtanh, "min_val", "max_val")


@rule(F.softplus, numbers=("beta", "threshold"))
def softplus(rules: Rules, input: Tensor, beta: Any = 1.0, threshold: Any = 20.0) -> Tensor:
    scaled = input * beta
    linear = scaled > threshold
    return torch.where(linear, input, torch.where(linear, 0.0, scaled).exp().log1p() / beta)


@rule(F.hardshrink, Tensor.hardshrink, numbers=("lambd",))
def hardshrink(rules: Rules, input: Tensor, lambd: Any = 0.5) -> Tensor:
    return torch.where((input >= -lambd) & (input <= lambd), 0.0, input)


@rule(F.softshrink, numbers=("lambd",))
def softshrink(rules: Rules, input: Tensor, lambd: Any = 0.5) -> Tensor:
    # the product with zero keeps a NaN
    return torch.where(input > lambd, input - lambd, torch.where(input < -lambd, input + lambd, input * 0))


def _rrelu(rules: Rules, x: Tensor, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False) -> Tensor:
    """B. Xu et al., "Empirical evaluation of rectified activations" (2015): a slope for each entry."""
    if not training:
        return leaky_relu(x, (lower + upper) / 2)
    slope = random(rules, x.shape, x.dtype) * (upper - lower) + lower
    return torch.where(x > 0, x, x * slope)


@rule(torch.rrelu)
def rrelu(rules: Rules, input: Tensor, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False) -> Tensor:
    return _rrelu(rules, input, lower, upper, training)


@rule(torch.rrelu_)
def rrelu_(rules: Rules, input: Tensor, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False) -> Tensor:
    return write(input, _rrelu(rules, input.clone(), lower, upper, training))
