"""What becomes of the samples that fill no batch at an epoch's end: `data.remainder`.

Oracle: torch's own `DataLoader`, with and without `drop_last`, in a plain loop with `torch.optim`; and the same
experiment alone. Float64 to 1e-10: sums of matrix products in another order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.configuration import make_experiments, rides
from coalesce.engine.batches import Batches
from coalesce.engine.check import check
from coalesce.engine.compiling import compilations
from coalesce.engine.lanes import Lanes
from coalesce.engine.order import Order
from coalesce.errors import ConfigError, TaskError
from coalesce.experiment import Experiment, group
from coalesce.random import epoch_order
from engine_helpers import experiment, lanes_of, template_of, train_alone, worst
from runner_helpers import Net, ran


class Normed(coalesce.Task):
    """Linear-(BatchNorm)-tanh-(Dropout)-Linear on 29 samples: 4 batches of 7, and 1 sample left, or 3 of 8, and 5."""

    def __init__(self, dropout: float = 0.0, norm: bool = True, dtype: str = "float64"):
        self.dropout, self.norm, self.dtype = dropout, norm, getattr(torch, dtype)

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(29, 4, generator=generator).to(self.dtype)
        y = torch.sin(x.sum(1, keepdim=True))
        return coalesce.Data(train=(x, y), val=(x[:10], y[:10]))

    def model(self) -> nn.Module:
        norm = [nn.BatchNorm1d(9)] if self.norm else []
        # only where it is wanted: its draws are most of the time that a trace takes
        dropout = [nn.Dropout(self.dropout)] if self.dropout else []
        # no bias in front of the norm: its gradient is zero but for rounding, which Adam would make steps of
        ends = nn.Linear(4, 9, bias=not self.norm), nn.Linear(9, 1)
        return nn.Sequential(ends[0], *norm, nn.Tanh(), *dropout, ends[1]).to(self.dtype)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


def normed(
    number: int, remainder: str, steps: int = 23, batch_size: int = 8, accumulate: int = 1, **arguments: Any
) -> Experiment:
    """Experiments of one graph that differ in every float and the seed."""
    optimizer = {"name": "adamw", "lr": 0.01 * (1 + number), "weight_decay": 0.1 * number, "accumulate": accumulate}
    return experiment(Normed, arguments, optimizer, "constant", steps, batch_size, number, {"remainder": remainder})


# what a batch is


@pytest.mark.parametrize(
    ("remainder", "batch_size", "accumulate"),
    [
        ("short", 8, 1),
        ("short", 8, 2),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("drop", 8, 1), ("short", 7, 1), ("short", 29, 1))),
    ],
)
def test_batches_are_those_of_a_data_loader(remainder: str, batch_size: int, accumulate: int) -> None:
    """Over some epochs: the short batch's mean loss, and BatchNorm over it. At 7 the short batch is one sample; in two
    micro-batches of 4 the short one of 5 samples is one of 4 and one of 1."""
    alone_in_it = batch_size == 7 or accumulate == 2
    arguments = {"batch_size": batch_size, "norm": not alone_in_it, "accumulate": accumulate}
    dropout = 0.1 if alone_in_it else 0.0
    experiments = [normed(n, remainder, dropout=dropout * (1 + n), **arguments) for n in range(3)]
    lanes = lanes_of(experiments)
    losses = []
    for _ in range(23):
        lanes.advance(1)
        losses.append(lanes.read().metrics["loss"])
    for lane, one in enumerate(experiments):
        alone = train_alone(one)
        assert [row[lane] for row in losses] == pytest.approx(alone.losses, abs=1e-10)
        assert worst(lanes, lane, alone.model) < 1e-10


def test_every_epoch_is_a_permutation_cut_into_batches() -> None:
    seed, count, size = 5, 29, 8
    for remainder, epoch in (("drop", 3), ("short", 4)):
        batches = Batches(size, remainder)
        for number in range(3):
            steps = range(number * epoch, (number + 1) * epoch)
            found = [Order(batches).batch(seed, s, count) for s in steps]
            order = epoch_order(seed, number, count)
            assert torch.equal(torch.cat(found), order[: 24 if remainder == "drop" else 29])


@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 200), st.sampled_from(["drop", "short", "straddle"]))
def test_tensors_and_integers_agree(size: int, more: int, step: int, remainder: str) -> None:
    batches, count = Batches(size, remainder), size + more
    lone, many = torch.tensor(step), torch.tensor(count)
    if remainder == "short":
        assert int(batches.rest(many)) == batches.rest(count)
        sizes = batches.sizes([count])
        assert [bool(batches.of_size(s, lone, many)) for s in sizes] == [
            s == batches.size_at(step, count) for s in sizes
        ]


# lanes at different places of their epochs


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 2)), min_size=1, max_size=6),
)
def test_the_graphs_are_called_often_enough(size: int, drawn: list[tuple[int, int, int]]) -> None:
    """Each lane takes exactly its steps, each in a call of its batch's size; aligned lanes cost nothing extra."""
    batches = Batches(size, "short")
    lanes = [(step, step + more, 2 * size + kind) for step, more, kind in drawn]
    calls = batches.calls(lanes)
    for step, until, count in lanes:
        for call in calls:
            if step < until and batches.size_at(step, count) == call:
                step += 1
        assert step == until
    longest = max(until - step for step, until, _ in lanes)
    assert len(calls) >= longest
    if len({(step, count) for step, _, count in lanes}) == 1:
        assert len(calls) == longest
    assert len(calls) <= 2 * sum(until - step for step, until, _ in set(lanes))


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_lanes_out_of_step_do_not_see_each_other(compile: bool) -> None:
    """Lanes that start later, end earlier, break, and are refilled: every one equals itself alone, bit for bit where
    the graph is compiled; run operation by operation, ATen's vector loops may differ in a lane's last bit."""
    experiments = [normed(n, "short", steps) for n, steps in enumerate((23, 9, 14, 23))]
    broken = normed(2, "short", 23)
    broken.config["optimizer"]["lr"] = 1e200
    before = compilations()
    lanes = Lanes(template_of([*experiments, broken]), 4, compile=compile)
    alone = {}
    for each in experiments:
        for lane in range(4):
            lanes.clear(lane)
        lanes.fill(0, each)
        lanes.advance(each.steps)
        alone[each.id] = lanes.state_dict(0), lanes.read().metrics["loss"][0]
    if compile:
        assert compilations() - before == 2
    for lane in range(4):
        lanes.clear(lane)
    one: Experiment | None
    done = [0, 0, 0, 0]
    placed: list[Experiment | None] = [None, None, None, None]
    for count, fill in ((1, {0: 0, 1: None}), (2, {2: 1}), (5, {3: 2}), (7, {1: 3}), (4, {2: 3}), (23, {})):
        for lane, number in fill.items():
            placed[lane] = broken if number is None else experiments[number]
            lanes.fill(lane, broken if number is None else experiments[number])
            done[lane] = 0
        lanes.advance(count)
        reading = lanes.read()
        for lane, one in enumerate(placed):
            if one is not None and one is not broken:
                done[lane] = min(done[lane] + count, one.steps)
                assert reading.steps[lane] == done[lane]
                assert reading.alive[lane]
            elif one is broken:
                assert reading.alive[lane] == (count == 1)
    losses = lanes.read().metrics["loss"]
    tolerance = 0.0 if compile else 1e-12
    for lane, number in enumerate((0, 3, 3, 2)):
        weights, loss = alone[experiments[number].id]
        assert abs(losses[lane] - loss) <= tolerance
        for name, value in lanes.state_dict(lane).items():
            assert (value - weights[name]).abs().max() <= tolerance


