"""``python -m coalesce.results FOLDER --watch``.

Oracle: a fake run that goes on while the watcher sleeps, in this process or as jobs; what it told its listeners.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from coalesce import results
from coalesce.launch.base import Look
from coalesce.report import watching
from coalesce.report.watching import ASK_S, LOOKS, watch_run
from coalesce.runner.listener import Listener
from coalesce.store.beat import Beat
from coalesce.store.jobs import JobRecord, Standing, write_record, write_standing
from coalesce.store.lock import RunLock
from coalesce.store.paths import RunPaths
from coalesce.store.writer import RunWriter
from run_fakes import drive, grid, plan, progress, result

EXPERIMENTS = grid(optimizer__lr=[0.1, 0.01], seed=[0, 1, 2, 3])
PLAN = plan(EXPERIMENTS)
NOW = 1_000_000.0


class Watch:
    """Watches a folder. Every time that it sleeps, the next step of what it watches is taken.

    Args:
        folder: the run folder.
        steps: what happens, one after the other; whoever sleeps behind the last of them watches too long.
    """

    def __init__(self, folder: Path, steps: Iterator[None]):
        self.now, self.file = NOW, io.StringIO()
        self._steps = steps
        console = Console(file=self.file, width=200)
        self.over = watch_run(folder, console, sleep=self._sleep, clock=lambda: self.now)
        self.lines = self.file.getvalue().splitlines()

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        next(self._steps)


class Moved(Beat):
    """On the watcher's clock."""

    def __init__(self, paths: RunPaths, id: str | None = None):
        self.now = NOW
        super().__init__(paths, id, every_s=0, clock=lambda: self.now)


def tell(listeners: list[Listener], what: str, *arguments: object) -> None:
    for listener in listeners:
        getattr(listener, what)(*arguments)


# a run in one process


def going(paths: RunPaths, end: Callable[[], BaseException | None]) -> Iterator[None]:
    beat = Moved(paths)
    listeners: list[Listener] = [RunWriter(paths), beat]
    tell(listeners, "started", PLAN)
    yield
    tell(listeners, "compiling", 0, "step")
    yield
    for step in range(1, 11):
        if step == 10:
            for one in EXPERIMENTS:
                tell(listeners, "ended", result(one))
        beat.now += 2
        tell(listeners, "advanced", progress(40 * step, 400, best=(0.9 + step / 1000, EXPERIMENTS[5])))
        yield
    tell(listeners, "closed", end())
    yield


