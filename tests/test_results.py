"""``python -m coalesce.results``: what it prints, merges and exports.

Oracle: the frames that `coalesce.load` gives, put together by pandas; pandas' and pyarrow's own readers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import coalesce
from coalesce import results
from coalesce.experiment import Experiment
from coalesce.store.jobs import JobRecord, Standing, write_record, write_standing
from coalesce.store.merge import find_runs, merged, read_run
from coalesce.store.paths import RunPaths
from coalesce.store.writer import RunWriter
from run_fakes import drive, experiment, grid, plan, result

ROOT = Path(coalesce.__file__).parent.parent
BIG = 2**63 - 1


def made(folder: Path, experiments: Sequence[Experiment], values: Sequence[float], **options: Any) -> Path:
    """A finished run whose experiments have these accuracies."""
    folder.mkdir(parents=True)
    ended = [result(one, value, **options) for one, value in zip(experiments, values, strict=True)]
    drive(RunWriter(RunPaths(folder)), plan(experiments), ended)
    return folder


def show(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command prints that must succeed."""
    assert results.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command says that must be refused."""
    try:
        code: Any = results.main([str(argument) for argument in arguments])
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return printed.err


def rows(out: str) -> list[list[str]]:
    """The table's rows, cell by cell."""
    return [line.split() for line in out.splitlines() if re.match(r"\s+[0-9a-f]{12}\s(?!.* after )", line)]


def test_the_best_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments = grid(optimizer__lr=[0.1, 0.01, 1e-3], seed=[0, BIG])
    values = [0.5, 0.75, math.nan, 0.25, 0.9, 0.5]
    out = show(capsys, made(tmp_path / "run", experiments, values))
    assert "6 of 6 experiments ended (6 finished)" in out
    assert "6 experiments, the best by best/val/accuracy (max) first" in out
    table = rows(out)
    # equal ones in the sweep's order, NaN last
    assert [row[0] for row in table] == [experiments[index].id for index in (4, 1, 0, 5, 3, 2)]
    assert table[0][1:] == ["0.001", "0", "50", "0.9000", "0.9000", "40"]
    assert table[1][2] == str(BIG)
    assert table[-1][-3:-1] == ["-", "-"]
    assert f"Best experiment: {experiments[4].id} (optimizer.lr=0.001, seed=0): val/accuracy 0.9000 at step 40" in out


def test_as_a_process(tmp_path: Path) -> None:
    made(tmp_path / "runs" / "lr" / "one", grid(seed=[0, 1]), [0.5, 0.6])
    command = [sys.executable, "-m", "coalesce.results", "runs/lr"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(rows(done.stdout)) == 2
    assert done.stderr == ""


def test_a_smaller_value_may_be_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments = grid(seed=[0, 1, 2])
    folder = made(tmp_path / "run", experiments, [0.5, 0.2, 0.9])
    table = rows(show(capsys, folder, "--mode", "min"))
    assert [row[0] for row in table] == [experiments[index].id for index in (1, 0, 2)]


def test_another_metric_by_its_last_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments = grid(seed=[0, 1])
    folder = made(tmp_path / "run", experiments, [0.5, 0.2], best=0.95)
    out = show(capsys, folder, "--monitor", "val/accuracy", "--mode", "min")
    assert [row[0] for row in rows(out)] == [experiments[1].id, experiments[0].id]
    assert "the best by val/accuracy (min) first" in out
    assert "0.9500" not in out
    assert "no such metric; valid: train/loss, val/accuracy" in refused(capsys, folder, "--monitor", "val/acuracy")
    assert "did you mean 'val/accuracy'?" in refused(capsys, folder, "--monitor", "val/acuracy")


def test_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments = grid(seed=list(range(40)))
    folder = made(tmp_path / "run", experiments, [index / 100 for index in range(40)])
    assert len(rows(show(capsys, folder))) == results.ROWS
    out = show(capsys, folder, "--limit", "3")
    assert [row[0] for row in rows(out)] == [experiments[index].id for index in (39, 38, 37)]
    assert "40 experiments, the best by best/val/accuracy (max) first; the first 3" in out
    assert len(rows(show(capsys, folder, "--limit", "0"))) == 40
    assert "must be at least 0" in refused(capsys, folder, "--limit", "-1")
    assert "invalid" in refused(capsys, folder, "--limit", "few")


def test_what_did_not_end_well_is_last_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments = grid(seed=[0, 1, 2])
    ended = [
        result(experiments[0], 0.99, status="diverged", steps=7, message="the loss is NaN"),
        dataclasses.replace(
            result(experiments[1], status="failed", steps=0, best_step=None, message="no [model]"), metrics={}, best={}
        ),
        result(experiments[2], 0.1),
    ]
    drive(RunWriter(RunPaths(tmp_path)), plan(experiments), ended)
    out = show(capsys, tmp_path)
    assert [row[0] for row in rows(out)] == [experiments[index].id for index in (2, 0, 1)]
    assert "(1 diverged, 1 failed, 1 finished)" in out
    assert f"Best experiment: {experiments[2].id}" in out
    assert "after 7 steps: the loss is NaN" in out
    assert "after 0 steps: no [model]" in out


def test_all_nan_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "run", grid(seed=[0, 1]), [math.nan, math.nan], best_step=None)
    out = show(capsys, folder)
    assert "No experiment is best: no finite val/accuracy was measured" in out
    assert len(rows(out)) == 2


