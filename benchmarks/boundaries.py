"""What host boundaries cost: logging every 10 steps and evaluating every 200, with a run folder and snapshots.

    python -m benchmarks.boundaries [--lanes 64] [--steps 2000] [--rounds 3] [--every 10] [--evaluate-every 200]

The MLP of `sweep=lr_grid` on the digits. Seconds of training, without planning and compiling, in runs that take turns:
with these boundaries and everything written, and with one boundary, at the end, and nothing written. Both end with one
evaluation of each split.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from coalesce.configuration import check_trainer, make_experiments, rides
from coalesce.runner.listener import Listener, Progress
from coalesce.runner.plan import Plan
from coalesce.runner.planning import make_plan
from coalesce.runner.run import run
from coalesce.store.paths import RunPaths
from coalesce.store.writer import RunWriter


class Clock(Listener):
    """Keeps the last that was told of the run's progress."""

    progress: Progress

    def advanced(self, progress: Progress) -> None:
        self.progress = progress


def training_s(plan: Plan, listeners: list[Listener]) -> float:
    """Seconds of training of a run."""
    clock = Clock()
    run(plan, [*listeners, clock])
    return clock.progress.training_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("lanes", 64), ("steps", 2000), ("rounds", 3), ("every", 10), ("evaluate-every", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    base = {"task": "coalesce.tasks.Digits", "optimizer": "adamw", "schedule": "cosine", "steps": options.steps}
    experiments, keys = make_experiments(base | {"batch_size": 64, "seed": 0}, {"seed": range(options.lanes)})
    # the check trains as well
    usual = {"width": options.lanes, "check": False, "weights": True}
    often = check_trainer({**usual, "every": options.every, "evaluate_every": options.evaluate_every})
    plan = make_plan("boundaries", keys, experiments, rides, often)
    once = replace(plan.trainer, every=options.steps, evaluate_every=options.steps, weights=False)
    seldom = replace(plan, trainer=once)
    seconds: dict[str, list[float]] = {"boundaries": [], "none": []}
    with tempfile.TemporaryDirectory() as folder:
        training_s(seldom, [])
        for _ in range(options.rounds):
            seconds["none"].append(training_s(seldom, []))
            writer = RunWriter(RunPaths.create(Path(folder), "boundaries"))
            seconds["boundaries"].append(training_s(plan, [writer]))
    table = Table("", "best, s", "median, s", title=f"{options.lanes} lanes, {options.steps} steps")
    for kind, found in seconds.items():
        table.add_row(kind, f"{min(found):.2f}", f"{statistics.median(found):.2f}")
    Console().print(table)
    ratio = statistics.median(seconds["boundaries"]) / statistics.median(seconds["none"])
    print(f"boundaries over none: {ratio:.3f} (median), {min(seconds['boundaries']) / min(seconds['none']):.3f} (best)")


if __name__ == "__main__":
    main()
