"""Case 25: our own masks never make a NaN; a NaN that the user's code makes is the same as alone, and is named.

Oracle: the values of CASES.md, which follow by hand, and autograd itself.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coalesce
from coalesce.engine.lanes import Lanes
from engine_helpers import experiment, lanes_of, template_of
from runner_helpers import ran


class Scalar(nn.Module):
    def __init__(self, start: float, dtype: torch.dtype):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=dtype))


class Rooted(coalesce.Task):
    """loss = sqrt(scale) w: its gradient is 1 at the scale 1, and loss and gradient are NaN at -1."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def data(self) -> coalesce.Data:
        return coalesce.Data(train=torch.ones(4, 1))

    def model(self) -> nn.Module:
        return Scalar(2.0, torch.float64)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model.w * torch.as_tensor(self.scale, dtype=torch.float64).sqrt()  # type: ignore[operator]

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"w": model.w.detach()}  # type: ignore[operator]


def test_a_dead_lane_keeps_its_last_finite_value_and_the_live_one_moves() -> None:
    pair = [experiment(Rooted, {"scale": scale}, {"name": "sgd", "lr": 0.1}) for scale in (-1.0, 1.0)]
    lanes = Lanes(template_of(list(reversed(pair))), 2, compile=False)
    for lane, one in enumerate(pair):
        lanes.fill(lane, one)
    lanes.advance(1)
    reading = lanes.read()
    assert (reading.alive, reading.steps) == ([False, True], [0, 1])
    assert lanes.state["trained/w"].tolist() == [2.0, 1.9]
    # and though the dead lane's own memory holds NaN: its gradient, its weight and its loss are NaN now
    lanes.state["trained/w"][0] = torch.nan
    lanes.advance(1)
    assert lanes.state["trained/w"][1].item() == 1.9 - 0.1
    assert math.isnan(lanes.state["trained/w"][0].item())
    assert lanes.read().metrics["loss"][1] == 1.9


class Distances(coalesce.Task):
    """Its metric is NaN for two samples that are equal."""

    def data(self) -> coalesce.Data:
        return coalesce.Data(train=torch.arange(7.0, dtype=torch.float64)[:, None])

    def folds(self, data: coalesce.Data) -> Any:
        return [([3, 4, 5, 6], [0, 1, 2]), ([0, 1, 2], [3, 4, 5, 6])]

    def model(self) -> nn.Module:
        return Scalar(2.0, torch.float64)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (model.w * batch).mean()  # type: ignore[operator]

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        apart = batch - batch.T + torch.eye(len(batch), dtype=batch.dtype)
        return {"one": (apart / apart).mean(), "sum": batch.sum()}


def test_a_padded_sample_has_no_effect() -> None:
    """Batches are never padded to train on. A lane whose fold has 3 samples is given its last one again where another
    lane's fold has 4: a metric that is NaN for it must not count."""
    lanes = lanes_of([experiment(Distances, batch_size=2, data={"fold": fold}) for fold in (0, 1)])
    assert lanes.evaluate("val") == {"one": [1.0, 1.0], "sum": [0.0 + 1 + 2, 3.0 + 4 + 5 + 6]}
    assert math.isnan(lanes.evaluate_samples("val", 0, 4)["one"][0])


class Chosen(coalesce.Task):
    """loss = exp(w) up to 0, 1 + w above: at 100 it is 101, but float32's exp(100) is infinite."""

    def __init__(self, start: float = 1.0):
        self.start = start

    def data(self) -> coalesce.Data:
        return coalesce.Data(train=torch.ones(4, 1), val=torch.ones(1, 1))

    def model(self) -> nn.Module:
        return Scalar(self.start, torch.float32)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        w: Any = model.w
        return torch.where(w <= 0, torch.exp(w), 1 + w)

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"w": model.w.clone()}  # type: ignore[operator]


@pytest.mark.parametrize("stack", [True, False])
def test_a_nan_of_the_branch_that_was_not_taken(stack: bool) -> None:
    model = Chosen(100.0).model()
    loss = Chosen().loss(model, torch.ones(1, 1))
    loss.backward()
    assert loss.item() == 101.0
    assert math.isnan(model.w.grad.item())  # type: ignore[operator,union-attr]
    done = ran(
        Chosen,
        {"task.start": [1.0, 100.0]},
        steps=3,
        batch_size=2,
        optimizer={"name": "sgd", "lr": 0.25},
        monitor="val/w",
        weights=True,
        stack=stack,
    )
    sound, broken = done.in_order()
    assert (sound.status, sound.metrics["val/w"]) == ("finished", 0.25)
    assert (broken.status, broken.steps) == ("diverged", 0)
    assert broken.weights is not None
    assert broken.weights["w"].item() == 100.0
    assert "turned infinite or NaN at step 1" in broken.message
    assert "the loss was finite" in broken.message
    assert "torch.where gives a NaN gradient if the branch that it did not take" in broken.message


def test_a_loss_that_is_not_finite_gets_no_such_hint() -> None:
    (broken,) = ran(Rooted, {"task.scale": [-1.0]}, steps=2, batch_size=2, monitor="train/loss").in_order()
    assert broken.message == "the loss or a parameter turned infinite or NaN at step 1"
