"""Jobs that share an Optuna study.

Oracle: laws of the study at its end, whoever was when how far (as many trials as asked for, each job its share of them,
none running, no experiment trained twice, every value that of its experiment), and Optuna's own tools.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from coalesce.experiment import Experiment
from coalesce.search.base import Ending, Trial
from coalesce.search.draws import evenly
from coalesce.search.metric import Metric
from coalesce.search.optuna import SAMPLERS, Optuna
from coalesce.search.space import Interval, Space
from coalesce.store.paths import RunPaths
from search_helpers import METRIC, Driver, make
from test_search_optuna import Killed, Mortal

MAX = Metric(METRIC, "max")
RATES = Space({"optimizer.lr": Interval(1e-4, 1.0, log=True), "task.hidden": [8, 16]})
FEW = Space({"task.hidden": [8, 16], "task.depth": [1, 2]})
SEEDS = Space({"task.hidden": [8, 16, 24], "seed": [1, 2]})
ONE = Space({"task.hidden": [8]})


def score(of: Experiment, step: int = 20) -> float:
    return math.sin(of.config["task"]["hidden"]) + of.config["optimizer"]["lr"] + of.seed / 7


def parts(
    file: Path | BaseStorage, space: Space, samples: int, jobs: int, sampler: str = "tpe", seed: int = 0
) -> list[Optuna]:
    found = []
    for job in range(jobs):
        storage = file if isinstance(file, BaseStorage) else None
        whole = Optuna(space, make, [], MAX, samples, seed, SAMPLERS[sampler], storage, "run")
        if isinstance(file, Path):
            whole.keep(file, "run")
        part = whole.part(job, [()] * jobs)
        assert isinstance(part, Optuna)
        found.append(part)
    return found


class Job:
    """Trains what its search asks for, one experiment at a time."""

    def __init__(self, search: Optuna, width: int):
        self.search, self.width = search, width
        self.left: list[Experiment] = []
        self.trained: list[str] = []
        self.over = False

    def move(self) -> None:
        """Ask, or train what was asked for first."""
        if not self.left:
            self.left = [trial.experiment for trial in self.search.ask(self.width)]
            self.over = not self.left
            return
        of = self.left.pop(0)
        self.trained.append(of.id)
        self.search.ended(ending(of))


def value(of: Experiment, step: int) -> float | None:
    """High rates diverge."""
    return None if of.config["optimizer"]["lr"] > 0.5 else score(of)


def ending(of: Experiment) -> Ending:
    found = value(of, 20)
    values = {} if found is None else {METRIC: found}
    return Ending(of, "diverged" if found is None else "finished", 20, values, values)


def check(
    trials: Sequence[FrozenTrial], trained: Sequence[Sequence[str]], samples: int, jobs: int, best: Mapping[str, float]
) -> None:
    """The laws of a study at its end."""
    assert len(trials) == samples
    assert Counter(t.user_attrs["job"] for t in trials) == Counter(dict(enumerate(evenly(samples, jobs))))
    assert {t.user_attrs["jobs"] for t in trials} == {jobs}
    once = Counter(name for names in trained for name in names)
    assert set(once.values()) == {1}
    assert set(once) == {name for t in trials for name in t.user_attrs["experiment"].split()}
    for trial in trials:
        values = [best[name] for name in trial.user_attrs["experiment"].split()]
        if all(map(math.isfinite, values)):
            assert trial.state is TrialState.COMPLETE
            assert trial.value == math.fsum(values) / len(values)
        else:
            assert trial.state is TrialState.FAIL


def best_of(space: Space, trials: Sequence[FrozenTrial]) -> dict[str, float]:
    """The value of each experiment, by the trials' own parameters."""
    found = {}
    for trial in trials:
        rate = {k: float(f"{v:.12g}") for k, v in trial.params.items() if k == "optimizer.lr"}
        for member in space.with_repeats({**trial.params, **rate}):
            ended = ending(make(member))
            found[ended.experiment.id] = ended.best.get(METRIC, math.nan)
    return found


