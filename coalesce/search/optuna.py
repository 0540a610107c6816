"""Optuna (Akiba et al. 2019, arXiv:1907.10902) by ask and tell, a lane-full at a time."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from coalesce.errors import ConfigError, Problem
from coalesce.experiment import Experiment
from coalesce.search.base import Ending, Search, Trial
from coalesce.search.draws import evenly, integer, job_seed
from coalesce.search.journal import SUFFIX, journal
from coalesce.search.metric import Metric
from coalesce.search.space import Axis, Space, rounded

#: Makes a sampler of a seed.
Sampler: TypeAlias = Callable[[int], BaseSampler]

#: The samplers with a name.
SAMPLERS: Mapping[str, Sampler] = {
    "tpe": lambda seed: TPESampler(seed=seed),
    "random": lambda seed: RandomSampler(seed=seed),
    # it draws what is no number independently, and would say so at every trial
    "cmaes": lambda seed: CmaEsSampler(seed=seed, warn_independent_sampling=False),
}
#: Names of attributes of a trial: the ids of its experiments, with spaces between; the number of the lane-full that it
#: was asked for with; the number of the trial that it repeats; and, where it could not be made, why.
EXPERIMENT, GENERATION, REPEATS, PROBLEM = "experiment", "generation", "repeats", "problem"
#: And where several jobs have one study: the job that asked for it, and how many there are.
JOB, JOBS = "job", "jobs"
#: Name of the study's attribute that tells which search it is of.
SEARCH = "coalesce"


def sampler_of(cls: type[BaseSampler], arguments: Mapping[str, Any]) -> Sampler:
    """A sampler of any class; it is seeded if its constructor takes a seed that the arguments do not give."""
    seeded = "seed" in inspect.signature(cls).parameters and "seed" not in arguments

    def make(seed: int) -> BaseSampler:
        with warnings.catch_warnings():
            # whoever names a class knows it; there is one for each trial
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return cls(**arguments, **({"seed": seed} if seeded else {}))

    return make


def distribution(axis: Axis) -> BaseDistribution:
    """What Optuna draws from for an axis: integers in equal steps have an order, other values of a list have none."""
    if axis.interval is not None:
        low, high, log = axis.interval.low, axis.interval.high, axis.interval.log
        return IntDistribution(int(low), int(high), log) if axis.interval.integer else FloatDistribution(low, high, log)
    values = _values(axis)
    if len(values) > 1 and all(type(value) is int for value in values):
        step = values[1] - values[0]
        if step > 0 and list(values) == list(range(values[0], values[-1] + 1, step)):
            return IntDistribution(values[0], values[-1], step=step)
    return CategoricalDistribution(values)


def _values(axis: Axis) -> list[Any]:
    """The members of an axis as Optuna can hold them: themselves where they are numbers or text, or else their text."""
    if len(axis.keys) == 1:
        values = [member[0] for member in axis.members]
        plain = all(value is None or isinstance(value, bool | int | float | str) for value in values)
        # to Optuna, values that are equal are one: 1 and True
        if plain and len(set(values)) == len(values):
            return values
    texts = [", ".join(_text(value) for value in member) for member in axis.members]
    return texts if len(set(texts)) == len(texts) else [f"{number}: {text}" for number, text in enumerate(texts)]


def _text(value: Any) -> str:
    return value.__qualname__ if isinstance(value, type) else "null" if value is None else str(value)


class Optuna(Search):
    """Trials of an Optuna study as experiments.

    A lane-full of trials is asked for; when all have ended, the next one is. A trial's value is the best value of its
    experiment's metric, as the results show it; with swept seeds or folds, the mean over all of them. An experiment
    that diverges or fails makes its trial fail. A trial that is drawn again is told the same again, and not trained.

    Everything is in the study: one that is loaded again goes on with the trials that were running. Each trial is drawn
    by a sampler of its own, whose seed follows from the search's seed and the trial's number, out of a copy of the
    study in memory, and enters the study in one piece. So what is drawn does not depend on interruptions.

    Jobs (`part`) have one study. Each asks for its own trials, as many as the others do, resumes them and tells their
    values; its samplers see what the others have told by the time it asks. So what is drawn depends on who was when how
    far, and no two runs in several jobs are alike. Of jobs that draw the same experiment one trains it, whose trial
    entered the study first, and the value is told to both. Trials that the study has from elsewhere, such as this
    process alone or another number of jobs, count as trials of the first job, which goes on with those that run.

    Args:
        space: what is drawn.
        make: an experiment from the values of the swept keys. It must work in whatever process asks.
        probes: see `Search.known`.
        metric: whose best value is optimised.
        samples: trials.
        seed: of the samplers.
        sampler: makes one.
        storage: Optuna's storage, or its URL; None: a file in the run folder, or memory where there is none. A file
            whose name ends in ``.journal`` is a journal, which jobs can share; others are SQLite's.
        study: the study's name; None: the run's, or where there is none, a name that no other study has. Trials that a
            study of this name has already are taken as done.
    """

    lists = False
    asks_again = True

    def __init__(
        self,
        space: Space,
        make: Callable[[Mapping[str, Any]], Experiment],
        probes: Sequence[Experiment],
        metric: Metric,
        samples: int,
        seed: int,
        sampler: Sampler = SAMPLERS["tpe"],
        storage: str | BaseStorage | None = None,
        study: str | None = None,
    ):
        self._space, self._make, self._probes = space, make, tuple(probes)
        self._metric, self._samples, self._seed, self._sampler = metric, samples, seed, sampler
        self.together = space.repeats.count
        #: Which job's, of how many.
        self._job, self._jobs = 0, 1
        self._distributions = {axis.name: distribution(axis) for axis in space.axes}
        self._file: Path | None = None
        self._storage, self._name = storage, study
        self._opened: Study | None = None
        #: Experiment → its value, of trials whose other experiments have not all ended; NaN: it failed.
        self._values: dict[str, float] = {}

    def part(self, number: int, shares: Sequence[Sequence[str]]) -> Search:
        if self._opened is not None:
            raise ValueError("the study is open: a search is divided before anything is asked for")
        part = copy.copy(self)
        part._values = {}
        part._job, part._jobs = number, len(shares)
        return part

    def keep(self, file: Path, name: str) -> None:
        self._file = file
        self._name = self._name or name

    @property
    def study(self) -> Study:
        """The study; it is made or loaded when it is first asked for.

        Raises:
            ConfigError: it cannot be, or belongs to another search.
        """
        if self._opened is None:
            with _quiet():
                self._opened = self._open()
        return self._opened

    def _open(self) -> Study:
        direction = StudyDirection.MAXIMIZE if self._metric.mode == "max" else StudyDirection.MINIMIZE
        try:
            storage = self._storage
            if storage is None and self._file is not None:
                storage = journal(self._file) if self._file.suffix == SUFFIX else _sqlite(self._file)
            study = optuna.create_study(
                storage=storage, study_name=self._name, direction=direction, load_if_exists=True
            )
        except Exception as error:  # whatever the database's driver raises
            rule = f"Optuna cannot open it: {str(error).strip().splitlines()[0]}"
            raise ConfigError([Problem("search.storage", str(self._storage or self._file), rule, STORAGES)]) from error
        own = {
            "space": {name: json.loads(_json(d)) for name, d in self._distributions.items()},
            "metric": self._metric.name,
            "seed": self._seed,
            "experiments": [experiment.id for experiment in self._probes],
        }
        if study.get_trials(deepcopy=False) and study.user_attrs.get(SEARCH) != own:
            rule = "the storage has a study of this name that belongs to another search"
            raise ConfigError([Problem("search.study", study.study_name, rule, "another name, or another storage")])
        if study.user_attrs.get(SEARCH) != own:
            study.set_user_attr(SEARCH, own)
        return study

    def ask(self, width: int) -> Sequence[Trial]:
        with _quiet():
            return [Trial(e) for e in self._lane_full(max(1, width // self.together))]

    def _lane_full(self, most: int) -> list[Experiment]:
        trials = self._settled()
        mine = [trial for trial in trials if self._is_mine(trial)]
        running = [trial for trial in mine if trial.state is TrialState.RUNNING]
        last = max((int(trial.user_attrs.get(GENERATION, 0)) for trial in mine), default=0)
        # those that are running were cut off, maybe before all of their lane-full were drawn
        generation = last if running else last + 1
        trains = self._trains(trials)
        asked = {
            str(t.user_attrs[EXPERIMENT]): self._experiments(t) for t in running if t.user_attrs[EXPERIMENT] in trains
        }
        drawn = [
            t for t in mine if t.user_attrs.get(GENERATION) == generation and t.user_attrs.get(EXPERIMENT) in trains
        ]
        full = {trial.user_attrs[EXPERIMENT] for trial in drawn if {REPEATS, PROBLEM}.isdisjoint(trial.user_attrs)}
        draw = self._drawing(trials, len(mine))
        for _ in range(self._quota(trials) - len(mine)):
            if len(full) >= most:
                break
            trial, experiments = draw(generation)
            if trial.state is TrialState.RUNNING:
                name = str(trial.user_attrs[EXPERIMENT])
                if self._jobs == 1 or name in self._trains(self._settled()):
                    full.add(name)
                    asked[name] = experiments
        return [e for experiments in asked.values() for e in experiments if e.id not in self._values]

    def _is_mine(self, trial: FrozenTrial) -> bool:
        if self._jobs > 1 and trial.user_attrs.get(JOBS) == self._jobs:
            return bool(trial.user_attrs[JOB] == self._job)
        return self._job == 0

    def _quota(self, trials: Sequence[FrozenTrial]) -> int:
        """How many trials of this job there are to be at the end."""
        others = sum(self._jobs > 1 and trial.user_attrs.get(JOBS) != self._jobs for trial in trials)
        share = evenly(max(0, self._samples - others), self._jobs)[self._job]
        return share + (others if self._job == 0 else 0)

    def _trains(self, trials: Sequence[FrozenTrial]) -> set[str]:
        """The experiments that are this job's to train: the first trial of each is of this job."""
        first = {
            str(trial.user_attrs[EXPERIMENT]): trial for trial in reversed(trials) if EXPERIMENT in trial.user_attrs
        }
        return {name for name, trial in first.items() if self._is_mine(trial)}

    def _settled(self) -> list[FrozenTrial]:
        """All trials; of this job none runs whose experiment another job has told by now."""
        trials = self.study.get_trials(deepcopy=False)
        if self._jobs == 1:
            return trials
        told = {t.user_attrs[EXPERIMENT]: t for t in trials if t.state.is_finished() and EXPERIMENT in t.user_attrs}
        late = [
            trial
            for trial in trials
            if trial.state is TrialState.RUNNING and self._is_mine(trial) and trial.user_attrs[EXPERIMENT] in told
        ]
        for trial in late:
            self._tell(trial, told[trial.user_attrs[EXPERIMENT]].value)
        return self.study.get_trials(deepcopy=False) if late else trials

    def _tell(self, trial: FrozenTrial, value: float | None) -> None:
        """Tell a trial its value, or that it failed."""
        # another job may tell the same at the same moment
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            state = TrialState.FAIL if value is None else TrialState.COMPLETE
            self.study.tell(trial.number, value, state, skip_if_finished=True)

    def _drawing(
        self, trials: Sequence[FrozenTrial], mine: int
    ) -> Callable[[int], tuple[FrozenTrial, list[Experiment]]]:
        """Make the function that draws the next trial of a lane-full and puts it into the study.

        Args:
            trials: of the study.
            mine: how many of them are this job's.
        """
        study = self.study
        mirror = optuna.create_study(direction=study.direction)
        mirror.add_trials(trials)
        known = {str(trial.user_attrs[EXPERIMENT]): trial for trial in trials if EXPERIMENT in trial.user_attrs}
        seed, job = job_seed(self._seed, self._job, self._jobs), {JOB: self._job, JOBS: self._jobs}
        own = itertools.count(mine)

        def draw(generation: int) -> tuple[FrozenTrial, list[Experiment]]:
            number = len(mirror.get_trials(deepcopy=False))
            mirror.sampler = self._sampler(integer(seed, "sampler", next(own), below=2**32))
            drawn = mirror.ask(self._distributions)
            frozen = mirror.get_trials(deepcopy=False)[number]
            attributes: dict[str, Any] = {GENERATION: generation, **(job if self._jobs > 1 else {})}
            state, value, experiments = TrialState.RUNNING, None, []
            try:
                experiments = self._experiments(frozen)
                attributes[EXPERIMENT] = " ".join(experiment.id for experiment in experiments)
                again = known.get(attributes[EXPERIMENT])
                if again is not None and again.state is not TrialState.RUNNING:
                    state, value, attributes[REPEATS] = again.state, again.value, again.number
            except ConfigError as error:
                state, attributes[PROBLEM] = TrialState.FAIL, "; ".join(str(problem) for problem in error.problems)
            new = optuna.create_trial(
                state=state,
                value=value,
                params=frozen.params,
                distributions=frozen.distributions,
                user_attrs=attributes,
                system_attrs=frozen.system_attrs,
            )
            study.add_trial(new)
            if state is not TrialState.RUNNING:
                mirror.tell(drawn, value, state=state)
            if EXPERIMENT in attributes:
                known.setdefault(attributes[EXPERIMENT], new)
            return new, experiments

        return draw

    def _experiments(self, trial: FrozenTrial) -> list[Experiment]:
        sample: dict[str, Any] = {}
        for axis in self._space.axes:
            value = trial.params[axis.name]
            if axis.interval is None:
                sample |= zip(axis.keys, axis.members[_values(axis).index(value)], strict=True)
            else:
                sample[axis.keys[0]] = value if axis.interval.integer else axis.interval.clipped(rounded(value))
        return [self._make(member) for member in self._space.with_repeats(sample)]

    def ended(self, ending: Ending) -> None:
        ok = ending.status in ("finished", "stopped")
        name, value = ending.experiment.id, self._metric.of(ending.best) if ok else math.nan
        with _quiet():
            if not (mine := self._running(name)):
                return
            self._values[name] = value
            names = str(mine[0].user_attrs[EXPERIMENT]).split()
            if not all(other in self._values for other in names):
                return
            values = [self._values.pop(other) for other in names]
            mean = math.fsum(values) / len(values) if all(map(math.isfinite, values)) else None
            for trial in mine:
                self._tell(trial, mean)
            # what another job has put in meanwhile; what it puts in now, it sees by itself that this was told
            for trial in self._running(name) if self._jobs > 1 else ():
                self._tell(trial, mean)

    def _running(self, name: str) -> list[FrozenTrial]:
        """The trials that wait for an experiment, of all jobs."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [trial for trial in running if name in str(trial.user_attrs[EXPERIMENT]).split()]

    def known(self) -> Sequence[Experiment]:
        return self._probes

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = {str(name): float(value) for name, value in state["values"].items()}

    @property
    def count(self) -> int:
        return evenly(self._samples, self._jobs)[self._job] * self.together


STORAGES = "a URL such as sqlite:///studies.db, or null: a file in the run folder"


def _json(distribution: BaseDistribution) -> str:
    return optuna.distributions.distribution_to_json(distribution)


def _sqlite(file: Path) -> RDBStorage:
    # by a connection of our own: a folder's name may hold what means something in a URL
    how = {"creator": lambda: sqlite3.connect(file, timeout=60.0, check_same_thread=False)}
    return RDBStorage("sqlite:///", engine_kwargs=how)


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna tells of new studies and the like; whoever calls us did not ask for it."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
