"""A run in jobs gives what it gives in one process: bit for bit, at one width and equally many threads."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console

import coalesce
from coalesce.errors import LaunchError
from coalesce.jobs import flow
from coalesce.jobs.work import JobWork
from coalesce.launch.base import Launcher, Look, Submitted
from coalesce.report.progress import ProgressView
from coalesce.runner.listener import Progress
from coalesce.search.base import Listed
from coalesce.store.files import read_json
from coalesce.store.jobs import JobRecord, Standing, read_records, read_standing, write_record, write_standing
from coalesce.store.paths import RunPaths
from coalesce.store.read import open_run
from coalesce.store.tables import remove_tables
from end_to_end_helpers import ROOT, Folder, user_folder
from jobs_helpers import HOW, LOCAL, SWEEP, begun, frame_of, same
from jobs_inside import Inside
from run_fakes import grid, plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Folder]:
    # a job's process finds the package where this one does
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    with user_folder(tmp_path, monkeypatch, capsys) as made:
        yield made


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Inside:
    """Stands in for local processes."""
    launcher, real = Inside(), flow.launcher_of

    def stand_in(settings: Any, name: str, device: str = "auto") -> Launcher:
        return launcher if settings.name == "local" else real(settings, name, device)

    monkeypatch.setattr(flow, "launcher_of", stand_in)
    return launcher


#: Commands that were run in one process, and their run folders: what jobs are compared with is the same for many tests.
WHOLE: dict[tuple[str, ...], Path] = {}


def in_one_process(folder: Folder, *arguments: str) -> Path:
    """The run folder of a command, of this test's or of one before."""
    if arguments not in WHOLE:
        WHOLE[arguments] = begun(folder, *arguments)[0]
    return WHOLE[arguments]


def resumed(folder: Folder, run: Path, *arguments: str, code: int = 0) -> str:
    """What a command prints that goes on."""
    found, out, err = folder.command(f"resume={run}", *arguments)
    assert found == code, (out, err)
    return out + err


@pytest.mark.slow
def test_local_processes_and_one_process(folder: Folder) -> None:
    whole = in_one_process(folder, *SWEEP)
    jobs, _ = begun(folder, *SWEEP, *LOCAL, "launcher.jobs=2")
    same(whole, jobs)
    records = read_records(RunPaths(jobs))
    assert [record.number for record in records] == [0, 1]
    assert sorted(name for record in records for name in record.experiments) == sorted(frame_of(whole)["experiment"])
    frame = coalesce.load(jobs)
    for record in records:
        standing = read_standing(RunPaths(jobs, record.number))
        assert standing is not None
        assert (standing.state, standing.id, standing.visible) == ("ended", record.id, "")
        assert set(frame["job"][frame["experiment"].isin(record.experiments)]) == {record.number}


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_however_many_jobs(jobs: int, folder: Folder, inside: Inside) -> None:
    """Of two cohorts, which have the numbers that they have in one process."""
    sweep = [*HOW, "sweep.params={task.hidden: [4, 8], optimizer.lr: [0.01, 0.1], task.dropout: [0.0, 0.2]}"]
    whole = in_one_process(folder, *sweep)
    run, _ = begun(folder, *sweep, *LOCAL, f"launcher.jobs={jobs}")
    same(whole, run)
    assert inside.started == list(range(jobs))


def test_every_job_multiplies_as_the_run_was_asked_to(folder: Folder, inside: Inside) -> None:
    """When it begins, and when it goes on."""
    some, more = ("sweep.params.seed=[0, 1]", "sweep.params.seed=[0, 1, 2, 3]")
    how = ["trainer.matmul_precision=medium", "steps=5", *LOCAL, "launcher.jobs=2"]
    run, _ = begun(folder, *HOW, some, *how)
    resumed(folder, run, more)
    assert len(inside.started) > 2
    for number in range(len(inside.started)):
        paths = RunPaths(run, number)
        assert read_json(paths.plan)["trainer"]["matmul_precision"] == "medium"
        # what torch said while the job trained
        assert read_json(paths.environment)["matmul_precision"] == "medium"
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_rides_in_one_process_rides_in_every_job(folder: Folder, inside: Inside) -> None:
    """Though a share has but one value of it: a constant in the graph may show in the bits."""
    run, _ = begun(folder, *HOW, "sweep.params.optimizer.lr=[0.01, 0.1]", "steps=5", *LOCAL, "launcher.jobs=2")
    for paths in (RunPaths(run), RunPaths(run, 0), RunPaths(run, 1)):
        (cohort,) = read_json(paths.plan)["cohorts"]
        assert cohort["riding"] == ["optimizer.lr"]


