"""What a step takes: time, peak memory, the allocator's counters, and whether it does what a plain loop does.

**Peak above rest.** On CUDA the allocator's own high-water mark (`torch.cuda.max_memory_allocated`, reset before). On
the CPU there is no such mark; the kernel's for the whole process is taken (VmHWM, reset by writing to ``clear_refs``),
so that every figure needs a process of its own. `alone` starts it with ``MALLOC_MMAP_THRESHOLD_`` set: by default glibc
keeps what is freed, and the mark reads 0 for anything. The mark sees everything, libraries' own memory too.

**Time** is the median of some steps, with nothing recorded meanwhile; on CUDA the device is waited for around each.
"""

from __future__ import annotations

import copy
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coalesce.memory.modes import MODES, PARAMETER, Mode, Size, Stack, seeded_model
from coalesce.memory.timeline import CATEGORIES, Recorder, torch_export

#: Steps that are compared with a plain loop's; before anything is measured; that are timed; during which the peak is
#: watched; that are recorded.
COMPARED, WARM, TIMED, WATCHED, RECORDED = 3, 2, 10, 3, 2

#: Environment of a process whose memory on the CPU can be read.
READABLE = {"MALLOC_MMAP_THRESHOLD_": "65536"}

#: A gigabyte, as in the JSON's ``gb``.
GB = 10**9


def resident_bytes(key: str) -> int | None:
    """A figure of this process's memory, VmRSS or VmHWM; None where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), None)


def peak(step: Callable[[], object], steps: int = WATCHED, device: torch.device | str = "cpu") -> int | None:
    """The rise of memory above its rest during some steps, in bytes. Warm up before.

    Returns:
        On the CPU a figure of the whole process, see above; None where the system does not tell it.
    """
    gc.collect()
    device = torch.device(device)
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        rest = torch.cuda.memory_allocated(device)
        for _ in range(steps):
            step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - rest
    before, clear = resident_bytes("VmRSS"), Path("/proc/self/clear_refs")
    if before is None or not clear.exists():
        return None
    # the mark falls back to what is resident now
    clear.write_text("5")
    for _ in range(steps):
        step()
    after = resident_bytes("VmHWM")
    return None if after is None else after - before


def alone(command: Sequence[str], environment: Mapping[str, str] = READABLE) -> str:
    """Run a Python command in a process of its own, by default so set up that its memory can be read.

    Args:
        command: behind the interpreter, such as ``["-m", "coalesce.memory"]``.
        environment: what is added to this process's.

    Returns:
        What it printed.

    Raises:
        RuntimeError: it failed; with what it wrote to stderr.
    """
    whole = os.environ | dict(environment)
    done = subprocess.run([sys.executable, *command], env=whole, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def synchronize(device: torch.device) -> None:
    """Wait for a device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(mode: Mode, size: Size, device: torch.device) -> dict[str, Any]:
    """Take the mode's first steps and compare every experiment's updates with those of a plain loop.

    Returns:
        ``updates_apart``: the norm of the difference of what became of the parameters, over the norm of their change,
        of the worst experiment. ``rounding_apart``: the same of the plain loop itself, when it takes the samples of
        every batch in reverse: the same sums, rounded otherwise. ``updates_equal``: whether all are equal, bit for bit.

    A few entries make most of it: AdamW divides a gradient by its own size, and so makes as large a change of one that
    is nothing but rounding.
    """
    for _ in range(COMPARED):
        mode.step()
    task = Stack(**asdict(size))
    apart, equal = 0.0, True
    for lane in range(mode.width):
        batches = [tuple(leaf.to(device) for leaf in mode.batch(lane, step)) for step in range(COMPARED)]
        start = seeded_model(task, lane).to(device)
        plain = _trained(task, start, batches)
        found = mode.parameters(lane)
        apart = max(apart, _apart(found, plain, start))
        equal = equal and all(torch.equal(found[n], p) for n, p in plain.items())
    turned = _trained(task, start, [tuple(leaf.flip(0) for leaf in batch) for batch in batches])
    return {"updates_apart": apart, "updates_equal": equal, "rounding_apart": _apart(turned, plain, start)}


