"""A run folder as a run finds it that goes on there."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from coalesce.errors import RunFolderError
from coalesce.runner.listener import Result
from coalesce.runner.plan import Plan
from coalesce.runner.snapshot import Begun, Snapshot
from coalesce.store.files import read_json
from coalesce.store.paths import RunPaths
from coalesce.store.plans import plan_from_json
from coalesce.store.read import ended, open_run
from coalesce.store.retries import read_retries
from coalesce.store.snapshots import Snapshots


@dataclass(frozen=True)
class Reopened:
    """What a run left behind.

    Args:
        paths: its folder.
        plan: what it was about to do, every experiment with the id that it had.
        configuration: the resolved configuration, YAML.
        results: of the experiments that ended, in the order in which they did, without weights.
        snapshot: the last one that is whole, or None: what has not ended starts anew.
        snapshots: for the writer that goes on.
        attempts: id → how often the experiment was begun once more.
        again: the ids of those that are to be, for the writer.
    """

    paths: RunPaths
    plan: Plan
    configuration: str
    results: tuple[Result, ...]
    snapshot: Snapshot | None = field(repr=False)
    snapshots: Snapshots = field(repr=False)
    attempts: Mapping[str, int] = field(default_factory=dict)
    again: tuple[str, ...] = ()

    @property
    def begun(self) -> Begun:
        """For the run that goes on."""
        return Begun(self.results, self.snapshot, self.plan.search, self.attempts)

    def retrying(self, statuses: Collection[str], among: Collection[str] | None = None) -> Reopened:
        """The same, with experiments that are to be trained once more.

        Args:
            statuses: of those: "failed", "diverged".
            among: the ids of those that may be; None: all.
        """
        again = [r.experiment.id for r in self.results if r.status in statuses]
        again = [name for name in again if among is None or name in among]
        results = tuple(r for r in self.results if r.experiment.id not in again)
        attempts = {**self.attempts, **{name: self.attempts.get(name, 0) + 1 for name in again}}
        return replace(self, results=results, attempts=attempts, again=tuple(again))

    @property
    def is_complete(self) -> bool:
        """Whether every experiment of the plan has ended."""
        return len(self.results) == len(self.plan.experiments)


def reopen(paths: RunPaths) -> Reopened:
    """Read a run folder to go on there. Whoever writes afterwards holds its lock already. No code is run here; the run
    that goes on imports the task that the plan names: it is for folders that one trusts.

    Args:
        paths: the folder; or a job's own part of it, if that has begun before.

    Raises:
        FileNotFoundError: it is no run folder.
        RunFolderError: its plan or its snapshot is damaged, or of another version.
    """
    try:
        stored = open_run(paths.folder)[1] if paths.job is None else read_json(paths.plan)
        plan = plan_from_json(stored)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{str(paths.plan)!r} is no plan that this version of coalesce can read ({type(error).__name__}: {error}). "
            "coalesce.load needs it as well; the results' parts lie beside it"
        ) from error
    configuration = paths.configuration.read_text("utf-8") if paths.configuration.is_file() else ""
    snapshots = Snapshots(paths)
    results = tuple(ended(paths, plan.experiments))
    attempts = read_retries(paths).attempts
    return Reopened(paths, plan, configuration, results, snapshots.newest(), snapshots, attempts)
