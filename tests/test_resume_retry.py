"""Experiments that failed or diverged, trained once more: what they left before no longer counts.

Oracle: the run of a task that had no fault, bit for bit.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import coalesce
from coalesce.runner.run import Begun, run
from coalesce.runner.snapshot import Snapshot
from coalesce.search.base import Listed
from coalesce.search.metric import Metric
from coalesce.search.stopping import Stopping
from coalesce.store.paths import RunPaths
from over_time_helpers import Keeper, outcome
from resume_helpers import NET, Command, Flawed, after, results, same
from runner_helpers import planned

#: One of them fails at its first evaluation, one diverges at once, and one would do both.
FOUR = [
    "task._target_=resume_helpers.Flawed",
    "sweep.name=four",
    "sweep.params={task.scale: [1.0, 3.0], optimizer.lr: [0.05, 1e30]}",
    "steps=20",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of the mended task, and one of the task as it was."""
    folders = []
    for broken, code in ((False, 0), (True, 1)):
        command = Command(tmp_path_factory.mktemp("made"))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Flawed, "broken", broken)
            assert command(*NET, *FOUR)[0] == code
        folders.append(command.latest())
    return folders[0], folders[1]


@pytest.fixture
def command(tmp_path: Path, made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Command:
    """From now on the task is mended."""
    monkeypatch.setattr(Flawed, "broken", False)
    return Command(tmp_path, *made)


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.name[:5] != ".lock"}


def test_what_failed_is_trained_once_more(command: Command, made: tuple[Path, Path]) -> None:
    folder = command.broken()
    failed = results(folder).query("status == 'failed'")["experiment"].tolist()
    assert len(failed) == 1
    assert len(coalesce.load_history(folder).query("experiment in @failed")) > 0
    before = files(folder)
    code, out = command(f"resume={folder}", "retry=failed", "plan=true")
    assert code == 0
    assert "3 experiments of these have ended" in out
    assert files(folder) == before
    # the second attempt is interrupted, and the next process need not be told of it
    told = after(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    code, out = command(f"resume={folder}", "retry=failed", told=told)
    assert code == 143
    assert "3 experiments ended, 1 to go on with or to begin (1 of them once more), 0 more" in out
    assert len(coalesce.load(folder)) == 3
    code, out = command(f"resume={folder}")
    assert code == 0
    assert "3 experiments ended, 1 to go on with or to begin, 0 more" in out
    same(made[0], folder)
    code, out = command(f"resume={folder}", "retry=failed")
    assert code == 0
    assert f"No experiment of {folder} has failed: none is trained once more." in out
    assert f"All 4 experiments of {folder} have ended" in out
    # and what diverges, diverges again
    code, out = command(f"resume={folder}", "retry=[failed, diverged]")
    assert code == 0
    assert "2 experiments ended, 2 to go on with or to begin (2 of them once more), 0 more" in out
    same(made[0], folder)
    assert (folder / "log.txt").read_text().count(" diverged after ") == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["retry=faild"],
            "retry='faild': only what has failed or diverged is trained once more; valid: failed, diverged",
        ),
        (["retry=faild"], "did you mean 'failed'?"),
        (["retry=[failed,finished]"], "retry='finished': only what has failed or diverged"),
        (["retry=[]"], "retry=[]: names no status"),
        (["retry="], "retry='': only what has failed or diverged"),
    ],
)
def test_what_cannot_be_retried(arguments: list[str], says: str, command: Command) -> None:
    folder = command.broken()
    before = files(folder)
    code, out = command(f"resume={folder}", *arguments)
    assert code == 2
    assert says in out
    assert files(folder) == before


def test_a_retry_needs_a_run(command: Command) -> None:
    code, out = command(*NET, *FOUR, "retry=failed")
    assert code == 2
    assert "retry='failed': there is no run whose experiments could be trained once more; valid: resume=FOLDER" in out
    assert not (command.folder / "runs").exists()


