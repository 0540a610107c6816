"""What is asked of the libraries below torch, through the environment, before they are loaded.

oneMKL picks its kernel for each matrix of a batch by the matrix's alignment. Lanes of odd sizes lie at different
alignments, so that equal lanes differ in the last bit. Its "conditional numerical reproducibility" in strict mode takes
the alignment out of the choice, and costs nothing that can be measured (`python -m benchmarks.kernels`).

OpenMP's threads wait for each other by spinning. Where another process wants the same cores, each of the many short
loops of a small model's step then lasts until the system takes the core away from the one that spins. Waiting asleep
does without.

Nothing here imports torch at the top: it must be said before torch is loaded.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

#: The environment variable that oneMKL reads at its first call, and what is asked of it.
VARIABLE, STRICT = "MKL_CBWR", "AUTO,STRICT"

#: What OpenMP reads when it is loaded.
WAIT, PASSIVE = "OMP_WAIT_POLICY", "PASSIVE"

#: Sizes (B, D, H) of which no matrix fills whole cache lines.
_PROBES = ((33, 17, 10), (17, 33, 3), (5, 7, 9))


def request() -> None:
    """Ask, unless the user asked for something else. In vain for kernels if a product was computed before, and for
    threads if torch was imported before."""
    os.environ.setdefault(VARIABLE, STRICT)
    os.environ.setdefault(WAIT, PASSIVE)


request()


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
