"""The command line from a task in the user's own folder to the files that it leaves behind.

Oracle: what the issue and DESIGN.md promise of exit codes, messages and the run folder; stock PyTorch for what the
kept weights compute. Most commands run in this process, in an empty folder; what only a process shows (signals, what
a pipe sees) runs as one. Nothing is compiled but in one test.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import coalesce
import coalesce.__main__ as command_line
from coalesce.report.progress import ProgressView
from coalesce.runner.listener import Progress
from coalesce.store.read import load_history, load_weights
from end_to_end_helpers import ALONE, EAGER, ROOT, TASK, Folder, user_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Folder]:
    with user_folder(tmp_path, monkeypatch, capsys) as made:
        yield made


SWEEP = "sweep.params={optimizer.lr: [1e-2, 3e-2], task.scale: [0.5, 1], seed: range(2)}"


@pytest.mark.thorough
def test_a_task_in_an_empty_folder_compiled(folder: Folder) -> None:
    """The whole way as a process, compiled; and the same uncompiled."""
    process = folder.process("Mine", SWEEP, "sweep.name=my sweep", "trainer.weights=true")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    # a file or a pipe gets plain lines
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out)
    assert "single" not in out
    assert re.search(r"^ *\d+%: cohort 1 of 1, 8/8 lanes, [\d,.]+ steps/s, [\d,.e]+ experiments/h", out, re.MULTILINE)
    assert re.search(r"^Best experiment: [0-9a-f]{12} \(optimizer.lr=0.0[13], task.scale=", out, re.MULTILINE)
    assert "8 of 8 experiments, 8 finished" in out
    # what is left behind: all of it in the run folder, none of Hydra's
    run = folder.run()
    assert run.parent.name == "my_sweep"
    frame = coalesce.load(run)
    top = {"runs", "runs/my_sweep", str(run.relative_to(folder.path))}
    names = ["config.yaml", "environment.json", "history.parquet", "log.txt", "metrics", "plan.json", "results"]
    names += ["results.csv", "results.parquet", "results/part-00000.parquet", "standing.json", "weights"]
    names += [f"weights/{name}{which}.safetensors" for name in frame["experiment"] for which in ("", "-best")]
    inside = {str((run / name).relative_to(folder.path)) for name in names}
    # some versions of filelock leave their file, unlocked
    assert {f for f in folder.files() if "/metrics/" not in f and not f.endswith("/.lock")} == top | inside
    # the last line can be typed
    (call,) = re.findall(r"^Read them: +(coalesce\.load\(.*\))$", out, re.MULTILINE)
    pd.testing.assert_frame_equal(eval(call, {"coalesce": coalesce}), frame)
    check_csv(run, frame)
    assert list(zip(frame["optimizer.lr"], frame["task.scale"], frame["seed"], strict=True)) == [
        (lr, scale, seed) for lr in (0.01, 0.03) for scale in (0.5, 1.0) for seed in (0, 1)
    ]
    # the same experiments, uncompiled: the same ids, the numbers of 20 float32 steps to rounding
    code, _, _ = folder("Mine", SWEEP, EAGER, "sweep.name=eager")
    assert code == 0
    (other,) = (folder.path / "runs" / "eager").iterdir()
    eager = coalesce.load(other)
    assert list(eager["experiment"]) == list(frame["experiment"])
    for name in ("train/loss", "val/loss"):
        np.testing.assert_allclose(eager[name], frame[name], rtol=1e-4, atol=1e-6)


def check_csv(run: Path, frame: pd.DataFrame) -> None:
    """The CSV holds the frame's values, each with every digit."""
    text = pd.read_csv(run / "results.csv", dtype=str, keep_default_na=False)
    assert list(text.columns) == list(frame.columns)
    assert len(text) == len(frame)
    for name in frame.columns:
        for written, value in zip(text[name], frame[name], strict=True):
            if pd.isna(value):
                assert written == "", name
            elif isinstance(value, float):
                assert float(written) == value, name
            else:
                assert written == str(value), name


def test_configurations_of_ones_own(folder: Folder) -> None:
    folder.write("my_conf/task/mine.yaml", "_target_: mytask.Mine\nhidden: 5\nscale: 1.0\ndropout: 0.1\n")
    folder.write(
        "my_conf/sweep/my_rates.yaml",
        "# @package _global_\ndefaults:\n  - override /task: mine\n  - override /optimizer: sgd\n"
        "steps: 10\nbatch_size: 8\ntrainer:\n  monitor: val/loss\n  mode: min\n  stack: false\n"
        "sweep:\n  params:\n    optimizer.lr: ${logspace:1e-2,1,3}\n    task.dropout: [0, 0.5]\n",
    )
    folder._monkeypatch.setattr(sys, "argv", ["coalesce", "--config-dir", "my_conf", "sweep=my_rates"])
    assert command_line.main() == 0
    frame = coalesce.load(folder.run())
    assert folder.run().parent.name == "my_rates"
    assert list(frame["optimizer.lr"]) == [0.01, 0.01, 0.1, 0.1, 1.0, 1.0]
    assert list(frame["task.dropout"]) == [0.0, 0.5] * 3
    assert "hidden: 5" in (folder.run() / "config.yaml").read_text()


