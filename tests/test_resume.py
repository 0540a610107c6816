"""``python -m coalesce resume=FOLDER``: a run goes on as if nothing had happened, and gets more experiments.

Oracle: the same run without an interruption, bit for bit; a new run of the larger sweep.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf

import coalesce
import coalesce.__main__ as command_line
from coalesce.runner import planning
from coalesce.runner.listener import Progress
from coalesce.store.lock import RunLock
from coalesce.store.paths import RunPaths
from coalesce.store.writer import RunWriter

#: Where and how long; everything else must be equal.
WHERE = ["seconds", "job", "device"]
NET = [
    "task=custom",
    "task._target_=runner_helpers.Net",
    "task.dropout=0.25",
    "task.splits=train val test",
    "optimizer=sgd",
    "optimizer.lr=0.05",
    "optimizer.momentum=0.9",
    "steps=40",
    "batch_size=8",
    "trainer.compile=false",
    "trainer.check=false",
    "trainer.monitor=val/loss",
    "trainer.mode=min",
    "trainer.every=5",
    "trainer.evaluate_every=10",
    "trainer.width=2",
]
SEEDS = ["sweep.name=nets", "sweep.params={seed: [0, 1, 2]}"]


class Command:
    """The command, in a folder of its own, in this process.

    Args:
        folder: where it is called.
        finished, broken: run folders that are made once for all tests, to be copied.
    """

    def __init__(self, folder: Path, finished: Path | None = None, broken: Path | None = None):
        self.folder, self._finished, self._broken = folder, finished, broken

    def __call__(self, *arguments: str, told: Any = None) -> tuple[int, str]:
        """Run it; exit code, and what it printed.

        Args:
            told: in place of `RunWriter.advanced`.
        """
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(out):
            patched.chdir(self.folder)
            patched.setattr(sys, "argv", ["coalesce", *arguments])
            patched.setattr(sys, "path", list(sys.path))
            # the run traces what the plan would
            patched.setattr(planning, "_check_traces", lambda templates: None)
            if told is not None:
                patched.setattr(RunWriter, "advanced", told)
            code = command_line.main()
        assert "Traceback" not in out.getvalue()
        return code, out.getvalue()

    def run(self, *arguments: str) -> Path:
        """A whole run; its folder."""
        code, out = self(*NET, *SEEDS, *arguments)
        assert code == 0, out
        return self.latest()

    def latest(self) -> Path:
        return max((self.folder / "runs").glob("*/*"), key=lambda folder: folder.stat().st_mtime_ns)

    def interrupted(self, name: str, at: int, *arguments: str) -> Path:
        """A run to which a signal is sent at a boundary; its folder."""
        told = after(at, lambda: os.kill(os.getpid(), getattr(signal, name)))
        code, out = self(*NET, *SEEDS, *arguments, told=told)
        assert code == {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 75, "SIGUSR2": 75}[name], out
        folder = self.latest()
        assert f"{name} has ended the run" in out
        assert f"To go on: python -m coalesce resume={folder.relative_to(self.folder)}" in out
        return folder

    def finished(self) -> Path:
        """A copy of a run of three seeds that is over."""
        return self._copy(self._finished)

    def broken(self) -> Path:
        """A copy of the same run, interrupted when the third experiment had taken 15 steps."""
        return self._copy(self._broken)

    def _copy(self, folder: Path | None) -> Path:
        assert folder is not None
        return Path(shutil.copytree(folder, self.folder / "runs" / "nets" / folder.name))


def after(count: int, action: Callable[[], Any]) -> Callable[[RunWriter, Progress], None]:
    """`RunWriter.advanced`, which does something at one of its calls."""
    advanced, calls = RunWriter.advanced, iter(range(1, 1000))

    def told(self: RunWriter, progress: Progress) -> None:
        advanced(self, progress)
        if next(calls) == count:
            action()

    return told


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A whole run, and one that was interrupted."""
    folders = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("broken")
    return Command(folders[0]).run(), Command(folders[1]).interrupted("SIGTERM", 11, "trainer.snapshot_minutes=0")


@pytest.fixture
def command(tmp_path: Path, made: tuple[Path, Path]) -> Command:
    return Command(tmp_path, *made)


@pytest.fixture
def whole(made: tuple[Path, Path]) -> Path:
    """The run without an interruption."""
    return made[0]


def results(folder: Path) -> pd.DataFrame:
    return coalesce.load(folder).drop(columns=WHERE)


def same(one: Path, other: Path) -> None:
    """Results, history and weights of two runs are equal, bit for bit."""
    pd.testing.assert_frame_equal(results(one), results(other), check_exact=True)
    pd.testing.assert_frame_equal(coalesce.load_history(one), coalesce.load_history(other), check_exact=True)
    names = {path.name for path in (one / "weights").iterdir()}
    assert names == {path.name for path in (other / "weights").iterdir()}
    for name in names:
        assert (one / "weights" / name).read_bytes() == (other / "weights" / name).read_bytes(), name


def times_ended(folder: Path) -> list[int]:
    """How often each experiment was trained to its end, by the log."""
    log = (folder / "log.txt").read_text()
    return [len(re.findall(rf"{name} .*finished after", log)) for name in coalesce.load(folder)["experiment"]]


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM", "SIGINT"])
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
    "search", ["asha", pytest.param("halving", marks=pytest.mark.slow), pytest.param("pbt", marks=pytest.mark.slow)]
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
