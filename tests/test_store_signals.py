"""Signals end a run at a host boundary, with everything saved.

Oracle: signals that are really sent, to this process or to one of its own; the exit codes of the shell's convention.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import coalesce
from coalesce.runner.snapshot import Snapshot
from coalesce.store import snapshots as module
from coalesce.store.paths import RunPaths
from coalesce.store.read import load_history
from coalesce.store.signals import EXIT_CODES, Interrupted
from coalesce.store.snapshots import Snapshots
from coalesce.store.writer import RunWriter
from run_fakes import grid, plan, progress, result

ROOT = Path(coalesce.__file__).parent.parent
EXPERIMENTS = grid(seed=[0, 1])


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Take:
    """Takes snapshots, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Snapshot:
        self.count += 1
        return Snapshot({"count": self.count}, {"id/w": torch.ones(3)})


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Whatever a test does, the signals are as they were at its end."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in EXIT_CODES}
    yield
    after = {name: signal.getsignal(getattr(signal, name)) for name in EXIT_CODES}
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)
    assert after == before


def started(folder: Path, clock: Clock | None = None, **trainer: Any) -> RunWriter:
    """A writer in the middle of training."""
    writing = RunWriter(RunPaths(folder), clock=clock or Clock())
    writing.started(plan(EXPERIMENTS, **trainer))
    writing.metrics(EXPERIMENTS[0], 10, {"x": 1.0})
    return writing


