"""What the compiled step of `sweep=lr_grid` costs: processor time to compile it, and per step, on one thread.

    python -m benchmarks.step [--lanes 64] [--steps 20] [--realize 4 10 30]

Each setting compiles from an empty cache in a process of its own, one after the other. Processor time rather than
wall time, so that other work on the machine disturbs it less; compare the rows of one run only.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from coalesce.configuration import make_experiments, rides
from coalesce.engine import compiling
from coalesce.engine.lanes import Lanes
from coalesce.engine.template import Template
from coalesce.experiment import group

ROUNDS = 10


def processor_s() -> float:
    """Processor seconds of this process and of the compilers that it started."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(lanes: int, steps: int, realize: int) -> tuple[float, float, float]:
    """Seconds to compile, and milliseconds per step: the best and the median of the rounds."""
    torch.set_num_threads(1)
    compiling._OPTIONS["realize_opcount_threshold"] = realize
    base = {"task": "coalesce.tasks.Digits", "optimizer": "adamw", "schedule": "cosine"}
    base |= {"steps": 10**6, "batch_size": 64, "seed": 0}
    experiments, _ = make_experiments(base, {"seed": range(lanes)})
    (cohort,) = group(experiments, rides)
    stack = Lanes(Template(cohort), lanes)
    for lane, experiment in enumerate(experiments):
        stack.fill(lane, experiment)
    started = processor_s()
    stack.prepare_step()
    compile_s = processor_s() - started
    stack.advance(steps)
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        stack.advance(steps)
        times.append((time.process_time() - started) / steps * 1e3)
    return compile_s, min(times), sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20, help="per round")
    parser.add_argument("--realize", type=int, nargs="+", default=[compiling._OPTIONS["realize_opcount_threshold"]])
    options = parser.parse_args()
    if os.environ.get("COALESCE_BENCHMARK_CHILD"):
        print(*measure(options.lanes, options.steps, options.realize[0]))
        return
    table = Table("realize_opcount_threshold", "compile, s", "step, ms (best)", "(median)", "µs per lane and step")
    environment = os.environ | {"COALESCE_BENCHMARK_CHILD": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    for realize in options.realize:
        command = [
            sys.executable,
            "-m",
            "benchmarks.step",
            "--lanes",
            str(options.lanes),
            "--steps",
            str(options.steps),
        ]
        command += ["--realize", str(realize)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        compile_s, best, median = map(float, done.stdout.split())
        table.add_row(
            str(realize), f"{compile_s:.1f}", f"{best:.2f}", f"{median:.2f}", f"{best / options.lanes * 1e3:.0f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
