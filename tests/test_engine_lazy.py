"""Lazy modules that nobody has called.

Oracle: the same model, called once by hand right behind `torch.manual_seed` and `model()`; the plain loop.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from engine_helpers import experiment, lanes_of, train_alone, worst

loads = 0


class Lazy(coalesce.Task):
    def __init__(self, dropout: float = 0.1, length: int = 6, call: bool = False):
        self.dropout, self.length, self.call = dropout, length, call

    def data(self) -> coalesce.Data:
        global loads
        loads += 1
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(20, 1, self.length, generator=generator, dtype=torch.float64)
        return coalesce.Data(train=(x, x[:, 0, 0]), val=(x, x[:, 0, 0]))

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.LazyConv1d(3, 2), nn.LazyBatchNorm1d(), nn.Tanh(), nn.Flatten()]
        model = nn.Sequential(*layers, nn.Dropout(self.dropout), nn.LazyLinear(2)).double()
        if self.call:
            model.eval()
            model(torch.zeros(1, 1, self.length, dtype=torch.float64))
            model.train()
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x).sum(1), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


def pair(length: int, call: bool = False) -> list[Any]:
    return [
        experiment(Lazy, {"dropout": 0.1 * i, "length": length, "call": call}, {"name": "sgd", "lr": 0.1 * i}, seed=i)
        for i in (1, 2)
    ]


@pytest.mark.parametrize("length", [6, 9])
def test_equal_to_a_model_called_by_hand(length: int) -> None:
    before = loads
    lanes = lanes_of(pair(length))
    # once for the sizes and once for training, however many experiments there are
    assert loads == before + 2
    called = [train_alone(one, steps=0) for one in pair(length, call=True)]
    assert [worst(lanes, lane, alone.model) for lane, alone in enumerate(called)] == [0.0, 0.0]
    lanes.advance(3)
    # the gradient of a bias in front of BatchNorm is zero in mathematics and noise in numbers
    trained = [train_alone(one, steps=3) for one in pair(length, call=True)]
    assert max(worst(lanes, lane, alone.model, ("0.bias",)) for lane, alone in enumerate(trained)) < 1e-12
