"""The whole command `python -m coalesce sweep=lr_grid`, from typing it to its end, beside the same experiments as
ordinary PyTorch in 1, 2, 4 and 6 processes.

Plain PyTorch trains each experiment as the command does: as many steps, the loss recorded and the validation split
evaluated as often, the test split at the end, by the state that was best as well, and the results written to a file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.throughput.lr_grid_plain import EVERY
from benchmarks.throughput.processes import Process, SideFailed, stock_environment
from benchmarks.throughput.report import spread
from benchmarks.throughput.sides import Setup
from benchmarks.throughput.workloads import Workload
from coalesce import kernels
from coalesce.store.paths import RunPaths
from coalesce.store.read import runs_below
from coalesce.store.resume import reopen

ROOT = Path(__file__).parents[2]


def write_experiments(setup: Setup) -> Path:
    """Write down what experiments the command had, as its run folder tells."""
    folder = next(iter(runs_below(setup.folder / "runs")))
    path = setup.folder / "experiments.json"
    path.write_text(json.dumps([e.config for e in reopen(RunPaths(folder)).plan.experiments]))
    return path


def _wait(processes: Sequence[subprocess.Popen[bytes]], what: str, log: Path) -> None:
    for process in processes:
        if process.wait():
            raise SideFailed(f"{what} failed:\n{log.read_text()[-4000:]}")


def plain_s(count: int, setup: Setup, optimizer: dict[str, Any], experiments: Path) -> float:
    """Seconds that so many processes of plain PyTorch take."""
    environment = stock_environment() | ({kernels.WAIT: kernels.PASSIVE} if setup.passive else {})
    started = time.monotonic()
    log = setup.folder / "plain.log"
    with log.open("w") as file:
        processes = []
        for number in range(count):
            files = str(experiments), f"{setup.folder}/{number}.json"
            how = json.dumps([number, count, max(1, setup.cores // count), optimizer, *files])
            command = [sys.executable, "-m", "benchmarks.throughput.lr_grid_plain", how]
            processes.append(subprocess.Popen(command, cwd=ROOT, stderr=file, stdout=file, env=environment))
        _wait(processes, f"plain PyTorch in {count} processes", log)
    return time.monotonic() - started


def command_s(name: str, setup: Setup, overrides: Sequence[str]) -> float:
    """Seconds that the command takes, with the compiler's cache of that name."""
    environment = stock_environment() | setup.caches.environment(name)
    command = [sys.executable, "-m", "coalesce", "sweep=lr_grid", f"runs={setup.folder / 'runs'}", *overrides]
    started = time.monotonic()
    log = setup.folder / "command.log"
    with log.open("w") as file:
        _wait([subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=environment)], "the command", log)
    return time.monotonic() - started


def measure(setup: Setup, rounds: int, overrides: Sequence[str], console: Console) -> dict[str, Any]:
    """Seconds of each, in turns, and the command's gain over the best of plain PyTorch, round by round."""
    if setup.compile and not setup.caches.primed:
        setup.prime()
    # AdamW as it is faster for this model
    optimizer = _optimizer(setup)
    rows: dict[str, list[float]] = {}
    for number in range(rounds):
        name = f"lr_grid-{number}"
        for kind in ("cold", "warm"):
            rows.setdefault(f"the command, {kind}", []).append(command_s(name, setup, overrides))
        experiments = write_experiments(setup)
        for count in setup.counts:
            kind = f"plain eager, {count} process{'es' * (count > 1)}"
            rows.setdefault(kind, []).append(plain_s(count, setup, optimizer, experiments))
    plain = {kind: seconds for kind, seconds in rows.items() if kind.startswith("plain")}
    chosen = min(plain, key=lambda kind: spread(plain[kind])["median"])
    found = {
        kind: spread([p / c for p, c in zip(plain[chosen], rows[f"the command, {kind}"], strict=True)])
        for kind in ("cold", "warm")
    }
    table = Table("", "s", f"{chosen}: its time over this")
    for kind, seconds in rows.items():
        ratio = found.get(kind.rpartition(" ")[2])
        shown = "" if ratio is None else f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
        table.add_row(kind, " ".join(f"{s:.1f}" for s in seconds), shown)
    console.print(table)
    return {"seconds": rows, "against": chosen, "ratios": found}


def _optimizer(setup: Setup) -> dict[str, Any]:
    digits = Workload("digits", {"_target_": "coalesce.tasks.Digits"}, lanes=1, batch_size=64, every=EVERY)
    process = Process("plain", setup.given(digits), setup.caches.environment("lr_grid-plain"))
    try:
        found: dict[str, Any] = process.call("choose")
    finally:
        process.close()
    return found
