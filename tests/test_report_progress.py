"""The progress display.

Oracle: what the fake run told it; on a terminal, the text that its last frame shows, and that the cursor comes back.
"""

from __future__ import annotations

import dataclasses
import io
import re
from bdb import BdbQuit
from typing import Any

import pytest
from rich.console import Console

from coalesce.errors import TaskError
from coalesce.report.progress import ProgressView
from coalesce.store.signals import Interrupted
from run_fakes import drive, grid, plan, progress, result

EXPERIMENTS = grid(optimizer__lr=[0.1, 0.01], seed=[0, 1, 2, 3])
BEST = (0.9712, EXPERIMENTS[5])


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def view(terminal: bool, **arguments: Any) -> tuple[ProgressView, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, width=80, force_terminal=terminal, **arguments)
    return ProgressView(console, clock=clock), file, clock


def frame(of: ProgressView) -> list[str]:
    """The lines that stand on the terminal."""
    console = Console(width=80)
    with console.capture() as capture:
        console.print(of._render())
    return [line.rstrip() for line in capture.get().splitlines()]


def test_plain_lines_of_a_whole_run() -> None:
    showing, file, _ = view(terminal=False)
    drive(showing, plan(EXPERIMENTS), [result(one) for one in EXPERIMENTS])
    lines = file.getvalue().splitlines()
    assert lines[0] == "made_up: 8 experiments in 1 cohort, 400 steps in all, on cpu"
    assert lines[1] == "compiling the step of cohort 1 of 1 (once for all of its experiments)..."
    assert lines[2] == "checking cohort 1 of 1 against plain PyTorch..."
    assert [line.split(":")[0].strip() for line in lines[3:-1]] == ["20%", "40%", "60%", "80%", "100%"]
    assert re.fullmatch(r"ended after .*: 8 of 8 experiments, 8 finished", lines[-1])
    assert not re.search(r"[^\x20-\x7e\n]", file.getvalue())


@pytest.mark.parametrize(
    ("trainer", "says"),
    [({}, "of it compiling"), ({"compile": False}, "of it tracing"), ({"stack": False}, "of it ")],
)
def test_what_is_waited_for_is_called_by_its_name(trainer: dict[str, Any], says: str) -> None:
    showing, file, _ = view(terminal=False)
    drive(showing, plan(EXPERIMENTS, **trainer), [result(one) for one in EXPERIMENTS])
    assert (says in file.getvalue()) == ("stack" not in trainer)
    assert ("tracing the step" in file.getvalue()) == ("compile" in trainer)
    # done before it is read, where nothing was compiled
    assert ("checking" in file.getvalue()) == ("compile" not in trainer)


def test_a_plain_line_says_everything() -> None:
    showing, file, clock = view(terminal=False)
    showing.started(plan(EXPERIMENTS))
    clock.now = 10.0
    showing.ended(result(EXPERIMENTS[0], status="diverged"))
    showing.advanced(progress(steps=1000, total_steps=4000, experiments=1, best=BEST))
    assert file.getvalue().splitlines()[-1] == (
        " 25%: cohort 1 of 1, 8/8 lanes, 100 steps/s, 720 experiments/h, 1/8 ended, 1 diverged, 30 s left, "
        "best val/accuracy 0.9712 (optimizer.lr=0.01, seed=1)"
    )


def test_a_long_run_is_not_a_long_log() -> None:
    showing, file, clock = view(terminal=False)
    showing.started(plan(EXPERIMENTS))
    seconds = 5 * 24 * 3600
    for clock.now in range(0, seconds, 60):
        showing.advanced(progress(steps=int(clock.now), total_steps=seconds))
    assert 100 < len(file.getvalue().splitlines()) < 500
    times = [line for line in file.getvalue().splitlines() if line.startswith("  0%")]
    assert len(times) > 20  # at first often


def test_a_slow_start_is_told_every_ten_seconds() -> None:
    showing, file, clock = view(terminal=False)
    showing.started(plan(EXPERIMENTS))
    for clock.now in range(1, 31):
        showing.advanced(progress(steps=int(clock.now), total_steps=10**9))
    assert len(file.getvalue().splitlines()) == 1 + 3


def test_what_an_earlier_process_did_is_no_speed() -> None:
    showing, file, _ = view(terminal=False)
    showing.started(plan(EXPERIMENTS))
    first = progress(steps=5_000, total_steps=16_000)
    showing.advanced(dataclasses.replace(first, training_s=2.0, before=4_000))
    assert "500 steps/s" in file.getvalue()


