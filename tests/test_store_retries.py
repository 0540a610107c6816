"""What no longer counts of a run folder's parts, when experiments are trained once more.

Oracle: the rows that were written since, by hand.
"""

from __future__ import annotations

from pathlib import Path

from coalesce.experiment import Experiment
from coalesce.runner.listener import Result
from coalesce.store.paths import RunPaths
from coalesce.store.read import load, load_history
from coalesce.store.resume import reopen
from coalesce.store.retries import read_retries
from coalesce.store.writer import RunWriter
from run_fakes import grid, plan, result

ONE, TWO = grid(seed=[0, 1])


def write(paths: RunPaths, *rows: tuple[Result, int], again: tuple[str, ...] = ()) -> None:
    """A process that ends experiments, each with a metric at one step."""
    writer = RunWriter(paths, again=again)
    writer.started(plan([ONE, TWO]))
    for ending, step in rows:
        writer.metrics(ending.experiment, step, {"train/loss": float(step)})
        writer.ended(ending)
        writer.flush()
    writer.closed(None)


def failed(experiment: Experiment, steps: int) -> Result:
    return result(experiment, status="failed", steps=steps, message="no")


def rows(folder: Path) -> tuple[list[tuple[str, str, int]], list[tuple[str, int]]]:
    frame, history = load(folder), load_history(folder)
    ended = list(zip(frame["experiment"], frame["status"], frame["steps"], strict=True))
    return ended, list(zip(history["experiment"], history["step"], strict=True))


def test_the_rows_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write(paths, (result(ONE, steps=40), 40), (failed(TWO, 30), 30))
    assert reopen(paths).attempts == {}
    back = reopen(paths).retrying(["failed"])
    assert (back.again, dict(back.begun.attempts)) == ((TWO.id,), {TWO.id: 1})
    assert [r.experiment.id for r in back.begun.results] == [ONE.id]
    assert reopen(paths).retrying(["failed"], among=[ONE.id]).again == ()
    assert reopen(paths).retrying(["diverged"]).again == ()
    write(paths, again=back.again)
    # it was interrupted before it ended once more: there is no row, and whoever goes on knows
    assert rows(tmp_path) == ([(ONE.id, "finished", 40)], [(ONE.id, 40)])
    assert (dict(reopen(paths).attempts), len(reopen(paths).results)) == ({TWO.id: 1}, 1)
    # fewer steps than before: none of those is left behind
    write(paths, (failed(TWO, 10), 10))
    assert rows(tmp_path) == (
        [(ONE.id, "finished", 40), (TWO.id, "failed", 10)],
        [(ONE.id, 40), (TWO.id, 10)],
    )
    write(paths, (result(TWO, steps=40), 20), again=(TWO.id,))
    assert rows(tmp_path)[0] == [(ONE.id, "finished", 40), (TWO.id, "finished", 40)]
    assert rows(tmp_path)[1] == [(ONE.id, 40), (TWO.id, 20)]
    assert dict(reopen(paths).attempts) == {TWO.id: 2}


def test_parts_of_jobs(tmp_path: Path) -> None:
    """An experiment may be another job's when it is trained once more; parts of each job are counted for themselves."""
    whole = RunPaths(tmp_path)
    write(whole)
    whole.jobs_folder.mkdir()
    for number, share in ((0, (failed(ONE, 30), failed(TWO, 20))), (1, ())):
        write(RunPaths(tmp_path, number), *((ending, ending.steps) for ending in share))
    write(RunPaths(tmp_path, 1), (result(ONE, steps=40), 40), again=(ONE.id,))
    # the tables are written by whoever started the jobs
    for table in (whole.results, whole.history, whole.results_csv):
        table.unlink()
    assert rows(tmp_path) == ([(ONE.id, "finished", 40), (TWO.id, "failed", 20)], [(ONE.id, 40), (TWO.id, 20)])
    assert whole.retries() == [RunPaths(tmp_path, 1).retried]
    assert dict(read_retries(whole).attempts) == {ONE.id: 1}


def test_weights_of_an_earlier_attempt_are_gone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write(paths, (failed(TWO, 30), 30))
    paths.weights_folder.mkdir()
    for experiment in (ONE, TWO):
        for which in ("last", "best"):
            paths.weights(experiment.id, which).touch()
    write(paths, again=(TWO.id,))
    assert sorted(paths.weights_folder.iterdir()) == sorted(paths.weights(ONE.id, which) for which in ("last", "best"))
