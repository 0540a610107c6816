"""Peak memory of a training step above its resting state, in units of the parameters' bytes of all lanes (law 4).

    python -m benchmarks.memory [--widths 1 2 4 8] [--layers 12] [--size 2048] [--json FILE]
    python -m benchmarks.memory --time [--layers 12] [--size 2048]

A stack of Linear(2048, 2048) without bias, batch 64, AdamW, on the CPU. The compiled tape, the same tape run operation
by operation, and, as one plain model (of several lanes: with stacked weights), `coalesce.compile_step` and
`coalesce.BackProp`. Its plain eager loop is the control: in it all gradients are alive at once, so that it must read at
least 1, else the measurement itself is broken.

Each figure is the high-water mark of a process of its own (`coalesce.memory.measure`). With `--time`, seconds instead:
one model's step in each of the ways, in turns in one process, whose allocator is as it comes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import coalesce
from coalesce.memory.measure import alone, peak
from coalesce.memory.modes import fill_lanes

BATCH, WARM, STEPS = 64, 2, 3
#: The most that each kind may read at every width. One layer of twelve is 0.08. Operation by operation, AdamW holds its
#: gradient and five more tensors of the layer's size, torch's own holds two or three; compiled, they never leave the
#: registers.
BOUNDS = {"tape, compiled": 0.20, "tape, op by op": 0.60, "compile_step": 0.20, "BackProp": 0.30}
#: The layers' inputs count as well, BATCH / size of the parameters: smaller layers may read so much more.
SIZE = 2048


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
    lanes = fill_lanes(task, width, BATCH, compile=compiled)
    return lambda: lanes.advance(1)


class Product(nn.Module):
    """One layer of several lanes."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, size, size) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


def stacked(width: int, layers: int, size: int) -> tuple[nn.Module, Tensor]:
    """The same layers for several lanes, as one model, and a batch. For one lane it is the plain model itself."""
    if width == 1:
        return Stack(layers, size).model(), torch.randn(BATCH, size)
    return nn.Sequential(*[Product(width, size) for _ in range(layers)]), torch.randn(width, BATCH, size)


def plain(width: int, layers: int, size: int, backprop: bool) -> Callable[[], None]:
    """One step of the stacked model in plain eager PyTorch."""
    model, batch = stacked(width, layers, size)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if backprop:
        model, optimizer = coalesce.BackProp(model, optimizer)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compiled(width: int, layers: int, size: int) -> Callable[[], None]:
    """One step of the stacked model, compiled."""
    model, batch = stacked(width, layers, size)
    optimizer = torch.optim.AdamW(model.parameters())
    step = coalesce.compile_step(model, lambda model, batch: model(batch).square().mean(), optimizer)
    return lambda: step(batch)


KINDS: dict[str, Callable[[int, int, int], Callable[[], None]]] = {
    "tape, compiled": lambda *a: tape(*a, compiled=True),
    "tape, op by op": lambda *a: tape(*a, compiled=False),
    "compile_step": compiled,
    "BackProp": lambda *a: plain(*a, backprop=True),
    "eager loop": lambda *a: plain(*a, backprop=False),
}


def measure(kind: str, width: int, layers: int, size: int) -> float:
    """The rise of this process's high-water mark during some steps, over the parameters' bytes."""
    step = KINDS[kind](width, layers, size)
    for _ in range(WARM):
        step()
    rise = peak(step, STEPS)
    assert rise is not None, "only Linux tells a process's high-water mark"
    return rise / (4 * width * layers * size**2)


def measured_alone(kind: str, width: int, layers: int, size: int) -> float:
    """`measure` in a fresh process."""
    command = ["-m", "benchmarks.memory", "--one", kind, "--widths", str(width)]
    return float(alone([*command, "--layers", str(layers), "--size", str(size)]).split()[-1])


def times(kinds: Sequence[str], layers: int, size: int, rounds: int = 15) -> dict[str, list[float]]:
    """Seconds of single steps of one lane, the kinds taking turns."""
    steps = {kind: KINDS[kind](1, layers, size) for kind in kinds}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(WARM + rounds):
        for kind, step in steps.items():
            begun = time.perf_counter()
            step()
            if turn >= WARM:
                found[kind].append(time.perf_counter() - begun)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--time", action="store_true", help="time the steps of one lane")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measure(options.one, options.widths[0], options.layers, options.size))
        return
    if options.time:
        table = Table("", "best", "median", "of BackProp's", title="milliseconds per step")
        found = times(["compile_step", "BackProp", "eager loop"], options.layers, options.size)
        for kind, seconds in found.items():
            best, median = min(seconds), statistics.median(seconds)
            ratios = f"{best / min(found['BackProp']):.2f}, {median / statistics.median(found['BackProp']):.2f}"
            table.add_row(kind, f"{1000 * best:.0f}", f"{1000 * median:.0f}", ratios)
        Console().print(table)
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
    inputs = max(0.0, BATCH / options.size - BATCH / SIZE)
    bounds = {kind: round(bound + inputs, 2) for kind, bound in BOUNDS.items()}
    over = [f"{kind}: above {bound}" for kind, bound in bounds.items() if max(figures[kind].values()) > bound]
    if over:
        sys.exit(", ".join(over))


if __name__ == "__main__":
    main()
