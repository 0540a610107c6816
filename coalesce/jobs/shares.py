"""From a plan to what each of its jobs does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coalesce.jobs.work import JobWork
from coalesce.launch.settings import LauncherSettings
from coalesce.launch.sharing import share_search
from coalesce.runner.plan import Plan
from coalesce.runner.width import widest
from coalesce.search.base import Search
from coalesce.store.paths import RunPaths


def shared_out(plan: Plan, search: Search, settings: LauncherSettings) -> tuple[list[tuple[str, ...]], dict[int, int]]:
    """Which job trains what, and the lanes of each cohort's graph.

    Returns:
        Ids for each job, none where the search makes its experiments as it goes; and number of a cohort → lanes.
    """
    jobs = settings.jobs or _devices(settings)
    shares = share_search(search, plan, jobs, settings.experiments_per_job)
    return list(shares.jobs), {index: widest(lanes, plan.trainer) for index, lanes in shares.lanes.items()}


def _devices(settings: LauncherSettings) -> int:
    if settings.name != "local":
        return 1
    from coalesce.launch.local import devices

    return max(1, len(devices()))


def threads_of(settings: LauncherSettings) -> int | None:
    """CPU threads of a job, which shows in the last bits: the same for all jobs."""
    if settings.cpus is not None or settings.name != "local":
        return settings.cpus
    return max(1, len(os.sched_getaffinity(0)) // (settings.jobs or _devices(settings)))


def with_widths(plan: Plan, lanes: Mapping[int, int]) -> Plan:
    """A plan to be sent to jobs: with these lanes, and without what was built for this process."""
    # a template holds the data
    cohorts = (replace(c, width=lanes.get(c.cohort.index, c.width), template=None) for c in plan.cohorts)
    return replace(plan, cohorts=tuple(cohorts))


def parts_of(search: Search, shares: Sequence[Sequence[str]]) -> list[Search]:
    """Each job's part of the search.

    Raises:
        ConfigError: it cannot be divided so.
    """
    return [search.part(number, shares) for number in range(len(shares))]


def works_of(
    paths: RunPaths,
    plan: Plan,
    parts: Sequence[Search],
    shares: Sequence[tuple[str, ...]],
    lanes: Mapping[int, int],
    settings: LauncherSettings,
) -> dict[int, JobWork]:
    """What the jobs of a run do, by their numbers."""
    # each device has a job of its own; where there is none, all are on one machine's memory
    beside = len(shares) if settings.name == "local" and not _cuda(plan) else 1
    return {
        number: JobWork(
            folder=str(paths.folder.absolute()),
            number=number,
            plan=plan,
            share=ids,
            search=parts[number],
            lanes=lanes,
            cwd=os.getcwd(),
            path=tuple(entry for entry in sys.path if entry),
            beside=beside,
            retries=settings.retries,
        )
        for number, ids in enumerate(shares)
    }


def _cuda(plan: Plan) -> bool:
    from coalesce.launch.local import devices

    return plan.trainer.device != "cpu" and bool(devices())
