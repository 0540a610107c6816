"""What the host knows of an experiment that trains."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from coalesce.experiment import Experiment, leaves
from coalesce.optim import SCHEDULES

#: What is said of an experiment whose loss was finite when it broke.
_UPDATE_BROKE = (
    "the loss was finite, so it is a gradient or the update. A torch.where gives a NaN gradient if the branch that it "
    "did not take is infinite or NaN, or has such a slope: give that branch an argument that is safe"
)


@dataclass
class Slot:
    """An experiment in its lane: what has been measured so far.

    Args:
        experiment: which.
        order: its place among those that were asked for together.
        until: the step at which it is put aside; None: it trains to its end.
        steps: updates done; ``moved``: those since it was last due.
        clock: the updates that it would have done had it not broken: where it stands among others.
        aside: whether it was put aside.
        metrics: the last value of each; ``fresh``: those of the boundary that it stands at.
        best: the values of the validation metrics when the monitored one was best, at ``best_step``; and those of the
            test split in that state, when it has ended.
        floats: dotted key → the value that it has now, where that is no longer its configuration's.
        seconds: in a lane, until ``since_s``, when it was last put into one.
    """

    experiment: Experiment
    order: int = 0
    until: int | None = None
    steps: int = 0
    moved: int = 0
    clock: int = 0
    aside: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    best_value: float = math.nan
    best_step: int | None = None
    floats: dict[str, float] = field(default_factory=dict)
    fresh: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    since_s: float = field(default_factory=time.monotonic)

    @property
    def end(self) -> int:
        """The step at which it leaves its lane."""
        return self.experiment.steps if self.until is None else min(self.until, self.experiment.steps)

    @property
    def seconds_now(self) -> float:
        return self.seconds + time.monotonic() - self.since_s

    def advanced(self, to: int, taken: int, alive: bool) -> None:
        """Steps were taken.

        Args:
            to: the updates that it has done now.
            taken: the steps of the graph.
            alive: whether it is sound still.
        """
        self.moved, self.steps = self.moved + to - self.steps, to
        self.clock = to if alive else min(self.clock + taken, self.experiment.steps)

    @property
    def monitored(self) -> str:
        """The metric that its schedule looks at."""
        return str(self.experiment.config["schedule"]["monitor"])

    @property
    def is_judged(self) -> bool:
        """Whether its schedule looks at a metric now, by its own steps."""
        schedule = self.experiment.config["schedule"]
        return SCHEDULES[schedule["name"]].judges and self.steps % schedule["every"] == 0

    def riding(self, keys: Collection[str]) -> dict[str, float]:
        """Of these keys those that are floats, with the values that they have now."""
        config = self.experiment.varied(self.floats).config
        return {key: value for key, value in leaves(config) if key in keys and isinstance(value, float)}

    def broke(self, finite: bool) -> str:
        """What is said of it when it has diverged.

        Args:
            finite: whether the loss was finite when it did.
        """
        message = f"the loss or a parameter turned infinite or NaN at step {self.steps + 1}"
        return f"{message}; {_UPDATE_BROKE}" if finite else message

    def note(self, values: Mapping[str, float], monitor: str, mode: str) -> bool:
        """Take over metrics, and tell whether the monitored one is the best so far."""
        self.metrics |= values
        self.fresh |= values
        value = values.get(monitor, math.nan)
        better = value > self.best_value if mode == "max" else value < self.best_value
        if not math.isfinite(value) or not (better or math.isnan(self.best_value)):
            return False
        self.best_value, self.best_step, self.best = value, self.steps, dict(values)
        return True

    def facts(self) -> dict[str, Any]:
        """What `of` makes it from, beside the experiment: of what JSON holds."""
        names = [f.name for f in fields(self) if f.name not in ("experiment", "fresh", "since_s", "seconds")]
        return {name: getattr(self, name) for name in names} | {"seconds": self.seconds_now}

    @classmethod
    def of(cls, experiment: Experiment, facts: Mapping[str, Any]) -> Slot:
        copies: dict[str, Any] = {
            name: dict(value) if isinstance(value, Mapping) else value for name, value in facts.items()
        }
        # the snapshot of an earlier version has none
        return cls(experiment, **{"clock": copies["steps"], **copies})


@dataclass(frozen=True)
class Saved:
    """An experiment that is in no lane, with all that it needs to go on.

    Args:
        facts: of its `Slot`.
        tensors: its lane's state, on the CPU.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
