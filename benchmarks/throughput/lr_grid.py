"""The whole command `python -m coalesce sweep=lr_grid`, from typing it to its end, beside the same experiments as
ordinary PyTorch in 1, 2, 4 and 6 processes.

Plain PyTorch trains each experiment as the command does: as many steps, the loss recorded and the validation split
evaluated as often, the test split at the end, by the state that was best as well, and the results written to a file.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.throughput.processes import SideFailed, stock_environment
from benchmarks.throughput.report import spread
from benchmarks.throughput.sides import Setup
from benchmarks.throughput.workloads import PRIMER

#: As `conf/trainer/default.yaml` has them.
EVERY, EVALUATE_EVERY = 100, 500

ROOT = Path(__file__).parents[2]


def compose(overrides: Sequence[str]) -> list[Any]:
    """The experiments of the sweep as it ships.

    Args:
        overrides: as on the command line.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    from coalesce.configuration import make_experiments

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config: Any = OmegaConf.to_container(hydra_compose("config", ["sweep=lr_grid", *overrides]), resolve=True)
    base = {n: config[n] for n in ("task", "optimizer", "schedule", "steps", "batch_size", "seed", "data", "precision")}
    return make_experiments(base, config["sweep"]["params"])[0]


def train(experiment: Any, data: Any, optimizer: dict[str, Any]) -> dict[str, Any]:
    """One experiment as an ordinary script trains it; its metrics."""
    from benchmarks.throughput.plain import Loop

    loop = Loop(experiment, data, EVERY, False, optimizer)
    schedule = experiment.config["schedule"]
    warmup = torch.optim.lr_scheduler.LinearLR(loop.optimizer, schedule["warmup_start"], 1.0, schedule["warmup"])
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, experiment.steps - schedule["warmup"])
    loop.scheduler = torch.optim.lr_scheduler.SequentialLR(loop.optimizer, [warmup, cosine], [schedule["warmup"]])

    def evaluate(split: str) -> dict[str, float]:
        loop.model.eval()
        with torch.no_grad():
            found = loop.task.metrics(loop.model, data.unflatten(data.leaves(split)))
        loop.model.train()
        return {f"{split}/{n}": float(value) for n, value in found.items()}

    losses, best, kept = [], -1.0, copy.deepcopy(loop.model.state_dict())
    found: dict[str, float] = {}
    for step in range(1, experiment.steps + 1):
        loop.step()
        if step % EVERY == 0:
            losses.append(loop.last)
        if step % EVALUATE_EVERY == 0 or step == experiment.steps:
            found = evaluate("val")
            if found["val/accuracy"] > best:
                best, kept = found["val/accuracy"], copy.deepcopy(loop.model.state_dict())
    found |= evaluate("test")
    loop.model.load_state_dict(kept)
    return {"losses": losses, **found, "best": evaluate("test")}


def share(number: int, count: int, threads: int, optimizer: dict[str, Any], overrides: list[str], out: str) -> None:
    """What one process of plain PyTorch does: every experiment whose number is its own, by turns."""
    from benchmarks.throughput.plain import stock
    from coalesce.engine.template import build

    stock()
    torch.set_num_threads(threads)
    mine = compose(overrides)[number::count]
    task, _ = build(mine[0])
    data = task.data()
    results = {e.id: train(e, data, optimizer) for e in mine}
    Path(out).write_text(json.dumps(results))


def _wait(processes: Sequence[subprocess.Popen[bytes]], what: str, log: Path) -> None:
    for process in processes:
        if process.wait():
            raise SideFailed(f"{what} failed:\n{log.read_text()[-4000:]}")


def plain_s(count: int, setup: Setup, optimizer: dict[str, Any], overrides: Sequence[str]) -> float:
    """Seconds that so many processes of plain PyTorch take."""
    started = time.monotonic()
    log = setup.folder / "plain.log"
    with log.open("w") as file:
        processes = []
        for number in range(count):
            how = (
                number,
                count,
                max(1, setup.cores // count),
                optimizer,
                list(overrides),
                f"{setup.folder}/{number}.json",
            )
            command = [sys.executable, "-m", "benchmarks.throughput.lr_grid", json.dumps(how)]
            processes.append(subprocess.Popen(command, cwd=ROOT, stderr=file, stdout=file, env=stock_environment()))
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
    if not setup.caches.primed:
        setup.caches.prime(PRIMER.to_json(), setup.cores)
    # AdamW as it is faster for this model
    optimizer = _optimizer(setup)
    rows: dict[str, list[float]] = {}
    for number in range(rounds):
        name = f"lr_grid-{number}"
        for kind in ("cold", "warm"):
            rows.setdefault(f"the command, {kind}", []).append(command_s(name, setup, overrides))
        for count in setup.counts:
            kind = f"plain eager, {count} process{'es' * (count > 1)}"
            rows.setdefault(kind, []).append(plain_s(count, setup, optimizer, overrides))
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
    from dataclasses import asdict

    from benchmarks.throughput.processes import Process
    from benchmarks.throughput.workloads import Workload

    digits = Workload("digits", {"_target_": "coalesce.tasks.Digits"}, lanes=1, batch_size=64, every=EVERY)
    process = Process("plain", {"workload": asdict(digits)}, setup.caches.environment("lr_grid-plain"))
    try:
        found: dict[str, Any] = process.call("choose")
    finally:
        process.close()
    return found


if __name__ == "__main__":
    share(*json.loads(sys.argv[1]))
