"""Law 5: a process that is killed at any moment loses nothing, and `resume` ends where an uninterrupted run does.

Oracle: the same run in one go, bit for bit: results (but for where and how long), history, weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

import coalesce
from coalesce.store.paths import RunPaths
from coalesce.store.signals import EXIT_CODES
from coalesce.store.snapshots import Snapshots
from kill_driver import Driver, driver

WHERE = ["seconds", "job", "device"]


@pytest.fixture(scope="module")
def drive() -> Iterator[Driver]:
    with driver() as started:
        yield started


@pytest.fixture(scope="module")
def whole(drive: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one go."""
    folder = tmp_path_factory.mktemp("whole")
    assert drive("SIGKILL", 600, folder) == 0
    return folder


def same(one: Path, other: Path) -> None:
    left, right = (coalesce.load(folder).drop(columns=WHERE) for folder in (one, other))
    assert len(left) == 9
    pd.testing.assert_frame_equal(left, right, check_exact=True)
    before, after = coalesce.load_history(one), coalesce.load_history(other)
    assert not before.duplicated(["experiment", "step", "metric"]).any()
    pd.testing.assert_frame_equal(before, after, check_exact=True)
    names = sorted(path.name for path in (one / "weights").iterdir())
    assert len(names) == 9 + 6  # the last of all, the best of those that did not diverge
    assert names == sorted(path.name for path in (other / "weights").iterdir())
    for name in names:
        assert (one / "weights" / name).read_bytes() == (other / "weights" / name).read_bytes(), name
    assert RunPaths(other).leftovers() == []


def killed(drive: Driver, folder: Path, times: int, seed: int, names: tuple[str, ...] = ("SIGKILL",)) -> list[int]:
    """Run to the end, with so many processes that are ended at random moments before.

    Returns:
        Their exit codes.
    """
    chance = random.Random(seed)
    codes = []
    for _ in range(times):
        # mostly while it trains, at times while it plans and traces
        seconds = chance.choice([chance.uniform(0, 0.3)] * 4 + [-chance.uniform(0.05, 2)])
        codes.append(drive(chance.choice(names), seconds, folder))
        if codes[-1] == 0:
            return codes
    assert drive("SIGKILL", 600, folder) == 0
    return codes


def test_three_kills(drive: Driver, whole: Path, tmp_path: Path) -> None:
    assert killed(drive, tmp_path, 3, seed=1) == [-9] * 3
    same(whole, tmp_path)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_case_34_it_saves_within_two_seconds_of_the_signal(name: str, drive: Driver, tmp_path: Path) -> None:
    """To the end of the process, far from the next host boundary. The least of three, since others use the machine."""
    took = []
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        code, took_s = drive.endless(name, folder)
        assert code == EXIT_CODES[name]
        snapshot = Snapshots(RunPaths(folder)).newest()
        assert snapshot is not None
        steps = [slot["steps"] for slot in snapshot.facts["slots"].values()]
        assert len(steps) == 2
        assert min(steps) > 0
        took.append(took_s)
        if took_s < 2:
            break
    assert min(took) < 2, took


@pytest.mark.thorough
def test_twenty_kills(drive: Driver, whole: Path, tmp_path: Path) -> None:
    codes = killed(drive, tmp_path, 20, seed=0)
    assert codes.count(-9) >= 10
    same(whole, tmp_path)


@pytest.mark.slow
def test_signals_of_all_kinds_in_the_middle_of_snapshots(drive: Driver, whole: Path, tmp_path: Path) -> None:
    """A snapshot is taken at every boundary, so that many a signal comes while one is written."""
    names = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGKILL")
    codes = killed(drive, tmp_path, 10, seed=2, names=names)
    assert set(codes) <= {143, 75, 130, -9, 0}
    assert len(set(codes)) >= 3
    same(whole, tmp_path)


@pytest.mark.slow
def test_a_snapshot_that_is_cut_off(drive: Driver, whole: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert drive("SIGKILL", 0.2, tmp_path) == -9
        last = RunPaths(tmp_path).snapshots()[-1]
        last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    assert drive("SIGKILL", 600, tmp_path) == 0
    assert "was damaged" in (tmp_path / "log.txt").read_text()
    same(whole, tmp_path)
