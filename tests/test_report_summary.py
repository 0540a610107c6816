"""The printed summary.

Oracle: means and standard deviations by Python's statistics module over the accuracies that were put in; sentences
written by hand.
"""

from __future__ import annotations

import ast
import io
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

import coalesce
from coalesce.experiment import Experiment
from coalesce.report.groups import ROWS
from coalesce.report.summary import print_summary
from coalesce.runner.listener import Result
from coalesce.store.frames import best_experiment, results_frame
from coalesce.store.paths import RunPaths
from coalesce.store.writer import RunWriter
from run_fakes import drive, experiment, grid, plan, result


def frame_of(experiments: Sequence[Experiment], results: Sequence[Result]) -> pd.DataFrame:
    return results_frame(results, list(experiments[0].values), [one.id for one in experiments])


def printed(
    frame: pd.DataFrame,
    keys: Sequence[str],
    mode: str = "max",
    monitor: str = "val/accuracy",
    show: Sequence[str] = (),
    width: int = 80,
) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_summary(frame, keys, monitor, mode, None, console, show)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows(text: str, columns: int) -> list[list[str]]:
    """The lines of the table: so many words, and none of them from a sentence."""
    lines = text[text.index("───") :].splitlines()[1:]
    return [line.split() for line in lines[: next(i for i, line in enumerate(lines) if not line.strip())]]


