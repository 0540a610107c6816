"""Convolutions whose channels come last: kernels of the library that a plain eager loop on the CPU seldom uses.

Some of them write beyond their memory (see `lowerings`). Oracle: the same convolution with channels in front, and the
C library's own look at the heap whenever memory is given back.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("channels_last_child.py")


@pytest.mark.parametrize("instructions", ["", "AVX2"])
@pytest.mark.parametrize(("seed", "count"), [(0, 60), *(pytest.param(n, 600, marks=pytest.mark.slow) for n in (1, 2))])
def test_no_kernel_writes_beyond_its_memory(instructions: str, seed: int, count: int) -> None:
    if instructions and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{instructions} are instructions of another processor")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if instructions:
        environment |= {"ONEDNN_MAX_CPU_ISA": instructions}
    if platform.system() == "Linux":
        environment |= {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
    command = [sys.executable, str(CHILD), str(seed), str(count)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    # of the C library's look at the heap
    assert "cannot be preloaded" not in child.stderr, child.stderr
    told = child.stdout.splitlines()
    assert (child.returncode, told[-1]) == (0, "all"), f"{told[-1]}\n{child.stderr[-2000:]}"
