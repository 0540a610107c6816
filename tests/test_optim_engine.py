"""Update rules in the engine: in a whole step, next to parameters that nothing updates, with values that ride.

Oracles: plain loops with the originals of `optim_rows.py`; the counter of compilations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coalesce
from coalesce.engine import compiling
from coalesce.engine.lanes import Lanes
from coalesce.engine.plain import Plain
from coalesce.experiment import Experiment
from coalesce.optim import OPTIMIZERS
from engine_helpers import GRAPHS, experiment, lanes_of, template_of, train_alone, worst
from optim_rows import BY_RULE, ROWS, Row

STEPS = 20


class Part(nn.Module):
    """Matrices, vectors and a scalar that are trained; one that is frozen, and one that has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.tall = nn.Linear(3, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.frozen = nn.Parameter(torch.tensor([0.5, 2.0, 1.0]), requires_grad=False)
        self.unused = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.norm(self.wide(x))) * self.frozen
        return self.tall(hidden) * self.scale


class Parts(coalesce.Task):
    def __init__(self, dtype: str = "float64"):
        self.dtype = getattr(torch, dtype)

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(11)
        x = torch.randn(23, 4, generator=generator).to(self.dtype)
        y = torch.randn(23, 5, generator=generator).to(self.dtype)
        return coalesce.Data(train=(x, y), val=(x[:7], y[:7]))

    def model(self) -> nn.Module:
        return Part().to(self.dtype)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are counted as they are compiled, and then run as they are: it is the count that is looked at."""
    monkeypatch.setattr(compiling, "_compiled", {})
    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs, options: module)


def make(row: Row, lane: int, **options: Any) -> Experiment:
    """An experiment with the hyperparameters of a lane of the table, and a seed and a warm-up of its own."""
    # the table's patterns name the parameter of another model
    static = {**row.static, **({"adamw": ["tall*"]} if "adamw" in row.static else {})}
    config = {"name": row.rule, **static, **row.lanes[lane % len(row.lanes)], **options}
    schedule = {"name": "constant", "warmup": 3 * lane, "warmup_start": 0.2 + 0.1 * lane}
    return experiment(Parts, {"dtype": "float64"}, config, schedule, STEPS, 7, seed=lane)


def rows(*fast: str) -> pytest.MarkDecorator:
    """Every row; those that are not named are slow."""
    params = [pytest.param(r, id=n, marks=[] if n in fast else pytest.mark.thorough) for n, r in ROWS.items()]
    return pytest.mark.parametrize("row", params)


@rows("sgd", "adamw", "nadam", "adafactor", "lion", "muon")
def test_lanes_equal_plain_loops_and_what_is_not_trained_stays(row: Row) -> None:
    """Case 7: a parameter without a gradient and a frozen one, under weight decay."""
    torch.set_default_dtype(torch.float64)  # in which NAdam's original keeps its product of momenta
    experiments = [make(row, lane) for lane in range(3)]
    lanes = lanes_of(experiments)
    lanes.advance(STEPS)
    assert all(lanes.read().alive)
    for lane, one in enumerate(experiments):
        model = train_alone(one).model
        assert worst(lanes, lane, model) < 1e-12
        state = lanes.state_dict(lane)
        assert state["unused"].tolist() == [[1.0, -2.0], [3.0, 0.5]]
        assert state["frozen"].tolist() == [0.5, 2.0, 1.0]
        plain = Plain(lanes.template)
        plain.fill(0, one)
        plain.advance(STEPS)
        for name, value in plain.state_dict(0).items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name", [pytest.param("adafactor-eps", marks=pytest.mark.thorough), pytest.param("muon", marks=pytest.mark.slow)]
)
def test_compiled_lanes_equal_plain_loops_beside_a_broken_one(name: str) -> None:
    """The rules with sums and matrix products inside a lane. What a neighbour does shows in no bit."""
    torch.set_default_dtype(torch.float64)
    row = ROWS[name]
    experiments = [make(row, lane) for lane in range(3)]
    wild = make(row, 1, **dict.fromkeys(OPTIMIZERS[row.rule].rates, 1e306), weight_decay=1.0)
    lanes = lanes_of(experiments, compile=True)
    lanes.advance(STEPS)
    usual = [lanes.state_dict(lane) for lane in range(3)]
    for lane, one in enumerate(experiments):
        assert worst(lanes, lane, train_alone(one).model) < 1e-12
    for lane, one in enumerate([experiments[0], wild, experiments[2]]):
        lanes.fill(lane, one)
    lanes.advance(STEPS)
    assert lanes.read().alive == [True, False, True]
    assert all(torch.isfinite(value).all() for value in lanes.state_dict(1).values())
    for lane in (0, 2):
        assert all(torch.equal(value, usual[lane][n]) for n, value in lanes.state_dict(lane).items())


@pytest.mark.parametrize(
    "row",
    [pytest.param(r, id=n, marks=[] if n in ("adamw", "muon") else pytest.mark.thorough) for n, r in BY_RULE.items()],
)
def test_new_values_compile_nothing(row: Row, counted: None) -> None:
    first = Lanes(template_of([make(row, 0), make(row, 1)]), 2)
    first.prepare_step()
    assert compiling.compilations() == GRAPHS
    second = Lanes(template_of([make(row, 2), make(row, 1)]), 2)
    second.fill(0, make(row, 2))
    second.advance(2)
    assert compiling.compilations() == GRAPHS
    if row is ROWS["adamw"]:
        # the counter moves
        Lanes(second.template, 3).prepare_step()
        assert compiling.compilations() == 2 * GRAPHS