@pytest.mark.parametrize("space", [RATES, FEW, SEEDS, ONE], ids=["rates", "few", "seeds", "one"])
def test_whoever_is_when_how_far(space: Space, tmp_path: Path) -> None:
    for seed in range(6):
        generator = random.Random(seed)
        jobs, samples = generator.choice([(2, 7), (3, 8), (4, 3)])
        file = tmp_path / f"{seed}.journal"
        running = [Job(search, generator.choice([2, 4])) for search in parts(file, space, samples, jobs)]
        everyone = list(running)
        while running:
            job = generator.choice(running)
            job.move()
            running = [job for job in running if not job.over]
        trials = everyone[0].search.study.get_trials()
        check(trials, [job.trained for job in everyone], samples, jobs, best_of(space, trials))


def test_samplers_see_what_others_have_told(tmp_path: Path) -> None:
    space = Space({"optimizer.lr": Interval(0.0, 0.4)})
    first, second = parts(tmp_path / "study.journal", space, 60, 2)
    alone = parts(tmp_path / "alone.journal", space, 60, 2)[1]
    Driver(first, score, width=30).run()
    # by then tpe no longer draws at random, and what was told says that high rates are better
    informed = [trial.experiment.config["optimizer"]["lr"] for trial in second.ask(30)]
    blind = [trial.experiment.config["optimizer"]["lr"] for trial in alone.ask(30)]
    assert sum(informed) / 30 > sum(blind) / 30 + 0.1


@pytest.mark.parametrize("sampler", ["random", "cmaes"])
def test_jobs_draw_otherwise(tmp_path: Path, sampler: str) -> None:
    searches = parts(tmp_path / "study.journal", RATES, 12, 3, sampler)
    rates = [[t.experiment.values["optimizer.lr"] for t in search.ask(4)] for search in searches]
    assert len({rate for drawn in rates for rate in drawn}) == 12


def test_one_job_draws_what_this_process_would(tmp_path: Path) -> None:
    stories = []
    for search in (Optuna(RATES, make, [], MAX, 14, 3), *parts(tmp_path / "study.journal", RATES, 14, 1, seed=3)):
        driver = Driver(search, score).run()
        trials = search.study.get_trials()
        stories.append((driver.asked, [(t.params, t.value, t.state, t.user_attrs) for t in trials]))
    assert stories[0] == stories[1]
    assert (tmp_path / "study.journal").exists()


# two jobs that draw the same at the same moment


def both(tmp_path: Path) -> tuple[Optuna, Optuna, Experiment]:
    """Two jobs; the first one trains the only experiment that there is."""
    first, second = parts(tmp_path / "study.journal", ONE, 2, 2)
    (trial,) = first.ask(1)
    return first, second, trial.experiment


def told_twice(search: Optuna) -> None:
    trials = search.study.get_trials()
    assert [t.state for t in trials] == [TrialState.COMPLETE] * 2
    assert trials[0].value == trials[1].value
    assert search.ask(1) == []


