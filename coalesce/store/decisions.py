"""What the jobs of a run agree on: what one of them decided by measuring, the others obey.

There is no lock between machines. The first job that comes to a cohort writes down what it decided, under a name that
only one can have; whoever comes second finds it, or finds that it lost, and takes the other's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from coalesce.runner.plan import Plan, PlannedCohort
from coalesce.store.files import read_json, write_json_first
from coalesce.store.paths import RunPaths
from coalesce.store.plans import cohort_from_json, cohort_json


def decided(paths: RunPaths, shapes: Iterable[str]) -> list[PlannedCohort]:
    """The cohorts of these shapes for which something was decided, without their experiments."""
    files = (paths.decisions(shape) for shape in shapes)
    return [cohort_from_json(read_json(file), {}) for file in files if file.is_file()]


def agreed(paths: RunPaths, plan: Plan) -> Plan:
    """A job's plan with what the first of all jobs decided for each of its cohorts. Where that is this one, the others
    will have this plan's.

    Raises:
        OSError: the folder cannot be written.
    """
    return replace(plan, cohorts=tuple(_agreed(paths, planned) for planned in plan.cohorts))


def _agreed(paths: RunPaths, planned: PlannedCohort) -> PlannedCohort:
    if planned.width == 0:
        # none of its experiments could be planned
        return planned
    file = paths.decisions(planned.cohort.shape)
    paths.jobs_folder.mkdir(exist_ok=True)
    if write_json_first(file, {**cohort_json(planned), "experiments": []}):
        return planned
    first = cohort_from_json(read_json(file), {})
    return replace(
        planned, width=first.width, pieces=first.pieces, checkpoint=first.checkpoint, lowerings=first.lowerings
    )
