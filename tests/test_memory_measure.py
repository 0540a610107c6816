"""The rulers of memory, and the comparison with a plain loop.

Oracle: tensors of known size in a process of its own; a plain loop of stock PyTorch, repeated, and with a fault put in.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coalesce.memory import measure
from coalesce.memory.modes import Coalesced, Eager, Size, Stack

CPU = torch.device("cpu")
SIZE = Size(layers=2, features=24, batch=16)

linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's high-water mark"
)

HOLDS = """
import torch
from coalesce.memory.measure import peak

def step():
    # 32 MB, and beside them 16 MB
    first = torch.ones(8_000_000)
    return (first[:4_000_000] + 1).sum()

step()
print(peak(step))
"""


@linux
def test_the_peak_of_a_known_step() -> None:
    rise = float(measure.alone(["-c", HOLDS]))
    # 1 MB for the interpreter's own comings and goings
    assert rise == pytest.approx(48e6, abs=1e6)


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"ended with 1:(.|\n)*ZeroDivisionError"):
        measure.alone(["-c", "1 / 0"])


def test_where_the_system_tells_nothing_there_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "resident_bytes", lambda key: None)
    assert measure.peak(lambda: None) is None


@pytest.mark.parametrize("hook", [False, True])
def test_eager_modes_do_what_a_plain_loop_does(hook: bool) -> None:
    found = measure.compare(Eager(SIZE, CPU, hook=hook), SIZE, CPU)
    assert found["updates_equal"]
    assert found["updates_apart"] == 0
    # float32 rounds at 6e-8; of an AdamW step, entries that are rounding alone may be off by their whole size
    assert 0 < found["rounding_apart"] < 1e-2


def test_lanes_do_what_plain_loops_do() -> None:
    """Each of its own seed and order of samples. As much apart as other orders of summation make it, and some times
    more: batched kernels, and a bias that is added apart."""
    found = measure.compare(Coalesced(SIZE, CPU, width=2, compile=False), SIZE, CPU)
    assert found["updates_apart"] < max(100 * found["rounding_apart"], 1e-5)


def test_a_wrong_update_shows() -> None:
    class Wrong(Eager):
        def step(self) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] = 1.01e-3
            super().step()

    found = measure.compare(Wrong(SIZE, CPU), SIZE, CPU)
    assert not found["updates_equal"]
    # a hundredth too large
    assert found["updates_apart"] == pytest.approx(0.01, rel=0.1)


def test_counters_of_cuda_s_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences per step, from whatever was counted before. The figures are made up: there is no device here."""
    calls: list[int] = []

    def memory_stats(device: torch.device) -> dict[str, int]:
        steps = len(calls)
        return {
            "allocation.all.allocated": 1000 + 7 * steps,
            "allocation.all.freed": 900 + 6 * steps,
            "num_device_alloc": 40 + steps,
            "num_device_free": 3,
            "num_alloc_retries": 0,
            "reserved_bytes.all.current": 2**30,
        }

    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert measure.device_counters(lambda: calls.append(0), torch.device("cuda", 0)) == {
        "allocations_per_step": 7,
        "frees_per_step": 6,
        "cuda_mallocs_per_step": 1,
        "cuda_frees_per_step": 0,
        "retries_per_step": 0,
        "reserved_bytes": 2**30,
    }
    assert measure.device_counters(lambda: None, CPU) == {}


@pytest.mark.parametrize("batch", [24, 10, 1])
def test_an_activation_may_not_look_like_a_parameter(batch: int) -> None:
    with pytest.raises(ValueError, match="an activation would be as large as a parameter of 24 features"):
        Stack(layers=2, features=24, batch=batch)