@pytest.mark.parametrize("call", range(4))
def test_another_job_draws_while_one_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    first, second, of = both(tmp_path)
    calls = itertools.count()

    def before(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            if next(calls) == call:
                assert second.ask(1) == []
            return method(*arguments)

        return called

    # the calls are: look, tell, look again, and maybe tell again
    monkeypatch.setattr(first, "_running", before(first._running))
    monkeypatch.setattr(first, "_tell", before(first._tell))
    first.ended(ending(of))
    if next(calls) <= call:
        assert second.ask(1) == []
    told_twice(second)


def test_one_tells_while_another_job_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, of = both(tmp_path)
    add = second.study.add_trial

    def late(trial: FrozenTrial) -> None:
        assert trial.state is TrialState.RUNNING
        first.ended(ending(of))
        add(trial)

    monkeypatch.setattr(second.study, "add_trial", late)
    assert second.ask(1) == []
    told_twice(second)


def test_both_draw_before_either_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = parts(tmp_path / "study.journal", ONE, 2, 2)
    add = first.study.add_trial
    asked: list[Trial] = []

    def late(trial: FrozenTrial) -> None:
        asked.extend(second.ask(1))
        add(trial)

    monkeypatch.setattr(first.study, "add_trial", late)
    # the second one was first
    assert first.ask(1) == []
    (trial,) = asked
    second.ended(ending(trial.experiment))
    told_twice(first)


# going on


def test_killed_at_any_change_of_the_study() -> None:
    samples, jobs = 7, 2
    number = 0
    while True:
        number += 1
        storage = Mortal()
        storage.left, storage.before = number, number % 2 == 0
        trained: list[dict[str, Ending]] = [{}, {}]
        for _ in range(2):
            for job, search in enumerate(parts(storage, FEW, samples, jobs)):
                try:
                    for ended in trained[job].values():
                        search.ended(ended)
                    while trials := search.ask(2):
                        for of in (trial.experiment for trial in trials):
                            trained[job][of.id] = ending(of)
                            search.ended(trained[job][of.id])
                except Killed:
                    assert storage.left == 0
        study = optuna.load_study(study_name="run", storage=storage)
        check(study.trials, [list(ended) for ended in trained], samples, jobs, best_of(FEW, study.trials))
        if storage.left > 0:
            break
    assert number > 10


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (3, 2)])
def test_another_number_of_jobs_goes_on(tmp_path: Path, before: int, after: int) -> None:
    file = tmp_path / "study.journal"
    trained = []
    for search in parts(file, RATES, 12, before):
        job = Job(search, 2)
        for _ in range(4):
            job.move()
        trained.append(job.trained)
        # the rest of its lane-full is left running
    for search in parts(file, RATES, 12, after):
        job = Job(search, 2)
        while not job.over:
            job.move()
        trained.append(job.trained)
    trials = search.study.get_trials()
    assert len(trials) == 12
    assert all(t.state.is_finished() for t in trials)
    names = [name for names in trained for name in names]
    assert len(names) == len(set(names)) == 12


def test_a_part_is_made_before_anything_is_asked_for() -> None:
    (search,) = parts(optuna.storages.InMemoryStorage(), RATES, 4, 1)
    search.ask(2)
    with pytest.raises(ValueError, match="divided before anything is asked for"):
        search.part(0, [()])


# the file


def test_optunas_own_tools_read_the_journal(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "what? #1 100% & more")
    paths.folder.mkdir()
    searches = parts(paths.journal, RATES, 9, 3)
    for search in searches:
        Driver(search, score).run()
    assert [f.name for f in paths.folder.iterdir()] == ["study.journal"]
    study = optuna.load_study(study_name="run", storage=JournalStorage(JournalFileBackend(str(paths.journal))))
    frame = study.trials_dataframe()
    assert list(frame["user_attrs_job"].value_counts()) == [3, 3, 3]
    assert study.best_value == max(t.value for t in searches[0].study.get_trials() if t.value is not None)


@pytest.mark.parametrize("left", [b'{"op_code": 4, "worker_id', b"{", b"\xff"])
def test_a_line_that_was_cut_off(tmp_path: Path, left: bytes) -> None:
    file = tmp_path / "study.journal"
    first, second = parts(file, RATES, 6, 2)
    Driver(first, score).run()
    lines = file.read_bytes()
    with file.open("ab") as stream:
        stream.write(left)
    Driver(second, score).run()
    assert file.read_bytes().startswith(lines)
    again = parts(file, RATES, 6, 2)[0]
    assert len(again.study.get_trials()) == 6
    assert again.ask(4) == []


def test_the_journal_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (search,) = parts(Path("study.journal"), RATES, 4, 1)
    trials = search.ask(2)
    monkeypatch.chdir("/")
    search.ended(ending(trials[0].experiment))
    assert sum(t.state.is_finished() for t in search.study.get_trials()) == 1
