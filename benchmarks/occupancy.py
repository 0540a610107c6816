"""What asynchronous halving saves, what it misses, and whether its lanes are busy.

    python -m benchmarks.occupancy [--rates 32] [--replicas 8] [--steps 1600] [--width 64] [--min-steps 50]
                                   [--searches 10]

The MLP of `sweep=lr_grid` on the digits, a grid of learning rates and seeds (256 experiments by default): once to the
end, and by `search=asha` with ten seeds of the search.

- lane-steps: steps that experiments took, over those of the full grid.
- test accuracy of the winner, the experiment that is best on the validation split at its best step, in that state. The
  standard error of the full grid's is that of a share of the test split's samples.
- occupancy: lanes in which an experiment trained, over all lanes, until the queue was empty.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from coalesce.configuration import check_trainer, make_experiments, rides
from coalesce.configuration.language import logspace
from coalesce.runner.listener import Listener, Progress, Result
from coalesce.runner.plan import Plan
from coalesce.runner.planning import make_plan
from coalesce.runner.run import run
from coalesce.search.base import Listed, Search
from coalesce.search.halving import Asha
from coalesce.search.metric import Metric

MONITOR, EVERY, FACTOR = "val/accuracy", 25, 4
BUDGET, BUSY = 0.25, 0.9


class Occupancy(Listener):
    """Adds up how many lanes were busy as long as experiments were waiting for one."""

    def __init__(self) -> None:
        self.busy = self.lanes = 0

    def advanced(self, progress: Progress) -> None:
        if progress.total_experiments - progress.experiments > progress.lanes:
            self.busy += progress.lanes
            self.lanes += progress.width


@dataclass(frozen=True)
class Outcome:
    """Of one search: steps of all experiments, the winner's test accuracy, and the share of busy lanes."""

    steps: int
    accuracy: float
    occupancy: float


def search(plan: Plan, how: Search) -> Outcome:
    """Run one."""
    occupancy = Occupancy()
    results = run(plan, [occupancy], search=how)

    def value(result: Result) -> float:
        return result.best.get(MONITOR, -math.inf) if result.status in ("finished", "stopped") else -math.inf

    winner = max(results, key=value)
    share = occupancy.busy / occupancy.lanes if occupancy.lanes else math.nan
    return Outcome(sum(r.steps for r in results), winner.best["test/accuracy"], share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"rates": 32, "replicas": 8, "steps": 1600, "width": 64, "min-steps": 50, "searches": 10}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    base = {"task": "coalesce.tasks.Digits", "optimizer": "adamw", "schedule": "cosine", "steps": options.steps}
    params = {"optimizer.lr": logspace(1e-4, 1e-1, options.rates), "seed": range(options.replicas)}
    experiments, keys = make_experiments(base | {"batch_size": 64, "seed": 0}, params)
    trainer = check_trainer({"width": options.width, "every": EVERY, "evaluate_every": EVERY, "monitor": MONITOR})
    plan = make_plan("occupancy", keys, experiments, rides, replace(trainer, weights=False))
    full = search(plan, Listed(experiments))
    halved = [
        search(plan, Asha(experiments, Metric(MONITOR, "max"), options.min_steps, FACTOR, seed))
        for seed in range(options.searches)
    ]
    samples = plan.cohorts[0].template.data.sizes["test"]
    error = math.sqrt(full.accuracy * (1 - full.accuracy) / samples)
    table = Table(
        "", "lane-steps", "of the grid", "winner's test accuracy", "occupancy", title=f"{len(experiments)} experiments"
    )
    for name, one in [("grid", full), *((f"asha, seed {n}", one) for n, one in enumerate(halved))]:
        of = one.steps / full.steps
        table.add_row(name, f"{one.steps:,}", f"{of:.3f}", f"{one.accuracy:.4f}", f"{one.occupancy:.3f}")
    Console().print(table)
    mean = statistics.mean(one.accuracy for one in halved)
    most = max(one.steps for one in halved) / full.steps
    least = min(one.occupancy for one in halved)
    print(f"mean test accuracy {mean:.4f}; the grid's {full.accuracy:.4f}, standard error {error:.4f}")
    print(f"lane-steps at most {most:.3f} of the grid's; occupancy at least {least:.3f}")
    missed = [
        *(["accuracy: further than one standard error"] if mean < full.accuracy - error else []),
        *([f"lane-steps: above {BUDGET}"] if most > BUDGET else []),
        *([f"occupancy: below {BUSY}"] if least < BUSY else []),
    ]
    if missed:
        sys.exit("; ".join(missed))


if __name__ == "__main__":
    main()
