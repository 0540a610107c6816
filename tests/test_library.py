"""`coalesce.sweep`: a sweep without files, one row per experiment.

Oracle: the values of CASES.md, which were measured in torch or follow by hand; and plain loops over `nn.Module` with
`torch.optim` on full batches, where the order of a batch does not matter.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional as F

import coalesce
from coalesce.configuration import DuplicateExperimentWarning
from coalesce.errors import ConfigError, TaskError
from runner_helpers import Net, Picky, ToyMlp, ToyW

#: toy-w: one sample, its weight after the last step.
TOY: dict[str, Any] = {"batch_size": 1, "monitor": "val/w", "optimizer": "sgd", "compile": False}
#: What a run of an experiment leaves that is not about where and how long it ran.
WHERE = ["cohort", "width", "job", "device", "seconds"]


class Weighted(ToyW):
    """toy-w with a mapping among its arguments."""

    def __init__(self, a: dict[str, int] | None = None, factors: tuple[float, ...] = (1.0,)):
        super().__init__()
        self.a, self.factors = a or {}, factors


def row(frame: pd.DataFrame, number: int) -> dict[str, Any]:
    """A row without what tells where it ran."""
    return {str(name): value for name, value in frame.drop(columns=[*WHERE, "message"]).iloc[number].items()}


# cases


@pytest.mark.parametrize("stack", [True, False])
def test_case_1_a_learning_rate_for_each(stack: bool) -> None:
    frame = coalesce.sweep(ToyW, {"optimizer.lr": [0.1, 0.01, 0.001]}, steps=3, stack=stack, **TOY)
    assert list(frame["optimizer.lr"]) == [0.1, 0.01, 0.001]
    assert frame["optimizer.lr"].dtype == np.float64
    assert list(frame["status"]) == ["finished"] * 3
    np.testing.assert_allclose(frame["val/w"], [0.512, 0.941192, 0.994011992], rtol=0, atol=1e-12)
    assert list(frame["width"]) == [3 if stack else 1] * 3


def test_case_2_more_lanes_change_nothing() -> None:
    """0.857375 would show a hidden mean over four lanes."""
    for width, rates in ((1, [0.1]), (2, [0.1, 0.2]), (4, [0.3, 0.1, 0.05, 0.2])):
        frame = coalesce.sweep(ToyW, {"optimizer.lr": rates}, steps=3, width=width, **TOY)
        (weight,) = frame.loc[frame["optimizer.lr"] == 0.1, "val/w"]
        assert weight == pytest.approx(0.512, abs=1e-12)
        assert list(frame["width"]) == [width] * len(rates)


def test_case_4_betas_and_weight_decay() -> None:
    frame = coalesce.sweep(
        ToyW,
        {
            "optimizer.betas": [[0.9, 0.999], [0.5, 0.9], [0.9, 0.999]],
            "optimizer.weight_decay": [0.0, 0, 0.1],
            "steps": [1, 5],
        },
        zip=[["optimizer.betas", "optimizer.weight_decay"]],
        **{**TOY, "optimizer": {"name": "adamw", "lr": 0.1}},
    )
    after = {steps: frame.loc[frame["steps"] == steps, "val/w"].tolist() for steps in (1, 5)}
    np.testing.assert_allclose(after[1], [0.9, 0.9, 0.89], rtol=0, atol=1e-7)
    np.testing.assert_allclose(after[5], [0.507963659, 0.527070209, 0.469952657], rtol=0, atol=1e-9)
    assert set(frame["cohort"]) == {0}
    assert frame["optimizer.betas"].tolist()[0] == (0.9, 0.999)


def test_case_24_one_diverged_lane_leaves_the_others_alone() -> None:
    def rates(middle: float) -> pd.DataFrame:
        params = {"optimizer.lr": [0.05, middle, 0.01]}
        return coalesce.sweep(
            Net, params, optimizer="sgd", steps=60, batch_size=64, compile=False, every=10, evaluate_every=10,
            monitor="val/loss", mode="min",
        )  # fmt: skip

    broken, whole = rates(1e6), rates(0.02)
    assert list(broken["status"]) == ["finished", "diverged", "finished"]
    assert list(whole["status"]) == ["finished"] * 3
    step = broken["steps"][1]
    assert 0 < step < 60
    assert broken["message"][1] == f"the loss or a parameter turned infinite or NaN at step {step + 1}"
    for number in (0, 2):
        assert row(broken, number) == row(whole, number)
    # what a user computes over the finished ones is not touched by it
    sound = broken[broken["status"] == "finished"]["val/loss"]
    assert np.isfinite(sound).all()


def test_case_31_structure_splits_and_each_row_equals_solo() -> None:
    params = {"task.hidden": [16, 32], "optimizer.lr": [1e-2, 1e-3], "optimizer": ["sgd", "adam"]}
    frame = coalesce.sweep(
        ToyMlp, params, steps=100, batch_size=17, compile=False, monitor="val/loss", mode="min", seed=5
    )
    asked = [(h, lr, o) for h in (16, 32) for lr in (1e-2, 1e-3) for o in ("sgd", "adam")]
    assert list(zip(frame["task.hidden"], frame["optimizer.lr"], frame["optimizer"], strict=True)) == asked
    assert sorted(frame["cohort"]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert frame.groupby("cohort")[["task.hidden", "optimizer"]].nunique().eq(1).all().all()
    for number, (hidden, rate, rule) in enumerate(asked):
        # 1e-6: CASES.md's own bound after 100 float32 steps
        assert frame["val/loss"][number] == pytest.approx(solo(hidden, rate, rule, steps=100, seed=5), abs=1e-6)


def solo(hidden: int, rate: float, rule: str, steps: int, seed: int) -> float:
    """toy-mlp in plain PyTorch; its loss after the last step."""
    task = ToyMlp(hidden)
    x, y = task.data().batch("train", torch.arange(17))
    torch.manual_seed(seed)
    model = task.model()
    optimizer: torch.optim.Optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[rule](
        model.parameters(), lr=rate
    )
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return F.cross_entropy(model(x), y).item()


ONE: dict[str, Any] = {**TOY, "steps": 1, "stack": False}


def test_case_30_grids_pairs_lists_and_mappings() -> None:
    assert len(coalesce.sweep(ToyW, {"optimizer.lr": [0.1, 0.2], "seed": range(3)}, **ONE)) == 6
    pairs = coalesce.sweep(
        ToyW,
        {"optimizer.lr": [0.1, 0.01, 0.001], "schedule.warmup": [0, 10, 20]},
        zip=[["optimizer.lr", "schedule.warmup"]],
        **ONE,
    )
    assert list(pairs["schedule.warmup"]) == [0, 10, 20]
    betas = coalesce.sweep(ToyW, {"optimizer.betas": [[0.9, 0.999], [0.5, 0.9]]}, **{**ONE, "optimizer": "adam"})
    assert list(betas["optimizer.betas"]) == [(0.9, 0.999), (0.5, 0.9)]
    # one can group by a list value
    assert len(betas.groupby("optimizer.betas")) == 2
    four = coalesce.sweep(Weighted, {"task.a.x": [1, 2], "task.a.y": [10, 20]}, **ONE)
    assert list(zip(four["task.a.x"], four["task.a.y"], strict=True)) == [(1, 10), (1, 20), (2, 10), (2, 20)]
    with pytest.raises(ConfigError, match=r"optimizer\.lr has 2, seed has 3"):
        coalesce.sweep(ToyW, {"optimizer.lr": [0.1, 0.2], "seed": [1, 2, 3]}, zip=[["optimizer.lr", "seed"]], **ONE)


def test_case_30_f_the_same_twice_is_one_row_and_one_warning() -> None:
    with pytest.warns(DuplicateExperimentWarning) as caught:
        frame = coalesce.sweep(ToyW, {"optimizer.lr": [0.1, 0.1, 0.2]}, **ONE)
    assert list(frame["optimizer.lr"]) == [0.1, 0.2]
    assert len(caught) == 1
    assert Path(caught[0].filename) == Path(__file__), "the warning points to the caller's line"


# the frame


def test_columns() -> None:
    frame = coalesce.sweep(
        Net, {"seed": [1, 0], "task.dropout": [0.5]}, steps=7, batch_size=8, stack=False, monitor="val/loss", mode="min"
    )  # fmt: skip
    metrics = ["train/loss", "val/error", "val/loss", "best/val/error", "best/val/loss", "best_step"]
    keys = ["experiment", "seed", "task.dropout", "status", "steps"]
    assert list(frame.columns) == [*keys, *metrics, *WHERE, "message"]
    assert list(frame["seed"]) == [1, 0]
    assert frame["experiment"].is_unique
    assert list(frame["steps"]) == [7, 7]
    assert list(frame["message"]) == ["", ""]
    assert frame.notna().all().all()


def test_one_experiment_and_all_defaults_but_the_monitor() -> None:
    frame = coalesce.sweep(ToyMlp, steps=3, batch_size=17, stack=False, monitor="val/loss", mode="min")
    assert len(frame) == 1
    assert list(frame.columns[:3]) == ["experiment", "status", "steps"]


def test_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    coalesce.sweep(ToyW, {"optimizer.lr": [0.1, 0.2]}, **ONE)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


# how a task, an optimiser and a schedule are given


def test_the_task_as_class_name_or_mapping() -> None:
    name = "runner_helpers.Net"
    options: dict[str, Any] = {"steps": 3, "batch_size": 8, "stack": False, "monitor": "val/loss", "mode": "min"}
    frames = [
        coalesce.sweep(task, {"seed": [0]}, **options)
        for task in (Net, name, {"_target_": name}, {"_target_": Net}, {"_target_": name, "hidden": 16})
    ]
    assert all(row(frame, 0) == row(frames[0], 0) for frame in frames)
    other = coalesce.sweep({"_target_": name, "hidden": 3}, {"seed": [0]}, **options)
    assert other["experiment"][0] != frames[0]["experiment"][0]


def test_optimiser_and_schedule_as_name_or_mapping() -> None:
    def final(optimizer: Any, schedule: Any = "constant") -> float:
        options = {**ONE, "steps": 4, "optimizer": optimizer}
        return float(coalesce.sweep(ToyW, schedule=schedule, **options)["val/w"][0])

    assert final("sgd") == final({"name": "sgd"}) == final({"name": "sgd", "lr": 0.1}) == pytest.approx(0.8**4)
    assert final({"name": "sgd", "lr": "1e-2"}) == pytest.approx(0.98**4)
    # a cosine over four steps: factors 1, 0.854, 0.5, 0.146
    factors = [(1 + np.cos(np.pi * step / 4)) / 2 for step in range(4)]
    assert final("sgd", "cosine") == pytest.approx(np.prod([1 - 0.2 * f for f in factors]), rel=1e-12)


def test_numpy_and_ranges_as_values() -> None:
    frame = coalesce.sweep({"_target_": ToyW}, {"optimizer": {"lr": np.array([0.1, 0.2])}, "seed": range(2)}, **ONE)
    assert list(zip(frame["optimizer.lr"], frame["seed"], strict=True)) == [(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]


# errors


def problems(*given: Any, **options: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        coalesce.sweep(*given, **{**ONE, **options})
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_all_problems_together() -> None:
    params = {"optimizer.lr": [-1.0, 0.1], "seed": [], "task.blnd": [1.0]}
    found = problems(ToyW, params, steps=0, width=0, moniter="val/w")
    assert set(found) == {"optimizer.lr", "seed", "task.blnd", "steps", "trainer.width", "trainer.moniter"}
    assert "did you mean 'blind'?" in found["task.blnd"]
    assert "did you mean 'monitor'?" in found["trainer.moniter"]


def test_problems_that_the_data_show() -> None:
    found = problems(ToyW, batch_size=2, monitor="val/scroe")
    assert "at most 1" in found["batch_size"]
    assert "did you mean 'val/score'?" in found["trainer.monitor"]


@pytest.mark.parametrize(
    ("task", "says"),
    [
        pytest.param(ToyW(), "is an object; give the class, and its arguments in a mapping", id="object"),
        ({"blind": 0.5}, "must name the task class under _target_"),
        (3, "must name the task class under _target_"),
        ("runner_helpers.Toy", "did you mean 'ToyW'?"),
        ("nowhere.Toy", "no module named 'nowhere'"),
        (int, "is not a subclass of coalesce.Task"),
        (coalesce.Task, "lacks the method"),
    ],
    ids=str,
)
def test_what_is_no_task(task: Any, says: str) -> None:
    assert says in " ".join(problems(task).values())


def test_a_failing_task_raises_or_costs_its_row() -> None:
    with pytest.raises(TaskError, match="no model for 5"):
        coalesce.sweep({"_target_": Picky, "scale": 5.0}, **{**ONE, "monitor": "val/loss"})
    options: dict[str, Any] = {"steps": 2, "batch_size": 8, "stack": False, "monitor": "val/loss"}
    frame = coalesce.sweep(Picky, {"task.scale": [1.0, 2.0, 5.0]}, **options)
    assert list(frame["status"]) == ["finished", "finished", "failed"]
    assert "no model for 5" in frame["message"][2]
    assert frame["steps"][2] == 0
    assert np.isnan(frame["val/loss"][2])
    assert pd.isna(frame["best_step"][2])


def test_sweeps_in_a_row_do_not_disturb_each_other() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options: dict[str, Any] = {"steps": 5, "batch_size": 8, "stack": False, "monitor": "val/loss"}
        frames = [coalesce.sweep(Net, {"seed": [0, 1]}, **options) for _ in range(2)]
    assert [row(frames[0], n) for n in (0, 1)] == [row(frames[1], n) for n in (0, 1)]
