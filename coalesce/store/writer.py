"""The listener that writes the run folder."""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from coalesce.errors import ConfigError, RunFolderError, TaskError
from coalesce.experiment import Experiment
from coalesce.runner.listener import Listener, Progress, Result
from coalesce.runner.plan import Plan
from coalesce.runner.snapshot import Snapshot
from coalesce.store.environment import environment
from coalesce.store.files import write_json, write_parquet, write_safetensors, write_text
from coalesce.store.frames import Row, history_frame, raw_frame
from coalesce.store.lock import RunLock, writing
from coalesce.store.paths import RunPaths
from coalesce.store.plans import plan_json
from coalesce.store.retries import write_retries
from coalesce.store.signals import Interrupted, Signals, ended_by
from coalesce.store.snapshots import Snapshots
from coalesce.store.tables import remove_tables, write_tables

logger = logging.getLogger("coalesce")


class RunWriter(Listener):
    """Writes everything that a run leaves behind.

    Results go to disk at the host boundary at which they end: lanes that end together make one part. Metrics go to
    disk every few seconds, and always before the result of the experiment that they belong to. Parts are never
    rewritten; a writer on a folder that has parts goes on behind them.

    The folder is locked from `started` to `closed`; of several jobs each writes files of its own (`RunPaths.job`), and
    leaves the summing up to whoever started them. Every ``trainer.snapshot_minutes`` the lanes are snapshotted. So
    they are when one of the signals of `EXIT_CODES` came, which ends the run at the next host boundary by
    `Interrupted`; while graphs are compiled there is nothing to save, and it ends at once.

    Args:
        paths: the run folder; `RunPaths.create` makes a new one.
        configuration: the resolved configuration as YAML text.
        lock: of the folder, where it is held already.
        snapshots: of the folder, where one of them was read to go on from.
        again: ids of experiments that are trained once more: what was written of them no longer counts.
        metrics_every_s: seconds after which recorded metrics are written.
        results_every_s: seconds after which an ended experiment is written even if no host boundary comes.
        metrics_rows: recordings after which metrics are written without waiting.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        paths: RunPaths,
        configuration: str = "",
        *,
        lock: RunLock | None = None,
        snapshots: Snapshots | None = None,
        again: Collection[str] = (),
        metrics_every_s: float = 5.0,
        results_every_s: float = 1.0,
        metrics_rows: int = 20_000,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.paths = paths
        self.configuration = configuration
        self.metrics_every_s = metrics_every_s
        self.results_every_s = results_every_s
        self.metrics_rows = metrics_rows
        self.clock = clock
        self._plan: dict[str, Any] | None = None
        self._rows: list[Row] = []
        self._rows_since = 0.0
        self._results: list[Result] = []
        self._results_since = 0.0
        self._ended: set[str] = set()
        self._next_part = {"metrics": 0, "results": 0}
        self._handler: logging.Handler | None = None
        self._level = logging.NOTSET
        self._lock = lock or RunLock(paths)
        self._locked = False
        self._signals = Signals()
        self._snapshots = snapshots or Snapshots(paths)
        self._again = tuple(again)
        #: whether all is over, and the snapshot that is kept nevertheless
        self._over = False
        self._last_snapshot: Path | None = None
        self._snapshot_every_s: float | None = None
        self._snapshot_at = 0.0

    @property
    def _alone(self) -> bool:
        """Whether no other process writes the folder. Several jobs do, each its own files, and need no lock."""
        return self.paths.job is None

    def started(self, plan: Plan) -> None:
        if self._alone:
            self._lock.acquire()
            self._locked = True
        # from here on a signal waits: nothing of the folder is left half made
        self._signals.install()
        with writing(self.paths):
            self._start(plan)
        self._end_if_asked()
        self._signals.at_once = True

    def _start(self, plan: Plan) -> None:
        for left in self.paths.leftovers():
            left.unlink(missing_ok=True)
        for folder in (self.paths.metric_part(0).parent, self.paths.result_part(0).parent):
            folder.mkdir(parents=True, exist_ok=True)
        if self._alone:
            remove_tables(self.paths)
        if self._again:
            write_retries(self.paths, self._again)
        self._next_part = {
            "metrics": RunPaths.next_part(self.paths.metric_parts()),
            "results": RunPaths.next_part(self.paths.result_parts()),
        }
        self._open_log()
        for path, why in self._snapshots.damaged.items():
            logger.warning("the snapshot %s was damaged (%s) and is not used", path, why)
        minutes = plan.trainer.snapshot_minutes
        self._snapshot_every_s = None if minutes is None else 60 * minutes
        self._snapshot_at = self.clock()
        self._plan = plan_json(plan)
        if self._alone:
            write_text(self.paths.configuration, self.configuration)
        write_json(self.paths.environment, environment(plan.trainer.device))
        write_json(self.paths.plan, self._plan)
        logger.info(
            "started %s: %d experiments, %d cohorts, on %s",
            plan.name,
            len(plan.experiments),
            len(plan.cohorts),
            plan.trainer.device,
        )

    def planned(self, plan: Plan) -> None:
        self._signals.at_once = False
        self._plan = plan_json(plan)
        with writing(self.paths):
            write_json(self.paths.plan, self._plan)

    def narrowed(self, cohort: int, width: int, message: str) -> None:
        self._signals.at_once = False
        logger.warning("cohort %d goes on in %d lanes: memory did not suffice (%s)", cohort, width, message)

    def compiling(self, cohort: int, what: str) -> None:
        self._signals.at_once = False
        logger.info("cohort %d: compiling %s", cohort, what)
        self.flush()
        self._end_if_asked()
        self._signals.at_once = True

    def checking(self, cohort: int) -> None:
        self._signals.at_once = False
        logger.info("cohort %d: checking against plain PyTorch", cohort)
        self._end_if_asked()
        self._signals.at_once = True

    def metrics(self, experiment: Experiment, step: int, values: Mapping[str, Any]) -> None:
        self._signals.at_once = False
        if not self._rows:
            self._rows_since = self.clock()
        self._rows.append((experiment.id, step, {name: float(value) for name, value in values.items()}))
        self._flush_if_due()

    def ended(self, result: Result) -> None:
        self._signals.at_once = False
        level = logging.INFO if result.status in ("finished", "stopped") else logging.WARNING
        message = f": {result.message}" if result.message else ""
        logger.log(level, "%s %s after %d steps%s", result.experiment, result.status, result.steps, message)
        for which, weights in (("last", result.weights), ("best", result.best_weights)):
            if weights is not None:
                # at once: the lane that they lie in may be refilled before the next boundary
                with writing(self.paths):
                    self.paths.weights_folder.mkdir(exist_ok=True)
                    write_safetensors(self.paths.weights(result.experiment.id, which), weights)
        if not self._results:
            self._results_since = self.clock()
        self._ended.add(result.experiment.id)
        self._results.append(dataclasses.replace(result, weights=None, best_weights=None))
        self._flush_if_due()

    def advanced(self, progress: Progress) -> None:
        if self._results:
            self.flush()
        else:
            self._flush_if_due()

    def wants_boundary(self) -> bool:
        """Whether the run should come to a host boundary soon, out of turn: a signal waits for being obeyed."""
        # lanes have taken steps since the graphs were made: there is something to be saved
        self._signals.at_once = False
        return self._signals.seen is not None

    def snapshot(self, take: Callable[[], Snapshot]) -> None:
        self._signals.at_once = False
        if self._signals.seen is None and not self._snapshot_is_due():
            return
        with writing(self.paths):
            # first what was measured up to here: what a snapshot has behind it is not measured again
            self.flush()
            path = self._snapshots.write(take())
        self._snapshot_at = self.clock()
        logger.info("snapshot %s", path.name)
        self._end_if_asked()

    def over(self, take: Callable[[], Snapshot] | None) -> None:
        self._signals.at_once = False
        self._over = True
        if take is not None:
            with writing(self.paths):
                self.flush()
                self._last_snapshot = self._snapshots.write(take())

    def closed(self, error: BaseException | None) -> None:
        self._signals.at_once = False
        try:
            if self._plan is not None:  # else it broke off before it started: there is no run to sum up
                self._close(self._plan, error)
        finally:
            self._close_log()
            self._signals.restore()
            if self._locked:
                self._locked = False
                self._lock.release()

    def _close(self, plan: dict[str, Any], error: BaseException | None) -> None:
        if error is not None:
            _log_end(error)
        try:
            with writing(self.paths):
                self.flush()
                # of a job: whoever started the jobs sums up
                ended = write_tables(self.paths, plan) if self._alone else len(self._ended)
                if self._over and error is None:
                    self._snapshots.clear(self._last_snapshot)
        except RunFolderError as late:
            if error is None:
                raise
            # the first failure is the one to tell; this one often follows from it
            logger.error("not summed up: %s", late)
            return
        logger.info("closed: %d of %d experiments ended", ended, len(plan["experiments"]))

    def _end_if_asked(self) -> None:
        if self._signals.seen is not None:
            raise Interrupted(self._signals.seen)

    def _snapshot_is_due(self) -> bool:
        every_s = self._snapshot_every_s
        return every_s is not None and self.clock() - self._snapshot_at >= every_s

    def flush(self) -> None:
        """Write what is held in memory. Metrics first: a result on disk has its whole history beside it.

        Raises:
            RunFolderError: the disk is full, or the folder is gone.
        """
        with writing(self.paths):
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            number = self._next_part["metrics"]
            write_parquet(self.paths.metric_part(number), history_frame(self._rows))
            self._next_part["metrics"] = number + 1
            self._rows = []
        if self._results:
            number = self._next_part["results"]
            write_parquet(self.paths.result_part(number), raw_frame(self._results))
            self._next_part["results"] = number + 1
            self._results = []

    def _flush_if_due(self) -> None:
        now = self.clock()
        late_rows = bool(self._rows) and now - self._rows_since >= self.metrics_every_s
        late_results = bool(self._results) and now - self._results_since >= self.results_every_s
        if late_rows or late_results or len(self._rows) >= self.metrics_rows:
            self.flush()

    def _open_log(self) -> None:
        self._handler = _LogFile(self.paths.log, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._level = logger.level
        logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
        logger.addHandler(self._handler)

    def _close_log(self) -> None:
        if self._handler is not None:
            logger.removeHandler(self._handler)
            logger.setLevel(self._level)
            self._handler.close()
            self._handler = None


class _LogFile(logging.FileHandler):
    """A log that keeps still about a disk that is full: whoever writes results tells it."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def _log_end(error: BaseException) -> None:
    how = ended_by(error)
    if how != "broke off":
        logger.warning("%s", how)
    elif isinstance(error, TaskError | RunFolderError | ConfigError):
        # whose texts are sentences for users
        logger.error("%s: %s", how, error)
    else:
        logger.error("%s (%s: %s)", how, type(error).__name__, error)
