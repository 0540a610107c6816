"""``python -m coalesce resume=FOLDER``: a run goes on as if nothing had happened, and gets more experiments.

Oracle: the same run without an interruption, bit for bit; a new run of the larger sweep.
"""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from coalesce.store.lock import RunLock
from coalesce.store.paths import RunPaths
from resume_helpers import Command, results, same, times_ended
from thorough import kept


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A whole run, and one that was interrupted."""
    folders = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("broken")
    return Command(folders[0]).run("trainer.snapshot_minutes=0"), Command(folders[1]).interrupted(
        "SIGTERM", 11, "trainer.snapshot_minutes=0"
    )


@pytest.fixture
def command(tmp_path: Path, made: tuple[Path, Path]) -> Command:
    return Command(tmp_path, *made)


@pytest.fixture
def whole(made: tuple[Path, Path]) -> Path:
    """The run without an interruption."""
    return made[0]


@pytest.mark.parametrize("name", kept(["SIGUSR1", "SIGTERM", "SIGINT"], of=["SIGUSR1", "SIGTERM"]))
def test_case_34_a_signal_and_then_resume(name: str, command: Command, whole: Path) -> None:
    broken = command.interrupted(name, 11)
    assert len(results(broken)) == 2
    assert len(RunPaths(broken).snapshots()) == 1
    code, out = command(f"resume={broken}")
    assert code == 0
    assert "2 experiments ended, 1 to go on with or to begin, 0 more" in out
    assert len(results(broken)) == 3
    same(whole, broken)
    assert times_ended(broken) == [1, 1, 1]


def test_a_finished_run_trains_nothing_and_says_so(command: Command) -> None:
    folder = command.finished()
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    for _ in range(2):
        code, out = command(f"resume={folder}")
        assert code == 0
        assert f"All 3 experiments of {folder} have ended: nothing to train." in out
        assert "Best experiment" in out
    after_it = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert {k: v for k, v in after_it.items() if k.name != ".lock"} == {
        k: v for k, v in files.items() if k.name != ".lock"
    }


def test_a_run_that_is_over_has_no_snapshots(command: Command) -> None:
    """Nothing needs them: `test_other_values_and_longer_ones_beside_those_that_there_are` goes on without."""
    assert not RunPaths(command.finished()).snapshot_folder.exists()
    broken = command.broken()
    assert RunPaths(broken).snapshots() != []
    (RunPaths(broken).snapshot_folder / "mine.txt").touch()
    assert command(f"resume={broken}")[0] == 0
    assert [path.name for path in RunPaths(broken).snapshot_folder.iterdir()] == ["mine.txt"]


def test_a_folder_above_stands_for_its_latest_run(command: Command) -> None:
    folder = command.finished()
    code, out = command("resume=runs/nets")
    assert code == 0, out
    assert f"Resuming runs/nets/{folder.name}" in out


def test_tables_that_a_killed_process_did_not_write(command: Command) -> None:
    folder = command.finished()
    expected = results(folder)
    for name in ("results.parquet", "results.csv", "history.parquet"):
        (folder / name).unlink()
    assert command(f"resume={folder}")[0] == 0
    assert (folder / "results.parquet").exists()
    pd.testing.assert_frame_equal(results(folder), expected)


def test_without_a_snapshot_what_has_not_ended_begins_anew(command: Command, whole: Path) -> None:
    broken = command.broken()
    for path in RunPaths(broken).snapshots():
        path.unlink()
    assert command(f"resume={broken}")[0] == 0
    same(whole, broken)


def test_a_snapshot_that_is_damaged_is_told(command: Command, whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = command.broken()
    path = RunPaths(broken).snapshots()[-1]
    path.write_bytes(path.read_bytes()[:-1])
    assert command(f"resume={broken}")[0] == 0
    assert f"the snapshot {path} is damaged" in caplog.text
    assert f"the snapshot {path} was damaged" in (broken / "log.txt").read_text()
    same(whole, broken)


def test_more_seeds(command: Command) -> None:
    larger = Command(command.folder / "larger")
    larger.folder.mkdir()
    expected = larger.run('sweep.params.seed="range(0, 5)"')
    broken = command.broken()
    code, out = command(f"resume={broken}", 'sweep.params.seed="range(0, 5)"')
    assert code == 0, out
    assert "2 experiments ended, 1 to go on with or to begin, 2 more" in out
    same(expected, broken)
    assert times_ended(broken) == [1] * 5
    # the folder's configuration is that of the larger sweep now
    assert "All 5 experiments" in command(f"resume={broken}")[1]
    assert "All 5 experiments" in command(f"resume={broken}", 'sweep.params.seed="range(0, 5)"')[1]
    assert OmegaConf.load(broken / "config.yaml").sweep.params.seed == "range(0, 5)"
    assert "resume" not in OmegaConf.load(broken / "config.yaml")


def test_other_values_and_longer_ones_beside_those_that_there_are(command: Command) -> None:
    folder = command.finished()
    before = results(folder)
    assert command(f"resume={folder}", "sweep.params.seed=[2, 7]")[0] == 0
    assert results(folder)["seed"].tolist() == [0, 1, 2, 7]
    assert command(f"resume={folder}", "steps=45")[0] == 0
    frame = results(folder)
    assert frame["seed"].tolist() == [0, 1, 2, 7, 2, 7]
    assert frame["steps"].tolist() == frame["steps_done"].tolist() == [40, 40, 40, 40, 45, 45]
    assert command(f"resume={folder}", "sweep.params.optimizer.lr=[0.01]")[0] == 0
    frame = results(folder)
    assert frame["optimizer.lr"].tolist() == [0.05] * 6 + [0.01] * 2
    assert times_ended(folder) == [1] * 8
    old = frame.head(3)
    pd.testing.assert_series_equal(old["train/loss"], before["train/loss"], check_exact=True)


def test_the_width_stays(command: Command) -> None:
    folder = command.finished()
    assert command(f"resume={folder}", "sweep.params.seed=[5]", "trainer.width=7")[0] == 0
    assert results(folder)["width"].tolist() == [2] * 4
    assert command(f"resume={folder}", "sweep.params.task.hidden=[8]", "trainer.width=3")[0] == 0
    frame = results(folder)
    assert frame["task.hidden"].tolist() == [16] * 4 + [8]
    assert frame["width"].tolist() == [2] * 4 + [3]
    assert frame["cohort"].tolist() == [0] * 4 + [1]


def test_what_would_be_trained(command: Command) -> None:
    folder = command.finished()
    before = sorted(path.name for path in folder.iterdir())
    code, out = command(f"resume={folder}", 'sweep.params.seed="range(0, 5)"', "plan=true")
    assert code == 0
    assert "3 experiments of these have ended" in out
    assert sorted(path.name for path in folder.iterdir()) == before
    assert len(results(folder)) == 3


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer=adamw", "optimizer='adamw': a run that goes on keeps the options that it chose"),
        ("sweep=lr_grid", "sweep='lr_grid': a run that goes on keeps"),
        ("sweep.name=other", "sweep.name='other': a run that goes on keeps its name, 'nets': its folder is"),
        ("runs=elsewhere", "runs='elsewhere': a run that goes on keeps its place, 'runs': its folder is"),
        ("trainer.every=10", "trainer.every=10: the run began with 5"),
        ("trainer.matmul_precision=high", "trainer.matmul_precision='high': the run began with 'highest'"),
        ("trainer.monitor=val/error", "trainer.monitor='val/error': the run began with 'val/loss'"),
        ("search.patience=1", "search.patience=1: the run began with None"),
        ("trainer.evry=10", "did you mean 'every'?"),
        ("steps=abc", "steps='abc': must be an integer"),
        ("sweep.params.sede=[1]", "did you mean 'seed'?"),
        ("task.hiden=3", "did you mean 'hidden'?"),
    ],
)
def test_overrides_that_are_refused(override: str, says: str, command: Command) -> None:
    folder = command.finished()
    plan = (folder / "plan.json").read_bytes()
    code, out = command(f"resume={folder}", override)
    assert code == 2
    assert says in out
    assert (folder / "plan.json").read_bytes() == plan


def test_settings_that_may_change(command: Command) -> None:
    broken = command.broken()
    same_as_before = ["trainer.every=5", "sweep.name=nets", "runs=runs"]
    assert command(f"resume={broken}", "trainer.weights=false", "trainer.show=[test/loss]", *same_as_before)[0] == 0
    assert len(list((broken / "weights").glob("*-best*"))) == 2


def test_folders_that_cannot_be_gone_on_from(command: Command) -> None:
    folder = command.finished()
    code, out = command("resume=runs/nest")
    assert code == 2
    assert "resume=runs/nest: " in out
    assert "does not exist; did you mean" in out
    for nothing, says in (("", "resume='': names no folder"), ("[a]", "resume=['a']: must name a folder")):
        code, out = command(f"resume={nothing}")
        assert code == 2
        assert f"{says}" in out
        assert "valid: a run folder" in out
    with RunLock(RunPaths(folder)):
        code, out = command(f"resume={folder}")
    assert code == 1
    assert f"is being written by process {os.getpid()} on host" in out
    (folder / "plan.json").write_text("{")
    code, out = command(f"resume={folder}")
    assert code == 1
    assert "is no plan that this version of coalesce can read" in out


@pytest.mark.parametrize(
    "search",
    ["asha", pytest.param("halving", marks=pytest.mark.thorough), pytest.param("pbt", marks=pytest.mark.slow)],
)
def test_a_search_goes_on_where_it_was(search: str, command: Command) -> None:
    options = [f"search={search}", "sweep.params.optimizer.lr=[0.1, 0.03, 0.01]", "trainer.width=3"]
    if search in ("asha", "halving"):
        options += ["search.min_steps=10"]
    whole = command.run(*options)
    broken = command.interrupted("SIGTERM", 9, *options)
    code, out = command(f"resume={broken}", "sweep.params.seed=[9]")
    assert code == 2
    assert "sweep.params.seed=[9]: the run's search decides by what it has seen" in out
    code, out = command(f"resume={broken}")
    assert code == 0, out
    same(whole, broken)
