"""From experiments to a plan: cohorts, widths, memory, and problems that only the data show.

Oracle: counts by hand; memory by the bytes of the lanes' own tensors; messages by what the issue demands of them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import coalesce
from coalesce.engine.lanes import Lanes
from coalesce.engine.template import Template
from coalesce.errors import ConfigError, Problem, TaskError
from coalesce.runner.width import AUTO_WIDTH
from runner_helpers import Net, Picky, ToyMlp, ToyW, planned

TOY: dict[str, Any] = {"batch_size": 1, "monitor": "val/w"}


class Classes(ToyMlp):
    """toy-mlp whose data know nothing of classes, with one label changed in the split and at the sample given."""

    def __init__(self, split: str = "val", sample: int = 5, label: int = 3):
        super().__init__()
        self.split, self.sample, self.label = split, sample, label

    def data(self) -> coalesce.Data:
        splits: dict[str, Any] = {}
        for name in ("train", "val"):
            x, y = super().data().batch(name, torch.arange(17))
            if name == self.split:
                y[self.sample] = self.label
            splits[name] = (x, y)
        return coalesce.Data(**splits)


class NotFinite(Net):
    """Data with a NaN and an infinity, in different splits."""

    def data(self) -> coalesce.Data:
        good = torch.zeros(4, 4), torch.zeros(4, 1)
        bad = torch.zeros(4, 4), torch.zeros(4, 1)
        good[0][2, 3], bad[1][1, 0] = torch.nan, torch.inf
        return coalesce.Data(train=good, val=bad)


class Unlike(Net):
    """Splits of different shapes."""

    def data(self) -> coalesce.Data:
        return coalesce.Data(train=(torch.zeros(4, 4), torch.zeros(4, 1)), val=(torch.zeros(4, 5), torch.zeros(4, 1)))


class Wrong(Net):
    """Each method wrong in the way that ``how`` names."""

    def __init__(self, how: str = "", hidden: int = 16):
        super().__init__(hidden)
        self.how = how
        if how == "init":
            raise RuntimeError("no task")

    def data(self) -> Any:
        return torch.zeros(3) if self.how == "data" else super().data()

    def model(self) -> Any:
        return (lambda x: x) if self.how == "function" else super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, _ = batch
        if self.how == "shape":
            return F.linear(x, torch.zeros(3, 3)).mean()
        loss = super().loss(model, batch)
        odd = {"vector": model(x)[:, 0], "number": 0.5, "int": torch.tensor(1), "cut": loss.detach()}
        return odd.get(self.how, loss)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        found: dict[str, Any] = super().metrics(model, batch)
        odd = {"float metric": {"loss": 0.5}, "list": [found["loss"]], "vector metric": {"loss": model(batch[0])}}
        return odd.get(self.how, found)


def problems(*given: Any, **options: Any) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        planned(*given, **options)
    return caught.value.problems


# widths and cohorts


@pytest.mark.parametrize(
    ("count", "asked", "width"),
    [
        (1, "auto", 2),  # a lane alone would differ in the last bit from one among others
        (2, "auto", 2),
        (7, "auto", 7),
        (AUTO_WIDTH, "auto", AUTO_WIDTH),
        # twice 65 lanes rather than 128 and 2
        (AUTO_WIDTH + 2, "auto", AUTO_WIDTH // 2 + 1),
        (3 * AUTO_WIDTH, "auto", AUTO_WIDTH),
        (7, 1, 1),
        (7, 4, 4),
        # wider than the cohort is what was asked for: numbers are those of that width
        (7, 16, 16),
    ],
)
def test_widths(count: int, asked: int | str, width: int) -> None:
    plan = planned(ToyW, {"optimizer.lr": [0.1 / (i + 1) for i in range(count)]}, width=asked, **TOY)
    assert [c.width for c in plan.cohorts] == [width]
    assert [len(c.cohort.experiments) for c in plan.cohorts] == [count]


def test_without_stacking_each_runs_alone() -> None:
    plan = planned(ToyW, {"optimizer.lr": [0.1, 0.2, 0.3]}, width=4, stack=False, **TOY)
    assert [c.width for c in plan.cohorts] == [1]


def test_case_31_structure_makes_cohorts() -> None:
    params = {"task.hidden": [16, 32], "optimizer.lr": [1e-2, 1e-3], "optimizer": ["sgd", "adam"]}
    plan = planned(ToyMlp, params)
    assert len(plan.experiments) == 8
    assert [len(c.cohort.experiments) for c in plan.cohorts] == [2] * 4
    assert [c.cohort.index for c in plan.cohorts] == [0, 1, 2, 3]
    assert {c.cohort.riding for c in plan.cohorts} == {("optimizer.lr",)}
    assert [c.width for c in plan.cohorts] == [2] * 4
    # every experiment in one cohort, once
    placed = [e.id for c in plan.cohorts for e in c.cohort.experiments]
    assert sorted(placed) == sorted(e.id for e in plan.experiments)
    structures = [
        {(e.config["task"]["hidden"], e.config["optimizer"]["name"]) for e in c.cohort.experiments}
        for c in plan.cohorts
    ]
    assert sorted(next(iter(s)) for s in structures) == [(16, "adam"), (16, "sgd"), (32, "adam"), (32, "sgd")]
    sizes = {c.parameters for c in plan.cohorts}
    assert sizes == {16 * 11 + 17 * 3, 32 * 11 + 33 * 3}


def test_the_plan_keeps_the_sweeps_order_and_resolves_the_trainer() -> None:
    plan = planned(Net, {"task.hidden": [8, 4], "seed": [1, 0]}, device="auto", threads=None)
    assert [(e.values["task.hidden"], e.seed) for e in plan.experiments] == [(8, 1), (8, 0), (4, 1), (4, 0)]
    assert plan.keys == ("task.hidden", "seed")
    assert plan.trainer.threads == torch.get_num_threads()
    assert plan.trainer.device == ("cuda" if torch.cuda.is_available() else "cpu")


# memory


@pytest.mark.parametrize("optimizer", ["sgd", {"name": "sgd", "momentum": 0.9}, "adamw"])
@pytest.mark.parametrize("norm", [False, True])
def test_memory_is_that_of_the_lanes(optimizer: Any, norm: bool) -> None:
    """A lane's estimate is its tensors, one set of gradients, and what one step keeps for its backward pass.

    Without what is kept beside a lane, which test_width.py looks at.
    """
    # a small batch, beside which the gradients weigh something
    hidden, batch = 256, 2
    plan = planned(
        Net, {"optimizer.lr": [0.1, 0.2, 0.3]}, arguments={"hidden": hidden, "norm": norm}, optimizer=optimizer,
        batch_size=batch, weights=False, snapshot_minutes=None,
    )  # fmt: skip
    (cohort,) = plan.cohorts
    template = Template(cohort.cohort)
    lanes = Lanes(template, cohort.width, compile=False)
    named = dict(template.model.named_parameters())
    weights = sum(p.nbytes for p in named.values())
    assert cohort.parameters * 4 == weights
    # the hyperparameters and counters of a lane, which the estimate leaves out, are some 100 bytes
    rest = cohort.bytes_per_lane - lanes.bytes / cohort.width - weights
    # at least the hidden layer's output after tanh, at most a handful of such tensors
    hidden_bytes = batch * hidden * 4
    assert 0.9 * hidden_bytes < rest < 6 * hidden_bytes
    assert cohort.bytes_shared == sum(t.nbytes for split in ("train", "val") for t in template.data.leaves(split))
    assert cohort.bytes == cohort.bytes_shared + 3 * cohort.bytes_per_lane


def test_memory_grows_with_the_batch_and_with_the_model() -> None:
    def per_lane(hidden: int, batch_size: int) -> int:
        return planned(Net, arguments={"hidden": hidden}, batch_size=batch_size).cohorts[0].bytes_per_lane

    assert per_lane(256, 64) - per_lane(256, 32) >= 32 * 256 * 4
    assert per_lane(512, 32) > 1.8 * per_lane(256, 32)


# problems that need the data or the task


def test_an_unknown_monitor_names_the_valid_and_the_nearest() -> None:
    (problem,) = problems(Net, monitor="val/eror")
    assert (problem.key, problem.value, problem.nearest) == ("trainer.monitor", "val/eror", "val/error")
    assert problem.valid == "train/loss, val/loss, val/error"


def test_pieces_that_match_nothing_name_the_nearest() -> None:
    (problem,) = problems(Net, monitor="val/error", pieces=("0", "frist"))
    assert (problem.key, problem.value) == ("trainer.pieces", "frist")
    assert "matches no module of Net's model" in problem.rule


def test_pieces_are_planned() -> None:
    (cohort,) = planned(Net, monitor="val/error", pieces=("*",)).cohorts
    assert cohort.pieces == tuple(n for n, _ in cohort.template.model.named_modules() if n)
    (cohort,) = planned(Net, monitor="val/error").cohorts
    assert cohort.pieces == ()


@pytest.mark.parametrize("monitor", ["test/loss", "loss", "val/w"])
def test_what_cannot_be_monitored(monitor: str) -> None:
    # the test split is looked at once, at the end: nothing can be chosen by it
    (problem,) = problems(Net, arguments={"splits": "train val test"}, monitor=monitor)
    assert problem.key == "trainer.monitor"


def test_metrics_to_show_are_checked_likewise() -> None:
    """Those of the test split exist, though only when an experiment has ended."""
    kept: dict[str, Any] = {"arguments": {"splits": "train val test"}, "monitor": "val/loss"}
    planned(Net, **kept, show=("test/loss", "train/loss"))
    found = problems(Net, **kept, show=("test/los", "val/w"))
    assert [(p.key, p.value, p.nearest) for p in found] == [
        ("trainer.show", "test/los", "test/loss"),
        ("trainer.show", "val/w", "val/loss"),
    ]
    found = problems(Net, arguments={"splits": "train val"}, monitor="val/loss", show=("test/loss",))
    assert "test" not in found[0].valid


def test_without_a_validation_split_its_metrics_are_no_monitor() -> None:
    (problem,) = problems(Net, arguments={"splits": "train test"}, monitor="val/loss")
    assert problem.valid == "train/loss"
    planned(Net, arguments={"splits": "train test"}, monitor="train/loss")


def test_a_batch_larger_than_the_data() -> None:
    planned(Net, batch_size=64)
    (problem,) = problems(Net, batch_size=65)
    assert (problem.key, problem.value) == ("batch_size", 65)
    assert "at most 64" in problem.valid


def test_problems_of_data_and_trainer_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = problems(
        Net, {"batch_size": [8, 100, 200], "task.hidden": [4, 5]}, monitor="val/eror", device="cuda", width=2
    )
    assert [(p.key, p.value) for p in found] == [
        ("trainer.device", "cuda"),
        ("trainer.monitor", "val/eror"),
        ("batch_size", 100),
        ("batch_size", 200),
    ]
    assert "auto or cpu" in found[0].valid


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("label", [3, -1])
@pytest.mark.parametrize("batch_size", [1, 17])
def test_labels_out_of_range(split: str, label: int, batch_size: int) -> None:
    """Told before training, wherever the label stands, the first batch or not."""
    (problem,) = problems(Classes, arguments={"split": split, "label": label}, batch_size=batch_size)
    assert split in problem.key
    assert problem.value == label
    assert "label" in problem.rule
    assert "5" in problem.rule
    assert "0 to 2" in problem.valid


def test_ignored_labels_are_no_problem() -> None:
    planned(Classes, arguments={"label": -100})


def test_data_that_are_not_finite() -> None:
    found = problems(NotFinite)
    assert [p.key for p in found] == ["task.data.train.0", "task.data.val.1"]
    assert "(2, 3)" in found[0].rule
    assert str(found[1].value) == "inf"


def test_splits_that_are_not_alike() -> None:
    (problem,) = problems(Unlike)
    assert (problem.key, problem.value, problem.valid) == ("task.data.val.0", (5,), "(4,)")


def test_problems_of_all_cohorts_come_together() -> None:
    found = problems(Classes, {"task.label": [3, 1, 4]}, monitor="val/x")
    assert [p.value for p in found] == [3, "val/x", 4]


@pytest.mark.parametrize(
    ("how", "says", "line"),
    [
        ("init", "constructor.*RuntimeError: no task", 'raise RuntimeError("no task")'),
        ("shape", r"Wrong.loss\(\) raised RuntimeError", "return F.linear(x, torch.zeros(3, 3)).mean()"),
        ("data", r"Wrong.data\(\) must return a coalesce.Data, not Tensor", ""),
        ("function", r"Wrong.model\(\) must return an nn.Module, not function", ""),
        ("vector", r"Wrong.loss\(\) must return a scalar floating-point tensor.*\(8,\)", ""),
        ("number", r"Wrong.loss\(\) must return a scalar .*not float", ""),
        ("int", r"Wrong.loss\(\) must return a scalar .*int64", ""),
        ("cut", r"Wrong.loss\(\) returned a loss that no trainable parameter has a part in", ""),
        ("float metric", r"Wrong.metrics\(\): 'loss' must be a real scalar tensor, not a float", ""),
        ("vector metric", r"Wrong.metrics\(\): 'loss' must be a real scalar tensor, not a \(8, 1\) tensor", ""),
        ("list", r"Wrong.metrics\(\) must be a dict of name → scalar tensor, not list", ""),
    ],
)
def test_a_task_that_fails_is_told_with_its_line(how: str, says: str, line: str) -> None:
    with pytest.raises(TaskError) as caught:
        planned(Wrong, arguments={"how": how})
    said = str(caught.value)
    assert re.search(says, said, re.DOTALL), said
    if line:
        where, source = said.splitlines()[-2:]
        assert re.fullmatch(r'  File ".*test_planning.py", line \d+, in \w+', where)
        assert source.strip() == line


def test_nothing_is_left_behind_by_planning() -> None:
    """Planning draws from streams of its own and leaves torch's, NumPy's and Python's as they were."""
    import random

    import numpy as np

    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    planned(Net, {"seed": [0, 1], "task.dropout": [0.1, 0.2]})
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]
    assert random.getstate() == before[2]


