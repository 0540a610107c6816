"""Law 7: sound graphs pass the check, with all that looks like a fault and is none.

Oracle: by hand. The lanes are left as they were, bit for bit.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checked_helpers import RULES, Usual, assert_same, sound, three, usual_lanes
from coalesce.engine.check import check
from coalesce.optim import OPTIMIZERS, SCHEDULES
from thorough import kept


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("optimizer", "width"),
    [*(pytest.param(*p.values, 2, marks=p.marks) for p in RULES), *kept([("sgd", 1), ("sgd", 5)], of=[("sgd", 1)])],
)
def test_a_sound_graph_passes_and_the_lanes_are_left_alone(optimizer: str, width: int) -> None:
    lanes = usual_lanes(optimizer, width)
    lanes.fill(width - 1, three(optimizer=optimizer)[1])
    lanes.advance(3)
    before, generator = {name: tensor.clone() for name, tensor in lanes.state.items()}, torch.get_rng_state()
    check(lanes, ["val"])
    assert_same(before, lanes.state)
    assert torch.equal(generator, torch.get_rng_state())
    # the sweep's own rates, which go up to 1000, do not disturb it
    assert lanes.read().alive == [lane == width - 1 for lane in range(width)]
    lanes.clear(width - 1)


def test_whoever_trains_goes_on_after_a_check() -> None:
    """With its own samples and draws, in lanes that the check has borrowed."""
    lanes = usual_lanes("sgd", 2)
    for lane, one in enumerate(three(optimizer="sgd")[:2]):
        lanes.fill(lane, replace(one, config={**one.config, "seed": 7 + lane}))
    lanes.advance(3)
    kept = lanes.save([0, 1])
    lanes.advance(4)
    expected = {name: tensor.clone() for name, tensor in lanes.state.items()}
    for lane in range(2):
        lanes.put(lane, lanes.held[lane], kept[lane])
    check(lanes, ["val"])
    lanes.advance(4)
    assert_same(expected, lanes.state)


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    kept(itertools.product(["float64", "bfloat16"], OPTIMIZERS), of=[("float64", "sgd"), ("bfloat16", "adamw")]),
)
def test_every_precision_passes(dtype: str, optimizer: str) -> None:
    check(sound(three(optimizer=optimizer, dtype=dtype)), ["val"])


@pytest.mark.parametrize("schedule", [pytest.param(n, marks=pytest.mark.thorough) for n in SCHEDULES])
def test_every_schedule_passes(schedule: str) -> None:
    lanes = sound(three(schedule={"name": schedule, "warmup": 1}))
    check(lanes, [])
    for steps in (1, 2, 1000):
        # lengths ride
        experiments = three(schedule={"name": schedule, "warmup": 1}, steps=steps)
        lanes.template.cohort = replace(lanes.template.cohort, experiments=tuple(experiments))
        check(lanes, [])


class Noise(Usual):
    """Extras and metrics that are zero in mathematics, and a parameter whose gradient is."""

    def model(self) -> nn.Module:
        layers = super().model()
        layers.register_parameter("unused", nn.Parameter(torch.ones(1)))
        return layers

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        score = model(x)
        # one number added to all scores changes nothing
        loss = F.cross_entropy(score + model.unused, y) + 0.0 * model.unused.sum()
        weights = score.softmax(-1)[:, 0]
        return loss, {"zero": (weights - weights.mean()).mean(), "one": score.log_softmax(-1).exp().sum(-1).mean() - 1}


class DeadUnits(Usual):
    def model(self) -> nn.Module:
        dead, head = nn.Linear(4, 5), nn.Linear(5, 3)
        nn.init.constant_(dead.bias, -100.0)
        nn.init.zeros_(head.weight)
        return nn.Sequential(dead, nn.ReLU(), nn.Dropout(self.a), nn.Identity(), head)


class Ties(Usual):
    """Scores that are equal but for rounding, in a metric that counts."""

    def metrics(self, model: Any, batch: Any) -> dict[str, Tensor]:
        score = model(batch[0]).logsumexp(-1)
        first = (score / 3 * 3 > score).double()
        return {"share": first.mean(), "number": first.sum()}


class Diverges(Usual):
    """At the second step, whatever the rate."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("steps", torch.zeros(()))
        return model

    def loss(self, model: Any, batch: Any) -> Tensor:
        factor = 1 / (1 - model.steps)
        model.steps += 1
        return super().loss(model, batch) * factor


class Steep(Usual):
    """Any of the usual rates blows it up."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        return 1e4 * super().loss(model, batch).square()


class Mixed(Usual):
    """Computes in bfloat16 what it keeps in float32."""

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        weight = model[0].weight.bfloat16()
        hidden = torch.tanh(F.linear(x.bfloat16(), weight, model[0].bias.bfloat16()))
        return F.cross_entropy(model[4](hidden.float()), y), {"hidden": hidden.mean()}


class Single(Usual):
    """A float64 model that tells a number in float32."""

    def __init__(self, a: float = 0.2):
        super().__init__(a, "float64")

    def loss(self, model: Any, batch: Any) -> Any:
        return super().loss(model, batch), {"a": torch.as_tensor(self.a, dtype=torch.float32)}


NO_FAULTS = [Noise, DeadUnits, Ties, Diverges, Steep, Mixed, Single]


@pytest.mark.parametrize("task", NO_FAULTS, ids=lambda task: task.__name__)
def test_what_is_no_fault_passes(task: type[Usual]) -> None:
    # Adam makes whole updates of what is noise
    check(sound(three(task, "adamw")), ["val"])
