"""State that Python code keeps between calls, and what is drawn or written outside the lanes' streams.

Oracle: a graph is traced once, so code whose second call differs from its first cannot be right in it and must be
refused before tracing; code that only looks as if it kept something must train as the plain loop does.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.errors import TaskError
from engine_helpers import experiment, lanes_of, template_of, train_alone, worst

TICKS = itertools.count(1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


class Small(coalesce.Task):
    """A tanh network in float64; `extra` is what a subclass does in each step."""

    def __init__(self, a: float = 0.2):
        self.a = a
        self.count = 0
        self.total = torch.zeros((), dtype=torch.float64)
        self.start: list[Tensor] | None = None
        self.generator = np.random.default_rng(0)
        self.log: list[Any] = []

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(33, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (33,), generator=generator)
        return coalesce.Data(train=(x, y), val=(x[:20], y[:20]))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y) * (1 + self.a) + self.extra(model)

    def extra(self, model: Any) -> Any:
        return 0.0

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": F.cross_entropy(model(x), y)}


class Counts(Small):
    def extra(self, model: Any) -> Any:
        self.count += 1
        return 0.0


class Accumulates(Small):
    def extra(self, model: Any) -> Any:
        self.total = self.total + 1
        return self.total


class AccumulatesInPlace(Small):
    def extra(self, model: Any) -> Any:
        self.total += 1
        return self.total


class Decays(Small):
    def extra(self, model: Any) -> Any:
        self.a *= 0.9
        return 0.0


class RemembersFirstWeights(Small):
    def extra(self, model: Any) -> Any:
        if self.start is None:
            self.start = [p.detach().clone() for p in model.parameters()]
        return sum((p - q).square().sum() for p, q in zip(model.parameters(), self.start, strict=True))


class Clock(Small):
    def extra(self, model: Any) -> Any:
        return float(next(TICKS))


class NumpyDraw(Small):
    def extra(self, model: Any) -> Any:
        return np.random.rand()


class PythonDraw(Small):
    def extra(self, model: Any) -> Any:
        return 1.0 if random.random() < 0.5 else 0.0


class OwnGenerator(Small):
    def extra(self, model: Any) -> Any:
        return self.generator.random()


class TorchDraw(Small):
    def extra(self, model: Any) -> Any:
        return torch.poisson(torch.ones(())) * self.a


class TorchDrawInMetrics(Small):
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"noise": torch.poisson(torch.ones(3)).mean()}


class ClampsWeights(Small):
    def extra(self, model: Any) -> Any:
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
        return 0.0


class ClampsData(Small):
    def extra(self, model: Any) -> Any:
        model[0].weight.data.clamp_(-0.1, 0.1)
        return 0.0


class WritesIntoEvaluationBatch(Small):
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": F.cross_entropy(model(x.mul_(2)), y)}


REFUSED = [
    (Counts, r"Counts changes task\.count from 1 to 2"),
    (Accumulates, "the loss is .* when it is called again"),
    (AccumulatesInPlace, "the loss is .* when it is called again"),
    (Decays, r"Decays changes task\.a from 0\.18"),
    (RemembersFirstWeights, "the loss is .* when it is called again"),
    (Clock, "the loss is .* when it is called again"),
    (NumpyDraw, r"draws from the generator of the module numpy\.random"),
    (PythonDraw, "draws from the generator of the module random"),
    (OwnGenerator, "the loss is .* when it is called again"),
    (
        TorchDraw,
        r"poisson\(\) draws from torch's global generator.*\n.*\n    return torch.poisson\(.*\) \* self.a",
    ),
    (TorchDrawInMetrics, r"poisson\(\) draws from torch's global generator"),
    (ClampsWeights, r"loss\(\) writes into the parameter 0\.weight"),
    (ClampsData, r"loss\(\) writes into the parameter 0\.weight"),
    (WritesIntoEvaluationBatch, r"metrics\(\) writes into its batch, leaf 0"),
]


@pytest.mark.parametrize(("task", "message"), REFUSED, ids=[task.__name__ for task, _ in REFUSED])
def test_refused(task: type[Small], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        template_of([experiment(task, {"a": 0.2})])


def test_the_global_generators_stay_as_they_were() -> None:
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    lanes_of([experiment(Small, {"a": 0.1 * i}, seed=i) for i in (1, 2)]).advance(1)
    assert random.getstate() == before[0]
    assert str(np.random.get_state()) == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


class Lazy(nn.Module):
    """Makes a mask and a factor at its first call, and keeps its activations."""

    def __init__(self, a: float):
        super().__init__()
        self.first, self.last, self.a = nn.Linear(4, 5), nn.Linear(5, 3), a
        self.mask: Tensor | None = None
        self.register_buffer("positions", None, persistent=False)
        self.factor: Any = None
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask, self.factor = torch.arange(5, dtype=torch.float64), self.a * 2
            self.positions = torch.linspace(0, 1, 5, dtype=torch.float64)
        self.hidden = torch.tanh(self.first(x) + self.positions) * self.mask * self.factor
        return self.last(self.hidden)


class Harmless(Small):
    """Everything here only looks as if it were kept from step to step."""

    def model(self) -> nn.Module:
        return Lazy(self.a).double()

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        x += self.a  # a lane's training batch is its own
        loss = F.cross_entropy(model(x), y) + self.a * model.hidden.square().mean()
        self.log.append(loss.detach())
        slope = torch.func.grad(lambda t: (t * self.a).sin())(torch.tensor(0.3, dtype=torch.float64))
        return loss + slope * model.last.weight.square().sum()


def test_harmless_state_trains_as_it_does_alone() -> None:
    experiments = [experiment(Harmless, {"a": 0.1 * i}, {"name": "sgd", "lr": 0.1 * i}, seed=i) for i in (2, 1, 3)]
    lanes = lanes_of(experiments)
    lanes.advance(3)
    # what a trace left in an attribute must not be there in the next one
    for _ in range(2):
        found = lanes.evaluate("val")["loss"]
        for lane, one in enumerate(experiments):
            plain = train_alone(one, steps=3)
            assert worst(lanes, lane, plain.model) < 1e-12
            expected = plain.task.metrics(plain.model.eval(), plain.task.data().splits["val"])["loss"].item()
            assert found[lane] == pytest.approx(expected, abs=1e-12)
    # and a refilled lane is compared with a task that was never traced
    lanes.fill(1, experiments[0])
