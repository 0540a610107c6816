"""Seconds to the first step, from a compiler's cache that does not have the graph, and from one that has it.

    python -m benchmarks.compile [--task gpt|mlp|cnn|digits] [--layers 2 4 8 12] [--lanes 1 8 64]
                                 [--cores N] [--device cpu|cuda] [--json FILE]

Each figure comes from a process of its own, in which the runner runs a plan as `coalesce.sweep` does, a run folder and
the evaluation's graph included, until the first step is taken. `--layers` is of gpt alone (`coalesce.tasks.CharLM`).

- cold: the compiler's cache has been used on this machine, but has not seen this graph. warm: it has this graph.
- first step: from the run's beginning, when its plan is made, to the end of the first step, by the clock.
- compile: of that, tracing and compiling, by the clock; then by the processor: all of it, and what is traced, what the
  compiler's Python does, and what the processes do that it starts, the C++ compiler above all.

What an empty cache costs once is a line of its own: the compiler's probes of the processor and its precompiled header.
At the end two ratios of the seconds to compile: the most layers over 4 (or the fewest), for each number of lanes, and
the most lanes over the fewest, for each number of layers; median, least and most.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.throughput.machine import cores, describe
from benchmarks.throughput.place import Place
from benchmarks.throughput.processes import Caches, Process
from benchmarks.throughput.report import spread
from benchmarks.throughput.workloads import PRIMER, WORKLOADS, Workload

LAYERS, LANES = (2, 4, 8, 12), (1, 8, 64)

#: What the most layers are compared with, where it is among them.
REFERENCE = 4

Figure = dict[str, Any]


def first_step(workload: Workload, how: Mapping[str, Any], environment: Mapping[str, str]) -> Figure:
    """Seconds until a process of its own has taken the first step: see `benchmarks.throughput.spent`."""
    process = Process("coalesced", {"workload": asdict(workload), **how}, environment)
    try:
        told: Figure = process.call("losses", steps=1)
    finally:
        process.close()
    del told["losses"]
    return told


def prepare(caches: Caches, how: Mapping[str, Any], around: dict[str, str]) -> Figure:
    """Use an empty cache once.

    Args:
        around: the rest of the environment; its temporary folder is empty as well, since the header lies there.

    Returns:
        What is spent on a small graph with the empty cache, above what is spent on one of the same size afterwards.
    """
    first = first_step(PRIMER, how, caches.environment("primer") | around)
    caches.primed = True
    # another number of lanes is another shape of everything: none of its graphs is there already
    sibling = replace(PRIMER, lanes=PRIMER.lanes + 1)
    second = first_step(sibling, how, caches.environment("sibling") | around)
    return {name: first[name] - second[name] for name in first}


def workloads(task: str, layers: Sequence[int | None], lanes: Sequence[int]) -> Iterator[tuple[int | None, Workload]]:
    """Each number of layers with each number of lanes; None: the task has no such option."""
    base = WORKLOADS[task]
    for layer in layers:
        own = dict(base.task) if layer is None else {**base.task, "layers": layer}
        for count in lanes:
            yield layer, replace(base, task=own, lanes=count)


def ratios(found: Sequence[Figure]) -> dict[str, dict[str, Any]]:
    """Seconds to compile: the most layers over `REFERENCE`, or the fewest, and the most lanes over the fewest."""
    told: dict[str, dict[str, Any]] = {}
    for by, beside in (("layers", "lanes"), ("lanes", "layers")):
        kinds = sorted({figure[by] for figure in found if figure[by] is not None})
        if len(kinds) < 2:
            continue
        most, least = kinds[-1], REFERENCE if by == "layers" and REFERENCE in kinds[:-1] else kinds[0]
        row: dict[str, Any] = {}
        for cache in ("cold", "warm"):
            for clock, key in (("clock", "compile_s"), ("processor", "processor_s")):
                if values := list(_pairs(found, cache, by, beside, most, least, itemgetter(key))):
                    row[f"{cache}, {clock}"] = spread(values)
        told[f"{most} {by} over {least}"] = row
    return told


def _pairs(
    found: Sequence[Figure],
    cache: str,
    by: str,
    beside: str,
    most: int,
    least: int,
    value: Callable[[Figure], float],
) -> Iterator[float]:
    values = {(f[by], f[beside]): value(f) for f in found if f["cache"] == cache}
    for (one, other), above in values.items():
        if one == most and values.get((least, other)):
            yield above / values[least, other]


def report(task: str, found: Sequence[Figure], told: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """A row for each figure, and a line for each ratio."""
    columns = "first step", "compile", "processor", "traced", "Python", "C++"
    keys = "first_s", "compile_s", "processor_s", "tracing_s", "compiler_s", "started_s"
    table = Table("layers", "lanes", "cache", *columns, title=f"{task}: seconds to the first step")
    for figure in found:
        which = "-" if figure["layers"] is None else str(figure["layers"])
        table.add_row(which, str(figure["lanes"]), figure["cache"], *(f"{figure[key]:.1f}" for key in keys))
    console.print(table)
    for name, row in told.items():
        parts = [f"{kind} {one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f})" for kind, one in row.items()]
        console.print(f"Compiling {name}: {'; '.join(parts)}")


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count}: must be at least 1")
    return count


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*WORKLOADS], default="gpt")
    parser.add_argument("--layers", type=_count, nargs="+", help="of gpt; 2, 4, 8 and 12 by default")
    parser.add_argument("--lanes", type=_count, nargs="+", default=[*LANES], help="experiments; 1, 8 and 64 by default")
    parser.add_argument("--cores", type=_count, help="threads of torch; all cores by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--no-compile", action="store_true", help="trace alone")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    if options.layers and options.task != "gpt":
        parser.error(f"--layers is an option of gpt; {options.task} has no such number")
    options.layers = options.layers or ([*LAYERS] if options.task == "gpt" else [None])
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    console = Console()
    place = Place(options.device)
    how = {"threads": options.cores or cores(), "compile": not options.no_compile, "place": asdict(place)}
    machine = describe(sys.executable, place)
    figures: dict[str, Any] = {"machine": machine, "task": options.task, "how": how, "figures": []}
    found: list[Figure] = figures["figures"]

    def write() -> None:
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")

    # the threads of a compiler end later than what they wrote is wanted
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = Caches(Path(folder) / "caches")
        temporary = Path(folder) / "temporary"
        temporary.mkdir()
        around = {"TMPDIR": str(temporary)}
        if not options.no_compile:
            figures["preparing an empty cache"] = once = prepare(caches, how, around)
            console.print(
                f"Preparing an empty cache: {once['compile_s']:.1f} s, {once['processor_s']:.1f} s of the processor"
            )
        for layers, workload in workloads(options.task, options.layers, options.lanes):
            environment = caches.environment(f"{workload.name}-{layers}-{workload.lanes}") | around
            for cache in ["cold"] if options.no_compile else ["cold", "warm"]:
                shown = "" if layers is None else f"{layers} layers, "
                console.print(f"{workload.name}: {shown}{workload.lanes} lanes, {cache}", style="dim")
                told = first_step(workload, how, environment)
                found.append({"layers": layers, "lanes": workload.lanes, "cache": cache, **told})
                write()
    figures["ratios"] = ratios(found)
    report(options.task, found, figures["ratios"], console)
    write()


if __name__ == "__main__":
    main()
