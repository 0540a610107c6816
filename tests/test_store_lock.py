"""One process at a time writes a run folder.

Oracle: other processes, which hold the lock, ask for it, and are killed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import coalesce
from coalesce.errors import RunFolderError
from coalesce.store.lock import RunLock
from coalesce.store.paths import RunPaths
from coalesce.store.writer import RunWriter
from run_fakes import drive, grid, plan, result

ROOT = Path(coalesce.__file__).parent.parent
EXPERIMENTS = grid(seed=[0, 1])

HOLD = f"""
import sys
sys.path[:0] = {[str(ROOT), str(Path(__file__).parent)]}
from run_fakes import grid, plan
from coalesce.store.paths import RunPaths
from coalesce.store.writer import RunWriter
writing = RunWriter(RunPaths(sys.argv[1]))
writing.started(plan(grid(seed=[0, 1])))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes the folder until it is killed."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    with another_process(tmp_path) as first:
        writing = RunWriter(RunPaths(tmp_path))
        before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir())
        with pytest.raises(RunFolderError) as refused:
            writing.started(plan(EXPERIMENTS))
        writing.closed(refused.value)
        assert f"is being written by process {first.pid} on host {socket.gethostname()}" in str(refused.value)
        assert str(tmp_path) in str(refused.value)
        # nothing of the first one's is changed
        assert sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir()) == before
        assert coalesce.load(tmp_path).empty  # reading needs no lock
        first.kill()
        first.wait()
        drive(RunWriter(RunPaths(tmp_path)), plan(EXPERIMENTS), [result(one) for one in EXPERIMENTS])
    assert len(coalesce.load(tmp_path)) == 2


def test_in_one_process_as_well(tmp_path: Path) -> None:
    first, second = RunWriter(RunPaths(tmp_path)), RunWriter(RunPaths(tmp_path))
    first.started(plan(EXPERIMENTS))
    with pytest.raises(RunFolderError, match=f"process {os.getpid()} on host"):
        second.started(plan(EXPERIMENTS))
    # a writer that was refused does not give back what another one holds
    second.closed(None)
    with pytest.raises(RunFolderError):
        RunLock(RunPaths(tmp_path)).acquire()
    first.closed(None)
    RunLock(RunPaths(tmp_path)).acquire()


def test_it_is_held_as_often_as_it_was_taken(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with RunLock(paths) as lock:
        drive(RunWriter(paths, lock=lock), plan(EXPERIMENTS), [result(one) for one in EXPERIMENTS])
        with pytest.raises(RunFolderError, match=f"process {os.getpid()} on host"):
            RunLock(paths).acquire()
    assert not paths.lock_owner.exists()
    with RunLock(paths):
        assert paths.lock_owner.exists()


def test_an_owner_that_has_not_written_its_name_yet(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with RunLock(paths):
        for text in (None, '{"pid": 1'):
            paths.lock_owner.unlink()
            if text is not None:
                paths.lock_owner.write_text(text)
            with pytest.raises(RunFolderError, match="is being written by another process"):
                RunLock(paths).acquire()
            paths.lock_owner.touch()


def test_jobs_write_beside_who_holds_it(tmp_path: Path) -> None:
    """Whoever launched them holds it, on another machine; each job has files of its own."""
    paths = RunPaths(tmp_path)
    paths.jobs_folder.mkdir()
    with RunLock(paths):
        for job in (0, 1):
            writer = RunWriter(RunPaths(tmp_path, job))
            writer.started(plan(grid()))
            writer.closed(None)
        assert paths.lock_owner.exists()
    assert {path.name for path in paths.jobs_folder.glob("plan-*")} == {"plan-0.json", "plan-1.json"}


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFolderError, match=r"cannot be written: .*It is gone"):
        RunLock(RunPaths(tmp_path / "gone")).acquire()
    assert list(tmp_path.iterdir()) == []

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(30, "Read-only file system", str(tmp_path / ".lock"))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RunFolderError, match="Read-only file system"):
        RunLock(RunPaths(tmp_path)).acquire()
    monkeypatch.undo()
    with RunLock(RunPaths(tmp_path)):
        pass


def test_a_folder_that_vanishes_while_it_is_held(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = RunLock(RunPaths(folder))
    with lock:
        shutil.rmtree(folder)
    folder.mkdir()
    with lock:
        assert RunPaths(folder).lock_owner.exists()
