"""A whole run folder, written by the listener and read back.

Oracle: the results and metrics that the listener was told, made into frames without any folder; pandas; what a
process leaves that was killed.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import coalesce
from coalesce.errors import TaskError
from coalesce.store.environment import commit, environment
from coalesce.store.frames import results_frame
from coalesce.store.paths import RunPaths
from coalesce.store.read import load, load_history, load_weights
from coalesce.store.writer import RunWriter
from run_fakes import drive, grid, plan, progress, result

ROOT = Path(coalesce.__file__).parent.parent
EXPERIMENTS = grid(optimizer__lr=[0.1, 0.01], optimizer__betas=[[0.9, 0.999], [0.5, 0.9]], seed=[0, 2**63 - 1])
KEYS = ["optimizer.lr", "optimizer.betas", "seed"]
ORDER = [one.id for one in EXPERIMENTS]
RESULTS = [
    result(one, 0.9 - 0.01 * index, best_step=None if index == 1 else 40) for index, one in enumerate(EXPERIMENTS)
]


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def writer(folder: Path, **arguments: Any) -> RunWriter:
    return RunWriter(RunPaths(folder), "sweep: made_up\n", **arguments)


def test_a_finished_run_comes_back_as_it_was(tmp_path: Path) -> None:
    drive(writer(tmp_path), plan(EXPERIMENTS), list(reversed(RESULTS)))
    expected = results_frame(RESULTS, KEYS, ORDER)
    pd.testing.assert_frame_equal(load(tmp_path), expected)
    pd.testing.assert_frame_equal(coalesce.load(str(tmp_path)), expected)
    assert load(tmp_path)["optimizer.betas"].tolist()[:3] == [(0.9, 0.999), (0.9, 0.999), (0.5, 0.9)]
    csv = pd.read_csv(tmp_path / "results.csv")
    assert list(csv) == list(expected)
    assert csv["seed"].tolist() == [0, 2**63 - 1] * 4
    assert json.loads(csv["optimizer.betas"][2]) == [0.5, 0.9]
    assert csv["val/accuracy"].tolist() == expected["val/accuracy"].tolist()
    names = {path.name for path in tmp_path.iterdir()}
    # some versions of filelock leave the file, unlocked
    assert names - {".lock"} == {
        *("config.yaml", "environment.json", "plan.json", "log.txt"),
        *("metrics", "results", "results.parquet", "results.csv", "history.parquet"),
    }
    assert (tmp_path / "config.yaml").read_text() == "sweep: made_up\n"


def test_lists_are_lists_for_whoever_reads_parquet_alone(tmp_path: Path) -> None:
    drive(writer(tmp_path), plan(EXPERIMENTS), RESULTS)
    assert list(pd.read_parquet(tmp_path / "results.parquet")["optimizer.betas"][0]) == [0.9, 0.999]


def test_curves_of_every_experiment(tmp_path: Path) -> None:
    """Case 38: 4 seeds x 2 rates, 50 steps, a metric every 10."""
    experiments = grid(optimizer__lr=[0.1, 0.01], seed=[0, 1, 2, 3])
    results = [result(one, one.values["optimizer.lr"] + one.seed) for one in experiments]
    drive(writer(tmp_path), plan(experiments), results)
    history, frame = coalesce.load_history(tmp_path), coalesce.load(tmp_path)
    assert len(history) == 8 * 5
    assert not history.duplicated(["experiment", "step"]).any()
    assert history["experiment"].tolist() == [one.id for one in experiments for _ in range(5)]
    assert history["value"].tolist() == [(index + 1) / step for index in range(8) for step in (10, 20, 30, 40, 50)]
    assert len(frame) == 8
    with_values = history.merge(frame[["experiment", "optimizer.lr", "seed"]])
    assert len(with_values) == 40
    assert not with_values.duplicated(["optimizer.lr", "seed", "step"]).any()
    summary = frame.groupby("optimizer.lr")["val/accuracy"].agg(["mean", "std", "count"])
    rows = summary.to_numpy().tolist()
    assert summary.index.tolist() == [0.01, 0.1]
    assert rows[0] == pytest.approx([1.51, math.sqrt(5 / 3), 4])
    assert rows[1] == pytest.approx([1.6, math.sqrt(5 / 3), 4])


def test_parts_hold_the_whole_truth(tmp_path: Path) -> None:
    drive(writer(tmp_path), plan(EXPERIMENTS), RESULTS)
    frame, history = load(tmp_path), load_history(tmp_path)
    for name in ("results.parquet", "results.csv", "history.parquet"):
        (tmp_path / name).unlink()
    pd.testing.assert_frame_equal(load(tmp_path), frame)
    pd.testing.assert_frame_equal(load_history(tmp_path), history)


def test_a_run_that_goes_on_can_be_read(tmp_path: Path) -> None:
    writing = writer(tmp_path)
    writing.started(plan(EXPERIMENTS))
    assert load(tmp_path).empty
    assert load_history(tmp_path).empty
    writing.metrics(EXPERIMENTS[3], 50, {"val/accuracy": 0.5})
    writing.ended(RESULTS[3])
    writing.advanced(progress(50, 400))
    assert load(tmp_path)["experiment"].tolist() == [ORDER[3]]
    # the history of what ended is on disk with it, although metrics alone are written more seldom
    assert load_history(tmp_path)["value"].tolist() == [0.5]
    writing.closed(None)


def test_lanes_that_end_together_are_one_part(tmp_path: Path) -> None:
    drive(writer(tmp_path, clock=Clock()), plan(EXPERIMENTS), RESULTS)
    assert len(RunPaths(tmp_path).result_parts()) == 1


def test_an_ended_experiment_waits_a_second_at_most(tmp_path: Path) -> None:
    clock, paths = Clock(), RunPaths(tmp_path)
    writing = writer(tmp_path, clock=clock)
    writing.started(plan(EXPERIMENTS))
    writing.ended(RESULTS[0])
    assert paths.result_parts() == []
    clock.now = 1.0
    writing.metrics(EXPERIMENTS[1], 10, {"x": 1.0})
    assert load(tmp_path)["experiment"].tolist() == [ORDER[0]]
    writing.ended(RESULTS[1])
    writing.compiling(1, "step")  # may take minutes
    assert load(tmp_path)["experiment"].tolist() == ORDER[:2]
    writing.closed(None)


def test_metrics_are_written_every_few_seconds_or_rows(tmp_path: Path) -> None:
    clock, paths = Clock(), RunPaths(tmp_path)
    writing = writer(tmp_path, clock=clock, metrics_every_s=5, metrics_rows=3)
    writing.started(plan(EXPERIMENTS))
    writing.metrics(EXPERIMENTS[0], 10, {"x": 1.0})
    clock.now = 4.9
    writing.advanced(progress(10, 400))
    assert paths.metric_parts() == []
    clock.now = 5.0
    writing.advanced(progress(10, 400))
    assert len(paths.metric_parts()) == 1
    for step in (20, 30, 40):
        writing.metrics(EXPERIMENTS[0], step, {"x": 1.0})
    assert len(paths.metric_parts()) == 2
    assert load_history(tmp_path)["step"].tolist() == [10, 20, 30, 40]
    writing.closed(None)


def test_a_second_process_goes_on_behind_the_first(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.started(plan(EXPERIMENTS))
    first.metrics(EXPERIMENTS[0], 10, {"val/accuracy": 0.1})
    first.ended(RESULTS[0])
    first.closed(KeyboardInterrupt())
    assert load(tmp_path)["experiment"].tolist() == ORDER[:1]
    second = writer(tmp_path)
    second.started(plan(EXPERIMENTS))
    second.ended(RESULTS[1])
    second.advanced(progress(50, 400))
    # not what the first process summed up
    assert load(tmp_path)["experiment"].tolist() == ORDER[:2]
    for ended in RESULTS[2:]:
        second.ended(ended)
    second.closed(None)
    pd.testing.assert_frame_equal(load(tmp_path), results_frame(RESULTS, KEYS, ORDER))
    assert load_history(tmp_path)["value"].tolist() == [0.1]


def test_a_killed_process_loses_nothing_that_ended(tmp_path: Path) -> None:
    code = """
