"""A run in jobs: shared out, submitted, watched, and summed up."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console

from coalesce.configuration import rides
from coalesce.errors import LaunchError, RunFolderError
from coalesce.jobs.collect import DONE, INTERRUPTED, sum_up
from coalesce.jobs.shares import parts_of, shared_out, threads_of, with_widths, works_of
from coalesce.jobs.work import JobWork, own_id
from coalesce.launch.base import Launcher, Submitted, ThisProcess
from coalesce.launch.settings import LauncherSettings
from coalesce.launch.watch import standing_of, watch
from coalesce.report import text
from coalesce.report.jobs import JobsDisplay
from coalesce.report.plan import print_plan
from coalesce.report.progress import ProgressView
from coalesce.report.summary import print_way_on
from coalesce.runner.plan import Plan
from coalesce.runner.planning import plan_search
from coalesce.search.base import Search
from coalesce.store.decisions import agreed
from coalesce.store.environment import environment
from coalesce.store.files import write_json, write_text
from coalesce.store.jobs import OVER, JobRecord, read_records, write_record
from coalesce.store.lock import RunLock, writing
from coalesce.store.paths import RunPaths
from coalesce.store.plans import plan_json
from coalesce.store.resume import Reopened
from coalesce.store.retries import write_retries
from coalesce.store.tables import remove_tables

if TYPE_CHECKING:
    from coalesce.configuration.hydra import Order

#: Seconds after which a process of another machine that has said nothing counts as dead. It says nothing while it
#: compiles.
SILENT_S = 600.0


def begin(order: Order, console: Console) -> int:
    """Plan what was asked for, share it out, and have it done by jobs.

    Returns:
        The exit code.

    Raises:
        ConfigError: what can be known only from the data is wrong.
        LaunchError: the jobs cannot be started.
    """
    settings = order.launcher
    launcher = launcher_of(settings, order.name, order.trainer.device)
    with console.status("planning: data, one plain step and one trace"):
        plan = plan_search(order.name, order.keys, order.search, rides, order.trainer, elsewhere=True)
    plan = replace(plan, trainer=replace(plan.trainer, threads=plan.trainer.threads or threads_of(settings)))
    shares, lanes = shared_out(plan, order.search, settings)
    plan = with_widths(plan, lanes)
    # before there is a folder: a search may refuse to be divided so
    parts = parts_of(order.search, shares)
    if order.plan_only:
        print_plan(plan, console)
        each = ", ".join(str(part.count) for part in parts)
        text.say(console, f"{text.count(len(shares), 'job')} of {each} experiments, by launcher={settings.name}.")
        return DONE
    paths = RunPaths.create(order.runs.absolute(), order.name)
    with RunLock(paths):
        with writing(paths):
            paths.jobs_folder.mkdir()
            write_text(paths.configuration, order.yaml)
            write_json(paths.environment, environment("cpu"))
            write_json(paths.plan, plan_json(plan))
        works = works_of(paths, plan, parts, shares, lanes, settings)
        try:
            return carry_out(paths, plan, launcher, settings, works, console)
        except LaunchError:
            # no job was started, so that there is nothing to go on with
            if not read_records(paths):
                paths.remove()
            raise


def go_on(
    paths: RunPaths,
    back: Reopened,
    plan: Plan,
    search: Search,
    settings: LauncherSettings,
    yaml: str,
    console: Console,
    *,
    plan_only: bool,
) -> int:
    """Go on with a run in jobs. Each job that has something left goes on with its share; what is new is shared out over
    more jobs.

    Args:
        paths: the run folder, whose lock is held.
        back: the run as it was left, with what is to be trained once more.
        plan: with what was added, made for another machine.
        search: the whole run's.
        settings: where the jobs run from now on.
        yaml: the configuration to keep.
        plan_only: print the plan and stop.

    Returns:
        The exit code.

    Raises:
        LaunchError: the jobs cannot be started.
        RunFolderError: some are still waiting or running, or nobody knows.
    """
    records = read_records(paths)
    _check_over(paths, records)
    over = {result.experiment.id for result in back.results}
    shares = [record.experiments for record in records]
    widths = {c.cohort.shape: c.width for c in back.plan.cohorts}
    lanes = {c.cohort.index: widths[c.cohort.shape] for c in plan.cohorts if c.cohort.shape in widths}
    if not records and (search.replays or not search.lists):
        # what it has seen is not divided
        where = f"the search of {str(paths.folder)!r} began in one process"
        raise RunFolderError(f"{where}, and goes on in one: launcher=process")
    if search.lists:
        more, wide = shared_out(_without(plan, over.union(*shares)), search, settings)
        shares += more
        lanes = wide | lanes
        left = [number for number, ids in enumerate(shares) if not over.issuperset(ids)]
    else:
        standings = {record.number: standing_of(paths, record) for record in records}
        left = [number for number, standing in standings.items() if standing is None or standing.state != "ended"]
    plan = with_widths(plan, lanes)
    launcher = launcher_of(settings, plan.name, plan.trainer.device)
    if plan_only:
        print_plan(plan, console)
        text.say(
            console,
            f"{text.count(len(over), 'experiment')} of these have ended; {text.count(len(left), 'job')} to go on.",
        )
        return DONE
    if not left:
        text.say(console, f"All jobs of {paths.folder} have ended: nothing to train.")
        return sum_up(paths, plan, [], console)
    with writing(paths):
        paths.jobs_folder.mkdir(exist_ok=True)
        if back.again:
            write_retries(paths, back.again)
        if not records:
            # what one process decided by measuring holds for the jobs that go on
            agreed(paths, back.plan)
        write_text(paths.configuration, yaml)
        write_json(paths.plan, plan_json(plan))
    works = works_of(paths, plan, parts_of(search, shares), shares, lanes, settings)
    return carry_out(paths, plan, launcher, settings, {number: works[number] for number in left}, console)


def _without(plan: Plan, ids: Collection[str]) -> Plan:
    """A plan without some of its experiments."""
    left = [tuple(e for e in c.cohort.experiments if e.id not in ids) for c in plan.cohorts]
    cohorts = (replace(c, cohort=replace(c.cohort, experiments=e)) for c, e in zip(plan.cohorts, left, strict=True))
    return replace(plan, cohorts=tuple(cohorts))


def _check_over(paths: RunPaths, records: Sequence[JobRecord]) -> None:
    """Refuse to start jobs again that are still there.

    Raises:
        RunFolderError: some are, or nobody knows.
    """
    there = []
    for name in {record.launcher for record in records} - {ThisProcess.name}:
        mine = [record for record in records if record.launcher == name]
        try:
            looks = launcher_of(LauncherSettings(name), "").look([record.id for record in mine])
        except LaunchError as error:
            where = f"whether jobs of {str(paths.folder)!r} are still running cannot be seen from here"
            raise RunFolderError(f"{where}: {error}") from error
        there += [r for r in mine if looks[r.id].state != "gone" or (name == "local" and _elsewhere(paths, r))]
    if there:
        which = ", ".join(record.id for record in there)
        raise RunFolderError(
            f"still waiting or running: {text.count(len(there), 'job')} of {str(paths.folder)!r} ({which}). Watch them "
            f"by python -m coalesce.results {paths.folder} --watch, or cancel them first"
        )


def _elsewhere(paths: RunPaths, record: JobRecord) -> bool:
    """Whether a job seems to be at work as a process of another machine, which cannot be asked."""
    standing = standing_of(paths, record)
    if standing is None or standing.state in OVER or standing.host == socket.gethostname():
        return False
    return time.time() - standing.written < SILENT_S


def launcher_of(settings: LauncherSettings, name: str, device: str = "auto") -> Launcher:
    """The launcher that settings name.

    Args:
        name: of the run, for the lists of a cluster.
        device: of the trainer.

    Raises:
        LaunchError: this machine has not what it needs.
    """
    # submitit is an optional dependency
    if settings.name == "local":
        from coalesce.launch.local import Local

        return Local(cuda=device != "cpu")
    if settings.name == "slurm":
        from coalesce.launch.slurm import Slurm

        return Slurm(settings, f"coalesce-{name}")
    return ThisProcess()


def carry_out(
    paths: RunPaths,
    plan: Plan,
    launcher: Launcher,
    settings: LauncherSettings,
    works: Mapping[int, JobWork],
    console: Console,
) -> int:
    """Start jobs, watch them to their ends, and sum up.

    Returns:
        The exit code.
    """
    with writing(paths):
        remove_tables(paths)
    if isinstance(launcher, ThisProcess):
        try:
            launcher.submit([Here(work, console) for work in works.values()], paths.submissions)
        except BaseException:
            # an interrupt, or the task's own code
            print_way_on(paths.folder)
            raise
        return sum_up(paths, plan, [], console)
    records = _submit(paths, launcher, works)
    text.say(
        console,
        f"{plan.name}: {text.count(plan.count, 'experiment')} in {text.count(len(records), 'job')} "
        f"({launcher.name}: {', '.join(record.id for record in records)}), in {paths.folder}",
        wrap=False,
    )
    if settings.detach:
        text.say(console, f"To watch: python -m coalesce.results {paths.folder} --watch", wrap=False)
        return DONE
    values = {experiment.id: text.values(experiment.values) for experiment in plan.experiments}
    try:
        with JobsDisplay(console, plan.trainer.mode, lambda name: values.get(name, name)) as display:
            outcomes = watch(paths, launcher, works, records, settings.retries, display.show, settings.poll_s)
    except KeyboardInterrupt:
        return _left(paths, launcher, records, console)
    launcher.close([outcome.record.id for outcome in outcomes])
    return sum_up(paths, plan, outcomes, console)


@dataclass(frozen=True)
class Here:
    """A job that is done in this process, which is shown as a run is that has no jobs.

    Args:
        work: what it does.
        console: where to show it.
    """

    work: JobWork
    console: Console

    @property
    def number(self) -> int:
        return self.work.number

    def within(self, environment: Mapping[str, str]) -> Here:
        return replace(self, work=self.work.within(environment))

    def __call__(self) -> None:
        paths = self.work.paths
        write_record(paths, _record(self.work, ThisProcess.name, Submitted(own_id())))
        self.work.train([ProgressView(self.console)])


def _submit(paths: RunPaths, launcher: Launcher, works: Mapping[int, JobWork]) -> list[JobRecord]:
    submitted = launcher.submit([*works.values()], paths.submissions)
    records = [_record(work, launcher.name, one) for work, one in zip(works.values(), submitted, strict=True)]
    with writing(paths):
        for record in records:
            write_record(paths, record)
    return records


def _record(work: JobWork, launcher: str, submitted: Submitted) -> JobRecord:
    share = set(work.share)
    steps = sum(e.steps for e in work.plan.experiments if e.id in share)
    count = work.search.count
    return JobRecord(work.number, launcher, submitted.id, 0, work.share, count, steps, time.time(), submitted.log)


def _left(paths: RunPaths, launcher: Launcher, records: Sequence[JobRecord], console: Console) -> int:
    """Ctrl-C while watching: the jobs are not the watcher's to end without being asked."""
    going = [
        r.id for r in read_records(paths) if (s := standing_of(paths, r)) is None or s.state not in ("ended", "broke")
    ]
    cancel = False
    if console.is_terminal and going:
        try:
            # as it stands: to rich "[y/N]" would be a style
            question = f"\n{text.count(len(going), 'job')} still waiting or running. Cancel them? [y/N] "
            answer = console.input(question, markup=False)
            cancel = answer.strip().lower() in ("y", "yes")
        except (EOFError, KeyboardInterrupt):
            cancel = False
    if cancel:
        launcher.cancel(going)
        text.say(
            console, f"cancelled; each saves itself. To go on: python -m coalesce resume={paths.folder}", wrap=False
        )
    else:
        text.say(console, f"left running. To watch: python -m coalesce.results {paths.folder} --watch", wrap=False)
    return INTERRUPTED
