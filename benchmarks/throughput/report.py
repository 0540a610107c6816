"""What was measured, as ratios and as tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.throughput.processes import Contestant
from benchmarks.throughput.sides import Side

#: How far (relative) the losses of two sides may lie apart in the median of the experiments, at each of the first
#: steps: some hundred times float32's precision, since sums are in another order.
TOLERANCE = 1e-4

#: Of fewer experiments a median says nothing: then this holds for the first loss alone, before any update.
SEVERAL = 4

#: The same in the worst one: AdamW's first steps have the size of the rate however small a gradient is, whose sign may
#: be rounding's. Of `cnn` at the rate 0.01 a plain loop whose model lies in `channels_last` is 3e-3 from a plain loop
#: after four steps. And where products are in bfloat16 or TF32, in the median too: a few times bfloat16's precision.
COARSE = 2e-2

#: How a ratio is taken, and what it is called.
KINDS = {"wall": "by time", "processor": "by processor time"}

#: What is asked of coalesced over each of the others, and of its time over the floor's.
TARGETS = {
    "mlp": {"plain eager": 4, "plain compiled": 4, "jax": 1.8, "modelbatch": 2, "floor": 1.8},
    "cnn": {"plain eager": 1.3, "plain compiled": 1.0, "jax": 1.5, "modelbatch": 2, "floor": 3},
    "gpt": {"plain eager": 1.5, "plain compiled": 1.5, "jax": 3, "modelbatch": 2, "floor": 1.8},
}


def apart(sides: Sequence[Side]) -> dict[str, tuple[float, float]]:
    """How far each one's losses lie, relative to them, from those of the plain eager loop: in the median of the
    experiments, at the worst step, and at the most. Where that is not among them, from those of the first one. Where a
    side knows the losses of few experiments, the first figure is of the first step.

    Raises:
        ValueError: a loss is not finite.
    """
    known = {name: rows for side in sides for name, rows in side.losses.items()}
    if not known:
        return {}
    reference = known.pop("eager" if "eager" in known else next(iter(known)))
    found = {}
    for name, rows in known.items():
        steps = []
        for row, other in zip(rows, reference, strict=True):
            pairs = [(a, b) for a, b in zip(row, other, strict=True) if a is not None and b is not None]
            if not all(math.isfinite(value) for pair in pairs for value in pair):
                raise ValueError(f"losses of {name}, or of what it is compared with, are not finite")
            if pairs:
                steps.append([abs(a - b) / max(abs(b), 1e-3) for a, b in pairs])
        middle = [statistics.median(one) for place, one in enumerate(steps) if place == 0 or len(one) >= SEVERAL]
        found[name] = max(middle), max(map(max, steps))
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def best(contestants: Sequence[Contestant], processor: bool = False) -> Contestant:
    """The fastest, by its median."""
    return max(contestants, key=lambda c: statistics.median(c.processor_rates if processor else c.rates))


def groups(sides: Sequence[Side]) -> dict[str, list[Contestant]]:
    """Name of a peer → the ways in which it works."""
    found: dict[str, list[Contestant]] = {}
    for side in sides:
        for contestant in side.contestants:
            found.setdefault(contestant.name.partition(",")[0], []).append(contestant)
    return found


def ratios(sides: Sequence[Side], processor: bool = True) -> dict[str, Any]:
    """Coalesced over each of the others, round by round; of the floor its own time over the floor's.

    Args:
        processor: also by processor time.
    """
    by_name = groups(sides)
    (ours,) = by_name.pop("coalesced")
    found: dict[str, Any] = {}
    for name, ways in by_name.items():
        row: dict[str, Any] = {}
        for kind in ("wall", "processor")[: 1 + processor]:
            chosen = best(ways, kind == "processor")
            mine, theirs = (c.rates if kind == "wall" else c.processor_rates for c in (ours, chosen))
            pairs = zip(mine, theirs, strict=True)
            row[kind] = spread([b / a if name == "floor" else a / b for a, b in pairs]) | {"against": chosen.name}
        found[name] = row
    return found


def figures(sides: Sequence[Side]) -> dict[str, Any]:
    """Everything measured of each side."""
    return {
        side.name: {
            **side.figures,
            "work": {
                c.name: {"rates": c.rates, "processor_rates": c.processor_rates, **spread(c.rates)}
                for c in side.contestants
            },
        }
        for side in sides
    }


def print_work(title: str, sides: Sequence[Side], console: Console) -> None:
    """A row for each way to work."""
    names = "experiment-steps/s", "µs per one", "per processor s", "compile, s", "cache warm", "KB per lane"
    table = Table("", *names, title=title)
    for side in sides:
        for contestant in side.contestants:
            # of plain PyTorch only one of its ways compiles
            own = {} if "eager" in contestant.name else side.figures
            memory = side.figures.get("memory", {})
            taken = None if not memory or memory["step"] is None else (memory["state"] + memory["step"]) / 1e3
            table.add_row(
                contestant.name,
                _spread(contestant.rates, 0),
                f"{1e6 / statistics.median(contestant.rates):.1f}",
                f"{statistics.median(contestant.processor_rates):.0f}",
                _number(own.get("compile"), 1),
                _number(own.get("compile, cache warm"), 1),
                _number(taken, 0),
            )
    console.print(table)


def print_ratios(name: str, found: Mapping[str, Any], console: Console) -> None:
    """A row for each peer."""
    kinds = [kind for kind in KINDS if any(kind in row for row in found.values())]
    table = Table("coalesced over", *[KINDS[kind] for kind in kinds], "asked for", "against")
    for peer, row in found.items():
        target = TARGETS.get(name, {}).get(peer)
        asked = "" if target is None else f"{'≤' if peer == 'floor' else '≥'} {target}"
        label = "the floor's time" if peer == "floor" else peer
        cells = [f"{r['median']:.2f} ({r['min']:.2f}-{r['max']:.2f})" for r in map(row.get, kinds)]
        table.add_row(label, *cells, asked, row["wall"]["against"])
    console.print(table)


def print_curve(name: str, found: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A row for each number of lanes: how fast coalesced is, and its ratios."""
    peers = list(dict.fromkeys(peer for row in found for peer in row["ratios"]))
    table = Table("lanes", "experiment-steps/s", *[f"over {peer}" for peer in peers], title=name)
    for row in found:
        rates = row["sides"]["coalesced"]["work"]["coalesced"]["rates"]
        cells = [row["ratios"][peer]["wall"] if peer in row["ratios"] else None for peer in peers]
        shown = ["" if c is None else f"{c['median']:.2f} ({c['min']:.2f}-{c['max']:.2f})" for c in cells]
        table.add_row(str(row["lanes"]), _spread(rates, 0), *shown)
    console.print(table)


def _spread(values: Sequence[float], digits: int) -> str:
    found = spread(values)
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f}-{found['max']:.{digits}f})"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
