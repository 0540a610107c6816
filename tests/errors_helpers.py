"""A task to break, and the line in a test's own file at which it breaks."""

from __future__ import annotations

import linecache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.experiment import Experiment
from engine_helpers import experiment


class Small(coalesce.Task):
    """Subclasses break one method."""

    def __init__(self, a: float = 0.2):
        self.a = a

    def data(self) -> coalesce.Data:
        x = torch.linspace(-1, 1, 44).view(11, 4)
        return coalesce.Data(train=(x, torch.arange(11) % 3), val=(x[:4], torch.arange(4) % 3))

    def model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.use(model(x)), y)

    def use(self, scores: Tensor) -> Tensor:
        return scores

    def metrics(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return {"loss": F.cross_entropy(model(x), y)}


def error_line(file: str, mark: str) -> str:
    """How a traceback shows the line of a file with a mark."""
    found = [i for i, text in enumerate(linecache.getlines(file), 1) if text.rstrip().endswith(f"# mark: {mark}")]
    assert len(found) == 1, mark
    return f'File "{file}", line {found[0]}, in '


def two(task: type[Small]) -> list[Experiment]:
    return [experiment(task, {"a": a}) for a in (0.2, 0.1)]
