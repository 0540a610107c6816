"""What a run is about to do, for reading before it is done."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coalesce.report import text
from coalesce.report.fitting import header, print_fitting
from coalesce.runner.plan import Plan, PlannedCohort

#: Experiments listed one by one.
LISTED = 20


def print_plan(plan: Plan, console: Console) -> None:
    """Print cohorts with their widths and memory, the experiments with their values, and the totals.

    Args:
        plan: what is about to run.
        console: where to print; tables keep to its width.
    """
    experiments = len(plan.experiments)
    steps = sum(experiment.steps for experiment in plan.experiments)
    text.say(console, f"Plan of {plan.name}", style="bold")
    riding = {planned.cohort.riding for planned in plan.cohorts}
    # long keys make a narrow column; where every graph has the same, one sentence says it
    console.print(_cohorts(plan.cohorts, riding=len(riding) > 1))
    if len(plan.cohorts) > LISTED:
        text.say(console, f"{text.ellipsis(console)} and {len(plan.cohorts) - LISTED:,} more\n")
    if len(riding) == 1 and any(riding):
        text.say(console, f"Riding, so that other values compile nothing: {', '.join(*riding)}")
    # a plan that was read from a file has no templates
    short = {size for planned in plan.cohorts if planned.template for size in planned.template.batch_sizes[1:]}
    if short:
        sizes = " and ".join(str(size) for size in sorted(short))
        text.say(console, f"Epochs end in a short batch of {sizes}, for which there is a further graph")
    if plan.keys:
        _print_experiments(plan, console)
    device = plan.trainer.device + (f" ({text.count(plan.trainer.threads, 'thread')})" if plan.trainer.threads else "")
    largest = max(plan.cohorts, key=lambda c: c.bytes, default=None)
    free = f", of {text.size(largest.bytes_free)} that may be taken" if largest and largest.bytes_free else ""
    text.say(
        console,
        f"{text.count(experiments, 'experiment')} in {text.count(len(plan.cohorts), 'cohort')}, "
        f"{text.count(steps, 'step')} in all, on {device}; "
        f"about {text.size(largest.bytes if largest else 0)} of memory at most{free}",
    )


def _cohorts(cohorts: tuple[PlannedCohort, ...], riding: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("cohort", "experiments", "width", "parameters", "per lane", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    if riding:
        table.add_column("riding", overflow="fold")
    for planned in cohorts[:LISTED]:
        table.add_row(
            str(planned.cohort.index),
            f"{len(planned.cohort.experiments):,}",
            f"{planned.width:,}",
            f"{planned.parameters:,}",
            text.size(planned.bytes_per_lane),
            text.size(planned.bytes),
            *((Text("\n".join(planned.cohort.riding) or "-"),) if riding else ()),
        )
    return table


def _print_experiments(plan: Plan, console: Console) -> None:
    listed = plan.experiments[:LISTED]
    cohort_of = {e.id: c.cohort.index for c in plan.cohorts for e in c.cohort.experiments}

    def build(keys: Sequence[str], broken: bool) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("experiment", no_wrap=True, vertical="bottom")
        table.add_column("cohort", justify="right", no_wrap=True, vertical="bottom")
        for key in keys:
            table.add_column(header(key, broken), justify="right", overflow="fold", vertical="bottom")
        columns = [text.distinct(experiment.values.get(key) for experiment in listed) for key in keys]
        for index, experiment in enumerate(listed):
            cells = [Text(column[index]) for column in columns]
            table.add_row(experiment.id, str(cohort_of[experiment.id]), *cells)
        return table

    rows = [experiment.values for experiment in plan.experiments]
    rest = len(plan.experiments) - LISTED
    print_fitting(build, rows, plan.keys, console, f"{text.ellipsis(console)} and {rest:,} more" if rest > 0 else "")
