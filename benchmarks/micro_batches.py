"""Peak memory of a training step above its resting state, by the number of micro-batches.

    python -m benchmarks.micro_batches [--counts 1 2 4 8]

Two lanes of an MLP of 8 Linear(256, 256) and GELU, batch 2048, SGD, one thread, on the CPU, measured as
`benchmarks.memory` does it, each figure in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from benchmarks.memory import resident_bytes
from coalesce.configuration import make_experiments, rides
from coalesce.engine.lanes import Lanes
from coalesce.engine.template import Template
from coalesce.experiment import group

BATCH, SIZE, LAYERS, STEPS = 2048, 256, 8, 3


class Wide(coalesce.Task):
    """Much activation beside few parameters."""

    def data(self) -> coalesce.Data:
        x = torch.randn(BATCH, SIZE)
        return coalesce.Data(train=(x, x.flip(1)))

    def model(self) -> nn.Module:
        return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(SIZE, SIZE), nn.GELU())])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


def measure(count: int, compiled: bool) -> float:
    """The rise of this process's high-water mark during some steps, in MiB."""
    torch.set_num_threads(1)
    base = {
        "task": {"_target_": "benchmarks.micro_batches.Wide"},
        "optimizer": {"name": "sgd", "lr": 0.01, "accumulate": count},
        "schedule": "constant",
        "steps": 10**6,
        "batch_size": BATCH,
        "seed": 0,
    }
    experiments, _ = make_experiments(base, {"seed": [0, 1]})
    (cohort,) = group(experiments, rides)
    lanes = Lanes(Template(cohort), 2, compile=compiled)
    for lane, experiment in enumerate(experiments):
        lanes.fill(lane, experiment)
    lanes.advance(2)
    gc.collect()
    rest = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    lanes.advance(STEPS)
    return (resident_bytes("VmHWM") - rest) / 2**20


def measured_alone(count: int, kind: str) -> float:
    """`measure` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.micro_batches", "--one", kind, "--counts", str(count)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--one", choices=["compiled", "eager"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measure(options.counts[0], options.one == "compiled"))
        return
    table = Table("micro-batches", *[str(count) for count in options.counts], title="peak above rest, MiB")
    for kind in ("compiled", "eager"):
        table.add_row(kind, *[f"{measured_alone(count, kind):.1f}" for count in options.counts])
    Console().print(table)


if __name__ == "__main__":
    main()
