"""The two frames: columns, order, types.

Oracle: the Python values that went in, compared as Python values; pandas' own comparison for what comes back from
Parquet; the column names of the user's contract.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coalesce.store.files import read_parquet, write_csv, write_parquet
from coalesce.store.frames import column, history_frame, results_frame, sorted_history
from run_fakes import experiment, grid, result

#: Values of one swept key, the type of its column, and what the column holds (None: the values themselves).
COLUMNS: dict[str, tuple[list[Any], str, list[Any] | None]] = {
    "floats": ([1e-3, 0.1 + 0.2, 1e4], "float64", None),
    "floats and None": ([1e-3, None, 1.0], "float64", None),
    "floats and integers": ([0.5, 1, None], "float64", [0.5, 1.0, None]),
    "integers": ([1, -(2**63), 2**63 - 1], "int64", None),
    "integers and None": ([2**63 - 1, None, 2**53 + 1], "Int64", None),
    "64 bits": ([2**64 - 1, 0, 2**63], "uint64", None),
    "64 bits and None": ([2**64 - 1, None, 1], "UInt64", None),
    "beyond 64 bits": ([2**70, None, 1], "string", [str(2**70), None, "1"]),
    "an integer that no float holds": ([2**53 + 1, 0.5, None], "string", [str(2**53 + 1), "0.5", None]),
    "booleans": ([True, False, True], "boolean", None),
    "booleans and None": ([True, None, False], "boolean", None),
    "text": (["adam", "sgd", None], "string", None),
    "mixed": ([1, "auto", True], "string", ["1", "auto", "true"]),
    "booleans and integers": ([True, 1, 0], "string", ["true", "1", "0"]),
    "lists": ([[0.9, 0.999], [0.5, 0.9], None], "object", [(0.9, 0.999), (0.5, 0.9), None]),
    "lists of both": ([[0, 0.999], [1, 2], None], "object", [(0.0, 0.999), (1.0, 2.0), None]),
    "lists of lists": ([[[1, 2], [3]], [[]], []], "object", [((1, 2), (3,)), ((),), ()]),
    "lists of text": ([["a"], [], ["b", "c"]], "object", [("a",), (), ("b", "c")]),
    "lists of mixed": ([[1, "a"], [2], None], "string", ['[1, "a"]', "[2]", None]),
    "ragged": ([[1], [[1]], None], "string", ["[1]", "[[1]]", None]),
    "mappings": ([{"x": 1}, None, {"y": 2}], "string", ['{"x": 1}', None, '{"y": 2}']),
    "nothing": ([None, None, None], "float64", None),
}


def python(values: Any) -> list[Any]:
    """A column as Python values, missing ones None."""
    return [None if not isinstance(value, tuple) and pd.isna(value) else value for value in values.tolist()]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_keeps_type_and_values(name: str, tmp_path: Path) -> None:
    values, dtype, expected = COLUMNS[name]
    wanted = values if expected is None else expected
    frame = pd.DataFrame({"key": column(values)})
    assert frame["key"].dtype == dtype
    write_parquet(tmp_path / "x.parquet", frame)
    back = read_parquet(tmp_path / "x.parquet")
    pd.testing.assert_frame_equal(back, frame)
    for held in (python(frame["key"]), python(back["key"])):
        assert held == wanted
        assert [type(item) for item in held] == [type(item) for item in wanted]


@given(st.lists(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3), max_size=4))
def test_no_value_is_lost_whatever_is_mixed(values: list[Any]) -> None:
    held = python(pd.Series(column(values)))
    for value, cell in zip(values, held, strict=True):
        if value is None or (isinstance(value, float) and math.isnan(value)):
            assert cell is None or cell == "NaN"
        elif isinstance(cell, str) and not isinstance(value, str):
            assert json.loads(cell) == value
        else:
            assert cell == value


def test_lists_can_be_grouped_by() -> None:
    frame = pd.DataFrame({"betas": column([[0.9, 0.999], [0.5, 0.9], [0.9, 0.999]]), "loss": [1.0, 2.0, 3.0]})
    assert frame.groupby("betas")["loss"].mean().to_dict() == {(0.9, 0.999): 2.0, (0.5, 0.9): 2.0}


def test_csv_is_readable(tmp_path: Path) -> None:
    values: dict[str, list[Any]] = {"betas": [[0.9, 0.999], None], "lr": [1e-3, 0.1 + 0.2]}
    values |= {"seed": [2**63 - 1, 1], "clip": [None, None]}
    write_csv(tmp_path / "x.csv", pd.DataFrame({key: column(items) for key, items in values.items()}))
    assert (tmp_path / "x.csv").read_text().splitlines() == [
        "betas,lr,seed,clip",
        '"[0.9, 0.999]",0.001,9223372036854775807,',
        ",0.30000000000000004,1,",
    ]


def test_rows_and_columns_of_the_results() -> None:
    experiments = grid(optimizer__lr=[0.1, 0.01], seed=[0, 1])
    order = [one.id for one in experiments]
    # the third has not ended, the others ended in another order than the sweep's
    ended = [
        result(experiments[3], 0.7, best_step=None),
        result(experiments[0], 0.8, best=0.85),
        result(experiments[1], math.nan, status="diverged", steps=7, message="loss is NaN"),
    ]
    frame = results_frame(ended, ["optimizer.lr", "seed"], order)
    assert frame["experiment"].tolist() == [order[0], order[1], order[3]]
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {
        "experiment": "string",
        "optimizer.lr": "float64",
        "seed": "int64",
        "status": "string",
        "steps": "int64",
        "train/loss": "float64",
        "val/accuracy": "float64",
        "best/val/accuracy": "float64",
        "best_step": "Int64",
        "cohort": "int64",
        "width": "int64",
        "job": "int64",
        "device": "string",
        "seconds": "float64",
        "message": "string",
    }
    assert frame["optimizer.lr"].tolist() == [0.1, 0.1, 0.01]
    assert frame["status"].tolist() == ["finished", "diverged", "finished"]
    assert frame["steps"].tolist() == [50, 7, 50]
    assert python(frame["val/accuracy"]) == [0.8, None, 0.7]
    assert python(frame["best/val/accuracy"]) == [0.85, None, 0.7]
    assert python(frame["best_step"]) == [40, 40, None]
    assert frame["message"].tolist() == ["", "loss is NaN", ""]


def test_the_columns_do_not_depend_on_who_ended_first() -> None:
    first, second = grid(seed=[0, 1])
    other = result(second)
    other = type(other)(**{**vars(other), "metrics": {"test/f1": 1.0, "speed": 2.0, "train/acc": 3.0}, "best": {}})
    order = [first.id, second.id]
    one, two = (results_frame(ended, ["seed"], order) for ended in ([result(first), other], [other, result(first)]))
    pd.testing.assert_frame_equal(one, two)
    columns = list(one)
    assert columns[4:10] == ["train/acc", "train/loss", "val/accuracy", "test/f1", "speed", "best/val/accuracy"]


def test_a_later_result_of_the_same_experiment_counts() -> None:
    (one,) = grid(seed=[0])
    frame = results_frame([result(one, 0.1), result(one, 0.2)], ["seed"], [one.id])
    assert frame["val/accuracy"].tolist() == [0.2]


def test_swept_steps_stand_beside_the_steps_done() -> None:
    experiments = grid(steps=[20, 50])
    ended = [result(experiments[0]), result(experiments[1], status="diverged", steps=3)]
    frame = results_frame(ended, ["steps"], [one.id for one in experiments])
    assert frame["steps"].tolist() == [20, 50]
    assert frame["steps_done"].tolist() == [20, 3]


def test_no_results_and_no_swept_keys() -> None:
    empty = results_frame([], ["seed"], [])
    assert empty.empty
    assert list(empty)[:4] == ["experiment", "seed", "status", "steps"]
    one = experiment({})
    assert list(results_frame([result(one)], [], [one.id]))[:3] == ["experiment", "status", "steps"]


def test_missing_swept_value_of_one_experiment() -> None:
    """Keys of one group option alone are missing in the others."""
    experiments = [
        experiment({"optimizer.name": "adam"}),
        experiment({"optimizer.name": "sgd", "optimizer.nesterov": True}),
    ]
    keys = ["optimizer.name", "optimizer.nesterov"]
    frame = results_frame(map(result, experiments), keys, [one.id for one in experiments])
    assert python(frame["optimizer.nesterov"]) == [None, True]


def test_the_history_is_long() -> None:
    frame = history_frame(
        [("b", 10, {"val/loss": torch.tensor(0.5), "val/acc": np.float32(0.25)}), ("a", 10, {"x": 1})]
    )
    assert [str(dtype) for dtype in frame.dtypes] == ["string", "int64", "string", "float64"]
    rows = [tuple(row) for row in frame.itertuples(index=False)]
    assert rows == [("b", 10, "val/loss", 0.5), ("b", 10, "val/acc", 0.25), ("a", 10, "x", 1.0)]
    assert list(history_frame([])) == ["experiment", "step", "metric", "value"]


def test_the_history_in_the_order_of_the_sweep() -> None:
    rows = [("b", 10, {"x": 1.0}), ("b", 20, {"x": 2.0}), ("a", 20, {"x": 3.0, "w": 4.0}), ("a", 10, {"x": 5.0})]
    again = [("b", 20, {"x": 6.0})]
    frame = sorted_history(history_frame(rows + again), ["a", "b"])
    assert [tuple(row) for row in frame.itertuples(index=False)] == [
        ("a", 10, "x", 5.0),
        ("a", 20, "x", 3.0),
        ("a", 20, "w", 4.0),
        ("b", 10, "x", 1.0),
        ("b", 20, "x", 6.0),
    ]
