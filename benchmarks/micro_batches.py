"""Peak memory of a training step above its resting state, by the number of micro-batches.

    python -m benchmarks.micro_batches [--counts 1 2 4 8]

Two lanes of an MLP of 8 Linear(256, 256) and GELU, batch 2048, SGD, one thread, on the CPU, each
figure measured in a process of its own (`coalesce.memory.measure`).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.memory.measure import alone, peak
from coalesce.memory.modes import fill_lanes

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
    optimizer = {"name": "sgd", "lr": 0.01, "accumulate": count}
    task = {"_target_": "benchmarks.micro_batches.Wide"}
    lanes = fill_lanes(task, 2, BATCH, compile=compiled, optimizer=optimizer)
    lanes.advance(2)
    rise = peak(lambda: lanes.advance(1), STEPS)
    assert rise is not None, "only Linux tells a process's high-water mark"
    return rise / 2**20


def measured_alone(count: int, kind: str) -> float:
    """`measure` in a fresh process."""
    return float(alone(["-m", "benchmarks.micro_batches", "--one", kind, "--counts", str(count)]).split()[-1])


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