def test_a_metric_that_nobody_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments = grid(seed=[0, 1])
    drive(RunWriter(RunPaths(tmp_path)), plan(experiments, monitor="val/f1"), [result(one, 0.5) for one in experiments])
    out = show(capsys, tmp_path)
    assert "2 experiments, no val/f1 was measured" in out
    assert "No experiment is best: no val/f1 at all" in out


def test_only_failed_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments = grid(seed=[0, 1])
    ended = [
        dataclasses.replace(result(one, status="failed", steps=0, best_step=None), metrics={}, best={})
        for one in experiments
    ]
    drive(RunWriter(RunPaths(tmp_path)), plan(experiments), ended)
    assert "2 of 2 experiments ended (2 failed)" in show(capsys, tmp_path, "--csv", tmp_path / "x.csv")
    assert len(pd.read_csv(tmp_path / "x.csv")) == 2


def test_runs_that_are_not_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments = grid(seed=[0, 1, 2])
    writing = RunWriter(RunPaths(tmp_path))
    writing.started(plan(experiments))
    out = show(capsys, tmp_path)
    assert f"0 of 3 experiments ended; it is being written by process {os.getpid()} on host" in out
    assert "No experiment has ended so far." in out
    writing.ended(result(experiments[1], 0.5))
    writing.flush()
    out = show(capsys, tmp_path)
    assert "1 of 3 experiments ended (1 finished); it is being written" in out
    assert len(rows(out)) == 1
    writing.closed(KeyboardInterrupt())
    assert "1 of 3 experiments ended (1 finished); it broke off" in (said := show(capsys, tmp_path))
    assert f"To go on: python -m coalesce resume={tmp_path}" in said
    # jobs need no process that writes here
    RunPaths(tmp_path).jobs_folder.mkdir()
    for number in range(2):
        write_record(RunPaths(tmp_path), JobRecord(number, "slurm", f"7_{number}", 0, (), 1, 10, 0.0))
    write_standing(RunPaths(tmp_path, 0), Standing("ended", "7_0", "node", "cpu", "", 0.0, 0.0))
    said = show(capsys, tmp_path)
    assert f"; 1 job may be waiting or at work. To watch: python -m coalesce.results {tmp_path} --watch" in said
    write_standing(RunPaths(tmp_path, 1), Standing("interrupted", "7_1", "node", "cpu", "", 0.0, 0.0))
    assert "it broke off" in show(capsys, tmp_path)
    # a process that was killed leaves its name
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    owner = {"pid": gone.pid, "host": os.uname().nodename}
    RunPaths(tmp_path).lock_owner.write_text(json.dumps(owner))
    assert "it broke off" in show(capsys, tmp_path)
    RunPaths(tmp_path).lock_owner.write_text(json.dumps({**owner, "host": "elsewhere"}))
    assert f"written by process {gone.pid} on host elsewhere" in show(capsys, tmp_path)


