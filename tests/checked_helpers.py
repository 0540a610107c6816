"""Lanes for the tests of law 7, and what the check says of a fault."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.engine.lanes import Lanes
from coalesce.experiment import Experiment
from coalesce.optim import OPTIMIZERS
from engine_helpers import experiment, template_of

FAULT = "do not compute what plain PyTorch does"


class Usual(coalesce.Task):
    """A bias in front of BatchNorm, whose gradient is noise; dropout and smoothing that ride."""

    def __init__(self, a: float = 0.2, dtype: str = "float32"):
        self.a, self.dtype = a, getattr(torch, dtype)

    def data(self) -> coalesce.Data:
        x = torch.linspace(-1, 1, 80).sin().view(20, 4).to(self.dtype)
        return coalesce.Data(train=(x, torch.arange(20) % 3), val=(x[:9], torch.arange(9) % 3))

    def model(self) -> nn.Module:
        hidden = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(self.a)]
        return nn.Sequential(*hidden, nn.Linear(5, 3)).to(self.dtype)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=self.a)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(-1) == y).float().mean()}


def three(
    task: Any = Usual, optimizer: str = "sgd", schedule: Any = "constant", steps: int = 10, **arguments: Any
) -> list[Experiment]:
    """Unequal floats everywhere, and rates from nothing to far too much: the check takes its own."""
    # what every rule has, and what only some have
    floats = {"weight_decay": [0.1, 1e-3, 0.01], "momentum": [0.9, 0.5, 0.0], "clip_norm": [0.05, 1.0, 9.0]}
    floats = {n: v for n, v in floats.items() if n in OPTIMIZERS[optimizer].hyper}
    rates = [1e3, 1e-3, 0.1]
    return [
        experiment(
            task,
            {"a": 0.1 + 0.1 * i, **arguments},
            {"name": optimizer, "lr": rates[i], **{n: v[i] for n, v in floats.items()}},
            schedule,
            steps=steps,
            seed=i,
        )
        for i in range(3)
    ]


def sound(experiments: list[Experiment], width: int = 2, compile: bool = False, **options: Any) -> Lanes:
    lanes = Lanes(template_of(experiments), width, compile=compile, **options)
    lanes.prepare_step()
    return lanes


#: Tracing takes a second: plain `pytest` has two rules, one with and one without a unit of its own.
RULES = [pytest.param(n, marks=() if n in ("sgd", "adamw") else pytest.mark.thorough) for n in OPTIMIZERS]


@cache
def usual_lanes(optimizer: str, width: int) -> Lanes:
    return sound(three(optimizer=optimizer), width)


def assert_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for name, tensor in before.items():
        # bit for bit: NaN too, and the sign of a zero
        assert tensor.contiguous().view(torch.uint8).equal(after[name].contiguous().view(torch.uint8)), name
