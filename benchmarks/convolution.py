"""What a convolutional network costs in lanes, by each lowering of its convolutions and by the one that is chosen.

    python -m benchmarks.convolution [--lanes 10] [--batch 100] [--channels 25] [--size 40] [--dims 1] [--layers 3]
                                     [--inputs 1] [--kernel 3] [--stride 2] [--norm 0] [--threads 2]

The defaults are the CNN of MNIST-1D, nearly; `--norm 1` puts a BatchNorm behind each convolution. Milliseconds per step
of all lanes, compiled; all ways are timed in turns, in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from benchmarks.step import processor_s
from coalesce.configuration import make_experiments, rides
from coalesce.engine.lanes import Lanes
from coalesce.engine.measure import CHOICES, choose_lowerings
from coalesce.engine.template import Template
from coalesce.experiment import group

ROUNDS, STEPS = 15, 3


class Images(coalesce.Task):
    """10 classes of noise."""

    def __init__(
        self, dims: int, inputs: int, channels: int, size: int, layers: int, kernel: int, stride: int, norm: int
    ):
        self.dims, self.inputs, self.channels, self.size = dims, inputs, channels, size
        self.layers, self.kernel, self.stride, self.norm = layers, kernel, stride, norm

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(512, self.inputs, *[self.size] * self.dims, generator=generator)
        return coalesce.Data(train=(x, torch.randint(10, (512,), generator=generator)))

    def model(self) -> nn.Module:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[self.dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[self.dims - 1]
        layers: list[nn.Module] = []
        for i in range(self.layers):
            inputs = self.inputs if i == 0 else self.channels
            layers.append(kind(inputs, self.channels, self.kernel, self.stride, self.kernel // 2, bias=not self.norm))
            layers += [norm(self.channels)] * bool(self.norm) + [nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(2), Mean(), nn.Linear(self.channels, 10))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {}


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = {"dims": 1, "inputs": 1, "channels": 25, "size": 40, "layers": 3, "kernel": 3, "stride": 2, "norm": 0}
    for name, default in {**model, "lanes": 10, "batch": 100, "threads": torch.get_num_threads()}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    task = {n: getattr(options, n) for n in model}
    base = {"task": {"_target_": "benchmarks.convolution.Images", **task}, "optimizer": "adamw", "steps": 10**6}
    base |= {"batch_size": options.batch, "seed": 0, "schedule": "constant"}
    experiments, _ = make_experiments(base, {"seed": range(options.lanes)})
    (cohort,) = group(experiments, rides)
    stacks: dict[str, tuple[Lanes, float, float]] = {}
    for choice in CHOICES:
        template = Template(cohort)
        started = time.perf_counter()
        chosen = choose_lowerings(template.rehearsal.convolutions, options.lanes, choice=choice)
        choose_s = time.perf_counter() - started
        lanes = Lanes(template, options.lanes, lowerings=chosen)
        for lane, experiment in enumerate(experiments):
            lanes.fill(lane, experiment)
        started = processor_s()
        lanes.advance(1)
        stacks[choice] = lanes, processor_s() - started, choose_s
    times: dict[str, list[float]] = {choice: [] for choice in stacks}
    for _ in range(ROUNDS):
        for choice, (lanes, _, _) in stacks.items():
            started = time.perf_counter()
            lanes.advance(STEPS)
            times[choice].append((time.perf_counter() - started) / STEPS * 1e3)
    table = Table("lowering", "chosen", "to choose, s", "trace and compile, s", "step, ms (best)", "(median)", "loss")
    for choice, (lanes, build_s, choose_s) in stacks.items():
        best, median = min(times[choice]), statistics.median(times[choice])
        loss = f"{lanes.read().metrics['loss'][0]:.6f}"
        chosen = "\n".join(lanes.lowerings.values())
        table.add_row(choice, chosen, f"{choose_s:.2f}", f"{build_s:.0f}", f"{best:.2f}", f"{median:.2f}", loss)
    Console().print(table)


if __name__ == "__main__":
    main()
