"""A step that breaks in its update leaves metrics and buffers as the last sound step left them.

Oracle: by hand. loss = w, so that SGD with a rate of 1e308 takes w to -1e308 and then past the largest float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import coalesce
from coalesce.engine.lanes import Lanes
from coalesce.engine.plain import Plain
from engine_helpers import experiment, template_of


class Falling(nn.Module):
    """w, and how often the model was called."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self) -> Tensor:
        self.calls += 1
        return self.w


class Fall(coalesce.Task):
    def data(self) -> coalesce.Data:
        return coalesce.Data(train=torch.zeros(1, 1))

    def model(self) -> nn.Module:
        return Falling()

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        w = model()
        return w, {"w": model.w}  # type: ignore[dict-item]

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize("stack", [True, False])
def test_a_step_that_breaks_in_its_update_leaves_no_trace(stack: bool) -> None:
    one = experiment(Fall, optimizer={"name": "sgd", "lr": 1e308}, batch_size=1, steps=9)
    template = template_of([one])
    lanes = Lanes(template, 2, compile=False) if stack else Plain(template)
    lanes.fill(0, one)
    lanes.advance(1)
    assert (lanes.read().steps[0], lanes.read().alive[0]) == (1, True)
    assert {name: values[0] for name, values in lanes.read().metrics.items()} == {"loss": 1.0, "w": 1.0}
    lanes.advance(3)
    assert (lanes.read().steps[0], lanes.read().alive[0]) == (1, False)
    assert {name: values[0] for name, values in lanes.read().metrics.items()} == {"loss": 1.0, "w": 1.0}
    state = lanes.state_dict(0)
    assert state["w"].item() == -1e308
    assert state["calls"].item() == 1
