"""What `lr_grid` compares the command with: a script that trains experiments one after the other.

It imports hardly more than such a script needs: what is timed is the whole process."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.throughput.place import Place
from benchmarks.throughput.plain import Loop, stock
from benchmarks.throughput.workloads import build
from coalesce.experiment import Experiment

#: As `conf/trainer/default.yaml` has them.
EVERY, EVALUATE_EVERY = 100, 500


def train(experiment: Experiment, data: Any, optimizer: dict[str, Any]) -> dict[str, Any]:
    """One experiment as an ordinary script trains it; its metrics."""
    loop = Loop(experiment, data, EVERY, "eager", optimizer, Place())
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


def share(number: int, count: int, threads: int, optimizer: dict[str, Any], given: str, out: str) -> None:
    """What one process of plain PyTorch does: every experiment whose number is its own, by turns.

    Args:
        number, count: of the process, and of all.
        given: a file of the configurations.
        out: the file for the results.
    """
    stock()
    torch.set_num_threads(threads)
    mine = [Experiment(config, {}) for config in json.loads(Path(given).read_text())][number::count]
    results: dict[str, Any] = {}
    data = None
    for experiment in mine:
        data = data or build(experiment)[0].data()
        results[experiment.id] = train(experiment, data, optimizer)
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    share(*json.loads(sys.argv[1]))
