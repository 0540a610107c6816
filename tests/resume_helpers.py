"""The command in a folder of its own, in this process, and what must be equal about two runs."""

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

import coalesce
import coalesce.__main__ as command_line
from coalesce.runner import planning
from coalesce.runner.listener import Progress
from coalesce.store.writer import RunWriter
from runner_helpers import Net

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


class Flawed(Net):
    """Its ``summary`` raises for a ``scale`` above 2, until somebody mends it."""

    broken = True

    def outputs(self, model: Any, batch: Any) -> Any:
        return model(batch[0])

    def summary(self, outputs: Any, split: str) -> dict[str, float]:
        if self.broken and self.scale > 2:
            raise ValueError("a fault of the user's")
        return {"largest": float(outputs.abs().max())}
