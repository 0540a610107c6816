"""What a search is to the runner: it is asked for experiments, told metrics, and says what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from coalesce.experiment import Experiment


@dataclass(frozen=True)
class Trial:
    """An experiment to train, and how far.

    Args:
        experiment: one that has not been asked for, or one that was put aside.
        until: the step at which it is put aside, to wait with all of its state for being asked for again; None: it
            trains to its end.
    """

    experiment: Experiment
    until: int | None = None


@dataclass(frozen=True)
class Report:
    """Where an experiment stands at a host boundary.

    Args:
        experiment: which.
        step: updates done.
        metrics: what was measured after exactly this step: "train/loss" always, "val/accuracy" where it was evaluated.
    """

    experiment: Experiment
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Stop:
    """The experiment ends here, with status "stopped".

    Args:
        reason: for the results' column ``message``.
    """

    reason: str


@dataclass(frozen=True)
class Copy:
    """The experiment goes on from another one's state: weights, buffers, optimiser state, stream and step.

    Args:
        source: the id of an experiment that is in a lane of the same graph, has trained equally many steps, and is
            told of in the same call.
        values: dotted configuration key → its new value, of floats that ride: ``{"optimizer.lr": 0.01}``. Other
            floats are the source's.
    """

    source: str
    values: Mapping[str, float] = field(default_factory=dict)


Verdict: TypeAlias = Stop | Copy


@dataclass(frozen=True)
class Ending:
    """How an experiment ended.

    Args:
        experiment: which.
        status: "finished", "stopped", "diverged" or "failed".
        steps: updates done.
        metrics: the last value of each metric.
        best: the value of each validation metric at the best step.
    """

    experiment: Experiment
    status: str
    steps: int
    metrics: Mapping[str, float]
    best: Mapping[str, float]


class Search:
    """Base of all searches.

    The runner asks for experiments, trains all of them, and asks again; when nothing is given, the run is over. While
    they train it tells at every host boundary what was measured.

    What a search decides must follow from its settings and from what it was told, and nothing else: no clock, no
    generator without a seed, no order of a set.
    """

    #: Whether what is said of one experiment depends on what was told of others before. Then a run that is resumed
    #: repeats everything since its last snapshot, so that it is told the same in the same order. Otherwise experiments
    #: that ended since stay ended, and the search is told so.
    replays = False

    #: Whether an experiment that diverged stays in its lane, standing still, as long as another one is there that has
    #: begun with it and is sound: it may be told to copy that one. It is reported at the step at which it would be,
    #: without metrics.
    replaces_broken = False

    #: Whether an experiment that has ended may be trained once more. Not where others were judged by how it ended, or
    #: it cannot be trained by itself.
    retries = False

    #: Whether it asks more than once, so that a cohort's graph is needed again.
    asks_again = False

    def ask(self, width: int) -> Sequence[Trial]:
        """What to train next, in this order.

        Args:
            width: lanes of a graph, for searches that ask for a lane-full at a time.

        Returns:
            Nothing: the search is over.
        """
        raise NotImplementedError

    def tell(self, reports: Sequence[Report]) -> Mapping[str, Verdict]:
        """What was measured at one boundary, of all lanes that are due, in the order in which they were asked for.

        An experiment that went back to an earlier snapshot, since the run was interrupted or memory did not suffice,
        is told of once more, with the same numbers.

        Returns:
            id → what becomes of the experiment; the others go on. Of those that are at their end nothing is asked. What
            is copied is copied before anything is stopped.
        """
        return {}

    def ended(self, ending: Ending) -> None:
        """One experiment ended, after `tell`. A run that is resumed tells it again of those that ended since the last
        snapshot."""

    def forget(self, name: str) -> None:
        """An experiment that it was told of will be trained once more, from its start; only where `retries` says so."""

    def dropped(self) -> Mapping[str, Stop]:
        """Experiments that were put aside and will not be asked for again: they end here. To be called after `ask`.

        Returns:
            id → why. What is named once may be named again.
        """
        return {}

    def known(self) -> Sequence[Experiment]:
        """Experiments to make a plan of, in the order of the results: all that there will be, where that is known.

        Otherwise (`lists` is false) a few that are never trained, but show by their values what rides: for each graph
        that the search may ask for, some that differ in every float that rides there.
        """
        raise NotImplementedError

    #: Whether `known` gives all experiments that will ever be asked for.
    lists = True

    #: How many experiments belong together, and are of one job, where `known` does not give them: the seeds of a trial.
    together = 1

    def part(self, number: int, shares: Sequence[Sequence[str]]) -> Search:
        """The search of one job, of several that divide the experiments among themselves: it decides about its own
        share by what it sees of its own share. To be called before anything is asked for.

        The part of a single share is the search itself. Where random numbers decide, each job has a seed of its own
        (`draws.job_seed`).

        Args:
            number: of the job, from 0.
            shares: for each job the ids of its experiments. A search that does not `list` its experiments looks at
                their number alone.

        Raises:
            ValueError: a share has an id that the search does not know.
            ConfigError: the share cannot be searched by itself.
        """
        raise NotImplementedError

    def keep(self, file: Path, name: str) -> None:
        """A run folder was made. Told before anything else.

        Args:
            file: where a search that keeps records of its own keeps them, unless its settings say otherwise.
            name: of the run.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to go on from here; of what JSON holds (NaN included)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from another one's state."""

    @property
    def count(self) -> int:
        """Experiments in all, for the display."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """Whose `state_dict` it is: only a search of the same kind can go on from it."""
        return type(self).__name__


def taken(experiments: Sequence[Experiment], share: Sequence[str]) -> tuple[Experiment, ...]:
    """Those of a share, in the order of the search.

    Raises:
        ValueError: the share has another's.
    """
    names = set(share)
    if strange := names - {experiment.id for experiment in experiments}:
        raise ValueError(f"the search has no experiments {', '.join(sorted(strange))}")
    return tuple(experiment for experiment in experiments if experiment.id in names)


class Listed(Search):
    """A list of experiments, each to its end: a grid, or random samples.

    One that goes on from the state of a shorter list asks for what that one did not have.
    """

    retries = True

    def __init__(self, experiments: Sequence[Experiment]):
        self.experiments = tuple(experiments)
        self._asked: dict[str, None] = {}

    def ask(self, width: int) -> Sequence[Trial]:
        trials = [Trial(experiment) for experiment in self.experiments if experiment.id not in self._asked]
        self._asked |= dict.fromkeys(trial.experiment.id for trial in trials)
        return trials

    def part(self, number: int, shares: Sequence[Sequence[str]]) -> Search:
        return Listed(taken(self.experiments, shares[number]))

    def state_dict(self) -> dict[str, Any]:
        return {"asked": list(self._asked)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._asked = dict.fromkeys(map(str, state["asked"]))

    def known(self) -> Sequence[Experiment]:
        return self.experiments

    @property
    def count(self) -> int:
        return len(self.experiments)
