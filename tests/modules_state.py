"""Rows of the table of modules: tied, frozen and unused parameters, buffers that change, views, writes in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from module_table import Row, rows
from modules_layers import Net


def tied(a: Any) -> nn.Module:
    """One weight in two layers, and by itself; one layer twice."""
    one, two = nn.Linear(6, 6), nn.Linear(6, 6)
    two.weight = one.weight
    return Net(
        lambda net, h: torch.tanh(net.two(torch.tanh(net.one(h)) @ net.one.weight) + net.again(h)),
        one=one,
        two=two,
        again=one,
    )


def partly(a: Any) -> nn.Module:
    """A frozen layer, an unused one, a parameter that the loss multiplies by zero, which decays, an empty one."""

    def between(net: Any, h: Tensor) -> Tensor:
        return torch.tanh(net.frozen(h)) * net.scale + 0.0 * net.zero

    frozen = nn.Linear(6, 6).requires_grad_(False)
    scalars: dict[str, Any] = {name: nn.Parameter(torch.ones(())) for name in ("scale", "zero")}
    empty = nn.Parameter(torch.ones(0, 3), requires_grad=False)
    return Net(between, frozen=frozen, unused=nn.Linear(6, 2), empty=empty, **scalars)


def buffers(a: Any) -> nn.Module:
    """One assigned, one written in place, one of integers, one without place in the state_dict."""

    def between(net: Any, h: Tensor) -> Tensor:
        h = torch.tanh(h)
        if net.training:
            net.assigned = 0.9 * net.assigned + 0.1 * h.detach().mean(0)
            net.written.mul_(0.5).add_(h.detach().mean(0))
            net.hidden.copy_(net.written * 2)
            net.count += 1
        return h * (1 + net.assigned + net.hidden) / net.count

    net = Net(between, assigned=torch.zeros(6), written=torch.zeros(6), count=torch.tensor(1))
    net.register_buffer("hidden", torch.zeros(6), persistent=False)
    return net


def writes(a: Any) -> nn.Module:
    """Into activations, by index, by mask and in place; into new tensors."""

    def between(net: Any, h: Tensor) -> Tensor:
        h = torch.tanh(h).clone()
        h[:, 0] = 0.5
        h[:, 1].mul_(2).add_(a)
        h[h > 0.6] = a
        new = torch.zeros(len(h), 6, dtype=h.dtype)
        new[:, 1:3] = h[:, 2:4]
        return F.relu(h, inplace=True) + new.scatter_(1, h.argmax(1, keepdim=True), 0.7)

    return Net(between)


def reads_views_below(a: Any) -> nn.Module:
    """A parameter is read, detached, by views of views, split and unbound, in a lower layer than the one where its
    gradient is born."""

    def between(net: Any, h: Tensor) -> Tensor:
        left, right = net.middle.detach().chunk(2, 1)
        rows = net.middle.detach().unbind(0)
        low = torch.cat([torch.sin(h @ left), torch.cos(h @ right)], 1) * rows[2]
        return torch.tanh(low.detach() @ net.middle + low)

    return Net(between, middle=nn.Parameter(torch.randn(6, 6)))


def pieces(a: Any) -> nn.Module:
    """A parameter that is used by pieces in several layers."""

    def between(net: Any, h: Tensor) -> Tensor:
        for weight in net.stack.unbind(0):
            h = torch.tanh(h @ weight)
        for weight in net.flat.view(2, 6, 6).split(1):
            h = torch.tanh(h @ weight[0].T)
        return h

    return Net(between, stack=nn.Parameter(torch.randn(3, 6, 6)), flat=nn.Parameter(torch.randn(72)))


rows(
    Row("tied", tied),
    Row("frozen and unused", partly),
    Row("buffers", buffers),
    Row("writes", writes, compiled=True, thorough=True),
    Row("reads views below", reads_views_below),
    Row("pieces", pieces),
)
