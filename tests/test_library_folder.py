"""`coalesce.sweep` in a folder: it goes on where it was, and asks for nothing twice.

Oracle: the same call without a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import coalesce
from coalesce.errors import RunFolderError
from coalesce.runner.listener import Listener
from coalesce.runner.run import Run
from coalesce.store.paths import RunPaths
from coalesce.store.snapshots import read_snapshot
from runner_helpers import Net

SETTINGS: dict[str, Any] = {
    "optimizer": "sgd",
    "steps": 20,
    "batch_size": 8,
    "every": 5,
    "evaluate_every": 10,
    "monitor": "val/loss",
    "mode": "min",
    "compile": False,
    "check": False,
    "width": 3,
}
ELSEWHERE = ["seconds"]


def swept(params: dict[str, Any], **more: Any) -> pd.DataFrame:
    return coalesce.sweep(Net, params, **SETTINGS | more)


def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of what ends from now on, in a process that trains."""
    ended: list[str] = []
    tell = Run.tell

    def noted(self: Run, what: str, *arguments: Any) -> None:
        if what == "ended":
            ended.append(arguments[0].experiment.id)
        tell(self, what, *arguments)

    monkeypatch.setattr(Run, "tell", noted)
    return ended


def same(one: pd.DataFrame, other: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(one.drop(columns=ELSEWHERE), other.drop(columns=ELSEWHERE), check_exact=True)


def test_a_folder_gets_what_the_command_line_writes(tmp_path: Path) -> None:
    frame = swept({"seed": range(4)}, folder=tmp_path / "runs" / "mine")
    same(frame, swept({"seed": range(4)}))
    same(frame, coalesce.load(tmp_path / "runs" / "mine"))
    history = coalesce.load_history(tmp_path / "runs" / "mine")
    assert set(history["experiment"]) == set(frame["experiment"])
    model = coalesce.load_model(tmp_path / "runs" / "mine", "best")
    assert isinstance(model, torch.nn.Module)


def test_a_cell_that_is_run_twice_trains_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = swept({"seed": range(4)}, folder=tmp_path)
    ended = trained(monkeypatch)
    same(swept({"seed": range(4)}, folder=tmp_path), first)
    assert ended == []


def test_a_cell_that_asks_for_more_trains_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept({"seed": [0, 2]}, folder=tmp_path)
    ended = trained(monkeypatch)
    frame = swept({"seed": range(4)}, folder=tmp_path)
    assert sorted(ended) == sorted(frame.loc[frame["seed"].isin([1, 3]), "experiment"])
    same(frame, swept({"seed": range(4)}))
    # one that asks for less gets what it asked for, in its own order, and the folder keeps the rest
    same(swept({"seed": [3, 1]}, folder=tmp_path), swept({"seed": [3, 1]}))
    assert len(coalesce.load(tmp_path)) == 4


def test_a_cell_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    usual = Listener.advanced

    def interrupted(self: Listener, progress: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        usual(self, progress)

    with monkeypatch.context() as patch:
        patch.setattr("coalesce.runner.listener.Latest.advanced", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            swept({"seed": range(5)}, folder=tmp_path, snapshot_minutes=0.0)
    same(swept({"seed": range(5)}, folder=tmp_path), swept({"seed": range(5)}))


def test_a_search_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"name": "asha", "min_steps": 10, "factor": 2}
    params = {"seed": range(6)}
    first = swept(params, search=how, folder=tmp_path, snapshot_minutes=0.0)
    same(first, swept(params, search=how))
    # what it has seen is all that is kept, so that it neither trains anybody again, nor judges by less
    (snapshot,) = RunPaths(tmp_path).snapshots()
    assert read_snapshot(snapshot).tensors == {}
    ended = trained(monkeypatch)
    same(swept(params, search=how, folder=tmp_path), first)
    assert ended == []
    more = swept({"seed": range(7)}, search=how, folder=tmp_path)
    assert len(ended) == 1
    assert not set(ended) & set(first["experiment"])
    same(more[more["experiment"].isin(first["experiment"])].reset_index(drop=True), first)


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(RunFolderError, match=r"plan\.json"):
        swept({"seed": [0]}, folder=tmp_path)


def test_what_shows_in_the_numbers_cannot_change_in_a_folder(tmp_path: Path) -> None:
    swept({"seed": [0]}, folder=tmp_path)
    with pytest.raises(coalesce.ConfigError, match=r"trainer\.every=10: the run began with 5") as caught:
        swept({"seed": [0, 1]}, folder=tmp_path, every=10, monitor="val/error")
    assert "trainer.monitor='val/error'" in str(caught.value)
    assert len(swept({"seed": [0, 1]}, folder=tmp_path, width=2, weights=False)) == 2


def test_another_search_in_a_folder_is_refused(tmp_path: Path) -> None:
    swept({"seed": range(4)}, folder=tmp_path, snapshot_minutes=0.0)
    before = (tmp_path / "plan.json").read_bytes()
    for other in ({"name": "asha", "min_steps": 10, "factor": 2}, {"name": "grid", "patience": 1}):
        with pytest.raises(RunFolderError, match="began with the search 'Listed'"):
            swept({"seed": range(4)}, folder=tmp_path, search=other)
    assert (tmp_path / "plan.json").read_bytes() == before


def test_a_run_in_jobs_is_not_gone_on_with_here(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run", 0)
    paths.jobs_folder.mkdir(parents=True)
    paths.job_record.write_text("{}")
    with pytest.raises(RunFolderError, match=r"is that of a run in jobs.*resume="):
        swept({"seed": range(2)}, folder=tmp_path / "run")
