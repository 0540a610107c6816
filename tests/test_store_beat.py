"""Where a run stands, as whoever watches it reads it.

Oracle: what the fake run told the listener, a clock that moves when a test says so, and the system's own refusals.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from coalesce.errors import RunFolderError, TaskError
from coalesce.runner.listener import Progress
from coalesce.store import beat as module
from coalesce.store.beat import MESSAGE, Beat
from coalesce.store.jobs import OVER, STATES, Standing, read_standing
from coalesce.store.lock import RunLock
from coalesce.store.paths import RunPaths
from coalesce.store.signals import Interrupted
from coalesce.store.speed import Speed
from coalesce.store.writer import RunWriter
from run_fakes import drive, grid, plan, progress, result

EXPERIMENTS = grid(optimizer__lr=[0.1, 0.01], seed=[0, 1, 2, 3])
PLAN = plan(EXPERIMENTS)


class Watched(Beat):
    """Keeps all that it writes, on a clock that a test moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, job: int | None = None, **arguments: Any):
        self.now = 1_000_000.0
        self.all: list[Standing] = []
        write = module.write_standing

        def kept(paths: RunPaths, standing: Standing) -> None:
            write(paths, standing)
            self.all.append(standing)

        monkeypatch.setattr(module, "write_standing", kept)
        super().__init__(RunPaths(folder, job), clock=lambda: self.now, **arguments)

    @property
    def last(self) -> Standing:
        """What lies in the folder."""
        found = read_standing(self.paths)
        assert found == self.all[-1]
        return found


@pytest.fixture
def beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_every_change_of_state_is_told_at_once(beat: Watched) -> None:
    drive(beat, PLAN, [result(one, status="failed" if one.seed == 2 else "finished") for one in EXPERIMENTS])
    assert [standing.state for standing in beat.all] == ["planning", "compiling", "training", "ended"]
    assert set(OVER) < set(STATES)
    assert beat.last == Standing(
        state="ended", id=str(os.getpid()), host=socket.gethostname(), device=beat.last.device, visible="",
        since=1_000_000.0, written=1_000_000.0, lanes=0, width=8, steps=400, total_steps=400, experiments=8,
        total_experiments=8, failed=2, monitor="val/accuracy",
    )  # fmt: skip
    assert beat.last.device.startswith("cpu ")


def test_what_is_the_same_is_told_every_two_seconds(beat: Watched) -> None:
    beat.started(PLAN)
    for step in range(1, 101):
        beat.now += 0.1
        beat.advanced(progress(step, 400))
    # once for the change, and then within ten seconds
    assert 1 + 4 <= len(beat.all) - 1 <= 1 + 5
    gaps = [after.written - before.written for before, after in zip(beat.all[1:], beat.all[2:], strict=False)]
    assert all(2.0 <= gap < 2.2 for gap in gaps)


def test_it_is_alive_between_boundaries_that_lie_far_apart(beat: Watched) -> None:
    beat.started(PLAN)
    beat.compiling(0, "step")
    for _ in range(1200):
        beat.now += 0.5
        assert beat.wants_boundary() is False
    assert beat.last.state == "training"
    assert beat.now - beat.last.written < 2.0
    assert len(beat.all) <= 2 + 1 + 600 / 2


def test_a_clock_that_is_put_back(beat: Watched) -> None:
    beat.started(PLAN)
    beat.advanced(progress(1, 400))
    beat.now -= 3600
    beat.advanced(progress(2, 400))
    assert beat.last.steps == 2


def test_numbers_of_a_run_that_goes_on(beat: Watched) -> None:
    beat.started(PLAN)
    beat.resumed([result(EXPERIMENTS[0]), result(EXPERIMENTS[1], status="failed")])
    beat.ended(result(EXPERIMENTS[2], status="failed"))
    told = progress(250, 400, lanes=5, best=(0.75, EXPERIMENTS[3]), training_s=2.0)
    beat.advanced(dataclasses.replace(told, before=100))
    seen = beat.last
    assert (seen.experiments, seen.failed, seen.total_experiments) == (3, 2, 8)
    assert (seen.steps, seen.total_steps, seen.lanes, seen.width) == (250, 400, 5, 8)
    assert (seen.best, seen.best_id, seen.speed) == (0.75, EXPERIMENTS[3].id, 75.0)
    assert (seen.since, seen.message) == (1_000_000.0, "")


