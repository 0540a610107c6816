"""Successive halving over steps: many experiments begin, and at each rung the best part of them goes on.

A rung is a number of steps: ``min_steps``, ``min_steps * factor``, ``min_steps * factor**2``, … At each, one in
``factor`` goes on. Jamieson & Talwalkar 2016, arXiv:1502.07943 (synchronous); Li et al. 2018, arXiv:1810.05934 (ASHA).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coalesce.experiment import Experiment
from coalesce.search.base import Ending, Listed, Report, Search, Stop, Trial, Verdict, taken
from coalesce.search.draws import job_seed, shuffled
from coalesce.search.metric import Metric, best_of


def rungs(steps: int, min_steps: int, factor: int) -> list[int]:
    """The rungs below the end of an experiment of so many steps.

    >>> rungs(2000, 100, 4)
    [100, 400, 1600]
    """
    found = []
    rung = min_steps
    while rung < steps:
        found.append(rung)
        rung *= factor
    return found


def not_among(kept: int, count: int, rung: int, metric: Metric, value: float) -> str:
    """Why an experiment does not go on from a rung."""
    best = f"among the best {kept}" if kept > 1 else "the best"
    return f"not {best} of {count} at step {rung}: {metric.name}={value:g}"


class Halving(Search):
    """Successive halving: the experiments of a rung are put aside when they have come to it; when all have, the best
    of them go on, from where they are.

    It decides better than `Asha`, since it sees all of a rung before it decides; but lanes wait at a rung's end.

    Args:
        experiments: all that begin.
        metric: by which they are compared, at the rung's own step. An experiment whose metric is not finite there does
            not go on.
        min_steps: the first rung; the metric is measured at its multiples.
        factor: one in so many goes on, but at least one.
    """

    replays = True
    asks_again = True

    def __init__(self, experiments: Sequence[Experiment], metric: Metric, min_steps: int, factor: int):
        self.experiments = tuple(experiments)
        self._by_id = {experiment.id: experiment for experiment in experiments}
        self._metric, self._min_steps, self._factor = metric, min_steps, factor
        #: Generations asked for.
        self._generation = 0
        #: Where those that were asked for last are put aside.
        self._rung = 0
        #: Those of them that will be put aside, and what was measured there: NaN until it is.
        self._values: dict[str, float] = {}
        #: Why experiments did not go on from the last rung.
        self._dropped: dict[str, str] = {}

    def ask(self, width: int) -> Sequence[Trial]:
        if self._generation == 0:
            going = list(self.experiments)
            self._rung = self._min_steps
        else:
            kept = best_of(len(self._values), self._factor)
            best = set(self._metric.ranked(self._values)[:kept])
            going = [self._by_id[name] for name in self._values if name in best]
            self._dropped = {
                name: not_among(kept, len(self._values), self._rung, self._metric, value)
                for name, value in self._values.items()
                if name not in best
            }
            self._rung *= self._factor
        self._generation += 1
        # one alone has nobody to be compared with
        aside = {e.id for e in going if e.steps > self._rung} if len(going) > 1 else set()
        self._values = {experiment.id: float("nan") for experiment in going if experiment.id in aside}
        return [Trial(experiment, self._rung if experiment.id in aside else None) for experiment in going]

    def tell(self, reports: Sequence[Report]) -> Mapping[str, Verdict]:
        for report in reports:
            if report.step == self._rung and report.experiment.id in self._values:
                self._values[report.experiment.id] = self._metric.of(report.metrics)
        return {}

    def ended(self, ending: Ending) -> None:
        # it stays counted: one that diverged is one that was worse than others
        if ending.experiment.id in self._values and ending.status != "finished":
            self._values[ending.experiment.id] = float("nan")

    def dropped(self) -> Mapping[str, Stop]:
        return {name: Stop(reason) for name, reason in self._dropped.items()}

    def part(self, number: int, shares: Sequence[Sequence[str]]) -> Search:
        return Halving(taken(self.experiments, shares[number]), self._metric, self._min_steps, self._factor)

    def known(self) -> Sequence[Experiment]:
        return self.experiments

    def state_dict(self) -> dict[str, Any]:
        values, dropped = dict(self._values), dict(self._dropped)
        return {"generation": self._generation, "rung": self._rung, "values": values, "dropped": dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generation, self._rung = int(state["generation"]), int(state["rung"])
        self._values = {str(name): float(value) for name, value in state["values"].items()}
        self._dropped = dict(state["dropped"])

    @property
    def count(self) -> int:
        return len(self.experiments)


class Asha(Listed):
    """Asynchronous successive halving in its stopping form: an experiment that comes to a rung goes on if it is among
    the best of those that have come to it so far, and is stopped for good otherwise.

    Those that come to a rung at one boundary are compared with each other as well. So the first ones go on more easily
    than later ones; nothing waits for anything, nothing that was stopped is taken up again, and freed lanes are filled
    at once.

    Args:
        experiments: all of them.
        metric: by which they are compared, at the rung's own step. Where it is not finite, the experiment is stopped.
        min_steps: the first rung; the metric is measured at its multiples.
        factor: one in so many goes on, but at least the best.
        seed: of the order in which they are asked for. In the grid's order those of one learning rate would come
            first, and would be compared with their like.
    """

    replays = True

    def __init__(self, experiments: Sequence[Experiment], metric: Metric, min_steps: int, factor: int, seed: int):
        super().__init__(experiments)
        self._metric, self._min_steps, self._factor = metric, min_steps, factor
        self._seed = seed
        self._order = shuffled(len(self.experiments), seed)
        #: Rung → experiment → its metric there, in the order in which they came.
        self._came: dict[int, dict[str, float]] = {}

    def ask(self, width: int) -> Sequence[Trial]:
        # of a longer list than the one whose state it goes on from, some alone
        trials = {trial.experiment.id: trial for trial in super().ask(width)}
        ordered = [self.experiments[number].id for number in self._order]
        return [trials[name] for name in ordered if name in trials]

    def part(self, number: int, shares: Sequence[Sequence[str]]) -> Search:
        seed = job_seed(self._seed, number, len(shares))
        return Asha(taken(self.experiments, shares[number]), self._metric, self._min_steps, self._factor, seed)

    def tell(self, reports: Sequence[Report]) -> Mapping[str, Verdict]:
        arrived: list[tuple[int, Report]] = []
        for report in reports:
            if report.step not in rungs(report.experiment.steps, self._min_steps, self._factor):
                continue
            came = self._came.setdefault(report.step, {})
            if report.experiment.id not in came:
                came[report.experiment.id] = self._metric.of(report.metrics)
                arrived.append((report.step, report))
        stopped: dict[str, Verdict] = {}
        for rung, report in arrived:
            came = self._came[rung]
            kept = best_of(len(came), self._factor)
            if report.experiment.id not in self._metric.ranked(came)[:kept]:
                value = came[report.experiment.id]
                stopped[report.experiment.id] = Stop(not_among(kept, len(came), rung, self._metric, value))
        return stopped

    def forget(self, name: str) -> None:
        for came in self._came.values():
            came.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        came = {str(rung): list(map(list, values.items())) for rung, values in self._came.items()}
        return super().state_dict() | {"came": came}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._came = {
            int(rung): {str(name): float(value) for name, value in values} for rung, values in state["came"].items()
        }
