"""Where a float or a tensor that differs between lanes may hide, and other references to a parameter.

Oracle: the plain loop, as which every lane must train. What is refused: `test_engine_hidden_refused.py`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coalesce.engine.objects import spell
from engine_helpers import experiment, lanes_of, template_of, train_alone, worst
from hidden_helpers import Net, Small, three


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


class Scale:
    def __init__(self, a: float):
        self.a = a

    def __call__(self, z: Tensor) -> Tensor:
        return torch.tanh(z) * self.a

    def method(self, z: Tensor) -> Tensor:
        return self(z)


def scaled_by(z: Any, a: Any) -> Any:
    return z * a


def scaled(a: Any, z: Any) -> Any:
    return z * a


@dataclass
class Config:
    a: float


@dataclass(frozen=True)
class Frozen:
    a: float


@dataclass(frozen=True, slots=True)
class Slots:
    a: float


class Pair(NamedTuple):
    a: float
    b: float


#: How to keep a float, and how to read it.
KEPT: dict[str, tuple[Callable[[float], Any], Callable[[Any], Any]]] = {
    "dataclass": (Config, lambda c: c.a),
    "frozen dataclass": (Frozen, lambda c: c.a),
    "slots": (Slots, lambda c: c.a),
    "namespace": (lambda a: types.SimpleNamespace(a=a), lambda c: c.a),
    "named tuple": (lambda a: Pair(a, 1.0), lambda c: c.a),
    "tuple": (lambda a: (1.0, a), lambda c: c[1]),
    "nested tuples": (lambda a: [((a, 2), 1.0)], lambda c: c[0][0][0]),
    "list, twice": (lambda a: [a, 2 * a, 0.3], sum),
    "dict": (lambda a: {"a": {"b": a}}, lambda c: c["a"]["b"]),
    "deque": (lambda a: deque([a]), lambda c: c[0]),
    "NumPy scalar": (np.float64, lambda c: c),
    "computed": (lambda a: 1 / a, lambda c: c),
    "tensor": (lambda a: torch.tensor([a, 1.0], dtype=torch.float64), lambda c: c[0]),
}


def default_argument(a: float) -> Callable[[Tensor], Tensor]:
    def function(z: Tensor, a: float = a) -> Tensor:
        return z * a

    return function


def keyword_default(a: float) -> Callable[[Tensor], Tensor]:
    def function(z: Tensor, *, a: float = a) -> Tensor:
        return z * a

    return function


#: Functions that keep a float, and give z * a.
FUNCTIONS: dict[str, Callable[[float], Callable[[Tensor], Tensor]]] = {
    "closure": lambda a: lambda z: z * a,
    "default argument": default_argument,
    "keyword default": keyword_default,
    "partial, by name": lambda a: functools.partial(scaled_by, a=a),
    "partial, by place": lambda a: functools.partial(scaled, a),
    "callable object": Scale,
    "bound method": lambda a: Scale(a).method,
}


class Keeper(Small):
    """Everything at once, each with a weight of its own in the loss, so that no two errors cancel."""

    def __init__(self, a: float = 0.2):
        self.a = a
        self.kept = {name: make(a) for name, (make, _) in KEPT.items()}

    @property
    def inverse(self) -> Any:
        return 1 / (self.a + 1)

    @functools.cached_property
    def root(self) -> Any:
        return self.a**0.5

    def own(self, z: Tensor) -> Tensor:
        return z * self.a

    def model(self) -> nn.Module:
        functions = {name: make(self.a) for name, make in FUNCTIONS.items()} | {"method of the task": self.own}
        return Net(lambda z: torch.stack([f(torch.tanh(z * (1 + i))) for i, f in enumerate(functions.values())]).sum(0))

    def factor(self) -> Any:
        values = [read(self.kept[name]) for name, (_, read) in KEPT.items()] + [self.inverse, self.root]
        return 1 + sum(0.1 * (i + 1) * value for i, value in enumerate(values))


class Seeded(Small):
    """Tensors that follow from the seed and are not the model's own: plain attributes, a fixed random network as
    teacher, a layer in a plain list, a copy of the initial weights."""

    def __init__(self, a: float = 0.2):
        self.a = a
        self.early = nn.Linear(4, 3).double()

    def model(self) -> nn.Module:
        layer = nn.Linear(5, 5).double()
        model = Net(layers=[layer], act=lambda z: torch.tanh(layer(torch.tanh(z))))
        model.projection = torch.rand(3, dtype=torch.float64)
        self.scale = torch.rand(3, dtype=torch.float64)
        self.teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().eval()
        self.start = copy.deepcopy([*model.parameters()])
        return model

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        target = self.teacher(x).detach() + self.early(x).detach()
        loss = F.cross_entropy(model(x) * model.projection * self.scale, y) + F.mse_loss(model(x), target)
        pairs = zip(model.parameters(), self.start, strict=True)
        return loss + 0.3 * sum((p - q.detach()).square().sum() for p, q in pairs)


class Referring(Small):
    """Other references to the model and to its parameters."""

    def model(self) -> nn.Module:
        self.net = Net()
        self.listed = list(self.net.parameters())
        self.tied = tuple(self.net.last.parameters())
        weight = self.net.first.weight
        self.penalty = lambda: weight.square().sum()
        return self.net

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        squares = sum(p.square().sum() for p in [*self.listed, *self.tied])
        return super().loss(self.net, batch) + 0.1 * squares + 0.2 * self.penalty()


class Twice(Small):
    """One module in two places of the model, and one parameter in two modules."""

    def model(self) -> nn.Module:
        inner, third = nn.Linear(5, 5), nn.Linear(5, 5)
        third.weight = inner.weight
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), inner, nn.Tanh(), inner, third, nn.Linear(5, 3)).double()


@pytest.mark.parametrize("task", [Keeper, Seeded, Referring, Twice])
def test_followed(task: type[Small]) -> None:
    experiments = three(task)
    lanes = lanes_of(experiments)
    lanes.advance(3)
    for lane, one in enumerate(experiments):
        plain = train_alone(one)
        assert worst(lanes, lane, plain.model) < 1e-12
        assert lanes.read().metrics["loss"][lane] == pytest.approx(plain.losses[-1], abs=1e-12)
        expected = plain.task.metrics(plain.model.eval(), plain.task.data().splits["val"])["loss"].item()
        assert lanes.evaluate("val")["loss"][lane] == pytest.approx(expected, abs=1e-12)


def test_every_way_of_keeping_a_float_is_an_input() -> None:
    template = template_of(three(Keeper))
    found = {spell(path) for path, origin in template.origins.items() if origin == "task.a"}
    for name in KEPT:
        assert any(path.startswith(f"task.kept[{name!r}]") for path in found), name
    for name in FUNCTIONS:
        assert any(path.startswith(f"model.act<functions>[{name!r}]") for path in found), name
    assert "task.a" in found


def test_a_bounded_value_is_followed() -> None:
    # 0.25 in the first two, so that only the third shows that it rides
    experiments = [experiment(Bounded, {"a": a}) for a in (0.3, 0.4, 0.1)]
    template = template_of(experiments)
    assert {spell(path) for path in template.origins} == {"task.a", "task.bounded"}
    lanes_of(experiments)


class Bounded(Small):
    def __init__(self, a: float = 0.2):
        self.a, self.bounded = a, min(a, 0.25)

    def factor(self) -> Any:
        return self.bounded


def test_what_changes_by_itself_does_not_ride() -> None:
    # a time stamp differs between any two builds, and no loss reads it
    experiments = three(TimeStamp)
    template = template_of(experiments)
    assert [path[-1][1] for path in template.riding] == ["a"]
    assert set(template.origins.values()) == {"task.a"}
    # a lane of another build, with another time, fits
    lanes_of(experiments)


class TimeStamp(Small):
    builds = 0

    def __init__(self, a: float = 0.2):
        type(self).builds += 1
        self.a, self.number, self.when = a, self.builds, self.builds / 7

    def factor(self) -> Any:
        return self.a