@pytest.mark.parametrize(
    ("error", "state", "says"),
    [
        (KeyboardInterrupt(), "interrupted", "ended by Ctrl-C"),
        (Interrupted("SIGUSR1"), "interrupted", "ended by SIGUSR1"),
        (TaskError("the model is wrong"), "broke", "the model is wrong"),
        (RunFolderError("no space"), "broke", "no space"),
        (RuntimeError("x" * 5000), "broke", ("RuntimeError: " + "x" * 5000)[:MESSAGE]),
        (None, "ended", ""),
    ],
)
def test_how_it_ended(beat: Watched, error: BaseException | None, state: str, says: str) -> None:
    beat.started(PLAN)
    beat.advanced(progress(100, 400))
    beat.closed(error)
    assert (beat.last.state, beat.last.message) == (state, says)
    assert (beat.last.lanes, beat.last.speed) == (0, 0.0)


def test_a_job_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    (tmp_path / "jobs").mkdir()
    left = tmp_path / "jobs" / ".standing-7.json.0123.tmp"
    others = tmp_path / "jobs" / ".standing-77.json.0123.tmp"
    left.touch()
    others.touch()
    beat = Watched(tmp_path, monkeypatch, 7, id="4711_7")
    beat.planning()
    assert (beat.last.state, beat.last.id, beat.last.visible) == ("planning", "4711_7", "3")
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == [others.name, "standing-7.json"]
    # no plan came of it
    beat.closed(TaskError("no data"))
    assert (beat.last.state, beat.last.message) == ("broke", "no data")
    assert read_standing(RunPaths(tmp_path)) is None


def test_what_never_began_says_nothing(beat: Watched, tmp_path: Path) -> None:
    """A run that is refused, since another process writes the folder, does not speak for that one."""
    with RunLock(RunPaths(tmp_path)):
        writer = RunWriter(RunPaths(tmp_path))
        with pytest.raises(RunFolderError) as refused:
            writer.started(PLAN)
        writer.closed(refused.value)
        beat.closed(refused.value)
    assert beat.all == []
    assert not beat.paths.standing.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.ESTALE])
def test_a_full_disk_is_told_by_who_writes_the_results(
    code: int, beat: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beat.started(PLAN)
    before = beat.paths.standing.read_bytes()

    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.replace", full)
    with caplog.at_level(logging.WARNING, "coalesce"):
        for step in range(1, 20):
            beat.now += 5
            beat.advanced(progress(step, 400))
        beat.closed(RunFolderError("no space left"))
    assert [record.getMessage() for record in caplog.records] == [
        f"where the run stands cannot be written: {OSError(code, os.strerror(code))}"
    ]
    assert beat.paths.standing.read_bytes() == before
    assert [path.name for path in beat.paths.folder.iterdir()] == ["standing.json"]


def test_the_folder_of_a_run_that_was_removed(beat: Watched, caplog: pytest.LogCaptureFixture) -> None:
    beat.started(PLAN)
    beat.paths.standing.unlink()
    beat.paths.folder.rmdir()
    with caplog.at_level(logging.WARNING, "coalesce"):
        beat.closed(RunFolderError("it is gone"))
    assert len(caplog.records) == 1
    assert not beat.paths.folder.exists()


def test_speed_is_that_of_the_last_while() -> None:
    def told(training_s: float, steps: int, before: int = 0) -> Progress:
        return dataclasses.replace(progress(steps, 10**6), training_s=training_s, before=before)

    speed = Speed()
    assert speed.per_second == 0.0
    speed.add(told(0.0, 500, before=500))
    assert speed.per_second == 0.0
    speed.add(told(2.0, 700, before=500))
    assert speed.per_second == 100.0
    # ten times slower from here on
    for second in range(3, 60):
        speed.add(told(second, 700 + 10 * (second - 2), before=500))
    assert speed.per_second == pytest.approx(10.0)
