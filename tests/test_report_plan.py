"""The printed plan.

Oracle: the plan's own numbers; no line wider than the console.
"""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from coalesce.experiment import Experiment
from coalesce.report.plan import LISTED, print_plan
from coalesce.runner.plan import Plan
from run_fakes import experiment, grid, plan
from runner_helpers import Net, planned


def printed(of: Plan, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_plan(of, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_counts_widths_memory_and_riding() -> None:
    of = plan(grid(optimizer__lr=[0.1, 1e-4], seed=list(range(32))))
    text = printed(of)
    (row,) = [line.split() for line in text.splitlines() if "13,066" in line]
    assert row == ["0", "64", "64", "13,066", "175.8", "KiB", "12.1", "MiB"]
    assert "Riding, so that other values compile nothing: optimizer.lr, seed" in text
    assert "64 experiments in 1 cohort, 3,200 steps in all, on cpu (1 thread); about 12.1 MiB of memory at most" in text
    cohorts = tuple(replace(cohort, bytes_free=3 * 2**30) for cohort in of.cohorts)
    told = " ".join(printed(replace(of, cohorts=cohorts)).split())
    assert "about 12.1 MiB of memory at most, of 3.0 GiB that may be taken" in told


def test_short_batches_are_told() -> None:
    text = printed(planned(Net, {"data.remainder": ["short"]}, batch_size=12))
    assert "Epochs end in a short batch of 4, for which there is a further graph" in text


def test_twenty_are_listed_and_the_rest_counted() -> None:
    of = plan(grid(optimizer__lr=[0.1, 1e-4], seed=list(range(32))))
    text = printed(of)
    listed = [one.id for one in of.experiments if one.id in text]
    assert listed == [one.id for one in of.experiments[:LISTED]]
    assert "… and 44 more" in text


def test_few_are_all_listed_with_values() -> None:
    of = plan(grid(optimizer__betas=[[0.9, 0.999], [0.5, 0.9]], task__name=["[red]", None]), cohorts=2)
    text = printed(of)
    ids = tuple(f"  {one.id}" for one in of.experiments)
    rows = [line.split(maxsplit=2) for line in text.splitlines() if line.startswith(ids)]
    assert [row[1] for row in rows] == ["0", "1", "0", "1"]
    assert [" ".join(row[2].split()) for row in rows] == [
        *("[0.9, 0.999] [red]", "[0.9, 0.999] null", "[0.5, 0.9] [red]", "[0.5, 0.9] null")
    ]
    assert "more" not in text


def test_cohorts_that_ride_on_different_keys() -> None:
    one, two = plan(grid(seed=[0, 1])), plan(grid(optimizer__lr=[0.1, 0.2]))
    experiments, cohorts = one.experiments + two.experiments, one.cohorts + two.cohorts
    both = Plan("both", ("seed", "optimizer.lr"), experiments, cohorts, one.trainer)
    text = printed(both, width=100)
    assert [line.split()[-1] for line in text.splitlines() if "13,066" in line] == ["seed", "optimizer.lr"]


def test_a_single_experiment_has_no_list() -> None:
    text = printed(plan([experiment({})]))
    assert "1 experiment in 1 cohort, 50 steps in all" in text
    assert "Riding" not in text


def test_nothing_is_wider_than_the_console() -> None:
    swept = {f"task.a_rather_long_name_{index}": [index, index + 0.123456789] for index in range(4)}
    of = plan(grid(**{key.replace(".", "__"): values for key, values in swept.items()}))
    tables = printed(of).split("Riding")[1].splitlines()[1:-1]
    assert max(map(len, tables)) <= 80
    assert all(one.id in "".join(tables) for one in of.experiments)


def test_values_that_a_swept_group_decides_get_a_table_of_their_own() -> None:
    names = [f"task.argument_number_{index}" for index in range(4)]
    experiments = [
        Experiment(
            {"seed": seed, "steps": 5, "task": task}, {"task": task, **dict.fromkeys(names, 10 + place), "seed": seed}
        )
        for place, task in enumerate(("first", "second"))
        for seed in range(15)
    ]
    text = printed(plan(experiments))
    # all of them are looked at, those that are not listed too
    head, _, tail = text.partition("… and 10 more")
    assert [line.split()[2:] for line in head.splitlines() if line.split()[:1] == [experiments[15].id]] == [
        *(["second", "0"],)
    ]
    assert [line.split() for line in tail.splitlines() if "argument" in line] == [[name, "10", "11"] for name in names]
    # what one of the options leaves open keeps its column
    open_ = [*experiments, Experiment({"seed": 99, "steps": 5}, {**experiments[0].values, names[0]: 99, "seed": 99})]
    tail = printed(plan(open_)).partition("more")[2]
    assert [line.split()[0] for line in tail.splitlines() if "argument" in line] == names[1:]


def test_plain_ascii_where_nothing_else_can_be_shown() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    print_plan(plan(grid(seed=list(range(30)))), Console(file=file, width=80))
    file.flush()
    assert b"... and 10 more" in raw.getvalue()