import os, sys
from run_fakes import plan, progress, result
from test_store_run import EXPERIMENTS, RESULTS, writer
from pathlib import Path
writing = writer(Path(sys.argv[1]))
writing.started(plan(EXPERIMENTS))
for index, ended in enumerate(RESULTS[:5]):
    writing.metrics(ended.experiment, 50, {"val/accuracy": float(index)})
    writing.ended(ended)
writing.advanced(progress(50, 400))
writing.metrics(EXPERIMENTS[5], 10, {"val/accuracy": 9.0})
os.kill(os.getpid(), 9)
"""
    path = [str(ROOT), str(Path(__file__).parent)]
    code = f"import sys\nsys.path[:0] = {path}\n{code}"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120)
    assert done.returncode == -9
    pd.testing.assert_frame_equal(load(tmp_path), results_frame(RESULTS[:5], KEYS, ORDER))
    assert load_history(tmp_path)["value"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert not (tmp_path / "results.parquet").exists()


def test_a_broken_off_run_is_summed_up_and_says_why(tmp_path: Path) -> None:
    writing = writer(tmp_path)
    writing.started(plan(EXPERIMENTS))
    writing.ended(result(EXPERIMENTS[0], math.nan, status="diverged", steps=7, message="the loss is NaN"))
    writing.closed(RuntimeError("out of memory"))
    assert load(tmp_path)["status"].tolist() == ["diverged"]
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert f"WARNING {ORDER[0]} (optimizer.lr=0.1" in log[1]
    assert log[1].endswith("diverged after 7 steps: the loss is NaN")
    assert log[2].endswith("ERROR broke off (RuntimeError: out of memory)")
    assert log[3].endswith("INFO closed: 1 of 8 experiments ended")
    pd.to_datetime([line[:19] for line in log], format="%Y-%m-%d %H:%M:%S")


def test_an_error_in_our_own_words_needs_no_name(tmp_path: Path) -> None:
    writing = writer(tmp_path)
    writing.started(plan(EXPERIMENTS))
    writing.closed(TaskError("no model for 3"))
    assert " ERROR broke off: no model for 3\n" in (tmp_path / "log.txt").read_text()


def test_a_run_that_never_started_leaves_nothing(tmp_path: Path) -> None:
    writer(tmp_path).closed(RuntimeError("bad task"))
    assert list(tmp_path.iterdir()) == []


def test_the_logger_is_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("coalesce")
    before = (logger.level, list(logger.handlers))
    drive(writer(tmp_path), plan(EXPERIMENTS), RESULTS)
    assert (logger.level, list(logger.handlers)) == before


def test_the_plan_is_whole(tmp_path: Path) -> None:
    drive(writer(tmp_path), plan(EXPERIMENTS, cohorts=2), RESULTS)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["keys"] == KEYS
    assert written["trainer"]["threads"] == 1
    assert [entry["id"] for entry in written["experiments"]] == ORDER
    assert [entry["config"] for entry in written["experiments"]] == [one.config for one in EXPERIMENTS]
    assert [entry["values"] for entry in written["experiments"]] == [one.values for one in EXPERIMENTS]
    assert [c["experiments"] for c in written["cohorts"]] == [ORDER[0::2], ORDER[1::2]]
    assert [entry["cohort"] for entry in written["experiments"]] == [0, 1] * 4


def test_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment("cpu")
    assert found["torch"] == torch.__version__
    assert found["device"] == "cpu"
    assert found["threads"] == torch.get_num_threads()
    assert found["matmul_precision"] == torch.get_float32_matmul_precision()
    json.dumps(found)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        done = subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    assert commit() is None  # nothing is committed yet
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert commit() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("two")
    assert commit() == {"commit": git("rev-parse", "HEAD"), "dirty": True}


def test_weights(tmp_path: Path) -> None:
    weights = {"weight": torch.randn(3, 2), "tracked": torch.tensor(50)}
    lane = {name: tensor.clone() for name, tensor in weights.items()}
    writing = writer(tmp_path)
    writing.started(plan(EXPERIMENTS))
    writing.ended(result(EXPERIMENTS[0], weights=lane))
    for tensor in lane.values():  # the lane is refilled
        tensor.zero_()
    writing.closed(None)
    back = load_weights(tmp_path, ORDER[0], "last")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())
    with pytest.raises(FileNotFoundError, match=f"{ORDER[1]} has no best weights.*trainer.weights=true"):
        load_weights(tmp_path, ORDER[1])


def test_an_unknown_experiment(tmp_path: Path) -> None:
    drive(writer(tmp_path), plan(EXPERIMENTS), RESULTS)
    wrong = ORDER[2][:-1] + "x"
    with pytest.raises(LookupError, match=f"experiment='{wrong}'.*among its 8; did you mean '{ORDER[2]}'"):
        load_weights(tmp_path, wrong)
    with pytest.raises(LookupError, match="no such experiment"):
        load_weights(tmp_path, "../../secret")


def test_no_run_folder(tmp_path: Path) -> None:
    paths = RunPaths.create(tmp_path / "runs", "lr_grid")
    drive(RunWriter(paths), plan(EXPERIMENTS), RESULTS)
    with pytest.raises(FileNotFoundError, match=r"does not exist; did you mean '.*lr_grid'"):
        load(tmp_path / "runs" / "lr_gird")
    with pytest.raises(FileNotFoundError, match=r"is no run folder: it has no plan\.json; it holds 1 of them"):
        load(tmp_path / "runs")
    with pytest.raises(FileNotFoundError, match=paths.folder.name):
        load_history(tmp_path / "runs" / "lr_grid")
    with pytest.raises(FileNotFoundError, match="is a file; give the run folder"):
        load(paths.results)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"is no run folder: it has no plan\.json$"):
        load(tmp_path / "empty")


def test_reading_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = writer(tmp_path)
    writing.started(plan(EXPERIMENTS))
    writing.ended(result(EXPERIMENTS[0], weights={"w": torch.ones(1)}))
    writing.closed(None)

    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert len(load(tmp_path)) == 1
    assert load_history(tmp_path).empty
    assert load_weights(tmp_path, ORDER[0], "last")["w"].item() == 1.0


def test_recording_is_cheap(tmp_path: Path) -> None:
    """Case 38: under a tenth of the step's time at 64 lanes, where 100 steps of 64 MLPs take about 0.6 s."""
    experiments = grid(optimizer__lr=[10.0**-i for i in range(8)], seed=list(range(8)))
    writing = writer(tmp_path)
    writing.started(plan(experiments))
    values = {"train/loss": 0.5, "train/accuracy": 0.5, "val/loss": 0.5, "val/accuracy": 0.5}
    taken = []
    for start in (0, 2000, 4000):  # the least of three: a machine that is busy otherwise may stand still for seconds
        began = time.process_time()
        for step in range(start + 100, start + 2001, 100):
            for one in experiments:
                writing.metrics(one, step, values)
            writing.advanced(progress(step, 6000))
        taken.append(time.process_time() - began)
    # 20 boundaries: 60 ms each would be a tenth; the bound is a fifth of that
    assert min(taken) < 20 * 0.06 / 5
    writing.closed(None)
    assert len(load_history(tmp_path)) == 64 * 60 * 4
