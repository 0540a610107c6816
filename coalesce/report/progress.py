"""How a run is getting on: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from coalesce.experiment import Experiment
from coalesce.report import text
from coalesce.report.fitting import telling
from coalesce.report.pace import Pace
from coalesce.runner.listener import Listener, Progress, Result
from coalesce.runner.plan import Plan
from coalesce.store.signals import ended_by
from coalesce.store.speed import Speed

#: Failures that are told one by one when they happen.
TOLD = 5


class ProgressView(Listener):
    """Shows lanes, speed, experiments per hour, time left and the best experiment so far.

    On a terminal it redraws a few lines in place; elsewhere, and where experiments run unstacked for debugging (a
    display that redraws itself would write over the debugger's prompt), it prints plain lines: at the start, when a
    graph is compiled, at every tenth of the steps or every ten seconds (more seldom in long runs), and at the end.

    Args:
        console: where to show it.
        clock: seconds, for tests.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic):
        self.console = console
        self.clock = clock
        self._plan: Plan | None = None
        self._keys: list[str] = []
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._compiling: tuple[str, float] | None = None
        self._verb = "compiling"
        self._pace = Pace(clock)
        self._statuses: Counter[str] = Counter()
        self._failed_before = 0
        self._speed = Speed()
        self._spinner = Spinner("dots")

    def started(self, plan: Plan) -> None:
        self._plan = plan
        self._keys = telling([experiment.values for experiment in plan.experiments], plan.keys)
        self._verb = "compiling" if plan.trainer.compile else "tracing"
        self._pace.restart()
        steps = sum(experiment.steps for experiment in plan.experiments)
        # those that are not known yet have no number of steps
        length = f", {text.count(steps, 'step')} in all" if plan.count == len(plan.experiments) else ""
        self._say(
            f"{plan.name}: {text.count(plan.count, 'experiment')} in "
            f"{text.count(len(plan.cohorts), 'cohort')}{length}, on {plan.trainer.device}"
        )
        if self.console.is_terminal and not self.console.is_dumb_terminal and plan.trainer.stack:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=8, transient=True)
            self._live.start()

    def resumed(self, results: Sequence[Result]) -> None:
        self._statuses.update(result.status for result in results)
        self._failed_before = self._statuses["failed"]

    def compiling(self, cohort: int, what: str) -> None:
        of = f" of {len(self._plan.cohorts)}" if self._plan is not None else ""
        self._compiling = (f"{self._verb} the {what} of cohort {cohort + 1}{of}", self.clock())
        if self._live is None:
            self._say(f"{self._compiling[0]} (once for all of its experiments)...")

    def checking(self, cohort: int) -> None:
        of = f" of {len(self._plan.cohorts)}" if self._plan is not None else ""
        self._compiling = (f"checking cohort {cohort + 1}{of} against plain PyTorch", self.clock())
        # plain lines are for what takes long, and that is seconds only where compiling took minutes
        if self._live is None and self._plan is not None and self._plan.trainer.compile:
            self._say(f"{self._compiling[0]}...")

    def narrowed(self, cohort: int, width: int, message: str) -> None:
        self._say(f"memory did not suffice: cohort {cohort + 1} goes on in {text.count(width, 'lane')} ({message})")

    def planned(self, plan: Plan) -> None:
        self._plan = plan
        self._keys = telling([experiment.values for experiment in plan.experiments], plan.keys)

    def ended(self, result: Result) -> None:
        self._statuses[result.status] += 1
        if result.status == "failed" and self._statuses["failed"] - self._failed_before <= TOLD:
            # the first ones are told at once; many mostly fail alike, and the summary counts them all
            self._say(f"failed: {_experiment(result.experiment)} after {result.steps:,} steps: {result.message}")

    def advanced(self, progress: Progress) -> None:
        self._compiling = None
        self._progress = progress
        self._speed.add(progress)
        if self._live is None and self._pace.due(progress.steps / max(progress.total_steps, 1)):
            self._say(_line(progress, self._speed.per_second, self._statuses, self._keys))

    def closed(self, error: BaseException | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._plan is None:
            return
        ended = sum(self._statuses.values())
        took = text.duration(self._pace.passed_s)
        if self._progress is not None and self._plan.trainer.stack:
            compiling_s = max(self._progress.elapsed_s - self._progress.training_s, 0.0)
            took += f" ({text.duration(compiling_s)} of it {self._verb})"
        head = "ended" if error is None else ended_by(error)
        statuses = "".join(f", {number:,} {status}" for status, number in self._statuses.items())
        self._say(f"{head} after {took}: {ended:,} of {text.count(self._plan.count, 'experiment')}{statuses}")

    def _say(self, line: str) -> None:
        text.say(self.console, line)

    def _render(self) -> RenderableType:
        progress, plan = self._progress, self._plan
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        cohort, cohorts = (progress.cohort + 1, progress.cohorts) if progress else (1, len(plan.cohorts) if plan else 1)
        done, total = (progress.steps, max(progress.total_steps, 1)) if progress else (0, 1)
        left = _left(progress, self._speed.per_second) if progress else ""
        bar.add_row(f"cohort {cohort}/{cohorts}", ProgressBar(total, done), f"{done / total:4.0%} {left}".rstrip())
        lines: list[RenderableType] = [bar]
        compiling = self._compiling
        if compiling is not None:
            waited = text.duration(self.clock() - compiling[1])
            self._spinner.update(text=Text(f"{compiling[0]}… {waited}", no_wrap=True, overflow="ellipsis"))
            lines.append(self._spinner)
        if progress is not None:
            if compiling is None:
                facts = " · ".join(_facts(progress, self._speed.per_second, self._statuses))
                lines.append(Text(facts, overflow="fold"))
            lines.append(Text(_best(progress, self._keys), no_wrap=True, overflow="ellipsis"))
        return Group(*lines)


def _experiment(experiment: Experiment) -> str:
    swept = text.values(experiment.values)
    return f"{experiment.id} ({swept})" if swept else experiment.id


def _facts(progress: Progress, speed: float, statuses: Counter[str]) -> list[str]:
    steps_each = progress.total_steps / max(progress.total_experiments, 1)
    facts = [f"{progress.lanes}/{progress.width} lanes", f"{text.rate(speed)} steps/s"]
    if steps_each:
        facts.append(f"{text.rate(3600 * speed / steps_each)} experiments/h")
    facts.append(f"{progress.experiments:,}/{progress.total_experiments:,} ended")
    return facts + [f"{statuses[status]:,} {status}" for status in ("diverged", "failed") if statuses[status]]


def _best(progress: Progress, keys: Sequence[str]) -> str:
    if progress.best is None:
        return f"best {progress.monitor}: none yet"
    value, experiment = progress.best
    # what the task decides, such as its number of steps, would only make the line longer
    swept = text.values({key: experiment.values[key] for key in keys if key in experiment.values})
    return f"best {progress.monitor} {text.metric(value)}" + (f" ({swept})" if swept else "")


def _left(progress: Progress, speed: float) -> str:
    left = progress.total_steps - progress.steps
    return f"{text.duration(left / speed)} left" if speed > 0 and left > 0 else ""


def _line(progress: Progress, speed: float, statuses: Counter[str], keys: Sequence[str]) -> str:
    done = progress.steps / max(progress.total_steps, 1)
    cohort = f"cohort {progress.cohort + 1} of {progress.cohorts}"
    facts = [cohort, *_facts(progress, speed, statuses), _left(progress, speed), _best(progress, keys)]
    return f"{done:4.0%}: " + ", ".join(fact for fact in facts if fact)
