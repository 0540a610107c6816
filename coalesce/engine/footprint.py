"""What lanes take of their device's memory while they step and while they are evaluated, measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch._C._profiler import _ExperimentalConfig

from coalesce.engine.lanes import Lanes


def peak_above_rest(lanes: Lanes, splits: Iterable[str]) -> int:
    """The most bytes above the stacked state, in one step and in the largest part of an evaluation.

    Traces what was not traced yet. The lanes are moved, and are of no further use to an experiment.

    Args:
        lanes: operation by operation. Compiled, most steps take less, since what is fused is never made.
        splits: those that are evaluated.
    """
    lanes.fill(0, lanes.template.experiment)
    lanes.prepare_step()
    peaks = [peak(partial(lanes.advance, 1), lanes.device)]
    # the same metrics of another split take as much for each sample; samples of a lane's own are gathered besides
    largest: dict[bool, tuple[int, int, int, str]] = {}
    for split in splits:
        start, stop = max(lanes.parts(0, split), key=lambda part: part[1] - part[0])
        own = lanes.template.has_own(split)
        largest[own] = max(largest.get(own, (0, 0, 0, "")), (stop - start, start, stop, split))
    for _, start, stop, split in largest.values():
        lanes.prepare_evaluation(split)
        peaks.append(peak(partial(lanes.evaluate_samples, split, start, stop), lanes.device))
    return max(peaks)


def peak(call: Callable[[], object], device: torch.device | str) -> int:
    """The most bytes that torch's allocator had given out during a call, above what it had before.

    >>> peak(lambda: torch.zeros(1000) + torch.zeros(1000), "cpu")
    12000
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    most = now = 0
    for change in _changes(call):
        now += change
        most = max(most, now)
    return most


def _changes(call: Callable[[], object]) -> list[int]:
    """What the CPU's allocator, which keeps no mark of its peak, gave out and took back, in order.

    By torch's older profiler. The newer one gives the same, and writes to the standard error of the process whenever it
    begins and ends (torch 2.13); a `TorchDispatchMode` does not see what an operation takes for itself, of which a
    convolution takes much.
    """
    from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy

    # with memory; without shapes, stacks, FLOPs and modules
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        # what it returns is freed before the recording ends
        call()
    finally:
        threads = _disable_profiler_legacy()
    # torch's annotation of `kind` is wrong: it is the event's name
    return [e.cpu_memory_usage() for events in threads for e in events if str(e.kind()) == "memory_alloc"]