def test_the_check_at_the_start_looks_at_the_short_batch_too() -> None:
    lanes = lanes_of([normed(0, "short"), normed(1, "short", steps=9)])
    lanes.prepare_step()
    before = {name: tensor.clone() for name, tensor in lanes.state.items()}
    check(lanes, ("val",))
    assert all(torch.equal(t.nan_to_num(), before[n].nan_to_num()) for n, t in lanes.state.items())
    assert lanes.read().steps == [0, 0]
    steps: Any = lanes._steps
    calls: list[int] = []
    kept = dict(steps)

    def counted(size: int, run: Any, inputs: list[Tensor]) -> tuple[Any, list[Tensor]]:
        def call(*given: Tensor) -> Any:
            calls.append(size)
            return run(*given)

        return call, inputs

    # aligned lanes are called as often as they step, whatever the check left
    steps |= {size: counted(size, *step) for size, step in kept.items()}
    lanes.advance(3)
    lanes.read()
    lanes.advance(5)
    assert calls == [8, 8, 8, 5] * 2
    assert lanes.read().steps == [8, 8]
    run, inputs = kept[5]
    steps |= kept

    def wrong(*given: Tensor) -> Any:
        run(*given)
        lanes.state["trained/0.weight"][0] += 0.01
        return []

    steps[5] = wrong, inputs
    with pytest.raises(TaskError, match=r"0\.weight \(update\)"):
        check(lanes, ("val",))


