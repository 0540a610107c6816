"""Law 1, invisible: an experiment's numbers do not depend on its lane, its neighbours or the order of the queue.

Oracle: the same experiment in the first lane of the same compiled graph, its other lanes idle. Bit for bit at equal
width; across widths what was measured, see `test_across_widths`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.configuration import rides
from coalesce.engine.lanes import Lanes
from coalesce.experiment import Experiment
from coalesce.runner import planning
from coalesce.runner.listener import Result
from coalesce.runner.plan import Trainer
from coalesce.runner.planning import make_plan
from coalesce.runner.run import run
from engine_helpers import experiment, template_of
from runner_helpers import Recorder
from thorough import kept

STEPS = 25


class Small(coalesce.Task):
    """Odd sizes, so that no lane's tensors fill the processor's vectors, and a batch that straddles epochs."""

    def __init__(self, dropout: float = 0.2, smoothing: float = 0.0):
        self.dropout, self.smoothing = dropout, smoothing

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(61, 10, generator=generator), torch.randint(3, (61,), generator=generator)
        return coalesce.Data(train=(x[:45], y[:45]), val=(x[45:], y[45:]))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(33, 3))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=self.smoothing)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": F.cross_entropy(model(x), y)}


def make(number: int, lr: float | None = None, steps: int = STEPS) -> Experiment:
    """Experiments of one graph that differ in every float, the seed and the warm-up."""
    return experiment(
        Small,
        {"dropout": 0.05 * (number % 9), "smoothing": 0.01 * (number % 7)},
        {
            "name": "adamw",
            "lr": 3e-3 * (1 + number % 5) if lr is None else lr,
            "betas": [0.9 - 0.01 * (number % 11), 0.99],
            "weight_decay": 0.02 * (number % 4),
        },
        {"name": "cosine", "warmup": number % 6, "final": 0.01 * (number % 3)},
        steps,
        17,
        number,
    )


EXPERIMENTS = [make(i) for i in range(64)]
#: Adam's first update is as large as the rate.
DIVERGES_AT_ONCE = make(4, lr=1e25)
#: Its weight decay of 0.06 multiplies the parameters by -59 in each step.
DIVERGES_LATER = make(3, lr=1e3)
#: Its loss is finite, its update is not.
BREAKS_IN_ITS_UPDATE = make(6, lr=1e300)
DIVERGING = (DIVERGES_AT_ONCE, DIVERGES_LATER, BREAKS_IN_ITS_UPDATE)


class Stand:
    """One compiled graph of a width, and what an experiment gives in it alone."""

    def __init__(self, width: int):
        self.width = width
        self.lanes = Lanes(template_of([*EXPERIMENTS, *DIVERGING]), width)
        self.alone: dict[str, Mapping[str, Tensor]] = {}

    def train(self, placed: Mapping[int, Experiment]) -> dict[int, dict[str, Tensor]]:
        """Train experiments from their start, each in its lane; return each lane's weights and last loss."""
        for lane in range(self.width):
            self.lanes.clear(lane)
        for lane, one in placed.items():
            self.lanes.fill(lane, one)
        self.lanes.advance(STEPS)
        losses = self.lanes.read().metrics["loss"]
        return {
            lane: {**self.lanes.state_dict(lane), "loss": torch.tensor(losses[lane], dtype=torch.float64)}
            for lane in placed
        }

    def reference(self, one: Experiment) -> Mapping[str, Tensor]:
        if one.id not in self.alone:
            self.alone[one.id] = self.train({0: one})[0]
        return self.alone[one.id]


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    """What is at stake is how work is divided, among lanes and among threads."""
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def stands() -> dict[int, Stand]:
    return {}


def stand(stands: dict[int, Stand], width: int) -> Stand:
    if width not in stands:
        stands[width] = Stand(width)
    return stands[width]


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), f"{name}: {(value - expected[name]).abs().max():.1e} apart"


