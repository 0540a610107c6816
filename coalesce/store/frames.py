"""The two DataFrames: results (one row per experiment) and history (one row per recorded metric).

Between a `Result` and a row of the results stands the *raw* table, which is what the run folder's parts hold: it has
no swept values, so that parts written at different times always agree in their types. The plan adds the values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa

from coalesce.store.files import tuples

if TYPE_CHECKING:
    from coalesce.runner.listener import Result

#: Metrics of one experiment after some steps: id, steps, values.
Row: TypeAlias = tuple[str, int, Mapping[str, Any]]

_BEFORE = {"experiment": "string", "status": "string", "steps": "int64"}
_AFTER = {
    "best_step": "Int64",
    "cohort": "int64",
    "width": "int64",
    "job": "int64",
    "device": "string",
    "seconds": "float64",
    "message": "string",
}
_INTEGERS = ((np.int64, pd.Int64Dtype(), -(2**63), 2**63), (np.uint64, pd.UInt64Dtype(), 0, 2**64))
_SPLITS = ("train", "val", "test")


def results_frame(results: Iterable[Result], keys: Sequence[str], order: Sequence[str]) -> pd.DataFrame:
    """One row per experiment that ended.

    Args:
        results: in any order; of two with one id the later counts.
        keys: the swept keys, dotted.
        order: the ids of the sweep's experiments, in its order; those that have not ended have no row.

    Returns:
        ``experiment``, the swept keys, ``status``, ``steps``, the last metrics (``train/…``, ``val/…``, ``test/…``,
        then by name), the best ones (``best/val/…``), ``best_step``, ``cohort``, ``width``, ``job``, ``device``,
        ``seconds``, ``message``. Where ``steps`` itself is swept, that column holds the swept value, and
        ``steps_done`` the updates done. Swept values keep their types, see `column`.
    """
    results = list(results)
    values = {result.experiment.id: result.experiment.values for result in results}
    return with_values(raw_frame(results), values, keys, order)


def raw_frame(results: Iterable[Result]) -> pd.DataFrame:
    """The results without their swept values, in the order given."""
    results = list(results)
    metrics = ordered_metrics({name for result in results for name in result.metrics})
    bests = ordered_metrics({name for result in results for name in result.best})
    data: dict[str, Any] = {
        "experiment": [result.experiment.id for result in results],
        "status": [result.status for result in results],
        "steps": [result.steps for result in results],
    }
    for name in metrics:
        data[name] = [float(result.metrics.get(name, np.nan)) for result in results]
    for name in bests:
        data[f"best/{name}"] = [float(result.best.get(name, np.nan)) for result in results]
    for name in _AFTER:
        data[name] = [getattr(result, name) for result in results]
    types = {**_BEFORE, **dict.fromkeys(metric_columns(data), "float64"), **_AFTER}
    return pd.DataFrame({name: pd.array(values, dtype=types[name]) for name, values in data.items()})


def with_values(
    raw: pd.DataFrame, values: Mapping[str, Mapping[str, Any]], keys: Sequence[str], order: Sequence[str]
) -> pd.DataFrame:
    """Put raw results into the sweep's order and their swept values beside them.

    Args:
        raw: as `raw_frame` makes it, or several of them concatenated.
        values: id → swept key → value.
        keys, order: see `results_frame`.
    """
    raw = _sorted(raw.drop_duplicates("experiment", keep="last"), order, ["experiment"])
    if "steps" in keys:
        raw = raw.rename(columns={"steps": "steps_done"})
    metrics = metric_columns(raw.columns)
    last = ordered_metrics(name for name in metrics if not name.startswith("best/"))
    best = ordered_metrics(name.removeprefix("best/") for name in metrics if name.startswith("best/"))
    swept = {key: column([values[name].get(key) for name in raw["experiment"]]) for key in keys}
    steps = "steps_done" if "steps" in keys else "steps"
    columns = [*last, *(f"best/{name}" for name in best), *_AFTER]
    return pd.DataFrame(
        {
            "experiment": raw["experiment"],
            **swept,
            "status": raw["status"],
            steps: raw[steps],
            **{name: raw[name] for name in columns},
        }
    )


def best_experiment(frame: pd.DataFrame, monitor: str, mode: str) -> dict[str, Any] | None:
    """The row of the best experiment with its best value and the step of it under ``value`` and ``step``.

    Returns:
        None if no experiment that ended well has a finite value.
    """
    column = next((name for name in (f"best/{monitor}", monitor) if name in frame), None)
    if column is None:
        return None
    well = frame[~frame["status"].isin(["diverged", "failed"]) & np.isfinite(frame[column])]
    if well.empty:
        return None
    row = well.loc[well[column].idxmax() if mode == "max" else well[column].idxmin()]
    step = row["best_step"] if column != monitor else row.get("steps_done", row["steps"])
    return {**row.to_dict(), "value": float(row[column]), "step": int(step)}


def history_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """The long table ``experiment``, ``step``, ``metric``, ``value``, in the order given.

    Args:
        rows: ``(experiment id, step, {metric: value})``, as `Listener.metrics` tells them; values are numbers or
            0-d tensors.
    """
    long = [(name, step, metric, float(value)) for name, step, values in rows for metric, value in values.items()]
    names, steps, metrics, numbers = zip(*long, strict=True) if long else ((), (), (), ())
    return pd.DataFrame(
        {
            "experiment": pd.array(list(names), dtype="string"),
            "step": np.array(steps, dtype=np.int64),
            "metric": pd.array(list(metrics), dtype="string"),
            "value": np.array(numbers, dtype=np.float64),
        }
    )


def sorted_history(history: pd.DataFrame, order: Sequence[str]) -> pd.DataFrame:
    """The history by experiment in the sweep's order, then by step; what was recorded twice counts once."""
    unique = history.drop_duplicates(["experiment", "step", "metric"], keep="last")
    return _sorted(unique, order, ["experiment", "step"])


