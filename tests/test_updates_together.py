"""Vectors whose gradients are born in one segment are updated as one.

Oracle: each parameter updated by itself, operation by operation in float64. The same operations on the same entries,
but ATen's loops end elsewhere, so to 1e-13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.engine import step
from coalesce.engine.lanes import Lanes
from coalesce.optim import OPTIMIZERS
from coalesce.optim.sgd import SGD
from engine_helpers import experiment, lanes_of

#: Rules that look at more of a parameter than one entry, and those with state of another shape than the parameter's.
BY_THEMSELVES = {"adafactor", "muon", "nadam"}


class Norms(coalesce.Task):
    """Linear-LayerNorm-tanh-Linear with a number of its own: six vectors and a scalar beside two matrices, one of the
    vectors frozen."""

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(24, 5, generator=generator, dtype=torch.float64)
        return coalesce.Data(train=(x, x.sum(1, keepdim=True)))

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3)).double()
        model.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        model[1].bias.requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x).mean(1, keepdim=True) * model.get_parameter("scale"), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {}


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of each update that is placed."""
    found: list[list[str]] = []
    original = step._place_update

    def place(template: Any, names: Sequence[str], *rest: Any) -> Any:
        found.append(list(names))
        return original(template, names, *rest)

    monkeypatch.setattr(step, "_place_update", place)
    return found


def trained(optimizer: dict[str, Any], **options: Any) -> Lanes:
    rates = (0.01, 0.003, 0.03)
    experiments = [experiment(Norms, {}, {**optimizer, "lr": lr}, "cosine", seed=i) for i, lr in enumerate(rates)]
    lanes = lanes_of(experiments, **options)
    lanes.advance(6)
    return lanes


OPTIONS = {"ema": 0.9, "clip_value": 0.1, "accumulate": 2}


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in sorted(OPTIMIZERS)), ("adamw", OPTIONS), ("sgd", OPTIONS)]
)
def test_as_each_by_itself(
    name: str, options: dict[str, Any], together: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = trained({"name": name, **options})
    vectors = {"0.bias", "1.weight", "3.bias", "scale"}
    if name in BY_THEMSELVES:
        assert sorted(together) == sorted([n] for n in [*vectors, "0.weight", "3.weight"])
    else:
        assert {frozenset(names) for names in together} == {frozenset(vectors)} | {
            frozenset({"0.weight"}),
            frozenset({"3.weight"}),
        }
    together.clear()
    monkeypatch.setattr(step, "_SMALL", 0)
    alone = trained({"name": name, **options})
    assert all(len(names) == 1 for names in together)
    assert lanes.read().alive == [True] * 3
    for key, value in lanes.state.items():
        torch.testing.assert_close(value, alone.state[key], rtol=1e-13, atol=1e-13, equal_nan=True)


class Normed(SGD):
    """An update of somebody else's, which looks at the whole parameter."""

    name = "normed"

    @classmethod
    def update(cls, param: Tensor, grad: Tensor, state: Any, hyper: Any, step: Tensor) -> Any:
        return super().update(param, grad / grad.norm(), state, hyper, step)


def test_an_update_that_replaces_another_speaks_for_itself(
    together: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "normed", Normed)
    trained({"name": "normed"})
    assert all(len(names) == 1 for names in together)
    assert SGD.entrywise


def test_parameters_of_two_groups_are_not_updated_as_one(together: list[list[str]]) -> None:
    trained({"name": "adamw", "weight_decay": 0.1, "no_decay": ["*bias"]})
    assert ["3.bias", "0.bias"] in together or ["0.bias", "3.bias"] in together
    assert {"1.weight", "scale"} in [set(names) for names in together]


def test_each_segment_updates_its_own(together: list[list[str]]) -> None:
    """A gradient is gone before the next piece's are born."""
    whole, cut = trained({"name": "adam"}, pieces=()), trained({"name": "adam"}, pieces=("0", "3"))
    assert ["3.bias"] in together
    for key, value in whole.state.items():
        torch.testing.assert_close(value, cut.state[key], rtol=1e-13, atol=1e-13, equal_nan=True)


def test_a_vector_that_breaks_breaks_its_lane_alone(together: list[list[str]]) -> None:
    """And keeps the last entries that were finite, as its neighbours in the joined update do."""
    experiments = [experiment(Norms, {}, {"name": "sgd", "lr": lr}, seed=1) for lr in (0.01, 1e308, 0.01)]
    lanes = lanes_of(experiments)
    alone = lanes_of(experiments[:1])
    for stack in (lanes, alone):
        stack.advance(3)
    reading = lanes.read()
    assert reading.alive == [True, False, True]
    assert all(value.isfinite().all() for name, value in lanes.state.items() if name.startswith(("trained/", "slot/")))
    for name, value in alone.state.items():
        if name.startswith("trained/"):
            torch.testing.assert_close(lanes.state[name][0], value[0], rtol=1e-13, atol=1e-13)


class Breaks(coalesce.Task):
    """Two numbers, and a loss that is finite where the update of the second is not: infinite at a rate of 1e308, and
    NaN at any, as the root's slope at 0 makes it."""

    def __init__(self, root: bool):
        self.root = root

    def data(self) -> coalesce.Data:
        return coalesce.Data(train=torch.zeros(8, 1))

    def model(self) -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.tensor([0.5, 0.25], dtype=torch.float64))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        first, second = model.get_parameter("w")
        return 1e-10 * first + ((second - second.clone()).sqrt() if self.root else 4 * second)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize("root", [False, True], ids=["infinite", "not a number"])
def test_an_entry_that_would_not_be_finite_keeps_its_value(root: bool) -> None:
    """Entry by entry, while the loss itself is finite."""
    lanes = lanes_of([experiment(Breaks, {"root": root}, {"name": "sgd", "lr": 1e308})])
    lanes.advance(1)
    reading = lanes.read()
    assert (reading.alive, reading.finite, reading.steps) == ([False], [True], [0])
    first, second = lanes.state["trained/w"][0].tolist()
    assert second == 0.25
    assert first == pytest.approx(-1e298)
