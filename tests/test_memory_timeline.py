"""The allocations of a step, and what each was for.

Oracle: the allocator's own total, which the profiler notes beside every event; the tensors that a plain step is known
to hold, counted by their shapes; and, of the bookkeeping, events written by hand.
"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

from coalesce.engine import pieces
from coalesce.memory.modes import CLASSES, Coalesced, Eager, Mode, Size
from coalesce.memory.timeline import (
    ACTIVATION,
    CATEGORIES,
    GRADIENT,
    INPUT,
    OPTIMIZER_STATE,
    PARAMETER,
    TEMPORARY,
    Allocation,
    Note,
    Recorder,
    Timeline,
    _timeline,
    read_trace,
    torch_export,
)

CPU = torch.device("cpu")
SIZE = Size(layers=3, features=48, batch=16)
LAYER = 4 * SIZE.features * (SIZE.features + 1)
PARAMETERS = SIZE.layers * LAYER + 4 * CLASSES * (SIZE.features + 1)


def recorded(mode: Mode, steps: int = 2) -> Timeline:
    for _ in range(2):
        mode.step()
    recorder = Recorder(mode.known, CPU)
    with recorder.recording():
        for _ in range(steps):
            mode.record(recorder)
    return recorder.timeline()


def assert_sums_to_what_is_live(timeline: Timeline) -> None:
    """All categories together are, at every moment, what torch's own allocator counts, and nothing is left over."""
    total = timeline.total()
    assert [now - total[0] for now in total] == timeline.seen_bytes
    assert len(total) > 50
    assert timeline.unknown == 0
    assert total[-1] == total[0]
    assert timeline.allocations == timeline.frees > 0
    assert all(min(values) >= 0 for values in timeline.bytes.values())
    assert timeline.time_ms == sorted(timeline.time_ms)


@pytest.mark.parametrize("hook", [False, True])
def test_what_rests(hook: bool) -> None:
    timeline = recorded(Eager(SIZE, CPU, hook=hook))
    assert_sums_to_what_is_live(timeline)
    assert set(timeline.bytes[PARAMETER]) == {PARAMETERS}
    # two moments and a 4-byte counter of steps per tensor
    assert set(timeline.bytes[OPTIMIZER_STATE]) == {2 * PARAMETERS + 4 * 2 * (SIZE.layers + 1)}
    assert set(timeline.bytes[INPUT]) == {SIZE.batch * (4 * SIZE.features + 8)}


def test_a_plain_loop_holds_every_gradient_at_once() -> None:
    timeline = recorded(Eager(SIZE, CPU))
    assert max(timeline.bytes[GRADIENT]) == PARAMETERS


def test_under_the_hook_no_two_layers_gradients_are_there() -> None:
    timeline = recorded(Eager(SIZE, CPU, hook=True))
    assert 4 * SIZE.features**2 <= max(timeline.bytes[GRADIENT]) <= LAYER


@pytest.mark.parametrize("hook", [False, True])
def test_activations_are_what_the_forward_pass_keeps(hook: bool) -> None:
    """Every layer's output, and of the head's the logarithms; the loss and the sum of its weights. BackProp holds the
    model's output as well, from which it will walk back."""
    timeline = recorded(Eager(SIZE, CPU, hook=hook))
    kept = 4 * SIZE.batch * (SIZE.layers * SIZE.features + (1 + hook) * CLASSES) + 2 * 4
    assert max(timeline.bytes[ACTIVATION]) == kept
    # AdamW without foreach: at least one tensor as large as the parameter, for its denominator
    assert max(timeline.bytes[TEMPORARY]) >= 4 * SIZE.features**2


def test_lanes_by_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operation by operation; cut, as a large model is. What crosses a cut is told by the graph."""
    monkeypatch.setattr(pieces, "LARGE_BYTES", 0)
    monkeypatch.setattr(pieces, "SHARE", 0.4)
    width = 2
    mode = Coalesced(SIZE, CPU, width=width, compile=False)
    timeline = recorded(mode)
    assert len(mode.lanes._steps[SIZE.batch][0].segments) > 2 * SIZE.layers
    assert_sums_to_what_is_live(timeline)
    assert set(timeline.bytes[PARAMETER]) == {width * PARAMETERS}
    assert timeline.bytes[OPTIMIZER_STATE][0] >= 2 * width * PARAMETERS
    rest, most = timeline.bytes[INPUT][0], max(timeline.bytes[INPUT])
    # each lane gathers its own batch, and keeps it for the first layer's gradient
    assert most - rest >= width * SIZE.batch * 4 * SIZE.features
    activation = max(timeline.bytes[ACTIVATION])
    assert activation >= width * SIZE.batch * 4 * (SIZE.layers - 1) * SIZE.features
    assert activation < 2 * width * SIZE.batch * 4 * SIZE.layers * SIZE.features


def test_the_trace_has_the_allocations_of_known_tensors() -> None:
    """What the reading of the profiler's trace stands on: a torch that exports it otherwise fails here."""
    with profile(profile_memory=True) as found:
        first = torch.ones(1000)
        second = torch.ones(3, 1000)
        address = second.untyped_storage().data_ptr()
        del first
    allocations, ranges = read_trace(found, CPU)
    assert [a.bytes for a in allocations] == [4000, 12000, -4000]
    assert allocations[1].address == address
    assert [a.total_bytes - allocations[0].total_bytes for a in allocations] == [0, 12000, 8000]
    assert ranges == []