def test_case_3_the_weights_reach_the_users_module(folder: Folder) -> None:
    """2 x Linear(2, 1), Adam at 0.05, constant input, 20 steps: the kept weights give the row's loss in a plain
    module, and the module that the task builds anew is not touched."""
    code, _, _ = folder(
        "Pair", "optimizer=adam", "optimizer.lr=0.05", "batch_size=4", "seed=0", "sweep.params.seed=[0,1]", EAGER,
        "trainer.weights=true", "trainer.monitor=val/loss", "trainer.mode=min", "schedule=constant",
    )  # fmt: skip
    assert code == 0
    frame = coalesce.load(folder.run())
    x, y = torch.ones(4, 2), torch.zeros(4, 1)
    for seed, experiment, loss in zip(frame["seed"], frame["experiment"], frame["val/loss"], strict=True):
        kept = load_weights(folder.run(), experiment, "last")
        module = nn.Linear(2, 1)
        module.load_state_dict(kept)
        assert F.mse_loss(module(x), y).item() == pytest.approx(loss, abs=1e-6)
        # and it is what torch.optim makes of the same start
        torch.manual_seed(seed)
        plain = nn.Linear(2, 1)
        start = {name: value.clone() for name, value in plain.state_dict().items()}
        optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
        for _ in range(20):
            optimizer.zero_grad()
            F.mse_loss(plain(x), y).backward()
            optimizer.step()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(kept[name], value, rtol=0, atol=1e-6)
            assert not torch.equal(kept[name], start[name]), "training must have moved it"


def test_case_38_curves(folder: Folder) -> None:
    code, _, _ = folder(
        "Mine", "sweep.params={seed: range(4), optimizer.lr: [0.1, 0.01]}", "steps=50", "trainer.every=10",
        "trainer.evaluate_every=10", EAGER,
    )  # fmt: skip
    assert code == 0
    history, frame = load_history(folder.run()), coalesce.load(folder.run())
    assert not history.duplicated(["experiment", "step", "metric"]).any()
    curves = history[history["metric"] == "val/loss"].merge(frame[["experiment", "seed", "optimizer.lr"]])
    assert len(curves) == 8 * 5
    assert set(curves["step"]) == {10, 20, 30, 40, 50}
    spread = curves.groupby(["optimizer.lr", "step"])["value"].agg(["mean", "std", "count"])
    assert (spread["count"] == 4).all()
    assert (spread["std"] > 0).all()
    last = curves[curves["step"] == 50].set_index("experiment")["value"]
    assert (last[frame["experiment"]].to_numpy() == frame["val/loss"].to_numpy()).all()


def test_a_failed_experiment_costs_its_row_and_the_exit_code(folder: Folder) -> None:
    code, out, err = folder("Picky", "sweep.params.task.scale=[1.0,2.0,3.0,1.5]", ALONE)
    assert (code, err) == (1, "")
    frame = coalesce.load(folder.run())
    assert list(frame["status"]) == ["finished", "finished", "failed", "finished"]
    assert "ValueError: no such model" in frame["message"][2]
    assert "Failed: 1 of 4 experiments" in out
    assert 'raise ValueError("no such model")' in out
    check_csv(folder.run(), frame)


def test_a_diverged_experiment_is_no_failure(folder: Folder) -> None:
    code, out, err = folder("Mine", "sweep.params.task.scale=[1.0,1e39]", "optimizer=sgd", ALONE)
    assert (code, err) == (0, "")
    frame = coalesce.load(folder.run())
    assert list(frame["status"]) == ["finished", "diverged"]
    assert "Diverged: 1 of 2 experiments" in out
    assert "at step 1" in out


def test_a_plan_writes_nothing(folder: Folder) -> None:
    code, out, err = folder("Mine", "sweep.params={task.hidden: [4, 8], seed: range(3)}", "plan=true")
    assert (code, err) == (0, "")
    assert "6 experiments in 2 cohorts, 120 steps in all" in out
    assert "of memory at most" in out
    assert folder.files() == set()


def test_the_same_experiment_twice_is_one_row(folder: Folder) -> None:
    code, _, err = folder("Mine", "sweep.params.seed=[3,3]", ALONE)
    assert code == 0
    assert err.count("warning:") == 1
    assert len(coalesce.load(folder.run())) == 1


