"""``python -m coalesce sweep=mnist1d_paper``, cut down: three models, one command, one table.

Oracle: the sweep's file read by hand (its columns, its paper's parameter counts), and the frame that the printed
table sums up. That the accuracies are the paper's takes the whole sweep: docs/log.md has them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import coalesce
import coalesce.__main__ as command_line
from cli_for_tests import CommandLine
from coalesce.configuration import rides
from coalesce.configuration.tasks import find_task
from coalesce.experiment import group

MODELS = ["mnist1d_mlp", "mnist1d_cnn", "mnist1d_gru"]
STEPS = [12, 8, 4]
#: Small enough for an eager run: fewer steps and units, two seeds.
CUT = [
    *(f"sweep.params.steps={STEPS}", "sweep.params.task.hidden=[8,null,3]", "sweep.params.seed=[0,1]"),
    *("sweep.params.batch_size=[16,8,4]", "trainer.every=4", "trainer.evaluate_every=4"),
]


@pytest.mark.slow
def test_three_models_in_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Operation by operation: compiling three models takes minutes, and each kind is compiled elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["coalesce", "sweep=mnist1d_paper", *CUT, "trainer.compile=false"])
    assert command_line.main() == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "mnist1d_paper: 6 experiments in 3 cohorts, 48 steps in all" in out
    (folder,) = tmp_path.glob("runs/mnist1d_paper/*")
    frame = coalesce.load(folder)
    keys = ["task", "steps", "batch_size", "optimizer.lr", "task.hidden", "task.dropout", "seed"]
    assert list(frame.columns[:8]) == ["experiment", *keys]
    assert list(frame["task"]) == [model for model in MODELS for _ in range(2)]
    assert list(frame["steps"]) == list(frame["steps_done"]) == [steps for steps in STEPS for _ in range(2)]
    assert frame["cohort"].tolist() == [0, 0, 1, 1, 2, 2]
    assert frame["task.hidden"].isna().tolist() == [False, False, True, True, False, False]
    assert set(frame["status"]) == {"finished"}
    assert frame["experiment"].is_unique
    for metric in ("train/loss", "val/accuracy", "val/loss", "test/accuracy", "test/loss"):
        assert frame[metric].notna().all()
    # at the end each model's test accuracy as mean, standard deviation and number
    means = frame.groupby("task", sort=False)[["val/accuracy", "test/accuracy"]].agg(["mean", "std"])
    rows = [line.split() for line in out.splitlines() if re.match(r" +mnist1d_\w+ +0\.\d{2}", line)]
    assert [row[0] for row in rows] == MODELS
    for row, (_, expected) in zip(rows, means.iterrows(), strict=True):
        assert [float(cell) for cell in row[1:5]] == pytest.approx(expected.tolist(), abs=6e-4)
        assert row[5:] == ["2", "0"]
    assert "decided by task" in out


def test_the_sweep_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten seeds of each; the CNN has the paper's size, and the others are of the order of theirs."""
    order = CommandLine(tmp_path, monkeypatch, capsys).order("sweep=mnist1d_paper")
    cohorts = group(order.experiments, rides)
    assert [[e.seed for e in cohort.experiments] for cohort in cohorts] == [list(range(10))] * 3
    sizes = []
    for cohort in cohorts:
        task = cohort.experiments[0].config["task"]
        found, _ = find_task(task["_target_"])
        assert found is not None
        assert task["label_smoothing"] == 0.1
        model = found.cls(**{key: value for key, value in task.items() if key != "_target_"}).model()
        sizes.append(sum(p.numel() for p in model.parameters()))
    assert sizes == [33_930, 5_210, 10_690]
    assert order.trainer.show == ("test/accuracy",)
    # the test split chooses nothing
    assert order.trainer.monitor == "val/accuracy"
