"""What becomes of a run when its jobs are over."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from coalesce.launch.watch import Outcome
from coalesce.report import text
from coalesce.report.summary import print_summary
from coalesce.runner.listener import Result
from coalesce.runner.plan import Plan
from coalesce.runner.slot import Slot
from coalesce.store.files import write_parquet
from coalesce.store.frames import raw_frame
from coalesce.store.jobs import read_standing
from coalesce.store.lock import writing
from coalesce.store.paths import RunPaths
from coalesce.store.plans import plan_json
from coalesce.store.read import assemble_history, ended, load, open_run
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
    done = {result.experiment.id for result in ended(paths, plan.experiments)}
    planned_of = {e.id: (e, c) for c in plan.cohorts for e in c.cohort.experiments}
    recorded = _recorded(paths, plan)
    results = []
    for outcome in lost:
        standing = read_standing(RunPaths(paths.folder, outcome.record.number))
        for name in outcome.record.experiments:
            if name in done:
                continue
            experiment, planned = planned_of[name]
            slot = recorded.get(name, Slot(experiment))
            results.append(
                Result(
                    experiment=experiment,
                    status="failed",
                    steps=slot.steps,
                    metrics=slot.metrics,
                    best=slot.best,
                    best_step=slot.best_step,
                    cohort=planned.cohort.index,
                    width=planned.width,
                    job=outcome.record.number,
                    device=standing.device.split()[0] if standing and standing.device else "",
                    # nobody is left who could tell
                    seconds=0.0,
                    message=outcome.message,
                )
            )
    if results:
        paths.result_part(0).parent.mkdir(exist_ok=True)
        write_parquet(paths.result_part(RunPaths.next_part(paths.result_parts())), raw_frame(results))


def _recorded(paths: RunPaths, plan: Plan) -> dict[str, Slot]:
    """How far experiments got, by what was recorded of them."""
    # what was measured of one split at one step was told at once
    told: dict[tuple[str, int, str], dict[str, float]] = {}
    for row in assemble_history(paths, plan_json(plan)).to_dict("records"):
        split = row["metric"].partition("/")[0]
        told.setdefault((row["experiment"], row["step"], split), {})[row["metric"]] = row["value"]
    experiments = {experiment.id: experiment for experiment in plan.experiments}
    slots: dict[str, Slot] = {}
    for (name, step, _), values in told.items():
        slot = slots.setdefault(name, Slot(experiments[name]))
        slot.steps = step
        slot.note(values, plan.trainer.monitor, plan.trainer.mode)
    return slots
