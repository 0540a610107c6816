"""Rows of the table of modules: losses that take gradients themselves, by `torch.autograd.grad`, and weights that stand
still for a part of the loss. The loss is the evaluation's metric too: each row takes its gradients there as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from module_table import Row, rows


def smooth(a: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def equation(model: nn.Module, x: Tensor, y: Tensor, a: Any) -> Tensor:
    """The terms of a differential equation in the batch itself, a penalty on the slope at points that are drawn, and
    one on the gradient of a weight."""
    with torch.enable_grad():
        x.requires_grad_()
        u = model(x)
        (first,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        drawn = torch.rand(4, 6, dtype=x.dtype, requires_grad=True)
        (slope,) = torch.autograd.grad(model(drawn).sum(), drawn, create_graph=True)
        weight = next(model.parameters())
        (by_weight,) = torch.autograd.grad(u.mean(), weight, create_graph=True)
    residual = (second[:, 0] + a * u[:, 0] - y).square().mean()
    return residual + a * (slope.norm(dim=1) - 1).square().mean() + by_weight.square().sum()


def attack(model: nn.Module, x: Tensor, y: Tensor, a: Any) -> Tensor:
    """Inputs that a few steps of gradient ascent have made worse; a step of one gradient follows on another's."""
    moved = torch.zeros_like(x)
    for _ in range(2):
        moved = moved.detach().requires_grad_()
        with torch.enable_grad():
            (upwards,) = torch.autograd.grad(F.mse_loss(model(x + moved)[:, 0], y), moved)
        moved = (moved + 0.2 * a * upwards.sign()).clamp(-a, a)
    return F.mse_loss(model(x + moved.detach())[:, 0], y)


def pair(a: Any) -> nn.Module:
    return nn.ModuleDict({"forger": nn.Linear(6, 6), "judge": smooth(a)})


def adversaries(model: Any, x: Tensor, y: Tensor, a: Any) -> Tensor:
    """The judge's weights stand still, by the method and by the attribute, where the forger is judged."""
    forged = model["forger"](x)
    judged = F.softplus(-model["judge"](x + y[:, None])).mean() + F.softplus(model["judge"](forged.detach())).mean()
    model["judge"].requires_grad_(False)
    fooled = F.softplus(-model["judge"](forged)).mean()
    for weight in model["judge"].parameters():
        weight.requires_grad = True
    return judged + a * fooled


def together(model: nn.Module, x: Tensor, y: Tensor, a: Any) -> Tensor:
    """Covariances and correlations of what a layer gives; of one row alone as well."""
    h = model[0](x)  # type: ignore[index]
    spread = torch.cov(h.T).square().sum() + torch.corrcoef(h.T).triu(1).sum() + torch.cov(h[:, 0], correction=0)
    return a * spread + F.mse_loss(model(x)[:, 0], y) + h.T.corrcoef().square().mean()


rows(
    Row("gradients by x", smooth, loss=equation, draws=True, compiled=True, thorough=True),
    Row("gradient ascent", smooth, loss=attack),
    Row("adversaries", pair, loss=adversaries),
    Row("covariance", smooth, loss=together),
)