def test_two_runs_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = made(tmp_path / "a" / "1", grid(optimizer__lr=[0.1, 0.01]), [0.5, 0.7])
    second = made(tmp_path / "b" / "1", grid(seed=[0, BIG], steps=[40]), [0.6, 0.8])
    out = show(capsys, first, second)
    assert "a/1: 2 of 2 experiments ended (2 finished)\nb/1: 2 of 2" in out
    assert [row[1] for row in rows(out)] == ["b/1", "a/1", "b/1", "a/1"]
    frame, keys = merged([read_run(first), read_run(second)])
    assert keys == ("optimizer.lr", "seed", "steps")
    # a key that a run does not sweep has the value of its configuration
    assert frame["optimizer.lr"].tolist() == [0.1, 0.01, 1e-3, 1e-3]
    assert frame["seed"].tolist() == [0, 0, 0, BIG]
    assert frame["steps"].tolist() == [50, 50, 40, 40]
    assert frame["steps_done"].tolist() == [50, 50, 40, 40]
    assert frame["run"].tolist() == ["a/1", "a/1", "b/1", "b/1"]
    parts = [coalesce.load(first), coalesce.load(second)]
    for name in ("experiment", "status", "val/accuracy", "best_step", "seconds"):
        assert frame[name].tolist() == [value for part in parts for value in part[name].tolist()]
        assert frame[name].dtype == parts[0][name].dtype


def test_the_types_of_merged_columns(tmp_path: Path) -> None:
    """What pandas would make floats of, or objects."""
    runs = [
        made(tmp_path / "a", grid(seed=[BIG], optimizer__clip_norm=[None]), [0.5]),
        made(tmp_path / "b", grid(seed=[2**64 - 1], optimizer__amsgrad=[True, None]), [0.5, 0.6], best_step=None),
        made(tmp_path / "c", grid(optimizer__betas=[[0.9, 0.999]], task__hidden=[16]), [0.5]),
        made(tmp_path / "d", [experiment({})], [0.5]),
    ]
    empty = tmp_path / "e"
    empty.mkdir()
    writing = RunWriter(RunPaths(empty))
    writing.started(plan(grid(seed=[1])))
    writing.closed(None)
    frame, _ = merged([read_run(folder) for folder in (empty, *runs)])
    assert len(frame) == 5
    assert frame["seed"].tolist() == [BIG, 2**64 - 1, 2**64 - 1, 0, 0]
    assert frame["seed"].dtype == "uint64"
    assert frame["optimizer.amsgrad"].dtype == "boolean"
    assert frame["optimizer.amsgrad"].isna().tolist() == [True, False, True, True, True]
    assert frame["optimizer.betas"].tolist()[3] == (0.9, 0.999)
    assert frame["task.hidden"].tolist() == [8, 8, 8, 16, 8]
    assert frame["best_step"].dtype == "Int64"
    assert frame["best_step"].isna().tolist() == [False, True, True, False, False]
    assert frame["val/accuracy"].dtype == "float64"


def test_a_swept_group_beside_a_run_that_has_one_option(tmp_path: Path) -> None:
    sgd, adamw = experiment({}), experiment({"seed": 1})
    swept = [Experiment({**sgd.config, "optimizer": {"name": name}}, {"optimizer": name}) for name in ("sgd", "adamw")]
    runs = [made(tmp_path / "a", swept, [0.1, 0.2]), made(tmp_path / "b", [adamw], [0.3])]
    frame, _ = merged([read_run(folder) for folder in runs])
    assert frame["optimizer"].tolist() == ["sgd", "adamw", "adamw"]