def test_a_search_that_has_judged_by_them_is_not_given_others(command: Command) -> None:
    folder = command.broken()
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(
        text.replace("search:\n  name: grid", "search:\n  name: halving\n  min_steps: 10")
    )
    code, out = command(f"resume={folder}", "retry=failed")
    assert code == 2
    assert "retry='failed': the run's search decides by what it has seen" in out


def test_a_snapshot_of_the_earlier_attempt_is_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the last snapshot that there is, and the search has been told of it."""
    plan = planned(Flawed, {"task.scale": [1.0, 3.0]}, steps=30, evaluate_every=5)

    def search() -> Stopping:
        return Stopping(Listed(plan.experiments), Metric("val/loss", "min"), patience=2, min_delta=1.0)

    whole, first, second = Keeper(), Keeper(), Keeper()
    with monkeypatch.context() as patched:
        patched.setattr(Flawed, "broken", False)
        run(plan, [whole], search=search())
    # the first evaluation is sound, the second fails: in between it was saved
    summary = Flawed.summary
    calls: list[str] = []

    def late(self: Flawed, outputs: Any, split: str) -> dict[str, float]:
        self.broken = len(calls) > 1
        calls.append(split)
        return summary(self, outputs, split)

    with monkeypatch.context() as patched:
        patched.setattr(Flawed, "summary", late)
        run(plan, [first], search=search())
    (failed,) = [r for r in first.results if r.status == "failed"]
    snapshot = first.snapshots[0]
    assert snapshot.facts["slots"][failed.experiment.id]["steps"] == failed.steps - 5 == 5
    monkeypatch.setattr(Flawed, "broken", False)
    attempts = {failed.experiment.id: 1}
    run(plan, [second], search=search(), begun=Begun((), snapshot, attempts=attempts))
    assert outcome(second.results) == outcome(whole.results)
    assert second.curve(failed.experiment) == whole.curve(failed.experiment)
    # a later snapshot knows of the attempt: it is gone on from
    third, later = Keeper(), Snapshot(*vars(second.snapshots[0]).values())
    assert later.facts["attempts"] == attempts
    run(plan, [third], search=search(), begun=Begun((), later, attempts=attempts))
    assert outcome(third.results) == outcome(whole.results)
    assert third.curve(failed.experiment) == whole.curve(failed.experiment)[2:]


def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"steps": 10, "batch_size": 8, "every": 5, "evaluate_every": 5, "monitor": "val/loss"}
    how |= {"mode": "min", "compile": False, "check": False}

    def swept(scales: list[float], **more: Any) -> pd.DataFrame:
        frame = coalesce.sweep(Flawed, {"task.scale": scales}, folder=tmp_path, **how, **more)
        return frame.drop(columns=["seconds"])

    assert swept([1.0, 3.0, 4.0])["status"].tolist() == ["finished", "failed", "failed"]
    monkeypatch.setattr(Flawed, "broken", False)
    assert swept([1.0, 3.0])["status"].tolist() == ["finished", "failed"]
    once_more = swept([1.0, 3.0], retry="failed")
    assert once_more["status"].tolist() == ["finished", "finished"]
    # what was not asked for is left as it was
    everything = coalesce.load(tmp_path).sort_values("task.scale")
    assert everything["status"].tolist() == ["finished", "finished", "failed"]
    assert len(coalesce.load_history(tmp_path).query("metric == 'val/loss'")) == 5
    pd.testing.assert_frame_equal(swept([1.0, 3.0], retry=["failed"]), once_more, check_exact=True)
    with pytest.raises(coalesce.ConfigError, match="did you mean 'diverged'"):
        swept([1.0], retry="divergd")
    with pytest.raises(coalesce.ConfigError, match="valid: folder= beside it"):
        coalesce.sweep(Flawed, {"seed": [0]}, retry="failed", **how)
    assert RunPaths(tmp_path).retries() == [tmp_path / "retried.json"]