@pytest.mark.parametrize(("remainder", "batch_size"), [("short", 29), ("drop", 8), ("straddle", 8)])
def test_there_is_no_further_graph_without_need(remainder: str, batch_size: int) -> None:
    lanes = lanes_of([normed(0, remainder, batch_size=batch_size)])
    assert lanes.template.batch_sizes == (batch_size,)
    assert "lane/until" not in lanes.state


# configuration


def test_it_belongs_to_the_experiment() -> None:
    base: dict[str, Any] = {"task": Net, "optimizer": "sgd", "schedule": "constant"}
    base |= {"steps": 5, "batch_size": 8, "seed": 0}
    words = ["straddle", "drop", "short"]
    experiments, keys = make_experiments(base, {"data.remainder": words, "optimizer.lr": [0.1, 0.2]})
    assert keys == ("data.remainder", "optimizer.lr")
    assert [e.remainder for e in experiments[::2]] == words
    assert [len(cohort.experiments) for cohort in group(experiments, rides)] == [2, 2, 2]
    (older,), _ = make_experiments({**base, "optimizer": {"name": "sgd", "lr": 0.1}})
    assert older.id == experiments[0].id
    assert len({e.id for e in experiments}) == 6


@pytest.mark.parametrize(
    ("data", "key", "valid"),
    [
        ({"remainder": "shrot"}, "data.remainder", "did you mean 'short'?"),
        ({"remainder": None}, "data.remainder", "straddle, drop, short"),
        ({"remainders": "drop"}, "data.remainders", "did you mean 'remainder'?"),
        ("short", "data", "must be a mapping"),
    ],
)
def test_what_is_wrong_is_said(data: Any, key: str, valid: str) -> None:
    with pytest.raises(ConfigError) as caught:
        coalesce.sweep(Net, data=data, steps=1)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert valid in str(problem)


def test_a_model_that_cannot_take_the_short_batch_is_refused_at_the_start() -> None:
    with pytest.raises(TaskError, match=r"Expected more than 1 value per channel(.|\n)*short batch of 1(.|\n)*drop"):
        ran(Normed, {"data.remainder": ["short"]}, batch_size=7)


@pytest.mark.slow
def test_a_sweep_of_all_three() -> None:
    done = ran(Normed, {"data.remainder": ["straddle", "drop", "short"]}, steps=12)
    assert [result.status for result in done.in_order()] == ["finished"] * 3
    assert len({result.metrics["val/loss"] for result in done.in_order()}) == 3