def test_one_width_for_all(folder: Folder, inside: Inside) -> None:
    """By itself it is as wide as the largest share, whatever a job's own is, and whichever comes first."""
    inside.backwards = True
    sweep = [*HOW[:1], *HOW[2:], "sweep.params.seed=[0, 1, 2, 3, 4]", "steps=5", "trainer.evaluate_every=5"]
    run, _ = begun(folder, *sweep, *LOCAL, "launcher.jobs=2")
    frame = coalesce.load(run)
    assert sorted(frame.groupby("job").size()) == [2, 3]
    assert set(frame["width"]) == {3}


def test_what_died_goes_on_from_where_it_was(folder: Folder, inside: Inside) -> None:
    whole = in_one_process(folder, *SWEEP)
    inside.strikes = {0: [3, 2], 1: [1]}
    run, _ = begun(folder, *SWEEP, *LOCAL, "launcher.jobs=2", "trainer.snapshot_minutes=0")
    assert inside.started == [0, 1, 0, 1, 0]
    same(whole, run)
    # job 0 after two and three boundaries of two lanes; job 1 was killed before it could save itself
    first, second, third, fourth, fifth = inside.before
    assert (first, second, fourth) == (0, 0, 0)
    assert fifth > third > 0


def test_what_cannot_be_finished_has_failed_and_can_be_retried(
    folder: Folder, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = in_one_process(folder, *SWEEP)
    inside.strikes = {1: [2, 2]}
    run, out = begun(folder, *SWEEP, *LOCAL, "launcher.jobs=2", "launcher.retries=1", code=1)
    assert "\njob 1 (p3) died: its process is gone" in out
    frame = coalesce.load(run)
    assert len(frame) == 8
    lost = frame[frame["status"] == "failed"]
    assert set(lost["job"]) == {1}
    assert lost["message"].str.contains("what it printed: its.log").all()
    # what was recorded of those that had begun
    history = coalesce.load_history(run).set_index("experiment")
    begun_ids = [name for name in lost["experiment"] if name in history.index]
    assert begun_ids
    for _, row in lost.iterrows():
        if row["experiment"] not in begun_ids:
            assert row["steps_done"] == 0
            continue
        recorded = history.loc[row["experiment"]]
        last = recorded.drop_duplicates("metric", keep="last").set_index("metric")["value"]
        assert row["steps_done"] == recorded["step"].max() > 0
        assert row[list(last.index)].tolist() == last.tolist()
        measured = recorded[recorded["metric"] == "val/accuracy"]
        if len(measured):
            assert row["best/val/accuracy"] == measured["value"].max()
            assert row["best_step"] == measured["step"].iloc[measured["value"].argmax()]
    assert "nothing to train" in resumed(folder, run, code=1)
    with monkeypatch.context() as patch:
        patch.setattr(Inside, "look", lambda self, ids: {name: Look("running") for name in ids})
        out = resumed(folder, run, "retry=failed", code=1)
        assert "still waiting or running: 2 jobs of" in out
        assert "--watch" in out
    resumed(folder, run, "retry=failed")
    same(whole, run)
    assert inside.started == [0, 1, 1, 1]


def test_jobs_that_are_refused(folder: Folder, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that never began leaves nothing; one that goes on keeps what it has."""

    def refuse(self: Inside, works: Sequence[Any], folder: Path) -> Sequence[Submitted]:
        raise LaunchError("Slurm takes no jobs: invalid account")

    with monkeypatch.context() as patch:
        patch.setattr(Inside, "submit", refuse)
        code, _, err = folder("Mine", *SWEEP, *LOCAL, "launcher.jobs=2")
        assert code == 1
        assert err.splitlines()[-1] == "coalesce: Slurm takes no jobs: invalid account"
        assert not list(folder.path.glob("runs/*"))
    whole = in_one_process(folder, *SWEEP)
    inside.strikes = {1: [2, 2]}
    run, _ = begun(folder, *SWEEP, *LOCAL, "launcher.jobs=2", "launcher.retries=1", code=1)
    with monkeypatch.context() as patch:
        patch.setattr(Inside, "submit", refuse)
        assert "invalid account" in resumed(folder, run, "retry=failed", code=1)
    resumed(folder, run)
    same(whole, run)


@pytest.mark.parametrize(("answer", "ends"), [("y", True), ("YES", True), ("", False), ("n", False)])
def test_whoever_stops_watching_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, ends: bool
) -> None:
    cancelled: list[str] = []
    monkeypatch.setattr(Inside, "cancel", lambda self, ids: cancelled.extend(ids))
    monkeypatch.setattr("builtins.input", lambda: answer)
    paths = RunPaths(tmp_path)
    paths.jobs_folder.mkdir()
    records = [JobRecord(number, "local", f"p{number}", 0, (), 1, 10, 0.0) for number in range(3)]
    for record in records:
        write_record(paths, record)
    write_standing(RunPaths(tmp_path, 0), Standing("ended", "p0", "here", "cpu", "", 0.0, 0.0))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system=None, width=200)
    assert flow._left(paths, Inside(), records, console) == 130
    assert "2 jobs still waiting or running. Cancel them? [y/N] " in shown.getvalue()
    assert cancelled == (["p1", "p2"] if ends else [])
    assert ("To go on: " in shown.getvalue()) == ends
    assert ("left running" in shown.getvalue()) != ends


def test_more_seeds_are_more_jobs(folder: Folder, inside: Inside) -> None:
    some, more = ("sweep.params={optimizer.lr: [0.01, 0.1], seed: " + seeds + "}" for seeds in ("[0, 1]", "[0, 1, 2]"))
    whole = in_one_process(folder, *HOW, more)
    run, _ = begun(folder, *HOW, some, *LOCAL, "launcher.jobs=2")
    resumed(folder, run, "sweep.params.seed=[0, 1, 2]")
    same(whole, run)
    assert set(coalesce.load(run)["job"]) == {0, 1, 2, 3}


@pytest.mark.thorough
def test_a_run_in_jobs_goes_on_in_this_process(folder: Folder, inside: Inside) -> None:
    whole = in_one_process(folder, *SWEEP)
    inside.strikes = {0: [2], 1: [1]}
    run, _ = begun(folder, *SWEEP, *LOCAL, "launcher.jobs=2", "launcher.retries=0", code=1)
    resumed(folder, run, "launcher=process", "retry=failed")
    same(whole, run)
    assert inside.started == [0, 1]


def test_a_run_of_one_process_goes_on_in_jobs(folder: Folder, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the laptop to the cluster: what had begun goes on from its snapshot."""
    whole = in_one_process(folder, *SWEEP)
    before = set(folder.path.glob("runs/*/*"))
    boundaries = []

    def advanced(self: ProgressView, progress: Progress) -> None:
        boundaries.append(progress.steps)
        # at the third both that are in a lane have ended
        if len(boundaries) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProgressView, "advanced", advanced)
        assert folder("Mine", *SWEEP, "trainer.snapshot_minutes=0")[0] == 130
    (run,) = set(folder.path.glob("runs/*/*")) - before
    resumed(folder, run, *LOCAL, "launcher.jobs=2")
    same(whole, run)
    assert inside.started == [0, 1]
    # what the first process had done was not done once more
    assert sum(inside.before) > 0


@pytest.mark.thorough
def test_an_experiment_that_fails_costs_itself(folder: Folder, inside: Inside) -> None:
    sweep = [*HOW, "sweep.params={task.scale: [1.0, 2.0, 3.0, 4.0], seed: [0, 1]}"]
    whole, _ = begun(folder, *sweep, task="Picky", code=1)
    run, _ = begun(folder, *sweep, *LOCAL, "launcher.jobs=3", task="Picky", code=1)
    same(whole, run)
    assert (coalesce.load(run)["status"] == "failed").sum() == 4


def test_the_plan_alone(folder: Folder, inside: Inside) -> None:
    code, out, _ = folder("Mine", *SWEEP, *LOCAL, "launcher.jobs=2", "launcher.experiments_per_job=3", "plan=true")
    assert code == 0
    assert "3 jobs of 3, 3, 2 experiments, by launcher=local" in out
    assert folder.files() == set()
    assert inside.started == []


def test_what_a_search_has_seen_is_not_divided(folder: Folder, inside: Inside) -> None:
    asha = ["search=asha", "search.min_steps=10", "trainer.monitor=val/loss", "trainer.mode=min"]
    run, _ = begun(folder, *HOW, *asha, "sweep.params={optimizer.lr: [0.01, 0.1]}", "steps=20")
    # as if it had not ended
    for part in RunPaths(run).result_parts():
        part.unlink()
    assert "began in one process" in resumed(folder, run, *LOCAL, code=1)
    assert inside.started == []


def test_a_population_that_cannot_be_divided_leaves_no_folder(folder: Folder, inside: Inside) -> None:
    population = ["search=pbt", "search.interval=10", "trainer.monitor=val/loss", "trainer.mode=min"]
    sweep = ["sweep.params={optimizer.lr: [0.01, 0.02, 0.1]}", "steps=20", "launcher.jobs=2"]
    code, _, err = folder("Mine", *HOW, *LOCAL, *population, *sweep)
    assert code == 2
    assert "launcher.jobs" in err
    assert folder.files() == set()


def test_a_shared_study_that_is_over_can_be_summed_up_later(folder: Folder, inside: Inside) -> None:
    """Nobody waited for its jobs: there are no tables yet. What they asked for is in no plan but their own."""
    search = ["search=optuna", "search.samples=4", "trainer.monitor=val/loss", "trainer.mode=min"]
    sweep = ["sweep.params={optimizer.lr: 'interval(0.001, 0.1)'}"]
    run, _ = begun(folder, *HOW, *search, *sweep, *LOCAL, "launcher.jobs=2")
    before = coalesce.load(run)
    assert len(before) == 4
    whole = open_run(run)[1]
    assert sorted(name for c in whole["cohorts"] for name in c["experiments"]) == sorted(before["experiment"])
    remove_tables(RunPaths(run))
    assert "nothing to train" in resumed(folder, run)
    pd.testing.assert_frame_equal(coalesce.load(run), before)
    assert RunPaths(run).results.exists()
    assert inside.started == [0, 1]


def test_a_job_whose_time_is_up_is_queued_again_as_long_as_it_gets_on(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, 0)
    paths.jobs_folder.mkdir()
    whole = plan(grid(seed=[0]))
    work = JobWork(str(tmp_path), 0, whole, (), Listed(whole.experiments), {}, str(tmp_path), (), retries=2)
    standing = Standing("interrupted", "7", "node", "cpu", "", 0.0, 0.0)

    def cut_off(steps: int) -> bool:
        """Whether it is queued again, from where it is."""
        nonlocal work
        write_standing(paths, replace(standing, steps=steps))
        again = work.checkpoint()
        if again is None:
            return False
        assert isinstance(again.function, JobWork)
        work = again.function
        return True

    assert [cut_off(steps) for steps in (0, 0, 5, 5, 5)] == [True] * 5
    assert not cut_off(5)
    last = read_standing(paths)
    assert last is not None
    assert last.state == "broke"
    assert "3 times in a row" in last.message
    assert "launcher.time" in last.message
