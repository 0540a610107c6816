"""What the compiled step of a sweep costs: that of `sweep=lr_grid` by default.

    python -m benchmarks.step [--task Digits] [--batch-size 64] [--lanes 64] [--threads 1]
                              [--compile] [--beside FOLDER ...] [--env NAME=VALUE ...] [--realize 4 10 30]
                              [--worth 0 1000000000]

Milliseconds per step, by the clock and by the processor; with `--compile` also processor seconds to trace and compile,
from a compiler's cache that has been used but not for this graph, and once more from one that has it.

What is compared has a process each, and their steps take turns, so that whatever else the machine does disturbs them
alike: this checkout, others (`--beside`, each a folder), this one in other environments (`--env`, each one or more
pairs "NAME=VALUE NAME=VALUE"), with one option of the compiler (`--realize`), or with lanes that are shared out among
the threads from another size on (`--worth`, bytes of a share; a large number: never). `ratio` is a step's time over
that of the first row in the same round: median, least and most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]


class Variant(NamedTuple):
    """What has a row: the checkout, what is set in its environment, the compiler's threshold, and a share's bytes."""

    name: str
    folder: Path = HERE
    environment: tuple[tuple[str, str], ...] = ()
    realize: int | None = None
    worth: int | None = None


def processor_s() -> float:
    """Processor seconds of this process and of the compilers that it started."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def build(task: str, batch_size: int, lanes: int, realize: int | None, worth: int | None = None) -> tuple[Any, float]:
    """The lanes of a sweep, compiled anew, and the processor seconds that it took."""
    from coalesce.configuration import make_experiments, rides
    from coalesce.engine import compiling
    from coalesce.engine.lanes import Lanes
    from coalesce.engine.measure import choose_lowerings
    from coalesce.engine.template import Template
    from coalesce.experiment import group

    base = {"task": f"coalesce.tasks.{task}", "optimizer": "adamw", "schedule": "cosine"}
    config = {**base, "steps": 10**6, "batch_size": batch_size, "seed": 0}
    experiments, _ = make_experiments(config, {"seed": range(lanes)})
    (cohort,) = group(experiments, rides)
    if worth is not None:
        from coalesce.engine import shares

        shares.WORTH = worth
    template = Template(cohort)
    # as a plan chooses them, but that a plan times them on the threads of a share
    stack = Lanes(template, lanes, lowerings=choose_lowerings(template.rehearsal.convolutions, lanes))
    for lane, experiment in enumerate(experiments):
        stack.fill(lane, experiment)
    compiling._compiled.clear()
    if realize is not None:
        for options in (compiling._DRAWN, compiling._UNDRAWN):
            options["realize_opcount_threshold"] = realize
    started = processor_s()
    stack.prepare_step()
    return stack, processor_s() - started


def work(options: argparse.Namespace) -> None:
    """A variant's process: compile, say what that took, and for each line of the input take that many steps."""
    from coalesce import kernels

    kernels.request()  # before torch is loaded
    import torch
    import torch._inductor.config
    from torch._inductor.utils import fresh_inductor_cache

    torch.set_num_threads(options.threads)
    cache = fresh_inductor_cache() if options.compile else contextlib.nullcontext()
    with torch._inductor.config.patch(compile_threads=1), cache:
        (realize,), (worth,) = options.realize or [None], options.worth or [None]
        sweep = options.task, options.batch_size, options.lanes, realize, worth
        seconds = []
        if options.compile:
            # the first compilation of a process probes the processor
            build("Digits", 16, 2, realize)
            seconds = [build(*sweep)[1]]
        stack, again_s = build(*sweep)
        stack.advance(5)
        print(json.dumps([*seconds, again_s]), flush=True)
        for line in sys.stdin:
            clock, processor = time.perf_counter(), time.process_time()
            stack.advance(int(line))
            taken = time.perf_counter() - clock, time.process_time() - processor
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(json.dumps([*(seconds / int(line) for seconds in taken), peak]), flush=True)


def start(variant: Variant, arguments: list[str], home: str) -> subprocess.Popen[str]:
    """A variant's process."""
    own = {"--realize": variant.realize, "--worth": variant.worth}
    settings = [text for name, value in own.items() if value is not None for text in (name, str(value))]
    environment = {**os.environ, **dict(variant.environment), "PYTHONPATH": str(variant.folder)}
    command = [sys.executable, "-W", "ignore", __file__, "--work", *arguments, *settings]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=home, env=environment, stdin=pipe, stdout=pipe, text=True)


def ask(worker: subprocess.Popen[str], steps: int | None = None) -> list[float]:
    """What a process says: after so many steps, or that it has compiled."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    if steps is not None:
        print(steps, file=worker.stdin, flush=True)
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"a process ended with {worker.wait()}")
    found: list[float] = json.loads(line)
    return found


def variants(options: argparse.Namespace) -> list[Variant]:
    """The rows, the first of which the others are compared with."""
    found = [] if options.realize else [Variant("this checkout")]
    found += [Variant(f"at realize {n}", realize=n) for n in options.realize]
    found += [Variant(f"shares of {n} bytes", worth=n) for n in options.worth]
    found += [Variant(folder.name, folder.resolve()) for folder in options.beside]
    for pairs in options.env:
        environment = tuple((name, value) for name, _, value in (pair.partition("=") for pair in pairs.split()))
        found.append(Variant(pairs, environment=environment))
    return found


def report(rows: list[Variant], compiled: list[list[float]], rounds: list[list[list[float]]], lanes: int) -> Table:
    """The table; `rounds` has what each row said in each round: seconds by clock, by processor, KiB."""
    headings = ("compile, s", "again, s") if len(compiled[0]) == 2 else ("ready, s",)
    table = Table("", *headings, "step, ms (best)", "(median)", "of processor", "µs per lane", "ratio", "peak, MB")
    for row, (variant, seconds) in enumerate(zip(rows, compiled, strict=True)):
        by_clock, by_processor, peak = zip(*(turns[row] for turns in rounds), strict=True)
        figures = min(by_clock), statistics.median(by_clock), statistics.median(by_processor)
        ratios = sorted(turns[row][0] / turns[0][0] for turns in rounds)
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        took = [f"{figure:.1f}" for figure in seconds] + [f"{figure * 1e3:.2f}" for figure in figures]
        table.add_row(variant.name, *took, f"{figures[1] / lanes * 1e6:.0f}", ratio, f"{max(peak) * 1024 / 1e6:.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="Digits", help="the name of a ready task")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="of one turn")
    parser.add_argument("--compile", action="store_true", help="say what compiling takes: some minutes")
    parser.add_argument("--realize", type=int, nargs="+", default=[], help="thresholds to compare")
    parser.add_argument("--worth", type=int, nargs="+", default=[], help="bytes of a share to compare")
    parser.add_argument("--beside", type=Path, nargs="+", default=[], help="other checkouts to compare")
    parser.add_argument("--env", nargs="+", default=[], metavar="NAME=VALUE", help="environments to compare")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options)
    given = {name: getattr(options, name) for name in ("task", "batch_size", "lanes", "threads")}
    arguments = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    arguments += ["--compile"] if options.compile else []
    rows = variants(options)
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        workers, compiled = [], []
        for variant in rows:
            workers.append(stack.enter_context(start(variant, arguments, home)))
            stack.callback(workers[-1].kill)
            compiled.append(ask(workers[-1]))
        rounds = [[ask(worker, options.steps) for worker in workers] for _ in range(options.rounds)]
    Console().print(report(rows, compiled, rounds, options.lanes))


if __name__ == "__main__":
    main()
