"""What becomes of a run when its jobs are over."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from coalesce.launch.watch import Outcome
from coalesce.report import text
from coalesce.report.summary import print_summary
from coalesce.runner.listener import Result
from coalesce.runner.plan import Plan
from coalesce.store.files import write_parquet
from coalesce.store.frames import raw_frame
from coalesce.store.lock import writing
from coalesce.store.paths import RunPaths
from coalesce.store.read import ended, load, open_run
from coalesce.store.tables import write_tables

#: Exit codes.
DONE, FAILED, INTERRUPTED = 0, 1, 130


def sum_up(paths: RunPaths, plan: Plan, outcomes: Sequence[Outcome], console: Console) -> int:
    """Say what became of the jobs, make the tables, and show the results.

    Returns:
        The exit code.
    """
    for outcome in outcomes:
        if outcome.status != "ended":
            text.say(console, outcome.message, wrap=False)
    lost = [outcome for outcome in outcomes if outcome.status in ("broke", "died")]
    with writing(paths):
        if lost:
            _give_up(paths, plan, lost)
        count = write_tables(paths, open_run(paths.folder)[1])
    if any(outcome.status == "interrupted" for outcome in outcomes):
        text.say(
            console, f"{text.count(count, 'experiment')} ended; what was recorded lies in {paths.folder}", wrap=False
        )
        text.say(console, f"To go on: python -m coalesce resume={paths.folder}", wrap=False)
        return INTERRUPTED
    frame = load(paths.folder)
    trainer = plan.trainer
    print_summary(frame, plan.keys, trainer.monitor, trainer.mode, paths.folder, console, trainer.show)
    return FAILED if lost or (frame["status"] == "failed").any() or not count else DONE


def _give_up(paths: RunPaths, plan: Plan, lost: Sequence[Outcome]) -> None:
    """What jobs could not finish has failed, and says why."""
    index_of = {e.id: c for c in plan.cohorts for e in c.cohort.experiments}
    done = {result.experiment.id for result in ended(paths, plan.experiments)}
    by_id = {e.id: e for e in plan.experiments}
    results = [
        Result(
            experiment=by_id[name],
            status="failed",
            steps=0,
            metrics={},
            best={},
            best_step=None,
            cohort=index_of[name].cohort.index,
            width=index_of[name].width,
            job=outcome.record.number,
            device="",
            seconds=0.0,
            message=outcome.message,
        )
        for outcome in lost
        for name in outcome.record.experiments
        if name not in done
    ]
    if results:
        paths.result_part(0).parent.mkdir(exist_ok=True)
        write_parquet(paths.result_part(RunPaths.next_part(paths.result_parts())), raw_frame(results))