def test_a_second_run_gets_a_folder_of_its_own(folder: Folder) -> None:
    assert folder("Mine", ALONE)[0] == folder("Mine", ALONE)[0] == 0
    first, second = sorted(folder.path.glob("runs/single/*"))
    apart = ["seconds"]
    pd.testing.assert_frame_equal(coalesce.load(first).drop(columns=apart), coalesce.load(second).drop(columns=apart))


# refused before anything is written


@pytest.mark.parametrize(
    ("name", "says", "line"),
    [
        ("Raises", "Raises.loss() raised ValueError: ", "return F.cross_entropy(model(x), y[:3])"),
        ("Stateless", "data() raised FileNotFoundError: nothing.csv", 'raise FileNotFoundError("nothing.csv")'),
        ("Measures", "Measures.metrics() raised IndexError", 'return {"accuracy": model(batch[0]).shape[7]}'),
        ("Constructs", "OSError: [red]no[/red] constructor", 'raise OSError("[red]no[/red] constructor")'),
    ],
)
def test_the_users_own_line(folder: Folder, name: str, says: str, line: str) -> None:
    code, out, err = folder(name, EAGER)
    assert (code, out) == (1, "")
    assert says in err
    where, source = err.splitlines()[-2:]
    number = [text.strip() for text in TASK.splitlines()].index(line) + 1
    assert where.startswith(f'  File "{folder.path / "mytask.py"}", line {number}, in ')
    assert source.strip() == line
    # no traceback, and none of our own files
    assert "Traceback" not in err
    assert str(ROOT / "coalesce") not in err
    assert folder.files() == set()


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("Labels", [], ["task.data.train=2: label out of range", "33", "0 to 1", "task.data.val=2"]),
        ("NotFinite", [], ["task.data.train.0=nan: must be finite", "(7, 1)"]),
        ("Mine", ["batch_size=41"], ["batch_size=41: larger than the training data", "at most 40", "command line"]),
        (
            "Mine",
            ["batch_size=41", "trainer.monitor=val/acuracy"],
            ["2 problems", "batch_size=41", "trainer.monitor='val/acuracy'", "did you mean 'val/accuracy'?"],
        ),
        ("Mine", ["sweep.params.batch_size=[8,99]"], ["batch_size=99", "(from command line)"]),
        ("Mine", ["runs=mytask.py"], ["runs='mytask.py'", "is a file"]),
        ("Mine", ["runs=/proc/nowhere", "steps=-1"], ["2 problems", "runs='/proc/nowhere'", "steps=-1"]),
        ("Mien", [], ["mytask has no 'Mien'", "did you mean 'Mine'?"]),
        ("Mine", ["task.hiden=3"], ["did you mean 'hidden'?"]),
        ("Mine", ["task.hidden=3.5"], ["task.hidden=3.5: must be an integer"]),
    ],
    ids=lambda value: " ".join(value) or "-" if isinstance(value, list) else value,
)
def test_what_is_refused(folder: Folder, name: str, arguments: list[str], says: list[str]) -> None:
    code, out, err = folder(name, *(f"++{a}" if a.startswith("task.") else a for a in arguments))
    assert (code, out) == (2, "")
    assert all(part in err for part in says), err
    assert "Traceback" not in err
    assert folder.files() == set()


def test_a_task_that_ends_the_process_says_so(folder: Folder) -> None:
    """sys.exit in the user's own code: his message and his exit code, not our silence."""
    with pytest.raises(SystemExit) as caught:
        folder("Exits")
    assert caught.value.code == "no data in this folder"
    assert folder.files() == set()


# interrupted


def test_an_interrupt_keeps_what_is_done(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the second experiment trains."""

    def interrupt(self: ProgressView, progress: Progress) -> None:
        if progress.experiments == 1 and progress.lanes == 1 and progress.steps > 20:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ProgressView, "advanced", interrupt)
    code, out, err = folder("Mine", "sweep.params.steps=[20,10000000]", ALONE)
    assert code == 130
    run = folder.run().relative_to(folder.path)
    said = [f"What was recorded so far lies in {run}", f"To go on: python -m coalesce resume={run}"]
    # in front of it stands a warning: the folder's steps=20 is swept over
    assert err.splitlines()[-3:] == [*said, "SIGINT has ended the run"]
    assert "ended by SIGINT after" in out
    assert "1 of 2 experiments, 1 finished" in out
    frame = coalesce.load(folder.run())
    assert list(frame["steps_done"]) == [20]
    history = load_history(folder.run())
    # what was measured of the other one is kept as well
    assert history["experiment"].nunique() == 2
    assert "WARNING ended by SIGINT" in (folder.run() / "log.txt").read_text()