def _trained(task: Stack, start: nn.Module, batches: Sequence[Any]) -> dict[str, Tensor]:
    """What a plain loop makes of a model's parameters; of a copy of them."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def _apart(found: Mapping[str, Tensor], plain: Mapping[str, Tensor], start: nn.Module) -> float:
    difference = sum(float((found[n] - p).square().sum()) for n, p in plain.items())
    change = sum(float((plain[n] - p.detach()).square().sum()) for n, p in start.named_parameters())
    return (difference / change) ** 0.5


def timed(mode: Mode, device: torch.device) -> dict[str, Any]:
    """``step_ms``: median, of one step of all experiments; ``best_step_ms``: of the fastest one; ``processor_ms``: the
    median of the host's processor time, of all threads, which other work on the machine changes less."""
    seconds, busy = [], []
    for _ in range(TIMED):
        synchronize(device)
        start, used = time.perf_counter(), time.process_time()
        mode.step()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - used)
    milliseconds = {
        "step_ms": statistics.median(seconds),
        "best_step_ms": min(seconds),
        "processor_ms": statistics.median(busy),
    }
    return {name: value * 1000 for name, value in milliseconds.items()}


def device_counters(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """What CUDA's allocator counts in some steps: blocks handed out and taken back, calls of cudaMalloc and cudaFree
    (all per step), and the pool that it has reserved."""
    if device.type != "cuda":
        return {}
    synchronize(device)
    before = torch.cuda.memory_stats(device)
    for _ in range(WATCHED):
        step()
    synchronize(device)
    after = torch.cuda.memory_stats(device)
    names = {
        "allocations_per_step": "allocation.all.allocated",
        "frees_per_step": "allocation.all.freed",
        "cuda_mallocs_per_step": "num_device_alloc",
        "cuda_frees_per_step": "num_device_free",
        "retries_per_step": "num_alloc_retries",
    }
    found = {name: (after.get(key, 0) - before.get(key, 0)) / WATCHED for name, key in names.items()}
    return found | {"reserved_bytes": after["reserved_bytes.all.current"]}


def record(mode: Mode, device: torch.device, raw: Path | None) -> dict[str, Any]:
    """Follow the allocations of some steps.

    Args:
        raw: where torch's own raw export goes, if it is wanted.
    """
    gc.collect()
    synchronize(device)
    recorder = Recorder(mode.known, device)
    with recorder.recording():
        for _ in range(RECORDED):
            mode.record(recorder)
            synchronize(device)
    timeline = recorder.timeline()
    # last: it holds what it should not
    missing = "not asked for" if raw is None else torch_export(mode.step, raw, device)
    return {
        "t": [round(t, 4) for t in timeline.time_ms],
        "gb": {category: [b / GB for b in timeline.bytes[category]] for category in CATEGORIES},
        "seen_gb": [b / GB for b in timeline.seen_bytes],
        "counters": {
            "allocations_per_step": timeline.allocations / RECORDED,
            "frees_per_step": timeline.frees / RECORDED,
            "unknown_frees_per_step": timeline.unknown / RECORDED,
        },
        "recorded_peak_bytes": timeline.peak_above_rest(),
        "raw_export_missing": missing,
    }


def measured(name: str, size: Size, device: torch.device, parts: Sequence[str], raw: Path | None) -> dict[str, Any]:
    """Everything about one mode, in this process.

    Args:
        parts: of "updates", "time", "peak" and "record". Recording may leave traces in the others, and so comes last.
    """
    mode = MODES[name](size, device)
    found: dict[str, Any] = compare(mode, size, device) if "updates" in parts else {}
    for _ in range(WARM):
        mode.step()
    gc.collect()
    if device.type == "cuda":
        # what the comparison took would count as the mode's reserved pool
        torch.cuda.empty_cache()
    parameter_bytes = sum(t.nbytes for t in mode.known[PARAMETER])
    found |= {"experiments": mode.width, "parameter_bytes": parameter_bytes, "counters": {}}
    if "time" in parts:
        found |= timed(mode, device)
    if "peak" in parts:
        rise = peak(mode.step, device=device)
        found["peak_bytes"] = rise
        found["peak_of_parameters"] = None if rise is None else rise / parameter_bytes
        found["counters"] = device_counters(mode.step, device)
    if "record" in parts:
        recorded = record(mode, device, raw)
        # the device's own, where both count: the recorder sees fewer steps
        recorded["counters"] |= found["counters"]
        found |= recorded
        found["recorded_peak_of_parameters"] = recorded["recorded_peak_bytes"] / parameter_bytes
    return found
