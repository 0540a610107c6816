"""Population-based training (Jaderberg et al. 2017, arXiv:1711.09846)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coalesce.errors import ConfigError, Problem
from coalesce.experiment import Experiment
from coalesce.search.base import Copy, Listed, Report, Search, Verdict, taken
from coalesce.search.draws import integer, job_seed, uniform
from coalesce.search.metric import Metric
from coalesce.search.space import Axis, Interval, Space, rounded


def perturbed(
    space: Space, experiments: Sequence[Experiment], rides: Callable[[Experiment, str, Any], bool]
) -> dict[str, Axis]:
    """The keys that a population may change, and what they are drawn from: continuous intervals, and lists of two or
    more floats, where they ride. Not those of a zip group, which a factor would part.

    Args:
        experiments: those of the population: they have the values as numbers, however they were written.
        rides: whether a leaf of the configuration may differ within a graph.
    """
    found = {}
    for axis in (axis for axis in space.axes if len(axis.keys) == 1):
        key = axis.keys[0]
        values = [experiment.values[key] for experiment in experiments]
        numbers = all(isinstance(v, float) and rides(e, key, v) for e, v in zip(experiments, values, strict=True))
        if numbers and axis.interval is None:
            axis = Axis((key,), tuple((value,) for value in sorted(set(values))))
        if numbers and (axis.interval is not None or len(axis.members) > 1):
            found[key] = axis
    return found


class Population(Listed):
    """Population-based training: every ``interval`` steps the worst experiments go on from the state of one of the
    best, with its hyperparameters, some of which are changed.

    What is compared are the experiments that stand at the same step at one boundary. A population that is larger than
    the graph is wide trains a lane-full at a time, each a population of its own.

    Which one is copied is drawn among the best part; and what becomes of each of its floats: with probability
    ``resample`` it is drawn anew, otherwise it is multiplied by one of the ``factors``, and stays between the ends of
    its interval, or between the least and the greatest value of its list. (The paper's truncation selection, its
    perturbation and its resampling.) An experiment whose metric is not finite counts among the worst, and is never
    copied; one that diverged does so at the next such moment, if there is one before its end.

    Args:
        experiments: of one graph, with equally many steps.
        metric: by which they are compared.
        axes: the keys that are changed; all of them ride. See `perturbed`.
        interval: steps; the metric is measured at its multiples.
        fraction: what part of the population is the worst, and what part the best; at most a half.
        factors: what a float is multiplied by.
        resample: the probability of drawing it anew.
        seed: of what is drawn.
    """

    replays = True
    replaces_broken = True
    # alone there would be nobody whom it could copy
    retries = False

    def __init__(
        self,
        experiments: Sequence[Experiment],
        metric: Metric,
        axes: Mapping[str, Axis],
        interval: int,
        fraction: float = 0.2,
        factors: Sequence[float] = (0.8, 1.2),
        resample: float = 0.25,
        seed: int = 0,
    ):
        super().__init__(experiments)
        self._by_id = {experiment.id: experiment for experiment in experiments}
        self._metric, self._axes, self._interval = metric, dict(axes), interval
        self._fraction, self._factors, self._resample, self._seed = fraction, tuple(factors), resample, seed
        #: Experiment → from which step on it trains with which values, where they are no longer its own.
        self._changes: dict[str, dict[int, dict[str, float]]] = {}

    def tell(self, reports: Sequence[Report]) -> Mapping[str, Verdict]:
        at: dict[int, dict[str, Report]] = {}
        for report in reports:
            if report.step % self._interval == 0 and report.step < report.experiment.steps:
                at.setdefault(report.step, {})[report.experiment.id] = report
        verdicts: dict[str, Copy] = {}
        for step, members in at.items():
            verdicts |= self._exploit(step, members)
        for step, members in at.items():
            for name in members:
                # an experiment that went back to a snapshot comes by here again
                kept = {before: v for before, v in self._changes.get(name, {}).items() if before < step}
                self._changes[name] = kept | ({step: dict(verdicts[name].values)} if name in verdicts else {})
        return verdicts

    def _exploit(self, step: int, members: Mapping[str, Report]) -> dict[str, Copy]:
        ranked = self._metric.ranked({name: self._metric.of(r.metrics) for name, r in members.items()})
        # of two or more at least one is replaced, whatever the fraction
        count = min(max(1, int(len(members) * self._fraction)), len(members) // 2)
        best = ranked[:count]
        lost = [name for name in members if name not in ranked]
        worst = [name for name in [*ranked, *lost][len(members) - count :] if name not in best]
        chosen = dict.fromkeys([*worst, *lost]) if best else {}
        verdicts: dict[str, Copy] = {}
        for name in (name for name in members if name in chosen):
            source = best[integer(self._seed, "source", step, name, below=len(best))]
            verdicts[name] = Copy(source, self._explored(self._values(source, step), step, name))
        return verdicts

    def part(self, number: int, shares: Sequence[Sequence[str]]) -> Search:
        least = min(map(len, shares))
        if len(shares) > 1 and least < 2:
            rule = f"search=pbt: in each job its share is a population, which needs 2 experiments, not {least}"
            most = len(self.experiments) // 2
            raise ConfigError([Problem("launcher.jobs", len(shares), rule, f"at most {most}" if most > 1 else "1")])
        experiments, seed = taken(self.experiments, shares[number]), job_seed(self._seed, number, len(shares))
        how = self._interval, self._fraction, self._factors, self._resample
        return Population(experiments, self._metric, self._axes, *how, seed)

    def _values(self, name: str, step: int) -> dict[str, float]:
        """The values that an experiment has trained with until this step."""
        changes = [before for before in self._changes.get(name, {}) if before < step]
        if changes:
            return self._changes[name][max(changes)]
        return {key: float(self._by_id[name].values[key]) for key in self._axes}

    def _explored(self, values: Mapping[str, float], step: int, name: str) -> dict[str, float]:
        return {key: self._changed(key, value, step, name) for key, value in values.items()}

    def _changed(self, key: str, value: float, step: int, name: str) -> float:
        axis, purpose = self._axes[key], (step, name, key)
        if uniform(self._seed, "resample", *purpose) < self._resample:
            return float(axis.draw(self._seed, "value", *purpose)[key])
        factor = self._factors[integer(self._seed, "factor", *purpose, below=len(self._factors))]
        numbers = [member[0] for member in axis.members]
        bounds = axis.interval or Interval(min(numbers), max(numbers))
        return float(bounds.clipped(rounded(value * factor)))

    def state_dict(self) -> dict[str, Any]:
        changes = {name: {str(step): dict(v) for step, v in steps.items()} for name, steps in self._changes.items()}
        return super().state_dict() | {"changes": changes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._changes = {
            str(name): {int(step): {str(k): float(v) for k, v in values.items()} for step, values in steps.items()}
            for name, steps in state["changes"].items()
        }
