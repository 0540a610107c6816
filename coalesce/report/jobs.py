"""How the jobs of a run are getting on: a line for each on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coalesce.launch.watch import JobView
from coalesce.report import text
from coalesce.report.pace import Pace
from coalesce.report.standings import BUSY, DONE, TROUBLES, State, Total, state_of, total_of

#: Columns below which there is no room for where a job runs, and for what its launcher calls it.
HOST_COLUMNS, ID_COLUMNS = 110, 90

#: Lines of the terminal that are kept for what stands around the jobs.
AROUND = 5


class JobsDisplay:
    """Shows the jobs of a run. To be told of them again and again, between `start` and `stop`.

    On a terminal it redraws a line for each job, as many as there is room for, and prints what goes wrong above them.
    Elsewhere it prints a line when jobs change what they are doing, and now and then how far all of them are.

    Args:
        console: where to show it.
        mode: whether the "max" or the "min" of the monitored metric is best.
        describe: id of an experiment → its swept values, as a person reads them.
        clock: seconds since 1970, for tests.
    """

    def __init__(
        self,
        console: Console,
        mode: str = "max",
        describe: Callable[[str], str] = str,
        *,
        clock: Callable[[], float] = time.time,
    ):
        self.console, self.mode, self.describe, self.clock = console, mode, describe, clock
        self._pace = Pace(clock)
        self._views: Sequence[JobView] = ()
        self._told: dict[int, str] = {}
        self._live: Live | None = None

    def start(self) -> None:
        """Begin to show."""
        self._pace.restart()
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def stop(self) -> None:
        """End it; on a terminal nothing of it stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> JobsDisplay:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def show(self, views: Sequence[JobView]) -> None:
        """Show what is known of all jobs now."""
        self._views = views
        self._tell_changes([(view, state_of(view, self.clock())) for view in views])
        if self._live is None and views:
            total = self._total()
            if self._pace.due(total.done):
                self._say(f"{total.done:4.0%}: " + ", ".join([*total.facts, self._best(total)]))

    def summary(self) -> str:
        """What became of all of them, in one line."""
        total = self._total()
        states = Counter(state_of(view, self.clock()).kind for view in self._views)
        how = ", ".join(f"{count} {kind}" for kind, count in states.items())
        head = text.count(len(self._views), "job")
        failed = f", {total.failed:,} failed" if total.failed else ""
        return f"{head} ({how}); {total.ended:,} of {text.count(total.count, 'experiment')} ended{failed}"

    def _tell_changes(self, jobs: Sequence[tuple[JobView, State]]) -> None:
        """Print what jobs are doing now that they did not do before, those that do the same in one line."""
        changed: dict[str, list[JobView]] = {}
        for view, state in jobs:
            # what a job waits for may change at every look, and for how long it is silent does
            key = state.line if state.kind in DONE else state.kind
            if self._told.get(view.record.number) != key:
                self._told[view.record.number] = key
                # what is redrawn shows the rest by itself
                if self._live is None or state.kind in TROUBLES:
                    changed.setdefault(state.line, []).append(view)
        for line, views in changed.items():
            self._say(f"{self._named(views)}: {line}")

    def _named(self, views: Sequence[JobView]) -> str:
        if len(views) == 1:
            record = views[0].record
            return f"process {record.id}" if record.launcher == "process" else f"job {record.number} ({record.id})"
        return f"jobs {_ranges([view.record.number for view in views])}"

    def _say(self, line: str) -> None:
        text.say(self.console, line)

    def _total(self) -> Total:
        return total_of(self._views, self.mode, self.clock())

    def _best(self, total: Total) -> str:
        if total.best is None:
            return f"best {total.monitor}: none yet" if total.monitor else "nothing measured yet"
        value, name = total.best
        return f"best {total.monitor} {text.metric(value)} ({self.describe(name) or name})"

    def _render(self) -> RenderableType:
        now, console = self.clock(), self.console
        if not self._views:
            return Text("looking at the jobs")
        jobs = [(view, state_of(view, now)) for view in self._views]
        room = max(1, console.height - AROUND)
        shown = jobs if len(jobs) <= room else _most_telling(jobs, room - 1)
        kept = {view.record.number for view, _ in shown}
        hidden = Counter(state.kind for view, state in jobs if view.record.number not in kept)
        total = self._total()
        lines: list[RenderableType] = [self._table(shown)]
        if hidden:
            dots, how = text.ellipsis(console), ", ".join(f"{count} {kind}" for kind, count in hidden.items())
            line = f"{dots} {hidden.total()} more: {how}"
            lines.append(Text(line, style="dim", no_wrap=True, overflow="ellipsis"))
        facts = list(total.facts)
        if len(jobs) > 1:
            bar = Table.grid(padding=(0, 1), expand=True)
            bar.add_column(no_wrap=True)
            bar.add_column(ratio=1)
            bar.add_column(no_wrap=True, justify="right")
            bar.add_row("all", ProgressBar(1000, int(1000 * total.done)), f"{total.done:4.0%} {total.left}".rstrip())
            facts = [fact for fact in facts if fact != total.left]
            lines.append(bar)
        lines.append(Text(" · ".join(facts), no_wrap=True, overflow="ellipsis"))
        lines.append(Text(self._best(total), no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _table(self, jobs: Sequence[tuple[JobView, State]]) -> Table:
        width = self.console.width
        with_host, with_id = width >= HOST_COLUMNS, width >= ID_COLUMNS
        failed = any(view.standing is not None and view.standing.failed for view, _ in jobs)
        table = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="dim", pad_edge=False)
        table.add_column("job", justify="right", no_wrap=True)
        if with_id:
            table.add_column("id", no_wrap=True, overflow="ellipsis", max_width=14)
        table.add_column("state", no_wrap=True, overflow="ellipsis", max_width=max(16, width // 3))
        if with_host:
            table.add_column("host", no_wrap=True, overflow="ellipsis", max_width=16)
        table.add_column("lanes", justify="right", no_wrap=True)
        table.add_column("", ratio=1, min_width=6)
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("steps/s", justify="right", no_wrap=True)
        table.add_column("ended", justify="right", no_wrap=True)
        if failed:
            table.add_column("failed", justify="right", no_wrap=True)
        for view, state in jobs:
            record, standing = view.record, view.standing
            steps = standing.total_steps if standing is not None and standing.total_steps else record.steps
            done = standing.steps if standing is not None else 0
            count = standing.total_experiments if standing is not None and standing.total_experiments else record.count
            cells: list[RenderableType] = [Text(str(record.number))]
            cells += [Text(record.id)] if with_id else []
            cells += [Text(state.line, style=state.style)]
            cells += [Text(standing.host if standing is not None else "")] if with_host else []
            cells += [
                Text(
                    f"{standing.lanes}/{standing.width}"
                    if standing is not None and standing.width and state.kind in BUSY
                    else ""
                ),
                ProgressBar(max(steps, 1), done),
                Text(f"{done / steps:.0%}" if steps else ""),
                Text(text.rate(standing.speed) if standing is not None and state.kind == "training" else ""),
                Text(f"{standing.experiments if standing is not None else 0:,}/{count:,}"),
            ]
            if failed:
                cells.append(Text(f"{standing.failed:,}" if standing is not None and standing.failed else ""))
            table.add_row(*cells)
        return table


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers on one line.

    >>> _ranges([0, 1, 2, 4, 6, 7])
    '0-2, 4, 6, 7'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _most_telling(jobs: Sequence[tuple[JobView, State]], count: int) -> list[tuple[JobView, State]]:
    """So many of the jobs, in their order: first those with which something is wrong, then those at work, then those
    that wait, then those that have ended."""

    def rank(entry: tuple[JobView, State]) -> int:
        kind = entry[1].kind
        if kind in TROUBLES:
            return 0
        return 1 if kind in BUSY else 3 if kind == "ended" else 2

    best = sorted(jobs, key=rank)[:count]
    return sorted(best, key=lambda entry: entry[0].record.number)
