"""Rows of the table of modules: what multiplies, normalises, drops, and pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from module_table import Row, rows


class Net(nn.Module):
    """Linear(6, 6), what stands between, Linear(…, 2), and whatever else is given by name."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], width: int = 6, **parts: Any):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(width, 2)
        self.between = between
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)).flatten(1))


def bilinear(a: Any) -> nn.Module:
    return Net(lambda net, h: torch.tanh(net.pair(h, torch.sin(h))), width=4, pair=nn.Bilinear(6, 6, 4))


rows(
    Row("Linear", lambda a: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))),
    Row("Bilinear", bilinear),
    Row(
        "BatchNorm1d",
        lambda a: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(a), nn.Linear(5, 2)),
        zero=("0.bias",),
        compiled=True,
    ),
    Row(
        "BatchNorm1d, cumulative",
        lambda a: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=None), nn.Tanh(), nn.Linear(5, 2)),
        zero=("0.bias",),
    ),
)
