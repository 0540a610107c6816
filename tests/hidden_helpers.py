"""A small task whose loss or model uses a float that differs between lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.experiment import Experiment
from engine_helpers import experiment


class Small(coalesce.Task):
    """A tanh network in float64, whose loss or model uses the float ``a``."""

    def __init__(self, a: float = 0.2):
        self.a = a

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(33, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (33,), generator=generator)
        return coalesce.Data(train=(x, y), val=(x[:20], y[:20]))

    def model(self) -> nn.Module:
        return Net()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y) * self.factor()

    def factor(self) -> Any:
        return 1.0

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": F.cross_entropy(model(x), y)}


class Net(nn.Module):
    """Linear(4, 5), an activation of the caller's, Linear(5, 3)."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.tanh, **attributes: Any):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.act = act
        for name, value in attributes.items():
            setattr(self, name, value)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def three(task: type[Small]) -> list[Experiment]:
    return [experiment(task, {"a": 0.1 * i}, {"name": "sgd", "lr": 0.05 * i}, steps=3, seed=i) for i in (2, 1, 3)]