def test_mean_std_and_n_over_the_seeds() -> None:
    rates, accuracies = np.logspace(-4, -1, 8).tolist(), np.random.default_rng(0).uniform(0.9, 1, (8, 8))
    experiments = grid(optimizer__lr=rates, seed=list(range(8)))
    results = [result(one, accuracies[i // 8, i % 8], 0.99 + i / 10_000) for i, one in enumerate(experiments)]
    text = printed(frame_of(experiments, results), ["optimizer.lr", "seed"])
    head = "val/accuracy (higher is better): last value, mean and standard deviation over the seeds; in the order"
    assert head in text
    table = rows(text, 5)
    names = ["1e-4", "2.683e-4", "7.197e-4", "0.001931", "0.005179", "0.01389", "0.03728", "0.1"]
    assert [row[0] for row in table] == names
    for row, values in zip(table, accuracies.tolist(), strict=True):
        assert row[1] == f"{statistics.mean(values):.4f}"
        assert float(row[2]) == pytest.approx(statistics.stdev(values), rel=0.05)
        assert row[3:] == ["8", "0"]
    best = int(accuracies.mean(1).argmax())
    assert f"Best mean: optimizer.lr={names[best]}: val/accuracy {accuracies[best].mean():.4f} over 8 seeds" in text
    # the best experiment is the best of the best values, which here is not where the best mean is
    last = accuracies[7, 7]
    sentence = f"Best experiment: {experiments[-1].id} (optimizer.lr=0.1, seed=7): val/accuracy 0.9963 at step 40, "
    assert sentence + f"{last:.4f} at its end" in text
    assert "Diverged:" not in text
    assert max(map(len, text[: text.index("Best mean")].splitlines()[3:])) <= 80


def test_a_diverged_lane_is_skipped_counted_and_named() -> None:
    """Case 24: lr 0.05, 1e6, 0.01, and the same with a second seed that stays whole."""
    experiments = grid(optimizer__lr=[0.05, 1e6, 0.01], seed=[0, 1])
    results = [result(one, 0.5 + i / 10) for i, one in enumerate(experiments)]
    # frozen at its last finite state: its accuracy may be finite, even the best, and still means nothing
    results[2] = result(experiments[2], 1.5, status="diverged", steps=3, message="the loss is NaN")
    results[4] = result(experiments[4], math.nan, math.nan, status="diverged", steps=1234, best_step=None)
    text = printed(frame_of(experiments, results), ["optimizer.lr", "seed"])
    assert rows(text, 5) == [
        ["0.05", "0.5500", "0.071", "2", "0"],
        ["1e6", "0.8000", "-", "1", "1"],
        ["0.01", "1.000", "-", "1", "1"],
    ]
    assert f"Best experiment: {experiments[5].id}" in text
    tail = text[text.index("Diverged") :].splitlines()
    assert tail == [
        "Diverged: 2 of 6 experiments",
        f"  {experiments[2].id} (optimizer.lr=1e6, seed=0) after 3 steps: the loss is NaN",
        f"  {experiments[4].id} (optimizer.lr=0.01, seed=0) after 1,234 steps",
    ]


def test_many_diverged_are_not_all_named() -> None:
    experiments = grid(seed=list(range(9)))
    text = printed(frame_of(experiments, [result(one, math.nan, status="diverged") for one in experiments]), ["seed"])
    assert text.splitlines()[-1] == "  … and 4 more, with status 'diverged' in the results"
    assert sum(one.id in text for one in experiments) == 5


def test_failed_experiments_have_a_column_of_their_own() -> None:
    experiments = grid(seed=[0, 1])
    ended = [result(experiments[0]), result(experiments[1], math.nan, status="failed", message="[red] is bad")]
    text = printed(frame_of(experiments, ended), ["seed"])
    assert "diverged   failed" in text
    assert rows(text, 5) == [["0.9000", "-", "1", "0", "1"]]
    assert f"Failed: 1 of 2 experiments\n  {experiments[1].id} (seed=1) after 50 steps: [red] is bad" in text


@pytest.mark.parametrize("status", ["finished", "diverged"])
def test_all_nan_is_a_sentence(status: str) -> None:
    experiments = grid(seed=[0, 1])
    ended = [result(one, math.nan, math.nan, status=status, best_step=None) for one in experiments]
    text = printed(frame_of(experiments, ended), ["seed"])
    assert "No experiment is best: no finite val/accuracy was measured in one that ended well." in text
    assert rows(text, 4)[0][:3] == ["-", "-", "0"]


def test_a_metric_that_is_not_there_is_a_sentence() -> None:
    experiments = grid(seed=[0, 1])
    text = printed(frame_of(experiments, [result(one) for one in experiments]), ["seed"], monitor="val/f1")
    assert "No experiment is best: no val/f1 at all was measured" in text


def test_nothing_ended_is_a_sentence() -> None:
    assert printed(results_frame([], ["seed"], []), ["seed"]) == (
        "No experiment has ended, so there is nothing to sum up.\n"
    )


def test_infinite_values_never_win() -> None:
    experiments = grid(seed=[0, 1, 2])
    ended = [result(one, value) for one, value in zip(experiments, (math.inf, 2.0, -math.inf), strict=True)]
    frame = frame_of(experiments, ended)
    for mode in ("max", "min"):
        best = best_experiment(frame, "val/accuracy", mode)
        assert best is not None
        assert best["experiment"] == experiments[1].id


def test_least_is_best_if_the_mode_says_so() -> None:
    experiments = grid(optimizer__lr=[0.1, 0.2, 0.3], seed=[0, 1])
    losses = [3.0, 3.0, 1.0, 1.0, 2.0, 0.5]
    ended = [result(one, loss) for one, loss in zip(experiments, losses, strict=True)]
    text = printed(frame_of(experiments, ended), ["optimizer.lr", "seed"], mode="min")
    assert "Best mean: optimizer.lr=0.2: val/accuracy 1.000 over 2 seeds, standard deviation 0.0\n" in text
    assert f"Best experiment: {experiments[5].id}" in text


def test_without_seeds_there_is_no_spread() -> None:
    experiments = grid(optimizer__betas=[[0.9, 0.999], [0.9, 0.99999], None])
    text = printed(frame_of(experiments, [result(one) for one in experiments]), ["optimizer.betas"])
    assert "val/accuracy (higher is better): last value; in the order of the sweep" in text
    assert "std" not in text
    assert [" ".join(row) for row in rows(text, 3)] == [
        *("[0.9, 0.999] 0.9000 0", "[0.9, 0.99999] 0.9000 0", "null 0.9000 0")
    ]


def test_lists_as_plain_parquet_readers_give_them(tmp_path: Path) -> None:
    experiments = grid(optimizer__betas=[[0.9, 0.999], [0.5, 0.9]], seed=[0, 1])
    paths = RunPaths(tmp_path)
    drive(RunWriter(paths), plan(experiments), [result(one) for one in experiments])
    keys = ["optimizer.betas", "seed"]
    expected = printed(frame_of(experiments, [result(one) for one in experiments]), keys)
    assert printed(pd.read_parquet(paths.results), keys) == expected


def test_two_keys_missing_values_and_types() -> None:
    experiments = grid(task__norm=["batch", None], task__bias=[True, False], seed=[0, 1])
    text = printed(frame_of(experiments, [result(one) for one in experiments]), ["task.norm", "task.bias", "seed"])
    assert [row[:2] for row in rows(text, 6)] == [
        *(["batch", "true"], ["batch", "false"], ["null", "true"], ["null", "false"])
    ]
    assert all(row[-2:] == ["2", "0"] for row in rows(text, 6))


def test_many_settings_show_the_best() -> None:
    experiments = grid(task__hidden=list(range(1, 51)), seed=[0, 1])
    ended = [result(one, one.values["task.hidden"] / 50) for one in experiments]
    ended[-1] = result(experiments[-1], status="diverged")
    ended[-2] = result(experiments[-2], status="diverged")
    text = printed(frame_of(experiments, ended), ["task.hidden", "seed"])
    assert f"the best {ROWS} of 50 settings first" in text
    assert [int(row[0]) for row in rows(text, 5)] == list(range(49, 49 - ROWS, -1))


def test_swept_steps_group_by_what_was_asked_for() -> None:
    experiments = grid(steps=[20, 50], seed=[0, 1])
    ended = [result(one) for one in experiments]
    ended[3] = result(experiments[3], status="diverged", steps=7)
    text = printed(frame_of(experiments, ended), ["steps", "seed"])
    assert [row[0] for row in rows(text, 5)] == ["20", "50"]
    assert f"{experiments[3].id} (steps=50, seed=1) after 7 steps" in text


def test_one_experiment_has_no_table() -> None:
    one = experiment({})
    text = printed(results_frame([result(one, 0.8, 0.85)], [], [one.id]), [])
    assert text == f"Best experiment: {one.id}: val/accuracy 0.8500 at step 40, 0.8000 at its end\n"


def test_the_last_value_stands_in_for_the_best_one() -> None:
    one = experiment({})
    frame = results_frame([result(one, 0.8)], [], [one.id]).drop(columns=["best/val/accuracy"])
    assert "val/accuracy 0.8000 at step 50, 0.8000 at its end" in printed(frame, [])


def test_the_folder_and_how_to_read_it(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted" name that is longer than any terminal is wide, as it may be' / "2026-11-29_16-03-37"
    folder.mkdir(parents=True)
    experiments = grid(seed=[0, 1])
    drive(RunWriter(RunPaths(folder)), plan(experiments), [result(one) for one in experiments])
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=terminal, no_color=True)
        print_summary(results_frame([], ["seed"], []), ["seed"], "val/accuracy", "max", folder, console)
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert lines[-3] == f"Run folder: {folder}"
        assert lines[-2] == f"Results:    {folder}/results.parquet and .csv"
        call = re.fullmatch(r"Read them:  coalesce\.load\((.*)\)", lines[-1])
        assert call is not None
        assert len(coalesce.load(ast.literal_eval(call[1]))) == 2


MODELS = ("mnist1d_mlp", "mnist1d_cnn", "mnist1d_gru")


def models() -> tuple[list[Experiment], list[Result]]:
    """Three tasks with values of their own, ten seeds each: a test accuracy 0.1 below that of validation."""
    own = {"steps": (3000, 1500, 1000), "optimizer.lr": (0.01, 0.02, 0.02), "task.hidden": (160, None, 12)}
    experiments, results = [], []
    for index, task in enumerate(MODELS):
        for seed in range(10):
            one = experiment({"steps": own["steps"][index]})
            values = {"task": task, **{key: given[index] for key, given in own.items()}, "seed": seed}
            one = Experiment({**one.config, "task": {"_target_": task}, "seed": seed}, values)
            accuracy = (0.7, 0.9, 0.8)[index] + seed / 100
            ended = result(one, accuracy)
            experiments.append(one)
            results.append(replace(ended, metrics={**ended.metrics, "test/accuracy": accuracy - 0.1}))
    return experiments, results


def test_a_swept_group_with_values_of_its_options() -> None:
    experiments, results = models()
    keys = ["task", "steps", "optimizer.lr", "task.hidden", "seed"]
    frame = frame_of(experiments, results)
    text = printed(frame, keys, show=["test/accuracy", "val/accuracy", "test/accuracy"], width=100)
    assert "val/accuracy (higher is better) and test/accuracy: last value, mean" in text
    std = f"{statistics.stdev([seed / 100 for seed in range(10)]):.3f}"
    means = [("0.7450", "0.6450"), ("0.9450", "0.8450"), ("0.8450", "0.7450")]
    own = [["3000", "0.01", "160"], ["1500", "0.02", "null"], ["1000", "0.02", "12"]]
    lines = text[: text.index("Best mean")].splitlines()
    table = [line.split() for line in lines if line.strip().startswith("mnist1d")]
    assert table == [
        [task, *values, val, std, test, std, "10", "0"]
        for task, values, (val, test) in zip(MODELS, own, means, strict=True)
    ]
    assert "Best mean: task=mnist1d_cnn, steps=1500, optimizer.lr=0.02, task.hidden=null: val/accuracy 0.9450" in text
    assert f"over 10 seeds, standard deviation {std}; test/accuracy 0.8450" in text
    assert "decided by" not in text
    # a narrow one keeps its numbers whole; what the task decides has a table of its own
    narrow = printed(frame, keys, show=["test/accuracy"], width=72)
    lines = narrow[: narrow.index("Best mean")].splitlines()
    assert max(len(line) for line in lines[2:]) <= 72
    table = [line.split() for line in lines if line.strip().startswith("mnist1d")]
    expected = zip(MODELS, means, strict=True)
    assert table == [[task, val, std, test, std, "10", "0"] for task, (val, test) in expected]
    place = next(i for i, line in enumerate(lines) if line.strip().startswith("decided by task"))
    assert lines[place].split()[3:] == list(MODELS)
    assert [line.split() for line in lines[place + 2 : place + 5]] == [
        [key, *(row[index] for row in own)] for index, key in enumerate(keys[1:-1])
    ]
    # narrower still, their names are all that is left of it
    narrow = printed(frame, keys, show=["test/accuracy"], width=55)
    assert "Decided by task, and not shown for want of width: steps, optimizer.lr, task.hidden\n" in narrow
    # what is not decided keeps its column
    one = replace_value(experiments[0], "optimizer.lr", 0.5)
    frame = frame_of([*experiments, one], [*results, result(one)])
    narrow = printed(frame, keys, show=["test/accuracy"], width=85)
    table = [line.split() for line in narrow.splitlines() if line.strip().startswith("mnist1d")]
    assert [row[:3] for row in table] == [
        ["mnist1d_mlp", "0.01", "0.7450"],
        ["mnist1d_cnn", "0.02", "0.9450"],
        ["mnist1d_gru", "0.02", "0.8450"],
        ["mnist1d_mlp", "0.5", "0.9000"],
    ]


def replace_value(one: Experiment, key: str, value: float) -> Experiment:
    config = {**one.config, "optimizer": {**one.config["optimizer"], "lr": value}}
    return Experiment(config, {**one.values, key: value})


def test_a_shown_metric_that_was_not_always_finite_says_its_number() -> None:
    experiments = grid(seed=[0, 1, 2])
    results = [replace(result(one, 0.5), metrics={"val/accuracy": 0.5, "test/f1": 0.25}) for one in experiments]
    results[1] = replace(results[1], metrics={"val/accuracy": 0.5, "test/f1": math.nan})
    text = printed(frame_of(experiments, results), ["seed"], show=["test/f1", "test/none"])
    row = next(line for line in text.splitlines() if line.strip().startswith("0.5000"))
    assert row.split() == ["0.5000", "0.0", "0.2500", "(n=2)", "0.0", "-", "(n=0)", "-", "3", "0"]
