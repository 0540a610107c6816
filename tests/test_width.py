"""How many lanes there is memory for: what a lane takes, what is chosen, and runs that must make do with less.

Oracle: the memory that torch's newer profiler sees; the lanes' own tensors; the same experiments where memory does not
matter. The toy network is the same bits at every width, operation by operation (law 1 promises that at equal
widths alone).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from coalesce.configuration import rides
from coalesce.engine import shares
from coalesce.engine.footprint import peak, peak_above_rest
from coalesce.engine.lanes import Lanes
from coalesce.engine.template import Template
from coalesce.errors import ConfigError
from coalesce.runner import memory, planning
from coalesce.runner.listener import Result
from coalesce.runner.plan import Plan
from coalesce.runner.planning import make_plan
from coalesce.runner.run import run
from coalesce.runner.width import GIB, MARGIN, NEAR, Footprint, Room, estimate, fitting
from coalesce.store.frames import results_frame
from coalesce.store.plans import plan_from_json, plan_json
from runner_helpers import Net, Recorder, planned

KIB = 1024

#: Ten experiments (case 27) of a network whose activations weigh more than its state.
TEN: dict[str, Any] = {
    "params": {"seed": range(5), "optimizer.lr": [0.05, 0.2]},
    "arguments": {"hidden": 256},
    "batch_size": 64,
    "optimizer": {"name": "sgd", "momentum": 0.9},
}


@cache
def template_of(batch_size: int = 64) -> Template:
    """Of the ten."""
    template: Template = plan_of(batch_size=batch_size).cohorts[0].template
    return template


def plan_of(**options: Any) -> Plan:
    """Ten experiments, planned without the trace that a run makes again."""
    with patch.object(planning, "_check_traces"):
        return planned(Net, **{**TEN, **options})


def outcome(results: Sequence[Result]) -> dict[str, str]:
    found = {}
    for r in results:
        weights = {n: t.tolist() for w in (r.weights, r.best_weights) if w for n, t in w.items()}
        found[r.experiment.id] = str((r.status, r.steps, dict(r.metrics), dict(r.best), r.best_step, weights))
    return found


# what a lane takes


def test_the_peak_is_what_is_there_at_once() -> None:
    def call() -> torch.Tensor:
        first, second = torch.empty(100 * KIB), torch.empty(100 * KIB)
        view = second[3:]
        del first, second
        third = torch.empty(50 * KIB)
        # the second is still there, since a view of it is
        return third + view[0]

    assert peak(call, "cpu") == pytest.approx(4 * 200 * KIB, abs=100)
    assert peak(lambda: None, "cpu") == 0


def test_the_newer_profiler_sees_the_same_peak() -> None:
    """A convolution takes memory for itself, which operators do not show."""
    x, weight = torch.randn(4, 32, 100), torch.randn(32, 8, 5, requires_grad=True)

    def call() -> None:
        torch.autograd.grad(torch.conv1d(x, weight, groups=4).tanh().sum(), weight)

    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert peak(call, "cpu") == most > 3 * 4 * 32 * 96 * 4


def test_lanes_take_in_proportion_to_their_number() -> None:
    two, four = (peak_above_rest(Lanes(template_of(), n, compile=False), ("val",)) for n in (2, 4))
    assert four == pytest.approx(2 * two, rel=0.01)
    # an evaluation of many samples may take more than a step of few
    lanes = Lanes(template_of(1), 2, compile=False)
    assert peak_above_rest(lanes, ()) < 2 * 20 * 256 * 4 <= peak_above_rest(lanes, ("val",))


def test_what_is_kept_beside_a_lane_counts() -> None:
    # with BatchNorm's statistics, which no optimiser has state of
    plan = plan_of(arguments={"hidden": 256, "splits": "train val test", "norm": True})
    template = plan.cohorts[0].template
    lanes = Lanes(template, 2, compile=False)
    state = lanes.bytes / 2
    lanes.keep([0, 1])
    best = sum(t.nbytes for n, t in lanes._best.items() if n not in ("lane/key", "lane/step")) / 2
    found = estimate(template, plan.trainer)
    # but for the hyperparameters and counters of a lane
    assert found.state == pytest.approx(state, abs=200)
    assert found.best == best
    assert found.per_lane == 2 * (found.state + best) + max(found.rise, found.state + best)
    alone = estimate(template, replace(plan.trainer, snapshot_minutes=None))
    assert alone.per_lane == found.state + best + found.rise
    # on CUDA the snapshots lie elsewhere
    assert estimate(template, replace(plan.trainer, device="cuda")) == alone
    # nobody asks for the best state where there is neither a test split nor a folder
    others = plan_of(weights=False)
    assert estimate(others.cohorts[0].template, others.trainer).best == 0


def test_accumulated_gradients_count() -> None:
    once, twice = (
        estimate(p.cohorts[0].template, p.trainer)
        for p in (plan_of(optimizer={"name": "sgd", "accumulate": n}, batch_size=n * 4) for n in (1, 2))
    )
    weights = 4 * (256 * 4 + 256 + 256 + 1)
    assert twice.rise - once.rise == weights


@given(
    st.integers(1, 2**40), st.integers(0, 2**40), st.integers(1, 2**36), st.integers(0, 2**36), st.booleans(),
)  # fmt: skip
def test_what_fits_is_the_most_that_leaves_the_margin(
    room: int, shared: int, state: int, rise: int, snapshots: bool
) -> None:
    footprint = Footprint(state, state // 2, rise, shared, snapshots)
    most = footprint.fits(room)
    assert most == 0 or shared + most * footprint.per_lane <= (1 - MARGIN) * room * (1 + 1e-9)
    assert shared + (most + 1) * footprint.per_lane > (1 - MARGIN) * room * (1 - 1e-9)


# what is chosen


def test_where_memory_is_plenty_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*arguments: Any) -> None:
        raise AssertionError("two traces for nothing")

    monkeypatch.setattr(planning, "measure", measure)
    (cohort,) = plan_of().cohorts
    assert cohort.width == 10
    assert cohort.bytes_free is not None
    assert NEAR * cohort.bytes < cohort.bytes_free
    with pytest.raises(AssertionError, match="for nothing"):
        plan_of(memory_gib=0.99 * NEAR * cohort.bytes / GIB)


def test_a_width_that_was_asked_for_is_obeyed(caplog: pytest.LogCaptureFixture) -> None:
    (cohort,) = plan_of(width=8, memory_gib=5e-4).cohorts
    assert cohort.width == 8
    (record,) = caplog.records
    assert "trainer.width=8 takes about" in record.getMessage()
    assert "0.0005 GiB may be taken" in record.getMessage()
    caplog.clear()
    plan_of(width=8)
    assert not caplog.records


def test_less_than_one_lane_takes_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(memory_gib=1e-4)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("trainer.memory_gib", 1e-4)
    assert "too little for one lane, which takes about" in problem.rule
    for way in ("null", "batch_size", "trainer.evaluate_batch_size", "trainer.checkpoint=auto"):
        assert way in problem.valid
    # what is told as enough is enough, and not more than that
    least = float(problem.valid.split()[2].rstrip(","))
    (cohort,) = plan_of(memory_gib=least).cohorts
    assert cohort.width == 1
    assert cohort.bytes > 0.98 * (1 - MARGIN) * least * GIB


def test_all_that_is_free_is_tried_if_it_seems_too_little(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "limit_room", lambda: iter([50 * KIB]))
    assert plan_of().cohorts[0].width == 1
    assert "one lane and its data take about" in caplog.text


def test_lanes_that_cannot_be_measured_are_estimated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Lanes, count: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Lanes, "advance", full)
    cap = 5e-4
    plan = plan_of(memory_gib=cap)
    (cohort,) = plan.cohorts
    found = estimate(cohort.template, plan.trainer)
    assert cohort.bytes_per_lane == found.per_lane
    assert cohort.width == found.fits(int(cap * GIB))
    assert "2 lanes are too many to be measured" in caplog.text


@pytest.mark.parametrize(("compile", "width"), [(True, 4), (False, 5)])
def test_lanes_that_nobody_fills_take_memory_too(
    compile: bool, width: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Five compiled lanes on two threads are two shares of three."""
    monkeypatch.setattr(shares, "WORTH", 0)
    trainer = replace(plan_of().trainer, compile=compile, threads=2)
    footprint = Footprint(state=100, best=0, rise=100, shared=0)
    room = int(5.5 * footprint.per_lane / (1 - MARGIN))
    assert footprint.fits(room) == 5
    assert fitting(footprint, template_of(), 5, trainer, room) == width
    # who asks for them is warned
    assert fitting(footprint, template_of(), 5, replace(trainer, width=5), room) == 5
    assert ["trainer.width=5 takes about" in record.getMessage() for record in caplog.records] == [True] * compile


