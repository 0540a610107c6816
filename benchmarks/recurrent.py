"""What a recurrent layer costs in lanes: stock, unrolled by hand, and by the rule.

    python -m benchmarks.recurrent [--kind GRU] [--hidden 6] [--time 40] [--lanes 10] [--batch 100] [--how alone rule]

A bidirectional layer and a linear layer of all its outputs. Processor seconds to trace and to compile from an empty
cache, and processor milliseconds per step of all lanes (``alone``: of one experiment in a plain loop). "stock" is what
vmap does by itself, and takes minutes to compile.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from benchmarks.step import processor_s
from coalesce.configuration import make_experiments, rides
from coalesce.engine.lanes import Lanes
from coalesce.engine.rules import RULES
from coalesce.engine.template import Template, build
from coalesce.experiment import Experiment, group

STEPS = 20


class Sequences(coalesce.Task):
    """10 classes of noise."""

    def __init__(self, kind: str, hidden: int, time: int):
        self.kind, self.hidden, self.time = kind, hidden, time

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(1000, self.time, 1, generator=generator), torch.randint(10, (1000,), generator=generator)
        return coalesce.Data(train=(x, y))

    def model(self) -> nn.Module:
        layer = getattr(nn, self.kind)(1, self.hidden, batch_first=True, bidirectional=True)
        return nn.ModuleList([layer, nn.Linear(2 * self.hidden * self.time, 10)])

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model[1](model[0](x)[0].flatten(1)), y)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {}


def timed(run: Callable[[], Any]) -> float:
    started = processor_s()
    run()
    return processor_s() - started


def plain_step(experiment: Experiment) -> Callable[[], None]:
    task, model = build(experiment)
    optimizer, batch = torch.optim.AdamW(model.parameters()), [t[:100] for t in task.data().splits["train"]]

    def step() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="GRU", choices=["RNN", "GRU", "LSTM"])
    parser.add_argument("--how", nargs="+", default=["alone", "rule"], choices=["alone", "stock", "rule"])
    for name, default in (("hidden", 6), ("time", 40), ("lanes", 10), ("batch", 100), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", "There is a performance drop")
    task = {"_target_": "benchmarks.recurrent.Sequences", "kind": options.kind, "hidden": options.hidden}
    base = {"task": {**task, "time": options.time}, "optimizer": "adamw", "steps": 10**6}
    base |= {"batch_size": options.batch, "seed": 0, "schedule": "constant"}
    experiments, _ = make_experiments(base, {"seed": range(options.lanes)})
    (cohort,) = group(experiments, rides)
    table = Table("how", "trace, s", "compile, s", "step, ms", "per lane, ms")
    for how in options.how:
        if how == "alone":
            step = plain_step(experiments[0])
            step()
            each = timed(step) / STEPS * 1e3
            table.add_row(how, "", "", f"{each:.2f}", f"{each:.2f}")
            continue
        if how == "stock":
            for kind in ("gru", "lstm", "rnn_tanh"):
                RULES.pop(getattr(torch, kind))
        lanes = Lanes(Template(cohort), options.lanes, compile=False)
        for lane, experiment in enumerate(experiments):
            lanes.fill(lane, experiment)
        trace_s = timed(lanes.prepare_step)
        lanes.compile, lanes._steps = True, {}
        with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
            compile_s = timed(lanes.prepare_step) - trace_s
        lanes.advance(3)
        started = time.process_time()
        lanes.advance(STEPS)
        each = (time.process_time() - started) / STEPS * 1e3
        table.add_row(how, f"{trace_s:.1f}", f"{compile_s:.1f}", f"{each:.2f}", f"{each / options.lanes:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