def test_the_first_failures_are_told_at_once_and_the_others_counted() -> None:
    showing, file, _ = view(terminal=False)
    failed = [result(one, status="failed", message="RuntimeError: [0] is bad") for one in EXPERIMENTS]
    drive(showing, plan(EXPERIMENTS), failed)
    line, *others = [line for line in file.getvalue().splitlines() if line.startswith("failed: ")]
    assert len(others) == 4
    assert line.startswith(f"failed: {EXPERIMENTS[0].id} (optimizer.lr=0.1, seed=0)")
    assert line.endswith("RuntimeError: [0] is bad")
    assert file.getvalue().endswith("8 of 8 experiments, 8 failed\n")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyboardInterrupt(), "ended by Ctrl-C"),
        (Interrupted("SIGUSR1"), "ended by SIGUSR1"),
        (BdbQuit(), "ended at a breakpoint"),
        (SystemExit(3), "ended by sys.exit(3)"),
        (TaskError("told below it"), "broke off"),
    ],
)
def test_a_run_that_breaks_off(terminal: bool, error: BaseException, says: str) -> None:
    showing, file, _ = view(terminal)
    showing.started(plan(EXPERIMENTS))
    showing.ended(result(EXPERIMENTS[0]))
    showing.closed(error)
    assert f"{says} after 0.0 s: 1 of 8 experiments, 1 finished\n" in file.getvalue()
    if terminal:
        assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def test_a_run_that_never_started_says_nothing() -> None:
    showing, file, _ = view(terminal=False)
    showing.closed(RuntimeError("bad task"))
    assert file.getvalue() == ""


def test_the_live_display_while_compiling() -> None:
    showing, file, clock = view(terminal=True)
    showing.started(plan(EXPERIMENTS, cohorts=2))
    try:
        showing.compiling(1, "evaluation")
        clock.now = 12.0
        first, second = frame(showing)
        assert first.startswith("cohort 1/2")
        assert second.endswith("compiling the evaluation of cohort 2 of 2… 12 s")
        showing.checking(1)
        assert frame(showing)[1].endswith("checking cohort 2 of 2 against plain PyTorch… 0.0 s")
    finally:
        showing.closed(None)
    assert "\x1b[?25l" in file.getvalue()


def test_the_live_display_while_training() -> None:
    showing, _, _ = view(terminal=True)
    showing.started(plan(EXPERIMENTS))
    try:
        showing.compiling(0, "step")
        showing.advanced(progress(steps=1000, total_steps=4000, lanes=6, experiments=2, best=BEST))
        first, second, third = frame(showing)
        assert first.startswith("cohort 1/1 ━")
        assert first.endswith("25% 30 s left")
        assert second == "6/8 lanes · 100 steps/s · 720 experiments/h · 2/8 ended"
        assert third == "best val/accuracy 0.9712 (optimizer.lr=0.01, seed=1)"
    finally:
        showing.closed(None)


def test_the_speed_is_that_of_the_last_while() -> None:
    showing, _, _ = view(terminal=False)
    showing.started(plan(EXPERIMENTS))
    for second in range(1, 101):
        steps = second * 1000 if second <= 50 else 50_000 + (second - 50) * 10
        showing.advanced(progress(steps=steps, total_steps=10**6, training_s=float(second)))
    assert showing._speed.per_second == pytest.approx(10.0)


def test_a_run_that_goes_on_counts_what_had_ended_and_only_its_own_speed() -> None:
    showing, file, clock = view(terminal=False)
    showing.started(plan(EXPERIMENTS))
    showing.resumed([result(EXPERIMENTS[0]), result(EXPERIMENTS[1], status="diverged")])
    clock.now = 10.0
    showing.advanced(progress(steps=3100, total_steps=4000, experiments=2, training_s=10.0, before=3000))
    assert " 10 steps/s, 72 experiments/h, 2/8 ended, 1 diverged, 90 s left" in file.getvalue()
    showing.ended(result(EXPERIMENTS[2]))
    showing.closed(None)
    assert file.getvalue().endswith(": 3 of 8 experiments, 2 finished, 1 diverged\n")


def test_a_key_that_only_others_have_is_not_told_of_the_best() -> None:
    showing, file, clock = view(terminal=False)
    showing.started(plan([*EXPERIMENTS, *grid(optimizer__lr=[0.1], seed=[0], steps=[80])]))
    clock.now = 10.0
    showing.advanced(progress(steps=1000, total_steps=4000, best=BEST))
    assert file.getvalue().endswith("best val/accuracy 0.9712 (optimizer.lr=0.01, seed=1)\n")


@pytest.mark.parametrize("reason", ["unstacked", "dumb"])
def test_no_redrawing_under_a_debugger_or_on_a_dumb_terminal(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"TERM": "dumb" if reason == "dumb" else "xterm"}
    showing, file, _ = view(terminal=True, _environ=environment)
    drive(showing, plan(EXPERIMENTS, stack=reason == "dumb"), [result(one) for one in EXPERIMENTS])
    assert "\x1b" not in file.getvalue()
    assert "20%: cohort 1 of 1" in file.getvalue()
