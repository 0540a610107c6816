"""A full disk, a folder that vanishes: one sentence, and what was done stays readable.

Oracle: the system's own errors, raised where it raises them; what `coalesce.load` reads afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import coalesce
from coalesce.errors import RunFolderError
from coalesce.runner.snapshot import Snapshot
from coalesce.store.paths import RunPaths
from coalesce.store.writer import RunWriter
from run_fakes import grid, plan, progress, result

ROOT = Path(coalesce.__file__).parent.parent
EXPERIMENTS = grid(seed=[0, 1, 2])


def full(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def started(folder: Path, **trainer: Any) -> RunWriter:
    """A writer with one experiment's result on disk."""
    folder.mkdir(exist_ok=True)
    writing = RunWriter(RunPaths(folder))
    writing.started(plan(EXPERIMENTS, **trainer))
    writing.metrics(EXPERIMENTS[0], 10, {"x": 1.0})
    writing.ended(result(EXPERIMENTS[0]))
    writing.advanced(progress(10, 100))
    return writing


def write_results(writing: RunWriter) -> None:
    writing.metrics(EXPERIMENTS[1], 20, {"x": 2.0})
    writing.ended(result(EXPERIMENTS[1]))
    writing.advanced(progress(20, 100))


def write_weights(writing: RunWriter) -> None:
    writing.ended(result(EXPERIMENTS[1], weights={"w": torch.ones(2)}))


def write_snapshot(writing: RunWriter) -> None:
    writing.snapshot(lambda: Snapshot({}, {"id/w": torch.ones(2)}))


@pytest.mark.parametrize("what", [write_results, write_weights, write_snapshot])
def test_a_full_disk(what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = started(tmp_path, snapshot_minutes=0)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError) as told:
        what(writing)
    assert f"the run folder {str(tmp_path)!r} cannot be written: No space left on device" in str(told.value)
    assert "What was written before is whole" in str(told.value)
    # the runner closes its listeners with what it caught; a second error would hide the first
    writing.closed(told.value)
    monkeypatch.undo()
    assert coalesce.load(tmp_path)["experiment"].tolist() == [EXPERIMENTS[0].id]
    assert coalesce.load_history(tmp_path)["step"].tolist() == [10]
    assert "not summed up" in (tmp_path / "log.txt").read_text()
    # and the run goes on when there is room
    again = RunWriter(RunPaths(tmp_path))
    again.started(plan(EXPERIMENTS))
    write_results(again)
    again.closed(None)
    assert len(coalesce.load(tmp_path)) == 2


def test_a_disk_that_is_full_at_the_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = started(tmp_path)
    write_results(writing)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match="No space left"):
        writing.closed(None)
    monkeypatch.undo()
    assert len(coalesce.load(tmp_path)) == 2


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """The disk is the limit that the system sets on a file's size; the log is the first to meet it."""
    code = f"""
import logging, resource, signal, sys
sys.path[:0] = {[str(ROOT), str(Path(__file__).parent)]}
from pathlib import Path
from test_store_broken import EXPERIMENTS, started
from coalesce.errors import RunFolderError
from run_fakes import progress
writing = started(Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for step in range(100):
    logging.getLogger("coalesce").info("a line that fills the log")
    writing.metrics(EXPERIMENTS[1], step, {{f"metric {{number}}": 0.1 * step for number in range(30)}})
try:
    writing.flush()
except RunFolderError as error:
    print(error)
    writing.closed(error)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot be written: " in done.stdout
    assert "File too large" in done.stdout
    assert done.stderr == ""
    assert coalesce.load(tmp_path)["experiment"].tolist() == [EXPERIMENTS[0].id]


@pytest.mark.parametrize("what", [write_results, write_weights, write_snapshot])
def test_a_folder_that_vanishes(what: Any, tmp_path: Path) -> None:
    writing = started(tmp_path / "run", snapshot_minutes=0)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"cannot be written: .*It is gone$") as told:
        what(writing)
    writing.closed(told.value)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        coalesce.load(tmp_path / "run")


def test_a_folder_that_vanishes_at_the_end(tmp_path: Path) -> None:
    writing = started(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunFolderError, match="It is gone"):
        writing.closed(None)


def test_a_start_that_fails_gives_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = RunWriter(RunPaths(tmp_path))
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if Path(target).name == "plan.json":
            full()
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RunFolderError, match="No space left") as told:
        writing.started(plan(EXPERIMENTS))
    writing.closed(told.value)
    monkeypatch.undo()
    again = RunWriter(RunPaths(tmp_path))
    again.started(plan(EXPERIMENTS))
    write_results(again)
    again.closed(None)
    assert len(coalesce.load(tmp_path)) == 1


def test_what_a_killed_process_left_half_written_goes(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for name in ("snapshots/.snapshot-00001.aa.tmp", "metrics/.part-00001.parquet.bb.tmp", "weights/.tmpAbC123"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".mine").write_text("not ours")
    assert len(paths.leftovers()) == 3
    started(tmp_path).closed(None)
    assert paths.leftovers() == []
    assert (tmp_path / ".mine").exists()