def test_a_failure_inside_the_export_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("no such device")

    monkeypatch.setattr(profile, "export_memory_timeline", fails, raising=False)
    why = torch_export(lambda: None, tmp_path / "plain.raw.json.gz", CPU)
    assert why.endswith("AssertionError: no such device")


def test_torch_s_own_export_has_the_same_bytes(tmp_path: Path) -> None:
    mode = Eager(SIZE, CPU)
    mode.step()
    path = tmp_path / "plain.raw.json.gz"
    assert torch_export(mode.step, path, CPU) == ""
    events = json.loads(gzip.decompress(path.read_bytes()))
    # actions, as torch numbers them from 1 on: there before, created, written, freed
    freed = sum(-size for _, action, size, _ in events if action == 4)
    timeline = recorded(mode, steps=1)
    total = timeline.total()
    assert freed == sum(max(0, a - b) for a, b in pairwise(total))


def test_a_torch_without_the_export_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(profile.__mro__[1], "export_memory_timeline")
    assert "has no export_memory_timeline" in torch_export(lambda: None, tmp_path / "plain.raw.json.gz", CPU)
    assert list(tmp_path.iterdir()) == []


def test_recording_changes_no_number_of_allocations() -> None:
    """Notes, spans and marks allocate nothing themselves, and no gradient is copied because somebody looks on."""
    mode = Eager(SIZE, CPU)
    for _ in range(2):
        mode.step()
    with profile(profile_memory=True) as found:
        mode.step()
    allocations, _ = read_trace(found, CPU)
    assert sum(a.bytes > 0 for a in allocations) == recorded(mode, steps=1).allocations


def events(*changes: tuple[int, int]) -> list[Allocation]:
    """Allocations (address, bytes) at 10, 20, … µs."""
    total, found = 0, []
    for i, (address, size) in enumerate(changes):
        total += size
        found.append(Allocation(10.0 * (i + 1), address, size, total))
    return found


def note(number: int, start: float, end: float) -> tuple[str, float, float]:
    return f"coalesce.memory/{number}", start, end


def after(allocations: list[Allocation], notes: list[Note], ranges: list[Any], exact: bool = True) -> dict[str, Any]:
    """The categories that are not empty, behind each event."""
    timeline = _timeline({1: (100, PARAMETER)}, notes, allocations, ranges, exact)
    assert list(timeline.bytes) == list(CATEGORIES)
    return {name: values[1:] for name, values in timeline.bytes.items() if any(values)}


def test_what_a_span_keeps_and_what_it_does_not() -> None:
    notes = [Note(TEMPORARY, kept=ACTIVATION)]
    found = after(events((7, 10), (8, 20), (8, -20), (7, -10)), notes, [note(0, 5, 35)])
    assert found == {PARAMETER: [100] * 4, ACTIVATION: [10, 10, 10, 0], TEMPORARY: [0, 20, 0, 0]}


def test_an_optimizer_s_step_inside_a_span() -> None:
    notes = [Note(GRADIENT)]
    ranges = [note(0, 5, 45), ("coalesce.memory/update", 15, 35)]
    found = after(events((7, 10), (8, 20), (8, -20), (9, 5)), notes, ranges)
    assert found == {PARAMETER: [100] * 4, GRADIENT: [10, 10, 10, 15], TEMPORARY: [0, 20, 0, 0]}


def test_an_address_that_is_used_again_is_another_block() -> None:
    notes = [Note(ACTIVATION, address=7), Note(GRADIENT, address=7)]
    found = after(events((7, 10), (7, -10), (7, 20)), notes, [note(0, 12, 13), note(1, 35, 36)])
    assert found == {PARAMETER: [100] * 3, ACTIVATION: [10, 0, 0], GRADIENT: [0, 0, 20]}


def test_a_mark_holds_against_the_end_of_its_span() -> None:
    notes = [Note(TEMPORARY, kept=ACTIVATION), Note(GRADIENT, address=7)]
    found = after(events((7, 10), (8, 1)), notes, [note(0, 5, 35), note(1, 12, 13)])
    assert found == {PARAMETER: [100] * 2, ACTIVATION: [0, 1], GRADIENT: [10, 10]}


def test_what_was_there_before_may_go() -> None:
    assert after(events((1, -100), (7, 10)), [], []) == {PARAMETER: [0, 0], TEMPORARY: [0, 10]}


@pytest.mark.parametrize(("size", "exact", "gradient"), [(64, True, True), (65, True, False), (512, False, True)])
def test_a_gradient_is_known_by_its_size(size: int, exact: bool, gradient: bool) -> None:
    """On CUDA, blocks are rounded up."""
    notes = [Note(TEMPORARY, gradients=frozenset([64]))]
    found = after(events((7, size), (8, 1)), notes, [note(0, 5, 15)], exact)
    assert found[GRADIENT if gradient else TEMPORARY][0] == size


def test_a_free_of_what_nobody_knows_is_counted() -> None:
    timeline = _timeline({}, [], events((7, -10)), [], exact=True)
    assert (timeline.unknown, timeline.frees, timeline.allocations) == (1, 1, 0)


def test_tied_tensors_count_once() -> None:
    weight = nn.Parameter(torch.ones(8))
    assert Recorder({PARAMETER: [weight, weight.view(2, 4)], OPTIMIZER_STATE: [weight]}, CPU).known == {
        weight.untyped_storage().data_ptr(): (32, PARAMETER)
    }