def send(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize("name", EXIT_CODES)
@pytest.mark.parametrize("minutes", [5.0, None])
def test_a_signal_ends_the_run_at_the_next_boundary(name: str, minutes: float | None, tmp_path: Path) -> None:
    take, writing = Take(), started(tmp_path, snapshot_minutes=minutes)
    writing.snapshot(take)
    assert take.count == 0
    assert not writing.wants_boundary()
    send(name)
    # it only waits: the runner goes on to the boundary, and is asked to hurry
    writing.metrics(EXPERIMENTS[1], 20, {"x": 2.0})
    writing.ended(result(EXPERIMENTS[1]))
    assert writing.wants_boundary()
    writing.advanced(progress(20, 100))
    with pytest.raises(Interrupted, match=name) as interrupted:
        writing.snapshot(take)
    assert isinstance(interrupted.value, KeyboardInterrupt)
    assert interrupted.value.code == {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 75, "SIGUSR2": 75}[name]
    writing.closed(interrupted.value)
    back = Snapshots(RunPaths(tmp_path)).newest()
    assert back is not None
    assert back.facts == {"count": 1}
    assert load_history(tmp_path)["step"].tolist() == [10, 20]
    assert coalesce.load(tmp_path)["experiment"].tolist() == [EXPERIMENTS[1].id]
    assert f" WARNING ended by {name}\n" in (tmp_path / "log.txt").read_text()


def test_snapshots_by_the_clock(tmp_path: Path) -> None:
    clock, take = Clock(), Take()
    writing = started(tmp_path, clock)  # every 5 minutes by default
    counts = []
    for clock.now in (0, 299, 300, 301, 599, 600, 1200):
        writing.snapshot(take)
        counts.append(take.count)
    writing.closed(None)
    assert counts == [0, 0, 1, 1, 1, 2, 3]
    assert len(RunPaths(tmp_path).snapshots()) == 2


@pytest.mark.parametrize(("minutes", "count"), [(0, 3), (None, 0), (0.5, 1)])
def test_how_often_is_a_setting(minutes: float | None, count: int, tmp_path: Path) -> None:
    clock, take = Clock(), Take()
    writing = started(tmp_path, clock, snapshot_minutes=minutes)
    for clock.now in (1, 31, 32):
        writing.snapshot(take)
    writing.closed(None)
    assert take.count == count


def test_what_was_measured_is_on_disk_before_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = started(tmp_path, snapshot_minutes=0)
    seen = []
    write = Snapshots.write

    def look(self: Snapshots, snapshot: Snapshot) -> Path:
        seen.append(load_history(tmp_path)["step"].tolist())
        return write(self, snapshot)

    monkeypatch.setattr(Snapshots, "write", look)
    writing.snapshot(Take())
    writing.closed(None)
    assert seen == [[10]]


@pytest.mark.parametrize("name", EXIT_CODES)
@pytest.mark.parametrize("where", ["taken", "written", "renamed"])
def test_a_signal_in_the_middle_of_a_snapshot(
    name: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, writing = Take(), started(tmp_path, snapshot_minutes=0)
    save, replace = module.save_safetensors, os.replace

    def save_interrupted(*arguments: Any) -> None:
        send(name)
        save(*arguments)

    def replace_interrupted(*arguments: Any) -> None:
        replace(*arguments)
        send(name)

    def take_interrupted() -> Snapshot:
        if where == "taken":
            send(name)
        return take()

    if where == "written":
        monkeypatch.setattr(module, "save_safetensors", save_interrupted)
    if where == "renamed":
        writing.flush()
        monkeypatch.setattr(os, "replace", replace_interrupted)
    with pytest.raises(Interrupted, match=name) as interrupted:
        writing.snapshot(take_interrupted)
    monkeypatch.undo()
    writing.closed(interrupted.value)
    # once: what was being written has everything in it
    assert take.count == 1
    back = Snapshots(RunPaths(tmp_path)).newest()
    assert back is not None
    assert back.facts == {"count": 1}


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writing = started(tmp_path)
    send("SIGINT")
    assert "saving at the next boundary; Ctrl-C once more ends at once" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt) as interrupted:
        send("SIGINT")
    assert not isinstance(interrupted.value, Interrupted)
    writing.closed(interrupted.value)
    assert load_history(tmp_path)["step"].tolist() == [10]


def test_the_first_signal_says_how_the_run_ends(tmp_path: Path) -> None:
    writing = started(tmp_path)
    send("SIGUSR1")
    send("SIGTERM")  # the cluster's patience is at its end
    with pytest.raises(Interrupted, match="SIGUSR1") as interrupted:
        writing.snapshot(Take())
    writing.closed(interrupted.value)


@pytest.mark.parametrize("phase", ["compiling", "checking", "started"])
@pytest.mark.parametrize("name", EXIT_CODES)
def test_while_graphs_are_compiled_it_ends_at_once(name: str, phase: str, tmp_path: Path) -> None:
    writing = RunWriter(RunPaths(tmp_path))
    writing.started(plan(EXPERIMENTS))
    if phase == "compiling":
        writing.compiling(0, "step")
    elif phase == "checking":
        writing.checking(0)
    with pytest.raises(Interrupted, match=name) as interrupted:
        send(name)
    writing.closed(interrupted.value)
    assert coalesce.load(tmp_path).empty


@pytest.mark.parametrize("name", EXIT_CODES)
def test_in_the_first_interval_it_waits(name: str, tmp_path: Path) -> None:
    """Between the graphs and the first boundary the runner only asks whether one is wanted."""
    take, writing = Take(), RunWriter(RunPaths(tmp_path))
    writing.started(plan(EXPERIMENTS))
    writing.compiling(0, "step")
    assert not writing.wants_boundary()
    send(name)
    assert writing.wants_boundary()
    with pytest.raises(Interrupted, match=name) as interrupted:
        writing.snapshot(take)
    writing.closed(interrupted.value)
    assert take.count == 1


def test_a_signal_that_waits_ends_before_more_is_compiled(tmp_path: Path) -> None:
    writing = started(tmp_path)
    writing.ended(result(EXPERIMENTS[0]))
    send("SIGTERM")
    with pytest.raises(Interrupted) as interrupted:
        writing.compiling(1, "step")
    writing.closed(interrupted.value)
    assert len(coalesce.load(tmp_path)) == 1


def test_a_run_that_ends_by_itself_first_is_over(tmp_path: Path) -> None:
    writing = started(tmp_path)
    send("SIGTERM")
    writing.ended(result(EXPERIMENTS[0]))
    writing.closed(None)
    assert len(coalesce.load(tmp_path)) == 1


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        writing = started(tmp_path)
        send("SIGINT")
        assert not writing.wants_boundary()
        writing.closed(None)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_writes_without_signals(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            writing = started(tmp_path)
            assert signal.getsignal(signal.SIGTERM) is before
            writing.closed(None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


def test_a_writer_that_was_refused_leaves_the_signals(tmp_path: Path) -> None:
    first, second = started(tmp_path), RunWriter(RunPaths(tmp_path))
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="is being written"):
        second.started(plan(EXPERIMENTS))
    second.closed(None)
    assert signal.getsignal(signal.SIGTERM) == handler
    first.closed(None)


def test_a_forked_process_dies_of_it(tmp_path: Path) -> None:
    """A worker that was forked off is not the run: it must not live on with a note."""
    code = f"""
import os, signal, sys, time
sys.path[:0] = {[str(ROOT), str(Path(__file__).parent)]}
from pathlib import Path
from test_store_signals import started
writing = started(Path(sys.argv[1]))
ready, tell = os.pipe()
child = os.fork()
if child == 0:
    os.write(tell, b"x")  # Python forgets signals that come while it forks
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), writing.wants_boundary())
writing.closed(None)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, capture_output=True, text=True)
    assert done.stdout == "-15 False\n", done.stderr


def test_the_log_tells_of_snapshots_that_were_damaged(tmp_path: Path) -> None:
    store = Snapshots(RunPaths(tmp_path))
    path = store.write(Take()())
    path.write_bytes(b"")
    assert store.newest() is None
    writing = RunWriter(RunPaths(tmp_path), snapshots=store)
    writing.started(plan(EXPERIMENTS))
    writing.closed(None)
    (line,) = [line for line in (tmp_path / "log.txt").read_text().splitlines() if "damaged" in line]
    assert path.name in line
    assert "WARNING" in line
    assert logging.getLogger("coalesce").handlers == []
