"""A signal that comes while a later cohort compiles: what was put aside since the last snapshot is trained again.

Oracle: the run that nobody interrupts, bit for bit.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import pytest

import coalesce
from coalesce.runner import planning
from coalesce.runner.listener import Listener, Progress
from coalesce.runner.plan import Plan
from coalesce.runner.run import Begun, run
from coalesce.search.halving import Halving
from coalesce.search.metric import Metric
from coalesce.store.paths import RunPaths
from coalesce.store.resume import reopen
from coalesce.store.signals import Interrupted
from coalesce.store.writer import RunWriter
from over_time_helpers import plan_of
from runner_helpers import Recorder

WHERE = ["seconds", "job", "device"]


def plans() -> Plan:
    return plan_of({"task.hidden": [4, 8], "seed": [0, 1, 2]}, steps=20, check=False)


def search() -> Halving:
    return Halving(plans().experiments, Metric("val/loss", "min"), min_steps=10, factor=3)


class Interrupting(Listener):
    """Lets a snapshot be due at the first boundary alone, and sends a signal while the second cohort compiles."""

    def __init__(self) -> None:
        self.now = 0.0

    def advanced(self, progress: Progress) -> None:
        self.now = 301.0

    def compiling(self, cohort: int, what: str) -> None:
        if cohort == 1 and what == "step":
            os.kill(os.getpid(), signal.SIGTERM)


def test_what_was_put_aside_since_the_last_snapshot_is_trained_again(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    run(plans(), [RunWriter(RunPaths(whole))], search=search())
    interrupting, first, second = Interrupting(), Recorder(), Recorder()
    writer = RunWriter(RunPaths(broken), clock=lambda: interrupting.now)
    with pytest.raises(Interrupted):
        run(plans(), [writer, first, interrupting], search=search())
    back = reopen(RunPaths(broken))
    assert back.snapshot is not None
    # it knows nothing of the rung at step 10, to which all of the first cohort have come since
    assert {slot["steps"] for slot in back.snapshot.facts["slots"].values()} == {5}
    assert {step for _, step, _ in first.rows} == {5, 10}
    assert back.results == ()
    with patch.object(planning, "_check_traces"):
        run(
            plans(),
            [RunWriter(RunPaths(broken), snapshots=back.snapshots), second],
            search=search(),
            begun=Begun((), back.snapshot),
        )
    trained = {name for name, step, _ in first.rows if step == 10}
    assert trained == {name for name, step, _ in second.rows if step == 10} & trained, "nothing was trained again"
    left, right = (coalesce.load(folder).drop(columns=WHERE) for folder in (whole, broken))
    pd.testing.assert_frame_equal(left, right, check_exact=True)
    left, right = (coalesce.load_history(folder) for folder in (whole, broken))
    assert not right.duplicated(["experiment", "step", "metric"]).any()
    pd.testing.assert_frame_equal(left, right, check_exact=True)