@pytest.mark.parametrize("width", kept([1, 2, 8, 64], of=[2, 8, 64]))
def test_any_lane_beside_any_neighbours(stands: dict[int, Stand], width: int) -> None:
    one = stand(stands, width)
    subject = EXPERIMENTS[1]
    expected = one.reference(subject)
    # every lane at once holds the same experiment
    for found in one.train(dict.fromkeys(range(width), subject)).values():
        assert_same(found, expected)
    # and every lane in turn, beside other experiments
    for lane in {0, 1 % width, width // 2, width - 1}:
        placed = {k: EXPERIMENTS[(k + 7) % 64] for k in range(width)} | {lane: subject}
        assert_same(one.train(placed)[lane], expected)


@pytest.mark.parametrize("width", kept([2, 8, 64], of=[8, 64]))
def test_beside_lanes_that_diverge(stands: dict[int, Stand], width: int) -> None:
    one = stand(stands, width)
    for bad in DIVERGING:
        placed = {k: EXPERIMENTS[k] if k % 2 else bad for k in range(width)}
        found = one.train(placed)
        reading = one.lanes.read()
        assert reading.alive == [bool(k % 2) for k in range(width)]
        assert max(reading.steps[0::2]) < STEPS
        for lane in range(width):
            assert all(torch.isfinite(t).all() for n, t in found[lane].items() if n != "loss")
            if lane % 2:
                assert_same(found[lane], one.reference(EXPERIMENTS[lane]))


def test_beside_a_lane_of_nothing_but_nan(stands: dict[int, Stand]) -> None:
    """Not even weights that are NaN from the start reach a neighbour."""
    one = stand(stands, 8)
    for lane in range(8):
        one.lanes.clear(lane)
        for name, value in one.lanes.state.items():
            if name.startswith("trained/"):
                value[lane] = torch.nan
    assert_same(one.train({5: EXPERIMENTS[2]})[5], one.reference(EXPERIMENTS[2]))


@pytest.mark.parametrize("width", kept([1, 2, 8, 64], of=[8]))
def test_in_five_orders_of_the_queue(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Unequal lengths, so that lanes are refilled beside others in the middle of their training."""
    # the run traces what the plan would
    monkeypatch.setattr(planning, "_check_traces", lambda templates: None)
    several = [make(i, steps=5 + 5 * (i % 4)) for i in range(max(10, width + 8))]
    several[3] = make(3, lr=1e3, steps=20)
    rows: list[dict[str, Result]] = []
    for seed in range(5):
        order = list(several)
        random.Random(seed).shuffle(order)
        # which experiment comes first, and so is the template, must not matter either
        trainer = Trainer(
            width=width, every=5, evaluate_every=10, monitor="val/loss", mode="min", weights=True, check=False
        )
        told = Recorder()
        run(make_plan("orders", [], order, rides, trainer), [told])
        rows.append({result.experiment.id: result for result in told.results})
    assert [len(row) for row in rows] == [len(several)] * 5
    assert [result.status for result in rows[0].values()].count("diverged") == 1
    for row in rows[1:]:
        for name, expected in rows[0].items():
            found = row[name]
            for what in ("status", "steps", "metrics", "best", "best_step"):
                assert getattr(found, what) == getattr(expected, what), what
            assert found.weights is not None
            assert expected.weights is not None
            assert_same(found.weights, expected.weights)


@pytest.mark.parametrize("width", kept([1, 8, 64], of=[8, 64]))
def test_across_widths(stands: dict[int, Stand], width: int) -> None:
    """Measured for this network after 25 steps: 2, 3 and 8 lanes equal bit for bit; 1 and 64 lanes, whose products and
    sums are cut otherwise, up to 1.2e-7 apart, which is one bit of the largest weight. Eight times that is allowed."""
    for one in EXPERIMENTS[:3]:
        expected, found = (stand(stands, w).reference(one) for w in (2, width))
        if width == 8:
            assert_same(found, expected)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0.0, atol=1e-6)
