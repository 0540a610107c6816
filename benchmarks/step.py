"""What the compiled step of `sweep=lr_grid` costs, for several settings of one option of the compiler.

    python -m benchmarks.step [--lanes 64] [--threads 1] [--realize 4 10 30]

Processor seconds to trace and compile from an empty cache, and milliseconds per step. The settings' steps are timed in
turns, so that whatever else the machine does disturbs them alike.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import torch
import torch._inductor.config
from rich.console import Console
from rich.table import Table

from coalesce.configuration import make_experiments, rides
from coalesce.engine import compiling
from coalesce.engine.lanes import Lanes
from coalesce.engine.template import Template
from coalesce.experiment import group

ROUNDS, STEPS = 15, 10


def processor_s() -> float:
    """Processor seconds of this process and of the compilers that it started."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def build(lanes: int, realize: int) -> tuple[Lanes, float]:
    """The lanes of the sweep, compiled anew, and the processor seconds that it took."""
    base = {"task": "coalesce.tasks.Digits", "optimizer": "adamw", "schedule": "cosine"}
    experiments, _ = make_experiments({**base, "steps": 10**6, "batch_size": 64, "seed": 0}, {"seed": range(lanes)})
    (cohort,) = group(experiments, rides)
    stack = Lanes(Template(cohort), lanes)
    for lane, experiment in enumerate(experiments):
        stack.fill(lane, experiment)
    compiling._compiled.clear()
    compiling._OPTIONS["realize_opcount_threshold"] = realize
    started = processor_s()
    stack.prepare_step()
    return stack, processor_s() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--realize", type=int, nargs="+", default=[compiling._OPTIONS["realize_opcount_threshold"]])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
        # the first compilation of a process probes the processor
        build(2, options.realize[0])
        built = [build(options.lanes, realize) for realize in options.realize]
    times: list[list[float]] = [[] for _ in built]
    for _ in range(ROUNDS):
        for (stack, _), taken in zip(built, times, strict=True):
            started = time.perf_counter()
            stack.advance(STEPS)
            taken.append((time.perf_counter() - started) / STEPS)
    table = Table("realize at", "compile, s", "step, ms (best)", "(median)", "µs per lane")
    for realize, (_, compile_s), taken in zip(options.realize, built, times, strict=True):
        best, median = min(taken), statistics.median(taken)
        row = (f"{compile_s:.1f}", f"{best * 1e3:.2f}", f"{median * 1e3:.2f}", f"{best / options.lanes * 1e6:.0f}")
        table.add_row(str(realize), *row)
    Console().print(table)


if __name__ == "__main__":
    main()