def column(values: Sequence[Any]) -> Any:
    """A column of swept values in the narrowest type that keeps each of them; None is missing.

    Booleans are ``boolean``; integers ``int64``, or ``Int64`` where one is missing (``uint64``, ``UInt64`` beyond
    63 bits); numbers ``float64``; lists tuples (a column of lists cannot be grouped by); text, and whatever is mixed
    or nested otherwise, ``string``, the latter as JSON.
    """
    present = [value for value in values if value is not None]
    missing = len(present) < len(values)
    kinds = {_kind(value) for value in present}
    if not present:
        return np.full(len(values), np.nan)
    if kinds == {"bool"}:
        return pd.array(list(values), dtype="boolean")
    if kinds == {"int"}:
        for plain, nullable, low, high in _INTEGERS:
            if min(present) >= low and max(present) < high:
                # not pd.array for plain integers: it turns 2**64 - 1 into 0 (pandas 3.1)
                return pd.array(list(values), dtype=nullable) if missing else np.array(values, dtype=plain)
    if kinds <= {"int", "float"} and all(_exact(value) for value in present):
        return np.array([np.nan if value is None else float(value) for value in values])
    if kinds == {"list"}:
        items = _lists(values)
        if items is not None:
            return items
    return pd.array([value if value is None else _text(value) for value in values], dtype="string")


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "list"
    return next((kind.__name__ for kind in (bool, int, float, str) if isinstance(value, kind)), "other")


def _exact(value: Any) -> bool:
    # a NaN is a float whatever it is unequal to
    return isinstance(value, float) or abs(value) <= 2**53


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _lists(values: Sequence[Any]) -> pd.Series[Any] | None:
    """The column as tuples if Parquet can hold it as a list without changing an item, else None."""
    kinds: set[str] = set()

    def look(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                look(item)
        else:
            kinds.add(_kind(value))

    def floats(value: Any) -> Any:
        return tuple(map(floats, value)) if isinstance(value, list | tuple) else float(value)

    look([value for value in values if value is not None])
    if kinds == {"int", "float"}:
        values = [value if value is None else floats(value) for value in values]
    elif len(kinds) > 1:
        return None
    values = [tuples(value) for value in values]
    try:
        pa.array(values)
    except (pa.ArrowException, OverflowError):  # ragged nesting, or an integer beyond 64 bits
        return None
    return pd.Series(values, dtype=object)


def metric_columns(names: Iterable[Any]) -> list[str]:
    """Of the columns of a raw frame those of metrics, the best ones included."""
    return [name for name in names if name not in _BEFORE and name not in _AFTER and name != "steps_done"]


def ordered_metrics(names: Iterable[str]) -> list[str]:
    """Metrics by split, then by name: the same whichever experiment ended first."""

    def place(name: str) -> tuple[int, str]:
        split = name.partition("/")[0]
        return (_SPLITS.index(split) if split in _SPLITS else len(_SPLITS), name)

    return sorted(names, key=place)


def _sorted(frame: pd.DataFrame, order: Sequence[str], by: list[str]) -> pd.DataFrame:
    rank = {name: index for index, name in enumerate(order)}
    keys = [frame[name].map(lambda i: rank.get(i, len(rank))) if name == "experiment" else frame[name] for name in by]
    # lexsort is stable and looks at its last key first
    places = np.lexsort([key.to_numpy(dtype=np.int64) for key in reversed(keys)])
    return frame.iloc[places].reset_index(drop=True)