def test_a_failure_of_the_first_experiment_costs_that_experiment() -> None:
    plan = planned(Picky, {"task.scale": [3.0, 1.0]})
    assert list(plan.failed) == [plan.experiments[0].id]
    assert "no model for 3.0" in plan.failed[plan.experiments[0].id]


def test_a_failure_of_all_stops_the_plan() -> None:
    """It is told before anything runs."""
    with pytest.raises(TaskError, match=r"no model for 3\.0"):
        planned(Picky, {"task.scale": [3.0, 4.0]})


class Guard(ToyMlp):
    """A guard against NaN as people write it: a Python branch on a tensor (case 22)."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        if torch.isnan(loss):
            raise RuntimeError("diverged")
        return loss


class Looker(ToyMlp):
    """A metric that is taken out of the graph."""

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": torch.tensor(F.cross_entropy(model(batch[0]), batch[1]).item())}


@pytest.mark.parametrize(("task", "line"), [(Guard, "if torch.isnan(loss):"), (Looker, ".item()")])
def test_what_cannot_be_traced_is_known_before_the_run(task: type[coalesce.Task], line: str) -> None:
    with pytest.raises(TaskError, match="while the graph is traced") as caught:
        planned(task, {"seed": [0, 1]}, batch_size=17, monitor="train/loss")
    assert line in str(caught.value)
    assert "test_planning.py" in str(caught.value)
    # unstacked, nothing is traced, and the code is plain PyTorch
    assert planned(task, {"seed": [0, 1]}, batch_size=17, monitor="train/loss", stack=False).cohorts


def test_cohorts_with_the_same_data_keep_them_once() -> None:
    plan = planned(ToyMlp, {"optimizer": ["sgd", "adam"]}, batch_size=17, monitor="train/loss")
    first, second = (c.template for c in plan.cohorts)
    assert first is not second
    assert first.data is second.data
