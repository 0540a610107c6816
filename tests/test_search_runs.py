"""Searches that train: `coalesce.sweep(..., search=...)`, uncompiled.

Oracle: the same experiments in a plain grid, bit for bit as far as they were trained. Most train toy-w, whose weight is
(1 - 2 lr) ** steps: the best rate is known, and no two curves cross.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pandas as pd
import pytest

import coalesce
from coalesce.runner import planning
from runner_helpers import Net, ToyW
from thorough import kept

RATES = [0.01 * number for number in (12, 3, 40, 7, 25, 1, 33, 18, 2, 45, 9, 30, 5, 21, 15, 37)]
USUAL: dict[str, Any] = {
    "optimizer": "sgd",
    "steps": 40,
    "batch_size": 1,
    "every": 5,
    "evaluate_every": 5,
    "compile": False,
    "check": False,
    "monitor": "val/w",
    "mode": "min",
    "width": 4,
}
METRICS = ["status", "steps", "train/loss", "val/w", "best/val/w", "best_step"]


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    # the run traces what the plan would
    with patch.object(planning, "_check_traces"):
        yield


def sweep(search: Any, params: dict[str, Any] | None = None, task: Any = ToyW, **options: Any) -> pd.DataFrame:
    given = params or {"optimizer.lr": RATES}
    return coalesce.sweep(task, given, search=search, **{**USUAL, **options}).set_index("experiment")


@pytest.fixture(scope="module")
def grid() -> pd.DataFrame:
    return sweep("grid")


def assert_same(frame: pd.DataFrame, other: pd.DataFrame, columns: list[str] = METRICS) -> None:
    pd.testing.assert_frame_equal(frame[columns], other[columns], check_exact=True)


@pytest.mark.parametrize(
    ("name", "width"), kept([("asha", 4), ("halving", 4), ("halving", 16)], of=[("asha", 4), ("halving", 4)])
)
def test_the_best_is_found_with_fewer_steps(name: str, width: int, grid: pd.DataFrame) -> None:
    frame = sweep({"name": name, "min_steps": 5, "factor": 2}, width=width)
    assert list(frame.index) == list(grid.index)
    finished, stopped = (frame[frame["status"] == status] for status in ("finished", "stopped"))
    assert len(finished) + len(stopped) == 16
    # whoever came to his end has the numbers that he has in the grid
    assert_same(finished, grid.loc[finished.index])
    assert 0.45 in set(finished["optimizer.lr"])
    assert set(stopped["steps"]) <= {5, 10, 20}
    assert all(
        f"at step {steps}: val/w=" in text for steps, text in zip(stopped["steps"], stopped["message"], strict=True)
    )
    for _, row in stopped.iterrows():
        assert row["val/w"] == pytest.approx((1 - 2 * row["optimizer.lr"]) ** row["steps"])
    if name == "halving":
        assert sorted(frame["steps"]) == [5] * 8 + [10] * 4 + [20] * 2 + [40] * 2
    else:
        assert frame["steps"].sum() < 0.6 * grid["steps"].sum()


def test_what_was_put_aside_ends_with_its_test_metrics() -> None:
    frame = sweep(
        {"name": "halving", "min_steps": 5, "factor": 4}, {"optimizer.lr": RATES[:6]}, arguments_of("train val test")
    )
    assert list(frame["status"]).count("stopped") == 5
    assert (frame["test/w"] == frame["val/w"]).all()
    assert (frame["best/test/w"] == frame["best/val/w"]).all()


def arguments_of(splits: str) -> dict[str, Any]:
    return {"_target_": ToyW, "splits": splits}


def test_patience_and_target(grid: pd.DataFrame) -> None:
    frame = sweep({"name": "grid", "target": 0.01, "patience": 2, "min_delta": 0.05})
    rates = frame["optimizer.lr"]
    # where each stands at every fifth step, by hand
    curves = {rate: [(1 - 2 * rate) ** step for step in range(5, 45, 5)] for rate in rates}
    expected = []
    for rate in rates:
        best, since, steps = float("inf"), 0, 40
        for number, value in enumerate(curves[rate], 1):
            best, since = (value, 0) if value < best - 0.05 else (best, since + 1)
            if value <= 0.01 or since == 2:
                steps = 5 * number
                break
        expected.append(steps)
    assert list(frame["steps"]) == expected
    assert len(set(expected)) > 3
    reached = frame["message"].str.contains("reached the target of 0.01")
    assert (frame.loc[reached, "val/w"] <= 0.01).all()
    assert frame.loc[frame["steps"] < 40, "status"].eq("stopped").all()


def test_random_draws_with_seeds() -> None:
    params = {"optimizer.lr": coalesce.Interval(1e-3, 0.3, log=True), "seed": [0, 1]}
    frame = sweep({"name": "random", "samples": 3}, params, steps=10)
    assert frame["optimizer.lr"].nunique() == 3
    assert list(frame["seed"]) == [0, 1] * 3
    again = sweep({"name": "random", "samples": 4}, params, steps=10)
    assert_same(again.iloc[:6], frame)


def test_a_population_beats_its_members() -> None:
    params = {"optimizer.lr": coalesce.Interval(0.001, 0.4)}
    search = {"name": "pbt", "samples": 8, "interval": 5, "fraction": 0.25, "seed": 1}
    frame = sweep(search, params, width=8)
    plain = sweep({"name": "random", "samples": 8, "seed": 1}, params, width=8)
    assert list(frame.index) == list(plain.index)
    assert set(frame["status"]) == {"finished"}
    assert frame["val/w"].max() < plain["val/w"].max()
    assert frame["val/w"].median() < plain["val/w"].median()
    assert_same(sweep(search, params, width=8), frame)


def test_optuna_trains_its_trials() -> None:
    params = {
        "optimizer.lr": coalesce.Interval(1e-3, 1e4, log=True),
        "task.hidden": [4, 8],
        "task.dropout": coalesce.Interval(0, 0.5),
    }
    search = {"name": "optuna", "samples": 8, "seed": 2}
    options: dict[str, Any] = {"task": Net, "steps": 10, "batch_size": 8, "monitor": "val/loss"}
    frame = sweep(search, params, **options)
    assert len(frame) == 8
    assert set(frame["task.hidden"]) == {4, 8}
    assert set(frame["status"]) == {"finished", "diverged"}
    # what was drawn trains as it does in a grid
    chosen = frame[frame["status"] == "finished"].iloc[[0]]
    alone = sweep("grid", {key: [chosen[key].iloc[0]] for key in params}, **options)
    assert_same(alone, chosen, ["status", "steps", "train/loss", "val/loss", "best/val/loss"])
