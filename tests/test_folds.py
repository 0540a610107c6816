"""Folds of a cross-validation as lanes of one graph.

Oracle: the same experiment alone on plain training and validation tensors that were cut by hand, in a plain loop with
`torch.optim`, float64 to 1e-10; and in lanes of its own. There training has the same operations on the same numbers
behind the gather, so bit for bit when compiled. In an evaluation a lane's batch is its own where the oracle's lanes
share one, so another matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.model_selection import KFold, StratifiedKFold
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.configuration import rides
from coalesce.engine.compiling import compilations
from coalesce.engine.folds import read_folds
from coalesce.engine.lanes import Lanes
from coalesce.errors import ConfigError, TaskError
from coalesce.experiment import Experiment, group
from engine_helpers import experiment, lanes_of, template_of, train_alone, worst
from runner_helpers import planned, ran

#: 29 samples in 3 folds: 19, 19 and 20 to train on, 10, 10 and 9 to validate on.
COUNT, FOLDS = 29, 3


class Folded(coalesce.Task):
    """Linear-(BatchNorm)-tanh-Linear; ``only`` cuts one fold's data by hand, in place of `data.fold`."""

    def __init__(self, only: int | None = None, norm: bool = True, dtype: str = "float64", classes: bool = False):
        self.only, self.norm, self.dtype, self.classes = only, norm, getattr(torch, dtype), classes

    def whole(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(COUNT, 4, generator=generator).to(self.dtype)
        return x, torch.sin(x.sum(1, keepdim=True))

    def split(self, y: Tensor) -> list[tuple[Any, Any]]:
        if self.classes:
            return list(StratifiedKFold(FOLDS, shuffle=True, random_state=1).split(y, y[:, 0] > 0))
        return list(KFold(FOLDS, shuffle=True, random_state=1).split(y))

    def data(self) -> coalesce.Data:
        x, y = self.whole()
        test = x[:6] + 1, y[:6]
        if self.only is None:
            return coalesce.Data(train=(x, y), test=test)
        train, val = self.split(y)[self.only]
        return coalesce.Data(train=(x[train], y[train]), val=(x[val], y[val]), test=test)

    def folds(self, data: coalesce.Data) -> Any:
        return iter(self.split(data.leaves("train")[1]))

    def model(self) -> nn.Module:
        norm = [nn.BatchNorm1d(9)] if self.norm else []
        ends = nn.Linear(4, 9, bias=not self.norm), nn.Linear(9, 1)
        return nn.Sequential(ends[0], *norm, nn.Tanh(), ends[1]).to(self.dtype)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        # infinite for samples that are all alike: what a lane is given beyond its own must not count
        x, _ = batch
        return {
            "loss": self.loss(model, batch),
            "spread": 1.0 / (x.max(0)[0] - x.min(0)[0]).sum() if len(x) > 1 else x.sum(),
        }


class Plainly(Folded):
    """The same without folds."""

    folds = coalesce.Task.folds


class Peeking(Folded):
    """Its folds depend on a float that rides."""

    def __init__(self, share: float = 0.5):
        super().__init__()
        self.share = share

    def folds(self, data: coalesce.Data) -> Any:
        count = int(self.share * COUNT)
        return [(range(count), range(count, COUNT))]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * self.share


def folded(number: int, fold: int | None, remainder: str = "straddle", **arguments: Any) -> Experiment:
    """Experiments of one graph that differ in seed, rate and length."""
    optimizer = {"name": "adamw", "lr": 0.01 * (1 + number), "weight_decay": 0.1 * number}
    data = {"remainder": remainder, "fold": fold}
    return experiment(Folded, arguments, optimizer, "constant", 23 + number, 8, number, data)


PAIRS = ((0, 0), (1, 1), (2, 2), (3, 2))


@pytest.mark.parametrize(
    "remainder",
    ["straddle", pytest.param("short", marks=pytest.mark.slow), pytest.param("drop", marks=pytest.mark.thorough)],
)
def test_a_fold_in_a_lane_is_the_fold_alone(remainder: str) -> None:
    lanes = lanes_of([folded(number, fold, remainder) for number, fold in PAIRS], evaluate_batch_size=4)
    for count in (9, 4, 20):
        lanes.advance(count)
    assert lanes.read().steps == [23 + number for number, _ in PAIRS]
    found = {split: lanes.evaluate(split) for split in ("val", "test")}
    for lane, (number, fold) in enumerate(PAIRS):
        alone = train_alone(folded(number, None, remainder, only=fold))
        assert worst(lanes, lane, alone.model) < 1e-10
        data = alone.task.data()
        alone.model.eval()
        for split, metrics in found.items():
            size = data.sizes[split]
            total = {"loss": 0.0, "spread": 0.0}
            for batch in torch.arange(size).split(4):
                for name, value in alone.task.metrics(alone.model, data.batch(split, batch)).items():
                    total[name] += value.item() * len(batch) / size
            assert {n: v[lane] for n, v in metrics.items()} == pytest.approx(total, abs=1e-10)


@pytest.mark.thorough
def test_a_fold_in_a_lane_is_the_fold_alone_bit_for_bit() -> None:
    experiments = [folded(number, fold, dtype="float32") for number, fold in PAIRS]
    lanes = lanes_of(experiments, compile=True)
    lanes.advance(30)
    for lane in (1, 2):
        number, fold = PAIRS[lane]
        alone = lanes_of([folded(number, None, only=fold, dtype="float32")], width=len(PAIRS), compile=True)
        alone.advance(30)
        expected, found = alone.state_dict(0), lanes.state_dict(lane)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert alone.read().metrics["loss"][0] == lanes.read().metrics["loss"][lane]


def test_folds_share_one_graph() -> None:
    experiments = [folded(number, fold) for number in range(2) for fold in range(3)]
    (cohort,) = group(experiments, rides)
    assert "data.fold" in cohort.riding
    assert len(group([*experiments, folded(0, None)], rides)) == 2
    assert len({e.id for e in experiments}) == 6


@pytest.mark.thorough
def test_another_fold_compiles_nothing() -> None:
    lanes = Lanes(template_of([folded(0, 0), folded(1, 1)]), 2, evaluate_batch_size=5)
    lanes.prepare_step()
    lanes.prepare_evaluation("val")
    before = compilations()
    lanes.fill(0, folded(0, 2))
    lanes.advance(3)
    lanes.evaluate("val")
    assert compilations() == before


def test_a_sweep_of_folds_and_the_plain_loop() -> None:
    params = {"data.fold": range(3), "seed": [0, 1]}
    options: dict[str, Any] = {
        "steps": 12,
        "evaluate_every": 5,
        "evaluate_batch_size": 6,
        "arguments": {"classes": True},
    }
    lanes, plain = ran(Folded, params, **options, width=4), ran(Folded, params, **options, stack=False)
    assert len(lanes.plan.cohorts) == 1
    for mine, theirs in zip(lanes.in_order(), plain.in_order(), strict=True):
        assert mine.status == theirs.status == "finished"
        assert set(mine.metrics) == {f"{s}/{n}" for s in ("val", "test") for n in ("loss", "spread")} | {"train/loss"}
        assert mine.metrics == pytest.approx(dict(theirs.metrics), abs=1e-12)
    assert len({result.metrics["val/loss"] for result in lanes.results}) == 6


def test_the_data_are_stored_once() -> None:
    (cohort,) = planned(Folded, {"data.fold": range(3)}).cohorts
    # x and y of all samples and of the test split; and for each fold its indices, where it starts, how many it has
    indices = 8 * (3 * COUNT + 3 * 2 * 2)
    assert cohort.bytes_shared == 8 * 5 * (COUNT + 6) + indices


@pytest.mark.slow
def test_a_frame_has_a_row_for_each_fold() -> None:
    frame = coalesce.sweep(
        Folded, {"data.fold": range(3), "optimizer.lr": [0.1, 0.01]}, steps=4, batch_size=8, every=4, evaluate_every=4,
        monitor="val/loss", mode="min", compile=False,
    )  # fmt: skip
    assert list(frame["data.fold"]) == [0, 0, 1, 1, 2, 2]
    assert frame.groupby("optimizer.lr")["val/loss"].count().tolist() == [3, 3]


# what can be wrong


def problems(task: type[coalesce.Task], **options: Any) -> Sequence[Any]:
    with pytest.raises(ConfigError) as caught:
        ran(task, **options)
    return caught.value.problems


def test_a_fold_that_is_not_there() -> None:
    (one,) = problems(Folded, params={"data.fold": [0, 3, 7]})[:1]
    assert "data.fold=3" in str(one)
    assert "0 to 2, or null" in str(one)
    assert "at least 0" in str(problems(Folded, params={"data.fold": [-1]})[0])
    assert "Plainly defines no folds(self, data)" in str(problems(Plainly, params={"data.fold": [0]})[0])
    assert "valid: at most 19" in str(problems(Folded, params={"data.fold": [0, 2]}, batch_size=20)[0])
    # and without a fold there is no split to look at
    assert "trainer.monitor" in str(problems(Folded)[0])


def test_folds_that_depend_on_what_rides_are_refused() -> None:
    """Lanes share them, as they share the data."""
    with pytest.raises(TaskError, match=r"folds\(\) reads task.share(.|\n)*static = \('share',\)"):
        planned(Peeking, {"data.fold": [0], "task.share": [0.4, 0.6]})


GOOD = (np.arange(4), [4, 5])


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (5, "must return pairs"),
        ("ab", "must return pairs"),
        ([], "returned no fold"),
        ([GOOD, np.arange(4)], "task.folds.1='ndarray': must be one of pairs"),
        ([([0, 1], [6])], "task.folds.0.val=6: no sample of the training split"),
        ([([-1, 1], [5])], "valid: 0 to 5"),
        ([([0, 1, 2], [2, 3, 0])], "2 samples are in both"),
        ([([0, 1], [])], "task.folds.0.val=0: is empty"),
        ([([True, False], [2])], "mask.nonzero"),
        ([([0.0, 1.0], [2])], "must be integers in one dimension"),
        ([([[0], [1]], [2])], "must be integers in one dimension"),
        ([(["a"], [2])], "must be an array of indices"),
    ],
)
def test_index_sets_are_checked(returned: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_folds(returned, coalesce.Data(train=torch.rand(6, 2)))
    assert text in str(caught.value)


def test_a_split_beside_the_folds_is_refused() -> None:
    data = coalesce.Data(train=torch.rand(6, 2), val=torch.rand(2, 2))
    with pytest.raises(ConfigError, match="data\\(\\) gives a val split beside the folds"):
        read_folds([GOOD], data)


def test_all_kinds_of_index_sets_are_taken() -> None:
    data = coalesce.Data(train=torch.rand(6, 2))
    # a bootstrap draws samples twice
    given = [GOOD, (torch.tensor([0, 0, 3], dtype=torch.int32), np.array([1, 2], dtype=np.uint8)), ((5,), range(2))]
    folds = read_folds(given, data)
    assert [t.tolist() for t in folds.rows["train"]] == [[0, 1, 2, 3], [0, 0, 3], [5]]
    assert [t.tolist() for t in folds.rows["val"]] == [[4, 5], [1, 2], [0, 1]]
    assert torch.equal(folds.data(data, 1).leaves("train")[0], data.leaves("train")[0][[0, 0, 3]])
