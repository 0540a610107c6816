"""What strict kernels cost: batched matrix products under several settings of oneMKL's reproducibility.

    python -m benchmarks.kernels

Each setting is a process of its own, the processes take turns; best of the rounds, on one thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from coalesce import kernels

SETTINGS = ("unset", kernels.STRICT, "COMPATIBLE")
#: (K lanes, B, D, H)
SIZES = ((64, 64, 64, 64), (64, 64, 64, 10), (8, 512, 256, 256), (64, 17, 10, 33))
ROUNDS, CALLS = 3, 300


def gflops(lanes: int, rows: int, inner: int, columns: int) -> float:
    """The best rate of 10 rounds."""
    left, right = torch.randn(lanes, rows, inner), torch.randn(lanes, columns, inner).transpose(1, 2)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(CALLS // 10):
            torch.bmm(left, right)
        best = min(best, (time.perf_counter() - started) / (CALLS // 10))
    return 2 * lanes * rows * inner * columns / best / 1e9


def child() -> None:
    if os.environ[kernels.VARIABLE] == "unset":
        del os.environ[kernels.VARIABLE]
    torch.set_num_threads(1)
    print(kernels.lanes_agree(), *(gflops(*size) for size in SIZES))


def main() -> None:
    rates: dict[str, list[float]] = {setting: [0.0] * len(SIZES) for setting in SETTINGS}
    agree = {}
    for _ in range(ROUNDS):
        for setting in SETTINGS:
            command = [sys.executable, "-c", "from benchmarks.kernels import child; child()"]
            environment = os.environ | {kernels.VARIABLE: setting}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            agree[setting], *found = done.stdout.split()
            rates[setting] = [max(a, float(b)) for a, b in zip(rates[setting], found, strict=True)]
    table = Table("GFLOP/s (K, B, D, H)", *(str(size) for size in SIZES), "lanes agree")
    for setting in SETTINGS:
        table.add_row(setting, *(f"{rate:.0f}" for rate in rates[setting]), agree[setting])
    Console().print(table)


if __name__ == "__main__":
    main()
