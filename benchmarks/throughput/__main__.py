"""Steps per second of the same experiments, by coalesce and by what people would use instead.

    python -m benchmarks.throughput [--task mlp|cnn|gpt|digits|all] [--json FILE] [--rounds 5] [--seconds S]
                                    [--sides plain coalesced jax modelbatch floor] [--peer-python PATH]
    python -m benchmarks.throughput --task lr_grid [--rounds 2] [--override steps=200 ...]
    python -m benchmarks.throughput --task mlp --check
    python -m benchmarks.throughput --task mlp --curve [--lanes 1 2 4 ... 512]
    python -m benchmarks.throughput --task mlp --device cuda [--precision bfloat16] [--matmul-precision high] [--graphs]

The same data, initial weights, model, loss, AdamW and cosine schedule on every side; experiments differ in their seed
and in their learning rate.

- plain: ordinary PyTorch loops, eager and compiled, as 1, 2, 4 and 6 processes that share the cores out.
- coalesced: the runner runs a plan as `coalesce.sweep` does, with a run folder and the losses recorded; without
  evaluations, which no side has.
- jax: jit(vmap(scan)) and optax. modelbatch: the package of that name. Both: pip install 'coalesce[bench]'.
- floor: the matrix products of the steps alone, each in the fastest of several ways.

Before anything is timed the losses of the first steps must agree on all sides. Then the sides take turns, round by
round, each with all cores for itself, while the others sleep. What counts is what all processes of a side do in one
window of time. The ratios are those of one round; shown are the median and the range of the rounds. Beside them the
ratios by processor time, which say more on a machine that others use as well.

--task lr_grid times the whole command `python -m coalesce sweep=lr_grid`, cold and warm, beside the same experiments as
plain eager processes; it is no part of "all".

"compile" is what comes before the first step: from a compiler's cache that has been used for another graph, and from
one that has this graph.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.throughput import lr_grid, report
from benchmarks.throughput.machine import cores, describe
from benchmarks.throughput.place import Place
from benchmarks.throughput.processes import Caches, SideFailed, interleave
from benchmarks.throughput.sides import SIDES, Setup, Side, missing
from benchmarks.throughput.turns import Turns
from benchmarks.throughput.workloads import WORKLOADS, Workload, small

#: Seconds of a turn.
SECONDS = {"mlp": 1.0, "digits": 1.0, "cnn": 2.0, "gpt": 2.0}

#: What ``--task all`` stands for.
ALL = ["mlp", "cnn", "gpt"]

LANES = [2**i for i in range(10)]


def bring_up(workload: Workload, names: Sequence[str], setup: Setup, console: Console) -> list[Side]:
    """The sides, ready, and in agreement about the first losses.

    Raises:
        SideFailed: they are not.
    """
    sides: list[Side] = []

    def prepare(name: str) -> Side:
        console.print(f"{workload.name}, {workload.lanes} lanes: preparing {name}", style="dim")
        return SIDES[name](workload, setup)

    try:
        with ThreadPoolExecutor(len(names) if setup.together else 1) as pool:
            # what else was preparing when one failed ends with this process
            for side in pool.map(prepare, names):
                sides.append(side)
        found = report.apart(sides)
        if found:
            shown = ", ".join(f"{name} {middle:.1e} ({most:.1e})" for name, (middle, most) in found.items())
            console.print(
                f"Losses of the first steps, relative difference from the first side's, median (most): {shown}"
            )
            exact = workload.precision == "float32" and setup.place.matmul in (None, "highest")
            bound = report.TOLERANCE if exact else report.COARSE
            far = [name for name, (middle, most) in found.items() if not (middle <= bound and most <= report.COARSE)]
            if far:
                raise SideFailed(f"{', '.join(far)} trains something else: above {bound:.0e}, or {report.COARSE:.0e}")
    except BaseException:
        for side in sides:
            side.close()
        raise
    return sides


def measure(
    workload: Workload,
    names: Sequence[str],
    setup: Setup,
    rounds: int,
    seconds: float | None,
    console: Console,
    turns: Turns,
    standing: Sequence[Side] = (),
) -> dict[str, Any]:
    """All that one task is measured for.

    Args:
        turns: this command's among others on the machine.
        standing: sides that are there already, and stay.
    """
    own = bring_up(workload, names, setup, console)
    sides = [*standing, *own]
    try:
        contestants = [contestant for side in sides for contestant in side.contestants]
        with turns.measuring():
            interleave(contestants, rounds, seconds or SECONDS[workload.name])
    finally:
        for side in own:
            side.close()
    title = f"{workload.name}: {workload.lanes} lanes, batch {workload.batch_size}"
    report.print_work(title, sides, console)
    found: dict[str, Any] = {"lanes": workload.lanes, "sides": report.figures(sides), "apart": report.apart(own)}
    if turns.quiet is not None:
        found["others were done preparing"] = turns.quiet
    if "coalesced" in names:
        # a process's own seconds say little of a GPU
        found["ratios"] = report.ratios(sides, processor=not setup.place.on_cuda)
        report.print_ratios(workload.name, found["ratios"], console)
    return found


def curve(
    workload: Workload,
    lanes: Sequence[int],
    names: Sequence[str],
    setup: Setup,
    rounds: int,
    seconds: float | None,
    console: Console,
    turns: Turns,
) -> list[dict[str, Any]]:
    """The same at several numbers of lanes. A plain loop knows no lanes: those of the first number stay."""
    standing = bring_up(workload, [name for name in names if name == "plain"], setup, console)
    others = [name for name in names if name != "plain"]
    found: list[dict[str, Any]] = []
    try:
        for count in lanes:
            # its best ways alone, once they are known
            for side in standing:
                ways = report.groups([side]).values() if found else [[way] for way in side.contestants]
                chosen = [report.best(some) if found else some[0] for some in ways]
                side.contestants = [replace(way, rates=[], processor_rates=[]) for way in chosen]
            one = replace(workload, lanes=count)
            found.append(measure(one, others, setup, rounds, seconds, console, turns, standing))
    finally:
        for side in standing:
            side.close()
    if "coalesced" in others:
        report.print_curve(workload.name, found, console)
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*WORKLOADS, "all", "lr_grid"], default="mlp")
    parser.add_argument("--sides", nargs="+", choices=[*SIDES], default=[*SIDES])
    parser.add_argument("--rounds", type=int, help="5 by default, of lr_grid 2")
    parser.add_argument("--seconds", type=float, help="of each turn")
    parser.add_argument(
        "--lanes", type=int, nargs="+", help="instead of the task's own number; of --curve all that it has"
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 6], help="numbers of plain processes")
    parser.add_argument("--cores", type=int, help="threads that a side has in all; all cores by default")
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter that has jax and modelbatch")
    parser.add_argument("--passive", action="store_true", help="threads wait asleep on all sides: on a shared machine")
    parser.add_argument("--check", action="store_true", help="compare the first losses, and stop")
    parser.add_argument("--rates", action="store_true", help="no second compile with a warm cache, and no memory")
    parser.add_argument("--curve", action="store_true", help="measure at each number of lanes")
    parser.add_argument("--no-compile", action="store_true", help="neither plain PyTorch nor coalesce compiles")
    parser.add_argument("--small", action="store_true", help="tiny experiments, to see whether everything runs")
    parser.add_argument("--override", nargs="+", default=[], help="of lr_grid: on the command line, such as steps=200")
    parser.add_argument("--json", type=Path, help="write the figures there")
    device = parser.add_argument_group("the device, and how exactly it computes")
    device.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where all sides compute")
    device.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="bfloat16: autocast")
    device.add_argument(
        "--matmul-precision", choices=["highest", "high"], help="of float32's products; high: TF32 on CUDA"
    )
    device.add_argument(
        "--graphs", action="store_true", help="coalesce's step as a CUDA graph, which it has no option for"
    )
    others = parser.add_argument_group("beside others of these commands, each of one task and one number of lanes")
    others.add_argument(
        "--turns", type=Path, metavar="FILE", help="prepare beside those that name this file, then take turns"
    )
    others.add_argument(
        "--patience", type=float, default=120, metavar="S", help="seconds in which the others must be ready"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device; cpu is always there")
    if options.device == "cuda" and options.task == "lr_grid":
        parser.error("--task lr_grid: runs on the CPU, not with --device cuda")
    if options.graphs and options.device != "cuda":
        parser.error("--graphs: needs --device cuda")
    if options.turns and (options.task == "all" or options.curve or len(options.lanes or [1]) > 1):
        parser.error("--turns: takes one task, one number of lanes, and no --curve")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    console = Console()
    place = Place(options.device, options.matmul_precision)
    turns = Turns(options.turns, options.patience)
    machine = describe(options.peer_python, place, options.precision)
    console.print(
        f"{machine['cores']} cores, {machine['cpu']}, {' '.join(machine['flags'])}; load {machine['load']:.1f}"
    )
    peers = options.peer_python, place, options.precision
    left_out = {name: reason for name in options.sides if (reason := missing(name, *peers))}
    names = [name for name in options.sides if name not in left_out]
    for reason in left_out.values():
        console.print(reason, markup=False)
    figures: dict[str, Any] = {"machine": machine, "left_out": [*left_out.values()], "tasks": {}}
    with tempfile.TemporaryDirectory() as folder:
        caches = Caches(Path(folder) / "caches")
        how = options.cores or cores(), options.processes, options.peer_python, not options.no_compile
        rates_alone = options.rates or options.check or options.curve or options.no_compile
        setup = Setup(
            Path(folder),
            caches,
            *how,
            thorough=not rates_alone,
            passive=options.passive,
            place=place,
            graphs=options.graphs,
            together=options.turns is not None,
        )
        if setup.thorough:
            figures["preparing an empty cache, s"] = seconds = setup.prime()
            console.print(f"An empty compiler's cache is prepared in {seconds:.0f} s")
        if options.task == "lr_grid":
            figures["lr_grid"] = lr_grid.measure(setup, options.rounds or 2, options.override, console)
            if options.json:
                options.json.write_text(json.dumps(figures, indent=2) + "\n")
            return
        for task in ALL if options.task == "all" else [options.task]:
            workload = replace(WORKLOADS[task], precision=options.precision)
            workload = small(workload) if options.small else workload
            how_long = setup, options.rounds or 5, options.seconds, console, turns
            lanes = options.lanes or (LANES if options.curve else [workload.lanes])
            if options.check:
                for count in lanes:
                    for side in bring_up(replace(workload, lanes=count), names, setup, console):
                        side.close()
                continue
            if options.curve:
                figures["tasks"][task] = curve(workload, lanes, names, *how_long)
            else:
                figures["tasks"][task] = [measure(replace(workload, lanes=n), names, *how_long) for n in lanes]
            if options.json:
                # as far as it got
                options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
