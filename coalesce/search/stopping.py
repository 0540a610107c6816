"""Ending experiments early by their own metrics: patience, and a target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coalesce.experiment import Experiment
from coalesce.search.base import Copy, Ending, Report, Search, Stop, Trial, Verdict
from coalesce.search.metric import Metric


class Stopping(Search):
    """Any search, whose experiments also end when they have reached a target or no longer improve.

    Each is judged by its own measurements alone, whatever the others do. What the search inside says of an experiment
    counts, unless it has reached the target. An experiment that copied another one's state starts its patience anew.

    Args:
        inner: the search.
        metric: what is looked at.
        patience: measurements in a row without improvement after which an experiment ends; None: no matter how many.
        min_delta: only what is better than the best so far by more than this is an improvement.
        target: a value at which an experiment ends; None: none.
    """

    def __init__(
        self, inner: Search, metric: Metric, patience: int | None, min_delta: float = 0.0, target: float | None = None
    ):
        self.inner = inner
        self.replays, self.retries = inner.replays, inner.retries
        self.replaces_broken = inner.replaces_broken
        self.lists, self.asks_again, self.together = inner.lists, inner.asks_again, inner.together
        self._metric, self._patience, self._min_delta, self._target = metric, patience, min_delta, target
        #: Experiment → the best value that counted as an improvement, measurements since then, and the last one's step.
        self._history: dict[str, tuple[float, int, int]] = {}

    def ask(self, width: int) -> Sequence[Trial]:
        return self.inner.ask(width)

    def tell(self, reports: Sequence[Report]) -> Mapping[str, Verdict]:
        verdicts = dict(self.inner.tell(reports))
        for report in (r for r in reports if self._metric.name in r.metrics):
            name, value = report.experiment.id, self._metric.of(report.metrics)
            best, since, step = self._history.get(name, (math.nan, 0, 0))
            if report.step <= step:
                # told before: the experiment went back to a snapshot
                continue
            improved = self._metric.is_better(value, best, self._min_delta)
            self._history[name] = (value, 0, report.step) if improved else (best, since + 1, report.step)
            if self._target is not None and self._metric.reaches(value, self._target):
                verdicts[name] = Stop(f"{self._metric.name}={value:g} reached the target of {self._target:g}")
            elif self._patience is not None and self._history[name][1] >= self._patience and name not in verdicts:
                more = f" by more than {self._min_delta:g}" if self._min_delta else ""
                count = f"{self._patience} measurements" if self._patience > 1 else "one measurement"
                verdicts[name] = Stop(f"{self._metric.name} has not improved{more} in {count}")
        for name, verdict in verdicts.items():
            if isinstance(verdict, Copy) and name in self._history:
                self._history[name] = (math.nan, 0, self._history[name][2])
        return verdicts

    def ended(self, ending: Ending) -> None:
        self._history.pop(ending.experiment.id, None)
        self.inner.ended(ending)

    def forget(self, name: str) -> None:
        self._history.pop(name, None)
        self.inner.forget(name)

    def dropped(self) -> Mapping[str, Stop]:
        return self.inner.dropped()

    def known(self) -> Sequence[Experiment]:
        return self.inner.known()

    def part(self, number: int, shares: Sequence[Sequence[str]]) -> Search:
        inner = self.inner.part(number, shares)
        return Stopping(inner, self._metric, self._patience, self._min_delta, self._target)

    def keep(self, file: Path, name: str) -> None:
        self.inner.keep(file, name)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "history": {name: list(h) for name, h in self._history.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self._history = {
            str(name): (float(best), int(since), int(step)) for name, (best, since, step) in state["history"].items()
        }

    @property
    def count(self) -> int:
        return self.inner.count

    @property
    def kind(self) -> str:
        return f"{self.inner.kind} with patience or a target"
