"""What `trainer.matmul_precision` costs in accuracy: of single products, and of what experiments end with.

    python -m benchmarks.precision [--task gpt|mlp|cnn|digits] [--steps 300] [--lanes 4] [--lr 0.001]
                                   [--settings highest high medium] [--device cpu|cuda] [--json FILE]

Products: of normal numbers, batched as lanes are, against the same product in float64; the norm of the difference over
the product's norm. Experiments: the same ones (seeds 0, 1, ... of the task as `benchmarks.throughput` has it) are
trained at each setting; by how much what they end with differs from what they end with at the first setting, experiment
by experiment, the median and the most. Beside it the standard deviation over the seeds: what another seed would change.
Where a setting gains nothing on this device, its differences are those of another order of sums at most, and a line
says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coalesce import kernels  # first: it speaks to what torch loads

# isort: split
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

import coalesce
from benchmarks.throughput.machine import describe
from benchmarks.throughput.place import Place
from benchmarks.throughput.workloads import WORKLOADS, Workload

#: Sizes of square matrices.
SIZES = (64, 256, 1024)


def product_error(size: int, setting: str, device: str) -> float:
    """The relative error of products of matrices of normal numbers."""
    generator = torch.Generator().manual_seed(size)
    left, right = (torch.randn(2, size, size, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    with kernels.products(setting):
        found = torch.bmm(left.to(device), right.to(device)).cpu().double()
    return ((found - exact).norm() / exact.norm()).item()


def train(workload: Workload, setting: str, options: argparse.Namespace) -> pd.DataFrame:
    """The results of the experiments, one row for each."""
    return coalesce.sweep(
        workload.task,
        {"seed": range(options.lanes)},
        optimizer={"name": "adamw", "lr": options.lr},
        schedule="cosine",
        steps=options.steps,
        batch_size=workload.batch_size,
        width=max(2, options.lanes),
        every=options.steps,
        evaluate_every=options.steps,
        evaluate_batch_size=128,
        monitor="val/loss",
        mode="min",
        matmul_precision=setting,
        device=options.device,
        compile=not options.no_compile,
    )


def differences(frames: Mapping[str, pd.DataFrame]) -> dict[str, dict[str, dict[str, float]]]:
    """Setting → metric → what the experiments end with, and how it differs from the first setting's.

    Raises:
        ValueError: an experiment did not finish, so that there is nothing to compare.
    """
    for setting, frame in frames.items():
        if list(frame["status"]) != ["finished"] * len(frame):
            raise ValueError(f"not all experiments finished at {setting}: {', '.join(frame['status'])}")
    first = next(iter(frames.values()))
    names = [name for name in first.columns if name.split("/")[0] in ("train", "val")]
    told: dict[str, dict[str, dict[str, float]]] = {}
    for setting, frame in frames.items():
        told[setting] = {}
        for name in names:
            apart = (frame[name] - first[name]).abs()
            told[setting][name] = {
                "mean": float(frame[name].mean()),
                "median": statistics.median(apart),
                "most": float(apart.max()),
                "seeds": float(first[name].std()) if len(first) > 1 else float("nan"),
            }
    return told


def report(figures: Mapping[str, Any], console: Console) -> None:
    """A table of products and one of experiments."""
    products = Table("setting", *(f"{size} x {size}" for size in SIZES), title="relative error of products")
    for setting, errors in figures["products"].items():
        products.add_row(setting, *(f"{error:.1e}" for error in errors))
    console.print(products)
    columns = "mean", "differs (median)", "(most)", "over the seeds"
    table = Table("metric", "setting", *columns, title=f"{figures['task']}: what {figures['steps']} steps end with")
    settings = list(figures["experiments"])
    for name in figures["experiments"][settings[0]]:
        for setting in settings:
            row = figures["experiments"][setting][name]
            shown = (f"{row['mean']:.5g}", f"{row['median']:.1e}", f"{row['most']:.1e}", f"{row['seeds']:.1e}")
            table.add_row(name, setting, *shown)
    console.print(table)
    for setting in figures["unchanged"]:
        console.print(f"{setting} gains nothing on this device: its products are as exact as at {kernels.EXACT}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*WORKLOADS], default="gpt")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lanes", type=int, default=4, help="experiments, which differ in their seed")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--settings", nargs="+", choices=kernels.PRECISIONS, default=[*kernels.PRECISIONS])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    workload = WORKLOADS[options.task]
    frames = {setting: train(workload, setting, options) for setting in options.settings}
    figures = {
        "machine": describe(sys.executable, Place(options.device)),
        "task": options.task,
        "steps": options.steps,
        "lr": options.lr,
        "products": {s: [product_error(size, s, options.device) for size in SIZES] for s in options.settings},
        "unchanged": [s for s in options.settings if s != kernels.EXACT and not kernels.less_exact(s, options.device)],
        "experiments": differences(frames),
    }
    report(figures, Console())
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