def test_lanes_that_are_there_at_once_share() -> None:
    plan = plan_of()
    twice = {"task.hidden": [256, 255], "seed": range(5)}
    both = plan_of(params=twice, arguments={"splits": "train val"}).experiments
    trainer = replace(plan.trainer, memory_gib=2.0)
    with patch.object(planning, "_check_traces"):
        apart, together = (make_plan("shared", [], both, rides, trainer, together=t) for t in (False, True))
    assert [c.bytes_free for c in apart.cohorts] == [2 * GIB] * 2
    assert [c.bytes_free for c in together.cohorts] == [GIB] * 2
    # on the CPU the data are there already; on CUDA they come
    assert Room(100).bytes(plan.trainer, 7) == 107
    assert Room(100).bytes(replace(plan.trainer, device="cuda"), 7) == 100
    assert Room(100, cap=50).bytes(plan.trainer, 7) == 50


# runs that make do with less


def test_a_sweep_in_pieces_is_the_same_sweep() -> None:
    options: dict[str, Any] = {"arguments": {"hidden": 256, "splits": "train val test"}, "steps": 10}
    small, plenty = plan_of(memory_gib=1.15e-3, **options), plan_of(**options)
    told, whole = Recorder(), Recorder()
    results = run(small, [told])
    expected = run(plenty, [whole])
    assert [c.width for c in plenty.cohorts] == [10]
    assert [c.width for c in small.cohorts] == [4]
    assert {r.width for r in results} == {4}
    assert outcome(told.results) == outcome(whole.results)
    assert [told.curve(e) for e in small.experiments] == [whole.curve(e) for e in small.experiments]
    # each once, and one graph for all
    assert len(told.results) == len({r.experiment.id for r in told.results}) == 10
    assert [what for _, what in told.compiled].count("step") == 1
    assert "narrowed" not in told.calls
    order = [e.id for e in small.experiments]
    frames = [results_frame(r, small.keys, order).drop(columns=["width", "seconds"]) for r in (results, expected)]
    assert list(frames[0]["experiment"]) == order
    assert frames[0].equals(frames[1])


