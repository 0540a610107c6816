"""Metrics that are no averages: `Task.outputs` and `Task.summary`.

Oracle: scikit-learn's own functions on the output of a model that a plain loop trained; a float64 score would have to
cross another one by 1e-12 to change them.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.errors import ConfigError, TaskError
from coalesce.experiment import Experiment
from engine_helpers import experiment, lanes_of, train_alone
from runner_helpers import ran

#: Samples of the splits.
SIZES = {"train": 30, "val": 17, "test": 9}


class Judged(coalesce.Task):
    """Two classes, one linear layer. ``threshold`` is used on the host alone."""

    def __init__(self, threshold: float = 0.5, named: bool = False, how: str = "", folded: bool = False):
        self.threshold, self.named, self.how, self.folded = threshold, named, how, folded

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(2)
        splits: dict[str, Any] = {}
        for name, size in SIZES.items():
            x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
            noise = torch.randn(size, generator=generator, dtype=torch.float64)
            # sorted by class: no part of a split needs to have both
            splits[name] = x, (x[:, 0] + x[:, 1] + noise > 0).long().sort()[0]
        if self.folded:
            del splits["val"]
        return coalesce.Data(**splits)

    def folds(self, data: coalesce.Data) -> Any:
        x, y = data.leaves("train")
        return StratifiedKFold(3).split(x, y)

    def model(self) -> nn.Module:
        return nn.Linear(5, 1).double()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.binary_cross_entropy_with_logits(model(x)[:, 0], y.double())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        x, _ = batch
        score = model(x)[:, 0].sigmoid()
        if self.how == "nan":
            score = torch.where(model.weight.abs().sum() > 3.0, torch.nan, score)  # type: ignore[operator]
        return {"score": score, "row": x} if self.named else score

    def summary(self, outputs: Any, split: Any) -> dict[str, Any]:
        x, y = split
        if self.named:
            assert torch.equal(outputs["row"], x)
            outputs = outputs["score"]
        assert isinstance(self.threshold, float)
        assert outputs.shape == y.shape
        if self.how == "raises" and self.threshold > 0.5:
            raise ValueError("no threshold of mine")
        if self.how == "other" and self.threshold > 0.5:
            return {"f2": 0.0}
        if self.how == "draws":
            return {"auc": random.random() + torch.rand(()).item() + np.random.rand()}
        f1 = f1_score(y, outputs > self.threshold)
        return {"f1": f1, "auc": roc_auc_score(y, outputs), "count": torch.tensor(len(y))}


def judged(number: int, **data: Any) -> Experiment:
    """Experiments of one graph that differ in threshold, rate and seed."""
    arguments = {"threshold": 0.3 + 0.1 * number, "named": number < 0, "how": "", "folded": bool(data)}
    rate = {"name": "sgd", "lr": 0.1 * (1 + number)}
    return experiment(Judged, arguments, rate, "constant", 12, 8, number, data)


def expected(task: Any, model: nn.Module, split: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Written without the task's own methods."""
    x, y = split
    with torch.no_grad():
        score = torch.sigmoid(x @ model.weight[0] + model.bias).numpy()  # type: ignore[index,operator]
    target = y.numpy()
    found = score > task.threshold
    hits = (found & (target == 1)).sum()
    pairs = [float(a > b) for a in score[target == 1] for b in score[target == 0]]
    return {"f1": 2 * hits / (found.sum() + target.sum()), "auc": sum(pairs) / len(pairs), "count": len(target)}


@pytest.mark.parametrize(
    ("most", "compile"),
    [(4, False), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((17, False), (100, False), (4, True)))],
)
def test_a_splits_whole_output_is_summed_up(most: int, compile: bool) -> None:
    experiments = [judged(number) for number in range(3)]
    lanes = lanes_of(experiments, compile=compile, evaluate_batch_size=most)
    lanes.advance(12)
    for split in ("val", "test"):
        found = lanes.evaluate(split)
        assert list(found) == ["loss", "f1", "auc", "count"]
        for lane, one in enumerate(experiments):
            alone = train_alone(one)
            right = expected(alone.task, alone.model, alone.task.data().splits[split])
            assert {n: found[n][lane] for n in right} == pytest.approx(right, abs=1e-12)


def test_a_fold_is_summed_up_over_its_own_samples() -> None:
    experiments = [judged(number, fold=number) for number in range(3)]
    lanes = lanes_of(experiments, evaluate_batch_size=3)
    found, test = lanes.evaluate("val"), lanes.evaluate("test")
    for lane, one in enumerate(experiments):
        whole = lanes.template.data
        alone = train_alone(one, 0)
        _, val = list(alone.task.folds(whole))[lane]
        right = expected(alone.task, alone.model, whole.batch("train", torch.as_tensor(val)))
        assert {n: found[n][lane] for n in right} == pytest.approx(right, abs=1e-12)
        assert {n: test[n][lane] for n in right} == pytest.approx(
            expected(alone.task, alone.model, whole.splits["test"]), abs=1e-12
        )


