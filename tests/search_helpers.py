"""A small runner made of numbers, for searches: learning curves are functions, a lane is an entry of a list.

It does what `coalesce.search.base` says of the runner: it asks for a generation, fills free lanes in the order asked
for, moves all lanes from boundary to boundary, evaluates by each lane's own steps, carries out verdicts, puts aside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coalesce.experiment import Experiment
from coalesce.search.base import Copy, Ending, Report, Search, Stop
from run_fakes import experiment

#: What is measured of an experiment at a step: its validation score, or None: it diverged there.
Curve = Callable[[Experiment, int], "float | None"]
METRIC = "val/score"


def make(member: Mapping[str, Any]) -> Experiment:
    """An experiment of these values."""
    return experiment(member)


def many(count: int, steps: int | Sequence[int] = 100) -> list[Experiment]:
    """Experiments that differ in their seed."""
    lengths = [steps] * count if isinstance(steps, int) else list(steps)
    return [make({"seed": seed, "steps": length}) for seed, length in enumerate(lengths)]


@dataclass
class Lane:
    """An experiment on its way."""

    experiment: Experiment
    until: int | None
    step: int = 0
    best: float = math.nan
    last: float = math.nan


@dataclass
class Driver:
    """Drives a search to its end.

    Args:
        search: the search.
        curve: what is measured.
        width, every, evaluate_every: as the trainer's.
        reload: makes an equal search, which goes on from the first one's state at every boundary, through JSON.
    """

    search: Search
    curve: Curve
    width: int = 4
    every: int = 10
    evaluate_every: int = 10
    reload: Callable[[], Search] | None = None
    #: What was trained: experiment → steps taken, how it ended, what was asked for in which order.
    steps: dict[str, int] = field(default_factory=dict)
    status: dict[str, str] = field(default_factory=dict)
    asked: list[list[str]] = field(default_factory=list)
    verdicts: list[tuple[str, int, Any]] = field(default_factory=list)
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    aside: dict[str, Lane] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)

    def run(self) -> Driver:
        while trials := list(self._alike().ask(self.width)):
            self._drop()
            self.asked.append([trial.experiment.id for trial in trials])
            queue = []
            for trial in trials:
                lane = self.aside.pop(trial.experiment.id, None)
                assert lane is not None or trial.experiment.id not in self.steps, "asked for twice"
                lane = lane or Lane(trial.experiment, None)
                lane.until = trial.until
                assert trial.until is None or lane.step < trial.until < trial.experiment.steps
                queue.append(lane)
                self.steps.setdefault(trial.experiment.id, 0)
            lanes: list[Lane] = []
            while queue or lanes:
                while queue and len(lanes) < self.width:
                    lanes.append(queue.pop(0))
                lanes = self._boundary(lanes)
        self._drop()
        assert not self.aside, "put aside and forgotten"
        return self

    def _drop(self) -> None:
        for name, stop in self._alike().dropped().items():
            if name in self.aside:
                self.reasons[name] = stop.reason
                self._end(self.aside.pop(name), "stopped")

    def _alike(self) -> Search:
        if self.reload is not None:
            state = json.loads(json.dumps(self.search.state_dict()))
            self.search = self.reload()
            self.search.load_state_dict(state)
        return self.search

    def _boundary(self, lanes: list[Lane]) -> list[Lane]:
        diverged = []
        reports = []
        for lane in lanes:
            end = lane.until or lane.experiment.steps
            before = lane.step
            while lane.step < min(before + self.every, end):
                if self.curve(lane.experiment, lane.step + 1) is None:
                    diverged.append(lane)
                    break
                lane.step += 1
            self.steps[lane.experiment.id] += lane.step - before
            metrics = {"train/loss": 0.5}
            measured = lane.step % self.evaluate_every == 0 or lane.step == lane.experiment.steps
            if measured and lane not in diverged and lane.step:
                value = self.curve(lane.experiment, lane.step)
                assert value is not None
                metrics[METRIC] = lane.last = value
                if math.isfinite(value) and not lane.best >= value:
                    lane.best = value
            if lane.step > before:
                reports.append(Report(lane.experiment, lane.step, metrics))
        verdicts = self._alike().tell(reports)
        at = {lane.experiment.id: lane for lane in lanes}
        told = {report.experiment.id for report in reports}
        for name, verdict in verdicts.items():
            self.verdicts.append((name, at[name].step, verdict))
            if isinstance(verdict, Copy):
                assert verdict.source in told
                assert at[verdict.source].step == at[name].step
                assert not isinstance(verdicts.get(verdict.source), Copy)
                self.values[name] = dict(verdict.values)
        kept = []
        for lane in lanes:
            found = verdicts.get(lane.experiment.id)
            if lane in diverged:
                self._end(lane, "diverged")
            elif lane.step >= lane.experiment.steps:
                self._end(lane, "finished")
            elif isinstance(found, Stop):
                self.reasons[lane.experiment.id] = found.reason
                self._end(lane, "stopped")
            elif lane.step == lane.until:
                self.aside[lane.experiment.id] = lane
            else:
                kept.append(lane)
        return kept

    def _end(self, lane: Lane, status: str) -> None:
        name = lane.experiment.id
        assert name not in self.status, "ended twice"
        self.status[name] = status
        self.best[name] = lane.best
        best = {METRIC: lane.best} if math.isfinite(lane.best) else {}
        self._alike().ended(Ending(lane.experiment, status, lane.step, {METRIC: lane.last}, best))
