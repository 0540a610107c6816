"""A run folder read back, to go on there.

Oracle: the plan and the results that were written; ids that are computed anew.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from coalesce.errors import RunFolderError
from coalesce.experiment import Cohort, Experiment
from coalesce.runner.listener import Result
from coalesce.runner.plan import Plan, PlannedCohort, Trainer
from coalesce.runner.snapshot import Snapshot
from coalesce.store.frames import results_frame
from coalesce.store.paths import RunPaths
from coalesce.store.plans import plan_from_json, plan_json
from coalesce.store.read import load
from coalesce.store.resume import reopen
from coalesce.store.writer import RunWriter
from run_fakes import drive, grid, plan, result
from runner_helpers import Net, planned

EXPERIMENTS = grid(optimizer__lr=[0.1, 1e-3], optimizer__betas=[[0.9, 0.999], None], seed=[0, 2**63 - 1])

#: A value of each setting that is not its default.
SETTINGS: dict[str, Any] = {
    "width": 3,
    "every": 7,
    "evaluate_every": 14,
    "evaluate_batch_size": 5,
    "pieces": ("blocks.*", "head"),
    "checkpoint": ("blocks.*",),
    "convolution": "columns",
    "compile": False,
    "check": False,
    "stack": False,
    "device": "cpu",
    "monitor": "val/loss",
    "mode": "min",
    "show": ("test/loss", "test/error"),
    "threads": 2,
    "matmul_precision": "medium",
    "snapshot_minutes": None,
}


def through_json(of: Plan) -> Plan:
    return plan_from_json(json.loads(json.dumps(plan_json(of))))


def test_a_plan_comes_back() -> None:
    younger = Experiment({**EXPERIMENTS[0].config, "steps": 3, "precision": "float32"}, {}, {"precision": "float32"})
    assert younger.id == Experiment({**EXPERIMENTS[0].config, "steps": 3}).id
    of = plan([*EXPERIMENTS, younger], cohorts=2, **SETTINGS)
    planned_cohort = dataclasses.replace(
        of.cohorts[1], pieces=("a", "b"), checkpoint=("c",), lowerings={"conv": "columns"}, width=7
    )
    of = dataclasses.replace(of, cohorts=(of.cohorts[0], planned_cohort))
    back = through_json(of)
    assert back == of
    assert [one.id for one in back.experiments] == [one.id for one in of.experiments]
    assert back.experiments[-1].introduced == {"precision": "float32"}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Trainer)])
def test_every_setting_comes_back(field: str) -> None:
    value = SETTINGS.get(field, not getattr(Trainer(), field))
    assert value != getattr(Trainer(), field)
    assert getattr(through_json(plan(EXPERIMENTS, **{field: value})).trainer, field) == value


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PlannedCohort)])
def test_every_field_of_a_cohort_comes_back(field: str) -> None:
    """A field that is younger than this test must be written as well."""
    other: dict[str, Any] = {
        "cohort": Cohort(3, tuple(EXPERIMENTS), ("seed", "optimizer.lr")),
        "lowerings": {"a": "columns"},
        "pieces": ("a",),
        "checkpoint": ("b",),
    }
    of = plan(EXPERIMENTS)
    if field != "template":  # what the planner built, which is not kept
        changed = dataclasses.replace(of.cohorts[0], **{field: other.get(field, 12_345)})
        assert changed != of.cohorts[0]
        assert through_json(dataclasses.replace(of, cohorts=(changed,))).cohorts == (changed,)


def test_a_real_plan_comes_back() -> None:
    of = planned(Net, {"optimizer.lr": [0.1, 0.01], "task.hidden": [4, 8], "seed": range(2)}, optimizer="adamw")
    back = through_json(of)
    assert [e.id for e in back.experiments] == [e.id for e in of.experiments]
    assert [[e.id for e in c.cohort.experiments] for c in back.cohorts] == [
        [e.id for e in c.cohort.experiments] for c in of.cohorts
    ]
    assert back.trainer == of.trainer


RESULTS = [
    result(EXPERIMENTS[3], 0.5, best=0.75, best_step=20, seconds=0.1 + 0.2),
    result(EXPERIMENTS[0], math.nan, status="diverged", steps=17, message="the loss is NaN"),
    dataclasses.replace(
        result(EXPERIMENTS[5], status="failed", steps=0, message="no model", best_step=None), metrics={}, best={}
    ),
    dataclasses.replace(result(EXPERIMENTS[1], best_step=None), best={}, metrics={"train/loss": 5e-324}),
]


def equal(left: Result, right: Result) -> bool:
    """Whether two results agree, NaN with NaN; a part has the metrics of all that ended together."""

    def plain(of: Result) -> dict[str, Any]:
        fields: dict[str, Any] = {f.name: getattr(of, f.name) for f in dataclasses.fields(of)}
        for name in ("metrics", "best"):
            fields[name] = {k: v for k, v in fields[name].items() if not math.isnan(v)}
        return fields

    return plain(left) == plain(right)


@pytest.mark.parametrize("together", [True, False])
def test_results_come_back(together: bool, tmp_path: Path) -> None:
    writing = RunWriter(RunPaths(tmp_path))
    writing.started(plan(EXPERIMENTS))
    for ended in RESULTS:
        writing.ended(dataclasses.replace(ended, weights={"w": torch.ones(1)}))
        if not together:
            writing.flush()
    writing.flush()
    back = reopen(RunPaths(tmp_path))
    assert [one.experiment.id for one in back.results] == [one.experiment.id for one in RESULTS]
    assert all(map(equal, back.results, RESULTS))
    assert not back.is_complete
    assert back.snapshot is None
    frame = results_frame(back.results, ["optimizer.lr"], [one.id for one in EXPERIMENTS])
    pd.testing.assert_frame_equal(
        frame, results_frame(RESULTS, ["optimizer.lr"], [one.id for one in EXPERIMENTS]), check_exact=True
    )
    writing.closed(None)


def test_the_later_of_two_results_counts(tmp_path: Path) -> None:
    writing = RunWriter(RunPaths(tmp_path))
    writing.started(plan(EXPERIMENTS))
    for accuracy, of in ((0.1, 2), (0.2, 0), (0.3, 2)):
        writing.ended(result(EXPERIMENTS[of], accuracy))
        writing.flush()
    writing.closed(None)
    back = reopen(RunPaths(tmp_path)).results
    assert [one.metrics["val/accuracy"] for one in back] == [0.3, 0.2]
    assert load(tmp_path)["val/accuracy"].tolist() == [0.2, 0.3]


def test_a_whole_run_is_reopened(tmp_path: Path) -> None:
    of = plan(EXPERIMENTS, cohorts=2)
    writing = RunWriter(RunPaths(tmp_path), "seed: 0\n")
    drive(writing, of, [result(one) for one in EXPERIMENTS])
    back = reopen(RunPaths(tmp_path))
    assert back.plan == of
    assert back.configuration == "seed: 0\n"
    assert back.is_complete


def test_the_newest_snapshot_and_the_store_that_read_it(tmp_path: Path) -> None:
    writing = RunWriter(RunPaths(tmp_path))
    writing.started(plan(EXPERIMENTS, snapshot_minutes=0))
    for number in range(3):
        writing.snapshot(lambda number=number: Snapshot({"number": number}, {}))  # type: ignore[misc]
    writing.closed(None)
    RunPaths(tmp_path).snapshots()[-1].write_bytes(b"damaged")
    back = reopen(RunPaths(tmp_path))
    assert back.snapshot is not None
    assert back.snapshot.facts == {"number": 1}
    assert len(back.snapshots.damaged) == 1


def changed(folder: Path, change: Any) -> RunPaths:
    """A finished run whose plan was changed."""
    drive(RunWriter(RunPaths(folder)), plan(EXPERIMENTS), [result(one) for one in EXPERIMENTS])
    paths = RunPaths(folder)
    data = json.loads(paths.plan.read_text())
    change(data)
    paths.plan.write_text(json.dumps(data))
    return paths


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data["experiments"][1]["config"].update(steps=51), "has a configuration whose id is"),
        (lambda data: data["trainer"].update(warp=9), "trainer.warp is nothing that this version"),
        (
            lambda data: data.pop("cohorts"),
            r"is no plan that this version of coalesce can read \(KeyError: 'cohorts'\)",
        ),
        (lambda data: data["cohorts"][0].update(experiments=["nobody"]), "KeyError: 'nobody'"),
        (lambda data: data.update(experiments=None), "is no plan"),
    ],
)
def test_a_plan_that_is_not_ours(change: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=says):
        reopen(changed(tmp_path, change))


def test_a_plan_of_an_older_version(tmp_path: Path) -> None:
    def change(data: Any) -> None:
        del data["trainer"]["snapshot_minutes"]
        for entry in data["experiments"]:
            del entry["introduced"]

    assert reopen(changed(tmp_path, change)).plan.trainer.snapshot_minutes == 5.0


def test_a_plan_that_is_cut_off(tmp_path: Path) -> None:
    paths = changed(tmp_path, lambda data: None)
    paths.plan.write_text(paths.plan.read_text()[:-20])
    with pytest.raises(RunFolderError, match=r"is no plan.*JSONDecodeError"):
        reopen(paths)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no run folder"):
        reopen(RunPaths(tmp_path))