def test_an_experiment_in_two_runs_has_two_rows_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments = grid(seed=[0, 1, 2])
    first = made(tmp_path / "a", experiments, [0.5, 0.6, math.nan], seconds=1.0)
    again = made(tmp_path / "b", experiments, [0.5, 0.6, math.nan], seconds=2.0)
    other = made(tmp_path / "c", experiments[:1], [0.4])
    out = show(capsys, first, again)
    assert len(rows(out)) == 6
    assert "3 experiments stand in more than one run, with a row for each; their results are equal" in out
    out = show(capsys, first, again, other)
    assert f"; the results of 1 differ: {experiments[0].id}" in out
    # the same folder twice is no second run
    out = show(capsys, first, f"{first}/../a")
    assert len(rows(out)) == 3
    assert "more than one run" not in out


def test_a_folder_above_stands_for_its_latest_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [made(tmp_path / "lr_grid" / name, grid(seed=[n]), [0.5]) for n, name in enumerate(("old", "mid", "new"))]
    for age, folder in enumerate(folders):
        os.utime(folder / "plan.json", (1e9 + age, 1e9 + age))
    assert find_runs(tmp_path / "lr_grid") == [folders[2]]
    assert find_runs(tmp_path) == [folders[2]]
    assert find_runs(tmp_path / "lr_grid", every=True) == folders
    assert find_runs(folders[0]) == folders[:1]
    assert "lr_grid/new: " in show(capsys, tmp_path / "lr_grid")
    assert len(rows(show(capsys, tmp_path / "lr_grid", "--all"))) == 3


def test_runs_that_look_at_different_metrics_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = made(tmp_path / "a", grid(seed=[0]), [0.5])
    (tmp_path / "b").mkdir()
    experiments = grid(seed=[1])
    other = plan(experiments, monitor="train/loss", mode="min")
    drive(RunWriter(RunPaths(tmp_path / "b")), other, [result(experiments[0], 0.4)])
    out = show(capsys, first, tmp_path / "b")
    assert "The runs look at train/loss (min), val/accuracy (max): here it is val/accuracy (max)" in out
    assert "The runs look at" not in show(capsys, first, tmp_path / "b", "--monitor", "train/loss", "--mode", "min")


def test_exports_keep_types_and_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiments = grid(optimizer__betas=[[0.9, 0.999], None], optimizer__lr=[0.1 + 0.2], seed=[BIG, 0])
    folder = made(tmp_path / "run", experiments, [0.1, 0.4, 0.3, 0.2])
    files = tmp_path / "x.csv", tmp_path / "x.parquet"
    out = show(capsys, folder, "--csv", files[0], "--parquet", files[1], "--limit", "1")
    assert f"Wrote 4 rows to {files[0]}" in out
    expected = coalesce.load(folder)
    back = pd.read_parquet(files[1])
    assert list(back) == list(expected)
    assert back["seed"].tolist() == [BIG, 0, BIG, 0]
    assert back["best_step"].dtype == expected["best_step"].dtype
    assert list(back["optimizer.betas"][0]) == [0.9, 0.999]
    csv = pd.read_csv(files[0])
    assert csv["seed"].tolist() == [BIG, 0, BIG, 0]
    assert csv["optimizer.lr"].tolist() == [0.1 + 0.2] * 4
    assert csv["optimizer.betas"].tolist()[:2] == ["[0.9, 0.999]"] * 2
    assert csv["experiment"].tolist() == [one.id for one in experiments]
    show(capsys, folder, made(tmp_path / "two", grid(seed=[7]), [0.5]), "--csv", files[0])
    assert pd.read_csv(files[0])["run"].nunique() == 2


def test_nothing_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "run", grid(seed=[0]), [0.5])
    assert "does not exist; did you mean" in refused(capsys, tmp_path / "rnu")
    (tmp_path / "empty").mkdir()
    assert "is no run folder" in refused(capsys, tmp_path / "empty")
    assert "is a file" in refused(capsys, folder / "log.txt")
    assert "FOLDER" in refused(capsys)
    assert "No such file" in refused(capsys, folder, "--parquet", tmp_path / "nowhere" / "x.parquet")
    shutil.copy(folder / "log.txt", folder / "results.parquet")
    assert "coalesce.results: " in refused(capsys, folder)
    (folder / "plan.json").write_text("{")
    assert "coalesce.results: " in refused(capsys, folder)
