"""Runs of the command line: begun, and gone on with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from coalesce.configuration import rides
from coalesce.configuration.union import check_retry, read_retry, united
from coalesce.engine import preparing
from coalesce.report import text
from coalesce.report.plan import print_plan
from coalesce.report.progress import ProgressView
from coalesce.report.summary import print_summary, print_way_on
from coalesce.runner.planning import make_plan, plan_search
from coalesce.runner.run import Begun, run
from coalesce.search.base import Listed, Search
from coalesce.store.beat import Beat
from coalesce.store.lock import RunLock, writing
from coalesce.store.merge import find_runs
from coalesce.store.paths import RunPaths
from coalesce.store.read import load, open_run
from coalesce.store.resume import Reopened, reopen
from coalesce.store.tables import write_tables
from coalesce.store.writer import RunWriter

if TYPE_CHECKING:
    from hydra.conf import HydraConf

    from coalesce.configuration.hydra import Order
    from coalesce.runner.plan import Plan, Trainer

#: Exit codes.
DONE, FAILED = 0, 1


def begin(order: Order) -> int:
    """Plan and run what was asked for, in a new folder.

    Returns:
        The exit code.

    Raises:
        ConfigError: what can be known only from the data is wrong.
    """
    console = Console()
    if order.launcher.name != "process":
        from coalesce.jobs.flow import begin as begin_jobs

        return begin_jobs(order, console)
    if order.trainer.compile and order.trainer.stack and not order.plan_only:
        preparing.begin(order.trainer.device)
    with _planning(order.trainer, console):
        plan = plan_search(order.name, order.keys, order.search, rides, order.trainer)
    if order.plan_only:
        print_plan(plan, console)
        return DONE
    paths = RunPaths.create(order.runs, order.name)
    return _train(plan, paths, order.search, RunWriter(paths, order.yaml), console, Begun())


def resume(folder: str, node: HydraConf, plan_only: bool, retry: Any = None) -> int:
    """Go on with a run, and add what overrides ask for.

    Args:
        folder: the run folder, or one that holds some.
        node: Hydra's own, with the overrides.
        plan_only: print the plan and stop.
        retry: which experiments are trained once more, see `read_retry`.

    Returns:
        The exit code.

    Raises:
        ConfigError: the overrides are wrong, or what can be known only from the data is.
        FileNotFoundError: it is no run folder.
        RunFolderError: another process writes it, or it cannot be gone on from.
    """
    console = Console()
    statuses = read_retry(retry)
    (found,) = find_runs(folder)
    paths = RunPaths(found)
    if found != Path(folder):
        text.say(console, f"Resuming {found}", wrap=False)
    if plan_only:
        return _go_on(paths, node, statuses, None, console)
    with RunLock(paths) as lock:
        return _go_on(paths, node, statuses, lock, console)


def _go_on(paths: RunPaths, node: HydraConf, retry: Sequence[str], lock: RunLock | None, console: Console) -> int:
    """Go on with a run; without its lock, only tell what would be done."""
    from coalesce.configuration.resume import launcher_of, overrides_of, read_resumed, settings

    back = reopen(paths)
    overrides = overrides_of(node)
    order = read_resumed(back, overrides) if overrides or _has_search(back) else None
    trainer = settings(back, order, overrides)
    launcher = launcher_of(back) if order is None else order.launcher
    search: Search = order.search if order else Listed(back.plan.experiments)
    check_retry(retry, search)
    back = back.retrying(retry)
    if retry and not back.again:
        text.say(console, f"No experiment of {paths.folder} has {' or '.join(retry)}: none is trained once more.")
    experiments, keys = list(back.plan.experiments), back.plan.keys
    if order is not None and search.lists and overrides:
        experiments, keys = united(back.plan, search.known(), order.keys)
    known = {experiment.id for experiment in back.plan.experiments}
    added = [experiment for experiment in experiments if experiment.id not in known]
    ended = {result.experiment.id for result in back.results}
    left = len(known - ended)
    if not (added or left) and (search.lists or len(ended) >= search.count):
        text.say(console, f"All {text.count(len(ended), 'experiment')} of {paths.folder} have ended: nothing to train.")
        if lock is not None and not paths.results.exists():
            # the process was ended between the last result and the tables, or nobody waited for its jobs
            with writing(paths):
                write_tables(paths, open_run(paths.folder)[1])
        return _sum_up(replace(back.plan, trainer=trainer), paths, console)
    # in the order in which they came, so that cohorts keep their numbers and the experiment that stands for them
    ordered = [*(e for e in experiments if e.id in known), *added]
    probes = () if search.lists else search.known()
    count = None if search.lists else search.count
    if paths.jobs() or launcher.name != "process":
        from coalesce.jobs.flow import go_on

        with _planning(trainer, console):
            more = probes, count, (), search.asks_again
            plan = make_plan(back.plan.name, keys, ordered, rides, trainer, *more, elsewhere=True)
        plan = replace(plan, experiments=tuple(experiments))
        yaml = order.yaml if order is not None and overrides else back.configuration
        return go_on(paths, back, plan, search, launcher, yaml, console, plan_only=lock is None)
    with _planning(trainer, console):
        earlier = back.plan.cohorts, search.asks_again
        plan = make_plan(back.plan.name, keys, ordered, rides, trainer, probes, count, *earlier)
    plan = replace(plan, experiments=tuple(experiments))
    if lock is None:
        print_plan(plan, console)
        text.say(console, f"{text.count(len(ended), 'experiment')} of these have ended.")
        return DONE
    once_more = f" ({len(back.again)} of them once more)" if back.again else ""
    text.say(
        console,
        f"{paths.folder}: {text.count(len(ended), 'experiment')} ended, {left} to go on with or to begin{once_more}, "
        f"{len(added)} more",
        wrap=False,
    )
    configuration = order.yaml if order is not None and overrides else back.configuration
    writer = RunWriter(paths, configuration, lock=lock, snapshots=back.snapshots, again=back.again)
    return _train(plan, paths, search, writer, console, back.begun)


def _has_search(back: Reopened) -> bool:
    """Whether a search decides about the run's experiments, or about when they end."""
    from omegaconf import DictConfig, OmegaConf

    config = OmegaConf.create(back.configuration)
    search = config.get("search") if isinstance(config, DictConfig) else None
    return search is not None and dict(search) != {"name": "grid"}


def _planning(trainer: Trainer, console: Console) -> AbstractContextManager[object]:
    # unstacked, a breakpoint may stop in the middle of it, and needs the terminal for itself
    return console.status("planning: data, one plain step and one trace") if trainer.stack else nullcontext()


def _train(plan: Plan, paths: RunPaths, search: Search, writer: RunWriter, console: Console, begun: Begun) -> int:
    try:
        search.keep(paths.study, f"{plan.name}/{paths.folder.absolute().name}")
        run(plan, [writer, Beat(paths), ProgressView(console)], search=search, begun=begun, rides=rides)
    except BaseException:
        # an interrupt, or the task's own code
        print_way_on(paths.folder)
        raise
    return _sum_up(plan, paths, console)


def _sum_up(plan: Plan, paths: RunPaths, console: Console) -> int:
    frame = load(paths.folder)
    trainer = plan.trainer
    print_summary(frame, plan.keys, trainer.monitor, trainer.mode, paths.folder, console, trainer.show)
    return FAILED if (frame["status"] == "failed").any() else DONE
