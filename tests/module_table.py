"""A table of modules: what a row says, the task that trains it, and the laws that it must keep.

Oracle: `train_alone`, the plain loop on stock PyTorch, in float64; every lane has another seed, learning rate, weight
decay and float. A row is a small model. Rows of one kind share a model where they can, since a trace takes most of a
second; `test_rules_*.py` look at each function by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coalesce
from coalesce.engine.compiling import compilations
from coalesce.engine.lanes import Lanes
from coalesce.engine.rules import Rules
from coalesce.experiment import Experiment
from coalesce.random import key_of
from engine_helpers import Alone, experiment, lanes_of, stream_dropout, train_alone, worst

STEPS, SAMPLES, BATCH = 3, 25, 6

#: Every row by name. A file of rows fills it when it is imported.
ROWS: dict[str, Row] = {}


@dataclass(frozen=True)
class Row:
    """One row.

    Args:
        name: unique in the table.
        model: makes the model, given the float that differs between the lanes: 0.15, 0.3 or 0.45.
        input: shape of one sample, drawn from a normal distribution; or of integers below ``vocabulary``.
        vocabulary: None for floating-point samples.
        loss: of (model, x, y, a), where y is (B,) and normal; without one, the mean square of the output's distance
            from y. It is the evaluation's metric as well.
        zero: names of parameters whose gradient is zero in mathematics, noise in numbers: a bias in front of a
            normalisation.
        tolerance: largest difference of a weight, buffer or loss from the plain loop after three steps. What is above
            1e-10 says why in the row.
        draws: the loss itself draws random numbers. Then the plain loop runs under the same rules, which
            `test_rules_draws.py` looks at.
        compiled: keep the laws compiled as well, marked slow. A row takes 10 to 50 seconds, so one row of a kind does.
        thorough: the compiled row is marked thorough instead.
        slow: eager as well it is no part of the plain suite, whose time is short: its functions are looked at one by
            one in `test_rules_riding.py`, or a row of the same kind stands beside it.
    """

    name: str
    model: Callable[[Any], nn.Module]
    input: tuple[int, ...] = (6,)
    vocabulary: int | None = None
    loss: Callable[[nn.Module, Tensor, Tensor, Any], Tensor] | None = None
    zero: tuple[str, ...] = ()
    tolerance: float = 1e-10
    draws: bool = False
    compiled: bool = False
    slow: bool = False
    thorough: bool = False


def rows(*given: Row) -> None:
    """Put rows into the table."""
    for row in given:
        assert row.name not in ROWS, f"two rows are called {row.name}"
        ROWS[row.name] = row


class Modules(coalesce.Task):
    """Trains a row."""

    def __init__(self, row: str, a: float = 0.3):
        self.row, self.a = row, a

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(1)
        row = ROWS[self.row]
        shape = (SAMPLES + 8, *row.input)
        if row.vocabulary is None:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            x = torch.randint(row.vocabulary, shape, generator=generator)
        y = torch.randn(len(x), generator=generator, dtype=torch.float64)
        return coalesce.Data(train=(x[:SAMPLES], y[:SAMPLES]), val=(x[SAMPLES:], y[SAMPLES:]))

    def model(self) -> nn.Module:
        return ROWS[self.row].model(self.a).double()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        given = ROWS[self.row].loss
        if given is not None:
            return given(model, x, y, self.a)
        return (model(x).flatten(1) - y[:, None]).square().mean()

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


def experiments(row: Row, shift: float = 0.0) -> list[Experiment]:
    """Three that differ in everything that rides; others with another shift."""
    return [
        experiment(
            Modules,
            {"row": row.name, "a": 0.15 * i + shift},
            {"name": "sgd", "lr": 0.05 * i + shift, "weight_decay": 0.1 * i},
            steps=STEPS,
            batch_size=BATCH,
            seed=i,
        )
        for i in (2, 1, 3)
    ]


class Stand:
    """The lanes of one row, traced once, and its plain loops."""

    def __init__(self, row: Row, compile: bool):
        self.row, self.compile = row, compile
        self.experiments = experiments(row)
        self.lanes: Lanes = lanes_of(self.experiments, compile=compile)

    @functools.cached_property
    def alone(self) -> list[Alone]:
        return [train_alone(one, draws=self.row.draws) for one in self.experiments]

    def train(self, placed: list[Experiment | None]) -> list[dict[str, Tensor]]:
        """Fill the lanes, train, and return each lane's weights, buffers and losses. None is a lane of NaN."""
        for lane, one in enumerate(placed):
            if one is not None:
                self.lanes.fill(lane, one)
                continue
            for name, value in self.lanes.state.items():
                if name.startswith("trained/"):
                    value[lane] = torch.nan
        self.lanes.advance(STEPS)
        losses = self.lanes.read().metrics["loss"]
        val = self.lanes.evaluate("val")["loss"]
        return [
            {**self.lanes.state_dict(lane), "loss": torch.tensor(losses[lane]), "val/loss": torch.tensor(val[lane])}
            for lane in range(3)
        ]

    def faithful(self) -> None:
        """Training equals the plain loop, and the lanes are three different ones."""
        self.train([*self.experiments])
        reading = self.lanes.read()
        assert reading.steps == [STEPS] * 3
        for lane, alone in enumerate(self.alone):
            assert worst(self.lanes, lane, alone.model, self.row.zero) <= self.row.tolerance
            assert reading.metrics["loss"][lane] == pytest.approx(alone.losses[-1], abs=self.row.tolerance)
            assert alone.losses[0] != pytest.approx(alone.losses[-1], abs=1e-6), "it does not train"
        assert len({round(alone.losses[-1], 6) for alone in self.alone}) == 3

    def evaluation(self) -> None:
        """Evaluation equals that of the plain model, and leaves the buffers alone."""
        for lane, one in enumerate(self.experiments):
            self.lanes.fill(lane, one)
        self.lanes.advance(STEPS)
        before = [self.lanes.state_dict(lane) for lane in range(3)]
        found = self.lanes.evaluate("val")["loss"]
        for lane, alone in enumerate(self.alone):
            alone.model.eval()
            # fractional pooling draws in evaluation as well
            key = key_of(self.experiments[lane].seed)
            stream = Rules(key, torch.tensor(STEPS), {}) if self.row.draws else stream_dropout(key, STEPS)
            batch = alone.task.data().splits["val"]
            with torch.no_grad(), stream:
                expected = alone.task.metrics(alone.model, batch)["loss"]
            # a parameter that is noise may have its part in the evaluation
            assert found[lane] == pytest.approx(expected.item(), abs=max(self.row.tolerance, 1e-10))
            after = self.lanes.state_dict(lane)
            assert all(torch.equal(value, after[name]) for name, value in before[lane].items())

    def invisible(self) -> None:
        """Bit for bit, whatever stands beside it; and, compiled, wherever it stands. Operation by operation another
        lane may differ in the last bit: ATen computes the ends of its vector loops by scalar functions."""
        first, second, third = self.experiments
        alone = self.train([first, None, None])[0]
        assert all(torch.isfinite(value).all() for value in alone.values())
        found = [self.train([first, third, second])[0], self.train([third, first, None])[1]]
        for place, state in enumerate(found):
            for name, value in state.items():
                if self.compile or place == 0:
                    assert torch.equal(value, alone[name]), name
                elif name not in self.row.zero:
                    torch.testing.assert_close(value, alone[name], rtol=0.0, atol=self.row.tolerance)

    def new_values_compile_nothing(self) -> None:
        """Another sweep of other floats, traced anew, finds the code that this process has."""
        self.lanes.prepare_evaluation("val")
        self.lanes.prepare_step()
        before = compilations()
        others = experiments(self.row, 0.02)
        lanes = lanes_of(others, compile=self.compile)
        lanes.advance(STEPS)
        lanes.evaluate("val")
        assert compilations() == before
        for lane, one in enumerate(others):
            assert worst(lanes, lane, train_alone(one, draws=self.row.draws).model, self.row.zero) <= self.row.tolerance


LAWS: dict[str, Callable[[Stand], None]] = {
    "faithful": Stand.faithful,
    "evaluation": Stand.evaluation,
    "invisible": Stand.invisible,
}
COMPILED_LAWS = {**LAWS, "new values compile nothing": Stand.new_values_compile_nothing}


# the rows come one after the other, so that one stand at a time is enough
@functools.lru_cache(maxsize=1)
def stand(name: str, compile: bool) -> Stand:
    return Stand(ROWS[name], compile)


def _marks(row: Row, compile: bool) -> list[Any]:
    if compile and row.thorough:
        return [pytest.mark.thorough]
    return [pytest.mark.slow] if compile or row.slow else []


def cases(compile: bool) -> list[Any]:
    """(row, law), row by row; the compiled ones and the slow rows marked slow."""
    return [
        pytest.param(name, law, id=f"{name}-{law}", marks=_marks(row, compile))
        for name, row in ROWS.items()
        for law in (COMPILED_LAWS if compile else LAWS)
        if row.compiled or not compile
    ]