def test_a_sweep_may_be_judged_by_it() -> None:
    params = {"task.threshold": [0.3, 0.6], "seed": [0, 1]}
    options: dict[str, Any] = {"monitor": "val/auc", "mode": "max", "evaluate_batch_size": 4, "steps": 15}
    options |= {"evaluate_every": 5, "arguments": {"named": True}, "optimizer": {"name": "sgd", "lr": 0.5}}
    lanes, plain = ran(Judged, params, **options, width=3), ran(Judged, params, **options, stack=False)
    for mine, theirs in zip(lanes.in_order(), plain.in_order(), strict=True):
        names = ["train/loss"] + [f"{s}/{n}" for s in ("val", "test") for n in ("loss", "f1", "auc", "count")]
        assert list(mine.metrics) == names
        assert mine.metrics == pytest.approx(dict(theirs.metrics), abs=1e-12)
        assert mine.best_step == theirs.best_step
        assert mine.best["val/auc"] == max(v["val/auc"] for _, v in lanes.told.curve(mine.experiment) if "val/auc" in v)
    with pytest.raises(ConfigError, match="did you mean 'val/auc'"):
        ran(Judged, monitor="val/acu")


# what goes wrong


def test_one_that_raises_fails_alone_and_says_where() -> None:
    done = ran(Judged, {"task.threshold": [0.5, 0.7, 0.4]}, arguments={"how": "raises"}, steps=10)
    first, second, third = done.in_order()
    assert (first.status, second.status, third.status) == ("finished", "failed", "finished")
    assert "summary() of experiment" in second.message
    assert "task.threshold=0.7" in second.message
    assert "ValueError: no threshold of mine" in second.message
    assert 'raise ValueError("no threshold of mine")' in second.message
    assert "test_summary.py" in second.message


def test_one_that_returns_other_metrics_fails_alone() -> None:
    done = ran(Judged, {"task.threshold": [0.5, 0.7]}, arguments={"how": "other"}, steps=5, stack=False)
    first, second = done.in_order()
    assert (first.status, second.status) == ("finished", "failed")
    assert "returned f2, but f1, auc, count at the start" in second.message


@pytest.mark.parametrize("stack", [True, False])
def test_nan_is_nan_and_raises_nothing(stack: bool) -> None:
    """scikit-learn refuses NaN. A lane that breaks is not asked at all."""
    done = ran(
        Judged,
        {"optimizer.lr": [0.1, 30.0, 1e300], "seed": [1]},
        arguments={"how": "nan"},
        # at the last rate it multiplies the weights by 1e300 in each step
        optimizer={"name": "sgd", "weight_decay": 1.0},
        steps=10,
        evaluate_every=5,
        stack=stack,
    )
    first, second, third = done.in_order()
    assert (first.status, second.status, third.status) == ("finished", "finished", "diverged")
    assert 0.0 <= first.metrics["val/auc"] <= 1.0
    assert all(math.isnan(second.metrics[f"val/{n}"]) for n in ("f1", "auc", "count"))
    assert "val/auc" not in third.metrics


def test_what_it_draws_follows_from_the_seed() -> None:
    """Not from the lanes beside it, nor from how often it was asked."""
    options: dict[str, Any] = {"arguments": {"how": "draws"}, "monitor": "val/auc", "steps": 5}
    many = ran(Judged, {"seed": [0, 1, 2]}, **options).in_order()
    (alone,) = ran(Judged, {"seed": [2]}, **options).in_order()
    assert many[2].metrics["val/auc"] == alone.metrics["val/auc"]
    assert len({result.metrics["val/auc"] for result in many}) == 3


class Odd(Judged):
    """Each hook wrong in its way."""

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        found = super().outputs(model, batch)
        odd = {"number": 1.0, "mean": found.mean(), "short": found[:-1], "keys": {1: found}, "empty": {}}
        if self.how == "line":
            return batch["x"]
        return odd.get(self.how, found)

    def summary(self, outputs: Any, split: Any) -> Any:
        if self.how == "writes":
            split[0][0] = 0.0
        odd = {"list": [1.0], "text": {"f1": "0.5"}, "vector": {"f1": outputs}, "key": {1: 1.0}, "taken": {"loss": 1.0}}
        return odd.get(self.how, super().summary(outputs, split))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("number", "must be a tensor with a row for each of the batch's 17 samples, or a dict of such, not a float"),
        ("mean", "not a () tensor"),
        ("short", "not a (16,) tensor"),
        ("keys", "an output's name must be text, not 1"),
        ("empty", "returned an empty dict"),
        ("line", 'return batch["x"]'),
        ("list", "must return a dict of name → number, not list"),
        ("text", "'f1' must be a number, not a str"),
        ("vector", "'f1' must be a number, not a Tensor of shape (17,)"),
        ("key", "a metric's name must be text, not 1"),
        ("taken", "both return loss: give one another name"),
        ("writes", "writes into the split, leaf 0"),
    ],
)
def test_what_is_wrong_is_said_at_the_start(how: str, text: str) -> None:
    with pytest.raises(TaskError) as caught:
        ran(Odd, arguments={"how": how})
    assert text in str(caught.value)


class NoSummary(Judged):
    """Outputs alone."""

    summary = coalesce.Task.summary


class NoOutputs(Judged):
    """A summary alone."""

    outputs = coalesce.Task.outputs


@pytest.mark.parametrize("task", [NoSummary, NoOutputs])
def test_the_two_belong_together(task: type[coalesce.Task]) -> None:
    with pytest.raises(TaskError, match="the two belong together"):
        ran(task)