class Snapshots(Recorder):
    """Takes a snapshot at each boundary and writes it, as a run folder does."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def snapshot(self, take: Any) -> None:
        from coalesce.store.snapshots import _storable

        _storable(take().tensors)


@pytest.mark.parametrize("batch_size", [1, 64])
def test_a_run_takes_no_more_than_it_may(tmp_path: Path, batch_size: int) -> None:
    """A small batch, where the state is what weighs, and a large one, where the activations do."""
    cap = {1: 4e-4, 64: 2e-3}[batch_size]
    plan = plan_of(memory_gib=cap, batch_size=batch_size, steps=10)
    assert 1 < plan.cohorts[0].width < 10
    most = peak(lambda: run(plan, [Snapshots(tmp_path)]), "cpu")
    assert 0.3 * cap * GIB < most <= cap * GIB


def test_what_was_decided_stays() -> None:
    plan = plan_of(memory_gib=1e-3, width=3)
    plan = replace(plan, trainer=replace(plan.trainer, width="auto"))
    read = plan_from_json(json.loads(json.dumps(plan_json(plan))))
    assert read.cohorts[0].bytes_free == int(1e-3 * GIB)
    # neither too little nor plenty changes it
    for cap in (1e-5, None):
        trainer = replace(plan.trainer, memory_gib=cap)
        with patch.object(planning, "_check_traces"):
            again = make_plan(plan.name, plan.keys, plan.experiments, rides, trainer, decided=read.cohorts)
        assert again.cohorts == plan.cohorts
        assert again.cohorts[0].template is not None


def wide() -> Plan:
    """Eight lanes with some 80 MiB of activations each."""
    options: dict[str, Any] = {"params": {"seed": range(8)}, "arguments": {"hidden": 2**16}, "batch_size": 64}
    return plan_of(**options, steps=2, width=8, every=2, evaluate_every=2, check=False, weights=False, threads=1)


#: A run whose width is twice what the process's own limit leaves room for.
_LIMITED = """
import gc, json, resource, sys
import psutil, torch
sys.path.insert(0, sys.argv[1])
import test_width
from coalesce.engine.footprint import peak_above_rest
from coalesce.engine.lanes import Lanes
from coalesce.runner.run import run
torch.set_num_threads(1)
plan = test_width.wide()
four = Lanes(plan.cohorts[0].template, 4, compile=False)
rise, state = peak_above_rest(four, ()), four.bytes
del four
gc.collect()
limit = psutil.Process().memory_info().vms + 2 * state + rise * 3 // 2
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
told = test_width.Recorder()
run(plan, [told])
print(json.dumps([test_width.outcome(told.results), [r.width for r in told.results], told.calls]))
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep to the limit")
def test_memory_that_really_does_not_suffice() -> None:
    """The process's own limit leaves room for four lanes and half as much again, and eight are asked for."""
    # what is freed goes back to the system at once, and threads reserve nothing
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}

    command = [sys.executable, "-c", _LIMITED, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, widths, calls = json.loads(done.stdout.splitlines()[-1])
    expected = run(wide(), [])
    assert ({*widths}, {r.width for r in expected}) == ({4}, {8})
    assert calls.count("narrowed") == 1
    assert found == outcome(expected)
    assert len(found) == 8
