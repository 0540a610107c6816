"""What is asked of the libraries below torch, through the environment, before they are loaded.

oneMKL picks its kernel for each matrix of a batch by the matrix's alignment. Lanes of odd sizes lie at different
alignments, so that equal lanes differ in the last bit. Its "conditional numerical reproducibility" in strict mode takes
the alignment out of the choice, and costs nothing that can be measured (`python -m benchmarks.kernels`).

OpenMP's threads wait for each other by spinning. Where another process wants the same cores, each of the many short
loops of a small model's step then lasts until the system takes the core away from the one that spins. Waiting asleep
does without, but waking takes as long as such a loop: so they spin for a little while, and then sleep.

glibc gives memory at the end of its heap back to the system when it is freed, and gets every large block from there. A
step frees what it allocates, so that the next one is given new pages, of which each is a fault and is filled with
zeros first. What a process that compiles steps has freed stays with it instead. Threads get their memory from the same
heap, since what they free of heaps of their own is given back whatever is asked.

Nothing here imports torch at the top: it must be said before torch is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

#: The environment variable that oneMKL reads at its first call, and what is asked of it.
VARIABLE, STRICT = "MKL_CBWR", "AUTO,STRICT"

#: What OpenMP reads when it is loaded; and GNU's, which torch's wheels bring along, how often a thread looks before it
#: sleeps: long enough for most of a step's waits, and short beside what the system takes to wake it
#: (`python -m benchmarks.step --threads 2 --env GOMP_SPINCOUNT=0 GOMP_SPINCOUNT=30000`).
WAIT, PASSIVE = "OMP_WAIT_POLICY", "PASSIVE"
SPIN, LOOKS = "GOMP_SPINCOUNT", "3000"

#: Parameters of glibc's mallopt, by their numbers in malloc.h: from how many free bytes on the heap's end goes back, by
#: how many it grows beyond what is asked for, how many blocks come straight from the system, and how many heaps there
#: are.
_MALLOC = {
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),
    "M_TOP_PAD": (-2, 2**26),
    "M_MMAP_MAX": (-4, 0),
    "M_ARENA_MAX": (-8, 1),
}

#: How exactly products of float32 are computed, by torch's names: in float32, or as much faster as the device can.
PRECISIONS = (EXACT := "highest", "high", "medium")

#: Sizes (B, D, H) of which no matrix fills whole cache lines.
_PROBES = ((33, 17, 10), (17, 33, 3), (5, 7, 9))


def request() -> None:
    """Ask, unless the user asked for something else. In vain for kernels if a product was computed before, and for
    threads if torch was imported before."""
    os.environ.setdefault(VARIABLE, STRICT)
    if WAIT not in os.environ:
        os.environ[WAIT] = PASSIVE
        os.environ.setdefault(SPIN, LOOKS)


request()


@functools.cache
def keep_memory() -> bool:
    """Have memory that is freed stay with this process, where glibc is and the user asked it for nothing himself.

    Returns:
        Whether it does.
    """
    asked = any(name.startswith("MALLOC_") for name in os.environ)
    if asked or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    set_parameter = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    return set_parameter is not None and all(set_parameter(*pair) == 1 for pair in _MALLOC.values())


def give_back() -> None:
    """Give the system back what was freed and is kept, where glibc is."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


@functools.cache
def lanes_agree() -> bool:
    """Whether equal lanes give equal products on the CPU of this process, tried on some odd sizes."""
    import torch

    for rows, inner, columns in _PROBES:
        left = torch.linspace(-1, 1, rows * inner).sin().view(rows, inner)
        right = torch.linspace(-1, 1, inner * columns).cos().view(columns, inner)
        lanes = torch.bmm(left.repeat(8, 1, 1), right.repeat(8, 1, 1).transpose(1, 2))
        if not (lanes == lanes[0]).all():
            return False
    return True


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run with a number of CPU threads; None: with as many as there are."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def precision() -> str | None:
    """How exactly this process computes products of float32; None: it was set for single backends, and has no name."""
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def backends() -> tuple[str, ...]:
    """What `precision` stands for, of each backend by itself. Compiled code may depend on it."""
    return tuple(backend.fp32_precision for backend in _backends())


def _backends() -> list[Any]:
    import torch

    # torch does not declare its own attribute
    oneDNN: Any = torch.backends.mkldnn
    return [torch.backends.cuda.matmul, oneDNN.matmul]


@contextmanager
def products(name: str) -> Iterator[None]:
    """Run with products of float32 as exact as one of `PRECISIONS` says; afterwards all is as it was.

    Compiled code follows as far as it calls products, which look at every call. Convolutions have settings of their
    own.
    """
    import torch

    named, each = precision(), backends()
    if named != name:
        torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(named or EXACT)
        for backend, before in zip(_backends(), each, strict=True):
            backend.fp32_precision = before


@contextmanager
def arithmetic(count: int | None, name: str) -> Iterator[None]:
    """`threads` and `products`: what a run has asked for, and what its numbers depend on."""
    with ExitStack() as stack:
        stack.enter_context(threads(count))
        stack.enter_context(products(name))
        yield


@functools.cache
def less_exact(name: str, device: str) -> bool:
    """Whether a device multiplies less exactly at a precision: tried on a product of lanes, large enough for torch to
    choose freely how. In another order of its sums it may do so all the same."""
    import torch

    left = torch.linspace(-1, 1, 2 * 128 * 64, device=device).sin().view(2, 128, 64)
    right = torch.linspace(-1, 1, 2 * 64 * 128, device=device).cos().view(2, 64, 128)
    found = []
    for one in (EXACT, name):
        with products(one):
            found.append(torch.bmm(left, right))
    # float32 keeps 24 bits of a factor, TF32 11, bfloat16 8
    return float((found[0] - found[1]).abs().max()) > 1e-5 * float(found[0].abs().max())
