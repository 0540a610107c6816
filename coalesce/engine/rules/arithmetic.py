"""Arithmetic whose factors and fillers ride, where torch takes them only as Python numbers: ``alpha=``, ``value=``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.draws import write
from coalesce.engine.rules.mode import Rules, rule


def add(input: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    return input + alpha * other


def sub(input: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    return input - alpha * other


def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
    return input + value * tensor1 * tensor2


def addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
    return input + value * tensor1 / tensor2


def _added(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def formula(input: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        return beta * input + alpha * product(left, right)

    return formula


def nan_to_num(input: Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Tensor:
    limits = torch.finfo(input.dtype)
    fill = [nan if nan is not None else 0.0, limits.max if posinf is None else posinf]
    fill.append(limits.min if neginf is None else neginf)
    cases = [torch.isnan(input), torch.isposinf(input), torch.isneginf(input)]
    for case, value in zip(cases, fill, strict=True):
        input = torch.where(case, torch.as_tensor(value, dtype=input.dtype), input)
    return input


def logit(input: Tensor, eps: Any = None) -> Tensor:
    inside = input.clamp(eps, 1 - eps)
    return (inside / (1 - inside)).log()


def cov(input: Tensor, correction: int) -> Tensor:
    """`torch.cov` without weights, which asks for a value that a trace does not have."""
    rows = input if input.dim() > 1 else input[None]
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.mH / max(rows.shape[1] - correction, 0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    found = cov(input, 1)
    if found.dim() == 0:
        return found / found
    deviation = found.diagonal().sqrt()
    return (found / deviation[:, None] / deviation[None, :]).clip(-1, 1)


def _register(name: str, formula: Callable[..., Tensor], *numbers: tuple[int, str]) -> None:
    """The rules of ``torch.<name>``, of the method and of the method in place."""

    def out(rules: Rules, *args: Any, **kwargs: Any) -> Tensor:
        return formula(*args, **kwargs)

    def in_place(rules: Rules, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return write(input, formula(input.clone(), *args, **kwargs))

    rule(getattr(torch, name), getattr(Tensor, name), places=numbers)(out)
    rule(getattr(Tensor, f"{name}_"), places=numbers)(in_place)


_register("add", add, (2, "alpha"))
_register("sub", sub, (2, "alpha"))
_register("addcmul", addcmul, (3, "value"))
_register("addcdiv", addcdiv, (3, "value"))
for _name, _product in (
    ("addmm", torch.matmul),
    ("addmv", torch.matmul),
    ("baddbmm", torch.matmul),
    ("addr", lambda left, right: left[:, None] * right),
    ("addbmm", lambda left, right: (left @ right).sum(0)),
):
    _register(_name, _added(_product), (3, "beta"), (4, "alpha"))
_register("nan_to_num", nan_to_num, (1, "nan"), (2, "posinf"), (3, "neginf"))
_register("logit", logit, (1, "eps"))


@rule(F.pad, numbers=("value",))
def pad(rules: Rules, input: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    outside = F.pad(torch.zeros_like(input, dtype=torch.bool), pad, mode, True)
    return torch.where(outside, value.to(input.dtype), F.pad(input, pad, mode))


@rule(torch.linspace, numbers=("start", "end"))
def linspace(rules: Rules, start: Any, end: Any, steps: int, *, dtype: Any = None, device: Any = None) -> Tensor:
    ends = [torch.as_tensor(e, dtype=dtype or torch.get_default_dtype(), device=device) for e in (start, end)]
    share = torch.linspace(0, 1, steps, dtype=ends[0].dtype, device=device)
    # from the nearer end, as ATen does
    return torch.where(share < 0.5, ends[0] + share * (ends[1] - ends[0]), ends[1] - (1 - share) * (ends[1] - ends[0]))


def _scatter(method: Callable[..., Tensor]) -> None:
    @rule(method)
    def scatter(rules: Rules, input: Tensor, dim: int, index: Tensor, src: Any = None, **kwargs: Any) -> Tensor:
        src = kwargs.pop("value", src)
        if isinstance(src, Tensor) and src.dim() == 0 and index.dim() > 0:
            src = src.to(input.dtype).expand(index.shape)
        elif rules.stacked and not isinstance(src, Tensor) and not kwargs:
            # a number has no rule for lanes of its own: it would be done lane by lane
            src = torch.full_like(index, src, dtype=input.dtype)
        if rules.stacked and method is Tensor.scatter_ and not kwargs:
            # nor has the form in place
            return write(input, torch.scatter(input, dim, index, src))
        return method(input, dim, index, src, **kwargs)


for _method in (torch.scatter, Tensor.scatter, Tensor.scatter_):
    _scatter(_method)


@rule(torch.cov, Tensor.cov)
def cov_rule(rules: Rules, input: Tensor, *, correction: int = 1, **weights: Any) -> Tensor:
    alone = not rules.stacked or input.is_complex() or any(w is not None for w in weights.values())
    return torch.cov(input, correction=correction, **weights) if alone else cov(input, correction)


@rule(torch.corrcoef, Tensor.corrcoef)
def corrcoef_rule(rules: Rules, input: Tensor) -> Tensor:
    return corrcoef(input) if rules.stacked and not input.is_complex() else torch.corrcoef(input)
