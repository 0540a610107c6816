"""Recurrent layers in lanes: case by case what the table of modules does not show.

Oracle: stock PyTorch in a plain loop; finite differences for the gradients of the gradients.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import coalesce
from coalesce.engine.rules import Rules
from coalesce.engine.rules.recurrence import CELLS, Recurrence
from coalesce.errors import TaskError
from coalesce.random import key_of
from engine_helpers import build_alone, experiment, lanes_of, template_of, train_alone, worst


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


class Sequences(coalesce.Task):
    """GRU(4, 8) or LSTM(4, 8) and Linear(8, 2) on sequences of 6, in float32."""

    def __init__(self, kind: str):
        self.kind = kind

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(3)
        x, y = torch.randn(30, 6, 4, generator=generator), torch.randn(30, 2, generator=generator)
        return coalesce.Data(train=(x[:20], y[:20]), val=(x[20:], y[20:]))

    def model(self) -> nn.Module:
        return nn.ModuleList([getattr(nn, self.kind)(4, 8, batch_first=True), nn.Linear(8, 2)])

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model[1](model[0](x)[0][:, -1]), y)

    def metrics(self, model: Any, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_trains_and_evaluates_as_alone(kind: str) -> None:
    """Stock recurrent layers train under vmap, and raise at the first evaluation."""
    pair = [experiment(Sequences, {"kind": kind}, {"name": "sgd", "lr": 0.1 * i}, steps=20, seed=i) for i in (1, 2)]
    lanes = lanes_of(pair)
    found = []
    for _ in range(4):
        lanes.advance(5)
        found.append(lanes.evaluate("val")["loss"])
    for lane, one in enumerate(pair):
        expected: list[float] = []

        def evaluate(step: int, task: Any, model: nn.Module, seen: list[float] = expected) -> None:
            if step % 5 == 4:
                model.eval()
                with torch.no_grad():
                    seen.append(task.metrics(model, task.data().splits["val"])["loss"].item())

        alone = train_alone(one, after=evaluate)
        # float32: rounding of losses near 1
        assert [f[lane] for f in found] == pytest.approx(expected, abs=1e-6)
        assert worst(lanes, lane, alone.model) < 1e-6
        assert abs(expected[0] - expected[-1]) > 1e-3


@pytest.mark.parametrize("kind", list(CELLS))
def test_gradients_of_gradients(kind: str) -> None:
    """The gradient is written by hand; its own gradient, and that of a stack of two, are right as well."""
    torch.manual_seed(0)
    gates = {"gru": 3, "lstm": 4}.get(kind, 1) * 2
    states = 2 if kind == "lstm" else 1
    shapes = [(2, gates, 3, 1), (2, gates, 2), (2, gates, 1), *[(2, 2, 1)] * states]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    torch.autograd.gradcheck(lambda *t: Recurrence.apply(kind, *t), inputs)
    torch.autograd.gradgradcheck(lambda *t: Recurrence.apply(kind, *t), inputs)

    def slope(*t: Tensor) -> Tensor:
        def total(x: Tensor) -> Tensor:
            return torch.sin(sum(y.square().sum() for y in Recurrence.apply(kind, x, *t[1:])))

        return grad(lambda x: grad(total)(x).square().sum())(t[0])

    stacked = [torch.stack([t, 0.5 * t]).detach() for t in inputs]
    for lane in range(2):
        torch.testing.assert_close(vmap(slope)(*stacked)[lane], slope(*(t[lane] for t in stacked)))


def test_a_rate_between_layers_rides() -> None:
    layer = nn.GRU(3, 4, num_layers=3, dropout=0.5)
    x = torch.randn(5, 2, 3)
    for rate in (0.0, 1.0):
        layer.dropout = torch.tensor(rate)  # type: ignore[assignment]
        with Rules(key_of(1), torch.tensor(0), {}):
            found = layer(x)[0]
        layer.dropout = rate
        torch.testing.assert_close(found, layer(x)[0])


class Packed(Sequences):
    def __init__(self) -> None:
        super().__init__("GRU")

    def loss(self, model: Any, batch: Any) -> Tensor:
        packed = pack_padded_sequence(batch[0], [6] * len(batch[0]), batch_first=True)
        return model[0](packed)[1].square().mean()


def test_packed_sequences_are_refused() -> None:
    with pytest.raises(TaskError, match=r"gru\(\) takes a packed sequence.*Pad the sequences(.|\n)*test_rules_recurr"):
        template_of([experiment(Packed, {}, steps=2)])


def test_no_time_step_reaches_the_graph() -> None:
    """Forty time steps make as many operations as five do."""
    sizes = []
    for time in (5, 40):
        task = build_alone(experiment(Sequences, {"kind": "GRU"})).task
        layer: nn.Module = task.model()[0]  # type: ignore[index]
        calls = count()

        class Counts(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                next(calls)  # noqa: B023
                return func(*args, **(kwargs or {}))

        with Rules(key_of(1), torch.tensor(0), {}), torch.device("meta"), Counts():
            layer.to("meta")(torch.empty(2, time, 4))[0].sum().backward()
        sizes.append(next(calls))
    assert sizes[0] == sizes[1]
