"""What the ruler does for a GPU, as far as it can be seen without one.

Oracles: runs without what is tried, processes that say when they were at work, and arguments that do not fit.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.throughput import __main__ as command
from benchmarks.throughput import replayed
from benchmarks.throughput.place import Place
from benchmarks.throughput.processes import Caches, stock_environment
from benchmarks.throughput.sides import Setup, missing
from benchmarks.throughput.turns import Turns
from benchmarks.throughput.workloads import WORKLOADS
from coalesce.configuration import rides
from coalesce.engine import lanes as engine_lanes
from coalesce.engine.lanes import Lanes
from coalesce.engine.template import Template
from coalesce.experiment import group

Call = Callable[[], object]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--device", "cuda"], "sees no CUDA device; cpu is always there"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--graphs"], "--graphs: needs --device cuda"),
        (["--turns", "f", "--curve"], "--turns: takes one task"),
        (["--turns", "f", "--task", "all"], "--turns: takes one task"),
        (["--turns", "f", "--lanes", "1", "2"], "--turns: takes one task"),
    ],
)
def test_what_does_not_fit_is_refused(
    given: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.parse(given)
    assert named in capsys.readouterr().err


def small_lanes() -> Lanes:
    """Two lanes of a small task, operation by operation."""
    experiments, _ = WORKLOADS["digits"].experiments()
    (cohort,) = group(experiments[:2], rides)
    found = Lanes(Template(cohort), 2, compile=False)
    for lane, experiment in enumerate(experiments[:2]):
        found.fill(lane, experiment)
    return found


def test_a_step_that_is_replayed_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a recorder that keeps the call: whatever a replay reads must be what the recorded call was given."""
    plain = small_lanes()
    plain.advance(5)
    recorded: list[Call] = []

    def warm(call: Call) -> None:
        call()

    def record(call: Call) -> Callable[[], None]:
        recorded.append(call)

        def replay() -> None:
            call()

        return replay

    monkeypatch.setattr(replayed.Replayed, "recorder", (warm, record))
    monkeypatch.setattr(engine_lanes, "Tape", engine_lanes.Tape)
    replayed.install()
    ours = small_lanes()
    ours.advance(2)
    ours.advance(3)
    assert len(recorded) == 1
    for name, value in plain.state.items():
        torch.testing.assert_close(ours.state[name], value, rtol=0, atol=0, equal_nan=True)
    # state that lies elsewhere: what was recorded does not write there
    before = {name: value.clone() for name, value in ours.state.items()}
    ours._whole = ours.state = {name: value.clone() for name, value in ours.state.items()}
    plain.advance(3)
    ours.advance(3)
    assert len(recorded) == 2
    assert not torch.equal(ours.state["lane/step"], before["lane/step"])
    for name, value in plain.state.items():
        torch.testing.assert_close(ours.state[name], value, rtol=0, atol=0, equal_nan=True)


COMMAND = """
import sys, time
from itertools import pairwise
from pathlib import Path
from benchmarks.throughput.turns import Turns

path, prepare_s, patience_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
turns = Turns(path, patience_s)
print("began", flush=True)
sys.stdin.readline()
time.sleep(prepare_s)
ready = time.monotonic()
with turns.measuring():
    started = time.monotonic()
    time.sleep(0.3)
    ended = time.monotonic()
print(ready, started, ended, int(turns.quiet))
"""


def commands(path: Path, prepare_s: list[float], patience_s: float) -> list[list[float]]:
    """When each of some commands was ready, began and ended to measure; and whether nobody prepared meanwhile."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(path), str(seconds), str(patience_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=stock_environment(),
            text=True,
        )
        for seconds in prepare_s
    ]
    for one in running:
        assert one.stdout is not None
        assert one.stdout.readline() == "began\n"
    for one in running:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    return [[float(word) for word in one.communicate()[0].split()] for one in running]


def test_commands_measure_one_after_the_other_when_all_are_ready(tmp_path: Path) -> None:
    found = commands(tmp_path / "turns", [0.0, 0.2, 1.0], 60)
    assert all(quiet for *_, quiet in found)
    assert min(started for _, started, _, _ in found) >= max(ready for ready, *_ in found)
    spans = sorted((started, ended) for _, started, ended, _ in found)
    assert all(after[0] >= before[1] for before, after in pairwise(spans))


def test_a_command_that_hangs_is_not_waited_for_longer_than_there_is_patience(tmp_path: Path) -> None:
    found = commands(tmp_path / "turns", [0.0, 0.0, 3.0], 1.0)
    assert [quiet for *_, quiet in found] == [0, 0, 1]
    hung = found.pop()
    assert all(ended < hung[0] for _, _, ended, _ in found)
    first, second = sorted((started, ended) for _, started, ended, _ in found)
    assert second[0] >= first[1]


def test_alone_nobody_is_waited_for() -> None:
    turns = Turns(None, 0)
    with turns.measuring():
        pass
    assert turns.quiet is None


def test_what_is_done_between_two_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA several steps and one wait; on the CPU every step."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))

    def step() -> None:
        done.append("step")

    assert Place().turn(step, 3) == (step, 1)
    call, steps = Place("cuda").turn(step, 3)
    call()
    assert (steps, done) == (3, ["step", "step", "step", "wait"])


def test_on_cuda_plain_loops_have_one_number_of_threads_and_graphs_too(tmp_path: Path) -> None:
    how = tmp_path, Caches(tmp_path), 16, (1, 6)
    on_cpu, on_cuda = Setup(*how), Setup(*how, place=Place("cuda"))
    assert ([on_cpu.threads(1), on_cpu.threads(6)], [on_cuda.threads(1), on_cuda.threads(6)]) == ([16, 2], [2, 2])
    assert (on_cpu.kinds, on_cuda.kinds) == (["eager", "compiled"], ["eager", "compiled", "reduce-overhead"])
    assert (len(on_cpu.policies), len(on_cuda.policies)) == (2, 1)


def test_jax_is_left_out_where_it_would_compute_otherwise() -> None:
    assert "not in bfloat16" in missing("jax", sys.executable, precision="bfloat16")
