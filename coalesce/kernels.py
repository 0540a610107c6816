"""Matrix products whose result does not depend on where in memory a lane lies.

oneMKL picks its kernel for each matrix of a batch by the matrix's alignment. Lanes of odd sizes lie at different
alignments, so that equal lanes differ in the last bit. Its "conditional numerical reproducibility" in strict mode takes
the alignment out of the choice, and costs nothing that can be measured (`python -m benchmarks.kernels`).
"""

from __future__ import annotations

import functools
import os

import torch

#: The environment variable that oneMKL reads at its first call, and what is asked of it.
VARIABLE, STRICT = "MKL_CBWR", "AUTO,STRICT"

#: Sizes (B, D, H) of which no matrix fills whole cache lines.
_PROBES = ((33, 17, 10), (17, 33, 3), (5, 7, 9))


def request() -> None:
    """Ask for strict kernels, unless the user asked for something. In vain if a product was computed before."""
    os.environ.setdefault(VARIABLE, STRICT)


@functools.cache
def lanes_agree() -> bool:
    """Whether equal lanes give equal products on the CPU of this process, tried on some odd sizes."""
    for rows, inner, columns in _PROBES:
        left = torch.linspace(-1, 1, rows * inner).sin().view(rows, inner)
        right = torch.linspace(-1, 1, inner * columns).cos().view(columns, inner)
        lanes = torch.bmm(left.repeat(8, 1, 1), right.repeat(8, 1, 1).transpose(1, 2))
        if not (lanes == lanes[0]).all():
            return False
    return True
