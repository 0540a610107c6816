"""What folding the lanes into the batch gains in a GPT, against vmap's way, which is one flash call per lane.

    python -m benchmarks.attention [--layers 4] [--width 64] [--time 64] [--lanes 8] [--batch 16] [--threads 1]

Milliseconds of processor time per step; both ways are timed in turns, compiled, in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
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
from coalesce.engine.rules import RULES
from coalesce.engine.template import Template
from coalesce.experiment import group

ROUNDS, STEPS, VOCABULARY = 15, 3, 65


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (z.unflatten(-1, (4, -1)).transpose(1, 2) for z in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Characters(coalesce.Task):
    """The next character of noise."""

    def __init__(self, layers: int, width: int, time: int):
        self.layers, self.width, self.time = layers, width, time

    def data(self) -> coalesce.Data:
        text = torch.randint(VOCABULARY, (512, self.time + 1), generator=torch.Generator().manual_seed(0))
        return coalesce.Data(train=(text[:, :-1], text[:, 1:].contiguous()))

    def model(self) -> nn.Module:
        blocks = [Block(self.width) for _ in range(self.layers)]
        return nn.Sequential(nn.Embedding(VOCABULARY, self.width), *blocks, nn.Linear(self.width, VOCABULARY))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("width", 64), ("time", 64), ("lanes", 8), ("batch", 16), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", "There is a performance drop")
    task = {n: getattr(options, n) for n in ("layers", "width", "time")}
    base = {"task": {"_target_": "benchmarks.attention.Characters", **task}, "optimizer": "adamw", "steps": 10**6}
    base |= {"batch_size": options.batch, "seed": 0, "schedule": "constant"}
    experiments, _ = make_experiments(base, {"seed": range(options.lanes)})
    (cohort,) = group(experiments, rides)
    stacks: dict[str, tuple[Lanes, float]] = {}
    rule = RULES[F.scaled_dot_product_attention]
    for how in ("lane by lane", "folded"):
        RULES[F.scaled_dot_product_attention] = rule
        if how == "lane by lane":
            del RULES[F.scaled_dot_product_attention]
        lanes = Lanes(Template(cohort), options.lanes)
        for lane, experiment in enumerate(experiments):
            lanes.fill(lane, experiment)
        started = processor_s()
        lanes.advance(1)
        stacks[how] = lanes, processor_s() - started
    times: dict[str, list[float]] = {how: [] for how in stacks}
    for _ in range(ROUNDS):
        for how, (lanes, _) in stacks.items():
            started = time.process_time()
            lanes.advance(STEPS)
            times[how].append((time.process_time() - started) / STEPS * 1e3)
    table = Table("attention", "trace and compile, s", "step, ms (best)", "(median)", "losses")
    for how, (lanes, build_s) in stacks.items():
        losses = ", ".join(f"{loss:.6f}" for loss in lanes.read().metrics["loss"][:2])
        table.add_row(how, f"{build_s:.0f}", f"{min(times[how]):.1f}", f"{statistics.median(times[how]):.1f}", losses)
    Console().print(table)


if __name__ == "__main__":
    main()
