"""A run in jobs gives what it gives in one process: bit for bit, at one width and equally many threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import coalesce
from coalesce.store.jobs import read_records, read_standing
from coalesce.store.paths import RunPaths
from end_to_end_helpers import EAGER, ROOT, Folder, user_folder

#: Where and how long.
EXCEPTED = ["job", "device", "seconds"]

#: Two cohorts, unequal lengths, a float that rides though some shares have but one value of it; more than the lanes.
SWEEP = [
    EAGER,
    "trainer.width=2",
    "trainer.threads=1",
    "trainer.check=false",
    "sweep.params={optimizer.lr: [0.01, 0.1], task.hidden: [4, 8], steps: [15, 20], task.dropout: [0.0, 0.2]}",
]
LOCAL = ["launcher=local", "launcher.poll_s=0.2", "trainer.device=cpu"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Folder]:
    # a job's process finds the package where this one does
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    with user_folder(tmp_path, monkeypatch, capsys) as made:
        yield made


def frame_of(folder: Path) -> pd.DataFrame:
    return coalesce.load(folder).drop(columns=EXCEPTED)


def same(one: Path, two: Path) -> None:
    """Whether two run folders hold the same results, history and weights."""
    pd.testing.assert_frame_equal(frame_of(one), frame_of(two), check_exact=True)
    pd.testing.assert_frame_equal(coalesce.load_history(one), coalesce.load_history(two), check_exact=True)
    ids = coalesce.load(one)["experiment"]
    for name in [ids.iloc[0], ids.iloc[-1]]:
        first, second = (coalesce.load_model(folder, name).state_dict() for folder in (one, two))
        for key, value in first.items():
            np.testing.assert_array_equal(value.numpy(), second[key].numpy(), err_msg=f"{name} {key}")


def begun(folder: Folder, *arguments: str, code: int = 0) -> Path:
    """The run folder of a command."""
    before = set(folder.path.glob("runs/*/*"))
    found = folder("Mine", *arguments)
    assert found[0] == code, found
    (made,) = set(folder.path.glob("runs/*/*")) - before
    return made


def test_local_jobs_and_one_process(folder: Folder) -> None:
    whole = begun(folder, *SWEEP)
    jobs = begun(folder, *SWEEP, *LOCAL, "launcher.jobs=3")
    same(whole, jobs)
    records = read_records(RunPaths(jobs))
    assert [record.number for record in records] == [0, 1, 2]
    assert sorted(name for record in records for name in record.experiments) == sorted(frame_of(whole)["experiment"])
    for record in records:
        standing = read_standing(RunPaths(jobs, record.number))
        assert standing is not None
        assert (standing.state, standing.id, standing.visible) == ("ended", record.id, "")
    frame = coalesce.load(jobs)
    assert set(frame["job"]) == {0, 1, 2}
    for record in records:
        assert set(frame["job"][frame["experiment"].isin(record.experiments)]) == {record.number}
