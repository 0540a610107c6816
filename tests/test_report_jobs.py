"""How the jobs of a run are shown.

Oracle: what was said of each job; sums by hand; the text that a terminal of the given size shows.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coalesce.launch.base import Look
from coalesce.launch.watch import JobView
from coalesce.report.jobs import JobsDisplay
from coalesce.report.standings import BUSY, DONE, SILENT_S, TROUBLES, State, state_of, total_of
from coalesce.store.jobs import STATES, JobRecord, Standing

NOW = 1_000_000.0
LOOKS = ("waiting", "running", "gone", "unknown")


def view(number: int, state: str | None = "training", look: Look | str = "running", **changes: Any) -> JobView:
    """A job of 7 experiments and 14,000 steps."""
    record = JobRecord(number, "slurm", f"4711_{number}", 0, (), 7, 14_000, NOW - 500)
    look = Look(look) if isinstance(look, str) else look
    if state is None:
        return JobView(record, None, look)
    standing = Standing(
        state=state, id=record.id, host=f"node{number}", device="cuda NVIDIA H200", visible="0", since=NOW - 400,
        written=NOW - 1, lanes=7, width=7, total_steps=14_000, total_experiments=7, monitor="val/accuracy",
        speed=100.0 if state == "training" else 0.0,
    )  # fmt: skip
    return JobView(record, dataclasses.replace(standing, **changes), look)


def lines(views: Sequence[JobView], width: int = 120, height: int = 40) -> list[str]:
    """What stands on a terminal."""
    console = Console(width=width, height=height, force_terminal=True, color_system=None, file=io.StringIO())
    display = JobsDisplay(console, describe=lambda name: f"seed={name}", clock=lambda: NOW)
    display._views = views
    with console.capture() as capture:
        console.print(display._render())
    return [line.rstrip() for line in capture.get().splitlines()]


# what a job is doing


@pytest.mark.parametrize(
    ("job", "state"),
    [
        (view(0), State("training")),
        (view(0, written=NOW - SILENT_S), State("training")),
        (view(0, written=NOW - 200), State("silent", "3:20 min")),
        # an earlier clock over there
        (view(0, written=NOW + 5000), State("training")),
        (view(0, "compiling"), State("compiling")),
        (view(0, "compiling", written=NOW - 130), State("compiling", "2:10 min")),
        (view(0, "planning", look="unknown"), State("planning")),
        (view(0, None), State("starting")),
        (view(0, None, Look("waiting", "Resources")), State("waiting", "Resources")),
        (view(0, None, Look("unknown", "squeue does not answer")), State("unknown", "squeue does not answer")),
        (view(0, None, "gone"), State("died", "its process is gone")),
        (view(0, "training", Look("gone", "NODE_FAIL")), State("died", "NODE_FAIL")),
        (view(0, "training", Look("gone", "CANCELLED by 0", cancelled=True)), State("cancelled", "CANCELLED by 0")),
        (view(0, "interrupted", "waiting", message="ended by SIGUSR2"), State("saved")),
        (view(0, "interrupted", "running", message="ended by SIGUSR2"), State("saved", "ended by SIGUSR2")),
        (view(0, "interrupted", "gone", message="ended by SIGTERM"), State("interrupted", "ended by SIGTERM")),
        (view(0, "broke", "gone", message="the model\nraises"), State("broke", "the model")),
        (view(0, "ended", Look("gone", "COMPLETED")), State("ended")),
        # it waits again since it was queued again: what it wrote before is no longer so
        (view(0, "training", Look("waiting", "BeginTime")), State("waiting", "BeginTime")),
    ],
)
def test_what_a_job_is_doing(job: JobView, state: State) -> None:
    assert state_of(job, NOW) == state


@given(st.sampled_from([None, *STATES]), st.sampled_from(LOOKS), st.booleans(), st.floats(0, 10**6))
def test_every_job_is_somewhere(state: str | None, look: str, cancelled: bool, age_s: float) -> None:
    changes = {} if state is None else {"written": NOW - age_s}
    kind = state_of(view(0, state, Look(look, "", cancelled)), NOW).kind
    assert (kind in DONE) == (state in ("ended", "broke") or look == "gone")
    assert not (kind in BUSY and kind in DONE)
    found = state_of(view(0, state, Look(look, "", cancelled), **changes), NOW)
    assert ("\n" in found.line) is False
    assert (found.style == "red") == (found.kind in TROUBLES)


# all of them


def test_sums() -> None:
    jobs = [
        view(0, steps=4_000, experiments=2, failed=1, best=0.9, best_id="a", speed=100.0),
        view(1, steps=12_000, experiments=5, best=0.95, best_id="b", speed=50.0),
        view(2, None, "waiting"),
        view(3, "ended", "gone", steps=14_000, experiments=7, best=0.5, best_id="c"),
    ]
    total = total_of(jobs, "max", NOW)
    assert (total.done, total.ended, total.count, total.failed) == (30 / 56, 14, 28, 1)
    assert total.best == (0.95, "b")
    assert total_of(jobs, "min", NOW).best == (0.5, "c")
    # the longest: 10,000 steps at 100 a second; and nobody knows how long the one takes that waits
    assert total.left == "at least 1:40 min left"
    assert total_of([jobs[0], jobs[1], jobs[3]], "max", NOW).left == "1:40 min left"
    assert total.facts == ("2 of 4 jobs at work", "150 steps/s", "14/28 ended", "1 failed", total.left)
    assert total_of([view(0, None, "waiting")], "max", NOW).left == ""


def test_steps_that_are_not_known_beforehand() -> None:
    record = dataclasses.replace(view(0).record, steps=0)
    jobs = [dataclasses.replace(view(0, None), record=record), view(1, "planning", total_steps=0, experiments=7)]
    jobs[1] = dataclasses.replace(jobs[1], record=dataclasses.replace(jobs[1].record, steps=0))
    assert total_of(jobs, "max", NOW).done == 0.5
    assert total_of([], "max", NOW).done == 0.0


# on a terminal


EIGHT = [
    view(0, steps=9_000, experiments=3, best=0.97, best_id="3"),
    view(1, steps=4_000, written=NOW - 200),
    view(2, "compiling", written=NOW - 130),
    view(3, None, Look("waiting", "Resources")),
    view(4, None, Look("waiting", "Priority")),
    view(5, "ended", "gone", steps=14_000, experiments=7, failed=1),
    view(6, "broke", "gone", message="the model raises: [bold]x"),
    view(7, "training", Look("gone", "OUT_OF_MEMORY"), steps=6_000),
]


def test_a_line_for_each_job() -> None:
    shown = lines(EIGHT)
    assert re.sub(r" +", " ", shown[0].strip()) == "job id state host lanes steps/s ended failed"
    bare = [re.sub(r"[━╸╺]+", "=", re.sub(r" +", " ", line.strip())) for line in shown]
    assert bare[1] == "0 4711_0 training node0 7/7 = 64% 100 3/7"
    assert "silent for 3:20 min" in shown[2]
    assert "compiling for 2:10 min" in shown[3]
    assert "waiting: Resources" in shown[4]
    assert shown[6].endswith("100%           7/7      1")
    assert "broke: the model raises: [bold]x" in shown[7]
    assert "died: OUT_OF_MEMORY" in shown[8]
    assert shown[-3].startswith("all ━")
    assert shown[-2] == "3 of 8 jobs at work · 100 steps/s · 10/56 ended · 1 failed"
    assert shown[-1] == "best val/accuracy 0.9700 (seed=3)"


@given(st.integers(1, 70), st.integers(40, 200), st.integers(6, 60), st.data())
def test_nothing_is_wider_or_higher_than_the_terminal(count: int, width: int, height: int, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(EIGHT), min_size=count, max_size=count))
    jobs = [dataclasses.replace(job, record=view(number).record) for number, job in enumerate(kinds)]
    shown = lines(jobs, width, height)
    assert len(shown) <= height
    assert all(len(line) <= width for line in shown)


def test_many_jobs_are_folded_to_what_tells_most() -> None:
    jobs = [view(n, "ended", "gone", steps=14_000) if n < 20 else view(n) if n < 30 else view(n, None, "waiting")
            for n in range(64)]  # fmt: skip
    jobs[50] = view(50, "broke", "gone", message="no data")
    shown = lines(jobs, height=20)
    assert [int(line.split()[0]) for line in shown[1:-4]] == [*range(20, 30), 30, 31, 32, 50]
    assert shown[-4] == "… 50 more: 20 ended, 30 waiting"
    assert len(lines(jobs, height=80)) == 64 + 4


def test_a_narrow_terminal_leaves_out_what_is_said_elsewhere() -> None:
    assert "host" not in lines(EIGHT, 109)[0]
    assert "id" not in lines(EIGHT, 89)[0]


def test_one_job_has_one_bar() -> None:
    shown = lines([view(0, steps=7_000)])
    assert len(shown) == 4
    assert shown[2] == "100 steps/s · 0/7 ended · 70 s left"


# plain lines


class Shown:
    """A display that prints plain lines, or one on a terminal, with a clock that a test moves."""

    def __init__(self, terminal: bool = False):
        self.now = NOW
        self.file = io.StringIO()
        console = Console(file=self.file, width=200, height=30, force_terminal=terminal, color_system=None)
        self.display = JobsDisplay(console, clock=lambda: self.now)
        self.display.start()

    def __call__(self, *views: JobView, after_s: float = 2.0) -> list[str]:
        """The lines that these jobs made."""
        self.now += after_s
        before = len(self.file.getvalue())
        self.display.show(views)
        return self.file.getvalue()[before:].splitlines()


def test_plain_lines_of_a_run() -> None:
    shown = Shown()
    waits = [view(n, None, Look("waiting", "Priority")) for n in range(4)]
    assert shown(*waits) == ["jobs 0-3: waiting: Priority"]
    assert shown(*(view(n, None, Look("waiting", "Resources")) for n in range(4))) == []
    assert shown(view(0), view(1), waits[2], view(3)) == ["jobs 0, 1, 3: training"]
    assert shown(view(0), view(1), waits[2], view(3), after_s=10) == [
        "  0%: 3 of 4 jobs at work, 300 steps/s, 0/28 ended, at least 2:20 min left, best val/accuracy: none yet"
    ]
    assert shown(view(0), view(1), waits[2], view(3, written=NOW - 200)) == ["job 3 (4711_3): silent for 3:38 min"]
    assert shown(view(0), view(1), waits[2], view(3, written=NOW - 200), after_s=1) == []
    done = [view(n, "ended", "gone", steps=14_000, experiments=7, best=0.5, best_id=f"e{n}") for n in range(4)]
    broke = view(2, "broke", "gone", message="no data", steps=2_000)
    assert shown(*done[:2], broke, done[3]) == [
        "jobs 0, 1, 3: ended",
        "job 2 (4711_2): broke: no data",
        " 79%: 0 of 4 jobs at work, 21/28 ended, best val/accuracy 0.5000 (e0)",
    ]
    assert shown.display.summary() == "4 jobs (3 ended, 1 broke); 21 of 28 experiments ended"
    assert not re.search(r"[^\x20-\x7e\n]", shown.file.getvalue())


def test_a_long_run_is_not_a_long_log() -> None:
    shown = Shown()
    hours = 5 * 24
    for minute in range(hours * 60):
        shown(view(0, steps=minute, total_steps=hours * 60, written=shown.now), after_s=60)
    assert 100 < len(shown.file.getvalue().splitlines()) < 500


def test_on_a_terminal_only_what_goes_wrong_stays() -> None:
    shown = Shown(terminal=True)
    shown(view(0), view(1, None, "waiting"))
    shown(view(0), view(1, "training", Look("gone", "NODE_FAIL")))
    shown.display.stop()
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", shown.file.getvalue())
    assert "job 1 (4711_1): died: NODE_FAIL" in text
    assert "job 0 (4711_0): training" not in text
    # the cursor comes back
    assert shown.file.getvalue().rindex("\x1b[?25h") > shown.file.getvalue().rindex("\x1b[?25l")
