"""Peak memory of a training step above its resting state, in units of the parameters' bytes of all lanes (law 4).

    python -m benchmarks.memory [--widths 1 2 4 8] [--layers 12] [--size 2048] [--json FILE]

A stack of Linear(2048, 2048) without bias, batch 64, AdamW, on the CPU. The compiled tape, the same tape run operation
by operation, and, as one plain model with stacked weights, `coalesce.BackProp`. Its plain eager loop is the control: in
it all gradients are alive at once, so that it must read at least 1, else the measurement itself is broken.

Each figure is the high-water mark of a process of its own. `MALLOC_MMAP_THRESHOLD_` is set for it: by default glibc
keeps what is freed, and the mark reads 0 for anything.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import coalesce
from coalesce.configuration import make_experiments, rides
from coalesce.engine.lanes import Lanes
from coalesce.engine.template import Template
from coalesce.experiment import group

BATCH, WARM, STEPS = 64, 2, 3
#: The most that each kind of tape may read, at every width. One layer of twelve is 0.08. Operation by operation, AdamW
#: holds its gradient and five more tensors of the layer's size; compiled, they never leave the registers.
BOUNDS = {"tape, compiled": 0.20, "tape, op by op": 0.60, "BackProp": 0.30}


class Stack(coalesce.Task):
    """Linear layers without bias or anything between them, on noise."""

    def __init__(self, layers: int = 12, size: int = 2048):
        self.layers = layers
        self.size = size

    def data(self) -> coalesce.Data:
        return coalesce.Data(train=torch.randn(BATCH, self.size))

    def model(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(self.size, self.size, bias=False) for _ in range(self.layers)])

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


def tape(width: int, layers: int, size: int, compiled: bool) -> Callable[[], None]:
    """One step of lanes."""
    task = {"_target_": "benchmarks.memory.Stack", "layers": layers, "size": size}
    base = {"task": task, "optimizer": "adamw", "schedule": "constant", "steps": 10**6, "batch_size": BATCH, "seed": 0}
    experiments, _ = make_experiments(base, {"seed": range(width)})
    (cohort,) = group(experiments, rides)
    lanes = Lanes(Template(cohort), width, compile=compiled)
    for lane, experiment in enumerate(experiments):
        lanes.fill(lane, experiment)
    return lambda: lanes.advance(1)


class Stacked(nn.Module):
    """The same layers for several lanes, as one model."""

    def __init__(self, width: int, layers: int, size: int):
        super().__init__()
        weights = [torch.randn(width, size, size) / size**0.5 for _ in range(layers)]
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.bmm(x, weight)
        return x


def plain(width: int, layers: int, size: int, backprop: bool) -> Callable[[], None]:
    """One step of the stacked model in plain eager PyTorch."""
    model = Stacked(width, layers, size)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if backprop:
        model, optimizer = coalesce.BackProp(model, optimizer)
    batch = torch.randn(width, BATCH, size)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


KINDS: dict[str, Callable[[int, int, int], Callable[[], None]]] = {
    "tape, compiled": lambda *a: tape(*a, compiled=True),
    "tape, op by op": lambda *a: tape(*a, compiled=False),
    "BackProp": lambda *a: plain(*a, backprop=True),
    "eager loop": lambda *a: plain(*a, backprop=False),
}


def resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(kind: str, width: int, layers: int, size: int) -> float:
    """The rise of this process's high-water mark during some steps, over the parameters' bytes."""
    step = KINDS[kind](width, layers, size)
    for _ in range(WARM):
        step()
    gc.collect()
    rest = resident_bytes("VmRSS")
    # the mark falls back to what is resident now
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(STEPS):
        step()
    return (resident_bytes("VmHWM") - rest) / (4 * width * layers * size**2)


def measured_alone(kind: str, width: int, layers: int, size: int) -> float:
    """`measure` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.memory", "--one", kind, "--widths", str(width)]
    command += ["--layers", str(layers), "--size", str(size)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measure(options.one, options.widths[0], options.layers, options.size))
        return
    table = Table("", *[f"{w} lanes" for w in options.widths], title="peak above rest / parameter bytes of all lanes")
    figures: dict[str, dict[int, float]] = {}
    for kind in KINDS:
        figures[kind] = {w: measured_alone(kind, w, options.layers, options.size) for w in options.widths}
        table.add_row(kind, *[f"{value:.3f}" for value in figures[kind].values()])
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if min(figures["eager loop"].values()) < 1:
        sys.exit("the plain eager loop reads under 1.0: this measurement sees nothing")
    over = [f"{kind}: above {bound}" for kind, bound in BOUNDS.items() if max(figures[kind].values()) > bound]
    if over:
        sys.exit(", ".join(over))


if __name__ == "__main__":
    main()