def test_a_run_in_one_process(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    steps = going(paths, lambda: None)
    next(steps)
    watched = Watch(tmp_path, steps)
    assert watched.over
    name = f"process {os.getpid()}"
    assert watched.lines[:3] == [f"{name}: planning", f"{name}: compiling", f"{name}: training"]
    assert watched.lines[3] == (
        " 10%: 100 steps/s, 0/8 ended, 3.6 s left, best val/accuracy 0.9010 (optimizer.lr=0.01, seed=1)"
    )
    assert [line[:4] for line in watched.lines[3:-2]] == [f"{10 * tenth:3d}%" for tenth in range(1, 11)]
    assert watched.lines[-2:] == [f"{name}: ended", "1 job (1 ended); 8 of 8 experiments ended"]


def test_a_run_that_is_interrupted(tmp_path: Path) -> None:
    steps = going(RunPaths(tmp_path), KeyboardInterrupt)
    next(steps)
    watched = Watch(tmp_path, steps)
    assert watched.over
    assert f"process {os.getpid()}: interrupted: ended by Ctrl-C" in watched.lines


def test_ctrl_c_ends_the_watching_alone(tmp_path: Path) -> None:
    listeners = [RunWriter(RunPaths(tmp_path)), Moved(RunPaths(tmp_path))]
    tell(listeners, "started", PLAN)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    def pressed() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    watched = Watch(tmp_path, pressed())
    assert not watched.over
    assert watched.lines[-1] == "No longer watching. The run goes on as it would have."
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    tell(listeners, "closed", None)


def test_a_run_whose_process_was_killed(tmp_path: Path) -> None:
    drive(RunWriter(RunPaths(tmp_path)), PLAN, [])
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    beat = Moved(RunPaths(tmp_path), str(gone.pid))
    beat.started(PLAN)
    beat.advanced(progress(100, 400))
    owner = {"pid": gone.pid, "host": socket.gethostname()}
    RunPaths(tmp_path).lock_owner.write_text(json.dumps(owner))
    watched = Watch(tmp_path, iter(()))
    assert watched.over
    assert f"process {gone.pid}: died: its process is gone" in watched.lines


def test_a_process_elsewhere_that_says_nothing_any_more(tmp_path: Path) -> None:
    drive(RunWriter(RunPaths(tmp_path)), PLAN, [])
    write_standing(RunPaths(tmp_path), dataclasses.replace(standing("17"), host="elsewhere"))
    RunPaths(tmp_path).lock_owner.write_text('{"pid": 17, "host": "elsewhere"}')

    def long() -> Iterator[None]:
        for _ in range(100):
            yield
        RunPaths(tmp_path).lock_owner.unlink()
        yield

    watched = Watch(tmp_path, long())
    assert any(line.startswith("process 17: silent for ") for line in watched.lines)


def test_what_a_process_before_wrote_is_not_taken_for_this_one(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    drive(RunWriter(paths), PLAN, [])
    write_standing(paths, standing("17", state="interrupted", steps=300))
    steps = going(paths, lambda: None)

    def planning() -> Iterator[None]:
        # it holds the lock while it plans, and does not speak yet
        with RunLock(paths):
            yield
        yield from steps

    stages = planning()
    next(stages)
    watched = Watch(tmp_path, stages)
    assert watched.lines[0] == f"process {os.getpid()}: starting"
    assert not any("300" in line or "interrupted" in line for line in watched.lines)


def test_a_run_of_which_nothing_is_known_but_its_results(tmp_path: Path) -> None:
    drive(RunWriter(RunPaths(tmp_path)), PLAN, [result(one) for one in EXPERIMENTS])
    watched = Watch(tmp_path, iter(()))
    assert (watched.over, watched.lines) == (True, [])


# jobs


def standing(id: str, **changes: object) -> Standing:
    found = Standing("training", id, "node1", "cuda", "0", NOW - 100, NOW, total_steps=400, total_experiments=4)
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def record(number: int, attempt: int = 0) -> JobRecord:
    return JobRecord(number, "slurm", f"4711_{number}{'r' * attempt}", attempt, (), 4, 400, NOW - 200)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A folder of two jobs, on a machine without Slurm's commands."""
    paths = RunPaths(tmp_path)
    drive(RunWriter(paths), PLAN, [])
    paths.jobs_folder.mkdir()
    for number in (0, 1):
        write_record(paths, record(number))
    monkeypatch.setenv("PATH", "")
    return paths


def say(paths: RunPaths, number: int, **changes: object) -> None:
    write_standing(RunPaths(paths.folder, number), standing(record(number).id, **changes))


def test_jobs_whose_launcher_cannot_be_asked(jobs: RunPaths) -> None:
    def steps() -> Iterator[None]:
        say(jobs, 0, steps=100, speed=10.0)
        yield
        say(jobs, 1, steps=0, state="compiling")
        yield
        say(jobs, 0, steps=400, state="ended", experiments=4, best=0.5, best_id=EXPERIMENTS[0].id)
        yield
        say(jobs, 1, state="broke", message="no data")
        yield

    watched = Watch(jobs.folder, steps())
    assert watched.over
    assert [line for line in watched.lines if "%:" not in line] == [
        "jobs 0, 1: unknown", "job 0 (4711_0): training", "job 1 (4711_1): compiling", "job 0 (4711_0): ended",
        "job 1 (4711_1): broke: no data", "2 jobs (1 ended, 1 broke); 4 of 8 experiments ended",
    ]  # fmt: skip
    assert " 12%: 1 of 2 jobs at work, 10 steps/s, 0/8 ended, at least 30 s left, nothing measured yet" in watched.lines
    assert any("best  0.5000 (optimizer.lr=0.1, seed=0)" in line for line in watched.lines)


def test_jobs_that_die_may_be_started_again(jobs: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = {record(0).id: Look("running"), record(1).id: Look("running")}
    asked: list[list[str]] = []

    class Slurm:
        def __init__(self, settings: object):
            pass

        def look(self, ids: list[str]) -> dict[str, Look]:
            asked.append(list(ids))
            return {name: looks.get(name, Look("waiting")) for name in ids}

    slurm = pytest.importorskip("coalesce.launch.slurm", reason="needs submitit")
    monkeypatch.setattr(slurm, "Slurm", Slurm)

    def steps() -> Iterator[None]:
        say(jobs, 0, state="ended", experiments=4, steps=400)
        yield
        looks[record(1).id] = Look("gone", "NODE_FAIL")
        # it is asked every ten seconds
        for _ in range(int(ASK_S / 2) + LOOKS - 3):
            yield
        write_record(jobs, record(1, attempt=1))
        yield
        yield
        looks[record(1, attempt=1).id] = Look("gone", "OUT_OF_MEMORY")
        for _ in range(int(ASK_S / 2) + LOOKS):
            yield

    watched = Watch(jobs.folder, steps())
    assert watched.over
    assert [line for line in watched.lines if "%:" not in line] == [
        "jobs 0, 1: starting", "job 0 (4711_0): ended", "job 1 (4711_1): died: NODE_FAIL", "job 1 (4711_1r): waiting",
        "job 1 (4711_1r): died: OUT_OF_MEMORY", "2 jobs (1 ended, 1 died); 4 of 8 experiments ended",
    ]  # fmt: skip
    assert len(asked) < 6


def test_a_run_of_jobs_that_goes_on_in_one_process(jobs: RunPaths) -> None:
    say(jobs, 0, state="interrupted")
    beat = Moved(jobs)
    beat.started(PLAN)
    beat.closed(None)
    assert Watch(jobs.folder, iter(())).lines[0] == f"process {os.getpid()}: ended"


def test_jobs_are_watched_as_long_as_somebody_looks_after_them(jobs: RunPaths) -> None:
    for number in (0, 1):
        say(jobs, number, state="ended", steps=400, experiments=4)
    lock = RunLock(jobs)
    lock.acquire()

    def steps() -> Iterator[None]:
        # the tables are being made
        for _ in range(3 * LOOKS):
            yield
        lock.release()
        yield

    assert Watch(jobs.folder, steps()).over


# the command


def test_the_table_comes_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive(RunWriter(RunPaths(tmp_path)), PLAN, [result(one) for one in EXPERIMENTS])
    assert results.main([str(tmp_path), "--watch"]) == 0
    assert "8 experiments, the best by best/val/accuracy (max) first" in capsys.readouterr().out


def test_whoever_ends_the_watching_sees_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drive(RunWriter(RunPaths(tmp_path)), PLAN, [result(one) for one in EXPERIMENTS])

    def pressed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching._Jobs, "look", pressed)
    assert results.main([str(tmp_path), "--watch"]) == 0
    assert capsys.readouterr().out == "No longer watching. The run goes on as it would have.\n"


@pytest.mark.parametrize("arguments", [["--all"], ["other"]])
def test_one_run_is_watched(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        results.main([str(tmp_path), *arguments, "--watch"])
    assert stop.value.code == 2
    assert "--watch shows one run" in capsys.readouterr().err


def test_what_is_no_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results.main([str(tmp_path), "--watch"]) == 2
    assert "Traceback" not in capsys.readouterr().err
