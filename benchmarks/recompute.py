"""What recomputing a model's pieces saves, and what it costs.

    python -m benchmarks.recompute [--blocks 16] [--size 256] [--batch 4096] [--lanes 2] [--threads 2]

A stack of blocks Linear-GELU-Linear-Tanh with Adam. In lanes (``trainer.checkpoint``, compiled and operation by
operation) and as one model in a plain loop (`coalesce.checkpoint_pieces`): the peak of a step above its resting state,
MiB, and milliseconds per step. The plain loop's peak holds all gradients beside the activations; they are counted
apart. Its control has `torch.utils.checkpoint` written by hand around each block, or around the whole model for 1.

Each peak is the high-water mark of a process of its own, as in `benchmarks.memory`. The times are another process's:
the ruler has every tensor fetched from the system anew, which costs most where most is computed again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import coalesce
from coalesce.configuration import make_experiments, rides
from coalesce.engine.lanes import Lanes
from coalesce.engine.pieces import recomputed
from coalesce.engine.template import Template
from coalesce.experiment import group
from coalesce.memory.measure import alone, peak

WARM, STEPS = 2, 9
SETTINGS = {"none": None, "auto": "auto", "4": 4, "1": 1}


def stack(blocks: int, size: int) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, size), nn.Tanh()) for _ in range(blocks)]
    return nn.Sequential(*layers)


class ByHand(nn.Sequential):
    """Each of its modules in a checkpoint of torch's."""

    def forward(self, input: Tensor) -> Tensor:
        for module in self:
            input = checkpoint(module, input, use_reentrant=False)
        return input


class Blocks(coalesce.Task):
    """The stack on noise."""

    def __init__(self, blocks: int, size: int, batch: int):
        self.blocks, self.size, self.batch = blocks, size, batch

    def data(self) -> coalesce.Data:
        return coalesce.Data(train=torch.randn(self.batch, self.size))

    def model(self) -> nn.Module:
        return stack(self.blocks, self.size)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {}


def lanes_step(options: Any, setting: Any, compiled: bool) -> Callable[[], Any]:
    """One step of lanes."""
    task = {"_target_": "benchmarks.recompute.Blocks", "blocks": options.blocks, "size": options.size}
    base = {"task": {**task, "batch": options.batch}, "optimizer": "adam", "schedule": "constant", "steps": 10**6}
    base |= {"batch_size": options.batch, "seed": 0}
    experiments, _ = make_experiments(base, {"seed": range(options.lanes)})
    (cohort,) = group(experiments, rides)
    template = Template(cohort)
    # one cut per block in any case, so that what differs is the recomputation alone
    pieces = [str(i) for i in range(options.blocks)]
    again = recomputed(template.model, setting)
    lanes = Lanes(template, options.lanes, compile=compiled, pieces=pieces, checkpoint=again)
    for lane, experiment in enumerate(experiments):
        lanes.fill(lane, experiment)
    return lambda: lanes.advance(1)


def plain_step(options: Any, setting: Any, by_hand: bool = False) -> Callable[[], Any]:
    """One forward and backward pass of one model; the gradients are there before, and stay."""
    model = stack(options.blocks, options.size)
    if setting is not None and by_hand:
        model = ByHand(model) if setting == 1 else ByHand(*model.children())
    elif setting is not None:
        coalesce.checkpoint_pieces(model, setting)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = torch.randn(options.batch, options.size)
    return lambda: model(batch).square().mean().backward()


KINDS: dict[str, Callable[[Any, Any], Callable[[], Any]]] = {
    "lanes, compiled": lambda o, s: lanes_step(o, s, True),
    "lanes, op by op": lambda o, s: lanes_step(o, s, False),
    "one model, plain loop": plain_step,
    "one model, torch.utils.checkpoint": lambda o, s: plain_step(o, s, by_hand=True),
}


def measure_peak(kind: str, setting: str, options: Any) -> float:
    """The peak of a step above rest, of this process, in bytes."""
    step = KINDS[kind](options, SETTINGS[setting])
    for _ in range(WARM):
        step()
    rise = peak(step)
    assert rise is not None, "this system does not tell its memory"
    return rise


def measure_times(kind: str, settings: Sequence[str], options: Any) -> list[float]:
    """Seconds of the fastest step with each setting; they take turns."""
    steps = [KINDS[kind](options, SETTINGS[setting]) for setting in settings]
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(WARM + STEPS):
        for step, found in zip(steps, times, strict=True):
            started_s = time.perf_counter()
            step()
            if turn >= WARM:
                found.append(time.perf_counter() - started_s)
    return [min(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("blocks", 16), ("size", 256), ("batch", 4096), ("lanes", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--one", choices=["peak", "time"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kinds, settings = options.kinds, options.settings
    if options.one == "peak":
        print(measure_peak(kinds[0], settings[0], options))
        return
    if options.one == "time":
        print(*measure_times(kinds[0], settings, options))
        return
    table = Table("", "checkpoint", "peak above rest, MiB", "of none", "step, ms", "of none")
    sizes = [f"--{n}={getattr(options, n)}" for n in ("blocks", "size", "batch", "lanes", "threads")]
    for kind in kinds:
        command = ["-m", "benchmarks.recompute", *sizes, "--kinds", kind]
        rises = [float(alone([*command, "--one", "peak", "--settings", s]).split()[-1]) for s in settings]
        printed = alone([*command, "--one", "time", "--settings", *settings], environment={}).split()
        seconds = list(map(float, printed[-len(settings) :]))
        for setting, rise, second in zip(settings, rises, seconds, strict=True):
            ratios = f"{rise / rises[0]:.2f}", f"{second / seconds[0]:.2f}"
            table.add_row(kind, setting, f"{rise / 2**20:.0f}", ratios[0], f"{second * 1e3:.0f}", ratios[1])
    Console().print(table)


if __name__ == "__main__":
    main()
