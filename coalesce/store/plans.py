"""A plan as the run folder keeps it, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from coalesce.errors import RunFolderError
from coalesce.experiment import Cohort, Experiment
from coalesce.runner.plan import Plan, PlannedCohort, Trainer
from coalesce.store.files import tuples


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as it stands in the run folder.

    Returns:
        ``name``, ``keys``, ``search``, ``trainer``, ``cohorts`` (index, width, pieces, checkpoint, convolutions,
        sizes, riding keys, shape, ids) and ``experiments`` (id, cohort, values, configuration, introduced), in the
        sweep's order.
    """
    cohort_of = {experiment.id: c.cohort.index for c in plan.cohorts for experiment in c.cohort.experiments}
    return {
        "name": plan.name,
        "keys": list(plan.keys),
        "trainer": dataclasses.asdict(plan.trainer),
        "cohorts": [cohort_json(cohort) for cohort in plan.cohorts],
        "failed": dict(plan.failed),
        "search": plan.search,
        "experiments": [
            {
                "id": experiment.id,
                "cohort": cohort_of[experiment.id],
                "values": dict(experiment.values),
                "config": dict(experiment.config),
                "introduced": dict(experiment.introduced),
            }
            for experiment in plan.experiments
        ],
    }


def cohort_json(planned: PlannedCohort) -> dict[str, Any]:
    """A planned cohort as it stands in a plan."""
    return {
        "index": planned.cohort.index,
        "width": planned.width,
        "pieces": list(planned.pieces),
        "checkpoint": list(planned.checkpoint),
        "convolutions": dict(planned.lowerings),
        "parameters": planned.parameters,
        "bytes_per_lane": planned.bytes_per_lane,
        "bytes_shared": planned.bytes_shared,
        "bytes_free": planned.bytes_free,
        "riding": list(planned.cohort.riding),
        "shape": planned.cohort.shape,
        "experiments": [experiment.id for experiment in planned.cohort.experiments],
    }


def cohort_from_json(data: Mapping[str, Any], experiments: Mapping[str, Experiment]) -> PlannedCohort:
    """What `cohort_json` wrote.

    Args:
        experiments: by their ids.
    """
    members = tuple(experiments[name] for name in data["experiments"])
    return PlannedCohort(
        Cohort(data["index"], members, tuple(data["riding"]), data.get("shape", "")),
        width=data["width"],
        parameters=data["parameters"],
        bytes_per_lane=data["bytes_per_lane"],
        bytes_shared=data["bytes_shared"],
        bytes_free=data.get("bytes_free"),
        pieces=tuple(data["pieces"]),
        checkpoint=tuple(data["checkpoint"]),
        lowerings=dict(data["convolutions"]),
    )


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The plan that `plan_json` wrote, without what the planner built for the run.

    Raises:
        RunFolderError: another version wrote it, and means something else by it.
    """
    experiments = {entry["id"]: experiment_from_json(entry) for entry in data["experiments"]}
    fields = {field.name for field in dataclasses.fields(Trainer)}
    unknown = [name for name in data["trainer"] if name not in fields]
    if unknown:
        raise RunFolderError(
            f"the plan's trainer.{unknown[0]} is nothing that this version of coalesce knows: resume the run with the "
            "version that wrote it"
        )
    cohorts = tuple(cohort_from_json(c, experiments) for c in data["cohorts"])
    trainer = Trainer(**{name: tuples(value) for name, value in data["trainer"].items()})
    failed, search = data.get("failed", {}), data.get("search", "")
    some = data["name"], tuple(data["keys"]), tuple(experiments.values()), cohorts, trainer, failed
    return Plan(*some, search=search)


def experiment_from_json(entry: Mapping[str, Any]) -> Experiment:
    """One of a plan's experiments.

    Raises:
        RunFolderError: its configuration has another id than it had.
    """
    experiment = Experiment(entry["config"], entry["values"], entry.get("introduced", {}))
    if experiment.id != entry["id"]:
        raise RunFolderError(
            f"the plan's experiment {entry['id']} has a configuration whose id is {experiment.id}: plan.json was "
            "changed, or written by a version of coalesce that makes ids in another way"
        )
    return experiment
