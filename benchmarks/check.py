"""What the check at the start costs, beside what it checks.

    python -m benchmarks.check [--tasks coalesce.tasks.Digits coalesce.tasks.Mnist1dCNN] [--lanes 64]

Processor seconds to trace and compile the step and the evaluation from an empty cache, and to check them. With
``--doubt`` every value is looked at as if it had differed: the steps from shifted weights are taken as well.
"""

from __future__ import annotations

import argparse

import torch
import torch._inductor.config
from rich.console import Console
from rich.table import Table

from benchmarks.step import processor_s
from coalesce.configuration import make_experiments, rides
from coalesce.engine import agreement, compiling
from coalesce.engine.check import check
from coalesce.engine.lanes import Lanes
from coalesce.engine.template import Template
from coalesce.experiment import group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["coalesce.tasks.Digits", "coalesce.tasks.Mnist1dCNN"])
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--doubt", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.doubt:
        agreement._MOST, agreement._MARGIN = -1.0, torch.inf
    table = Table("task", "compile, processor s", "check, processor s", "share")
    for task in options.tasks:
        base = {"task": task, "optimizer": "adamw", "schedule": "cosine", "steps": 1000, "batch_size": 64, "seed": 0}
        experiments, _ = make_experiments(base, {"seed": range(options.lanes)})
        (cohort,) = group(experiments, rides)
        lanes = Lanes(Template(cohort), options.lanes)
        compiling._compiled.clear()
        started = processor_s()
        with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
            lanes.prepare_step()
            lanes.prepare_evaluation("val")
        compiled = processor_s()
        check(lanes, ["val"])
        took = processor_s() - compiled
        table.add_row(
            task.rpartition(".")[2], f"{compiled - started:.1f}", f"{took:.2f}", f"{took / (compiled - started):.1%}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
