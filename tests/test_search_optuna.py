"""Optuna by ask and tell.

Oracle: Optuna's own loop (a fresh sampler for each trial, ask, tell) for what is drawn; a run that is never interrupted
for one that is cut off at any call of the storage; Optuna's own `load_study` for what lies in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from coalesce.errors import ConfigError, Problem
from coalesce.experiment import Experiment
from coalesce.search.base import Ending
from coalesce.search.draws import integer
from coalesce.search.metric import Metric
from coalesce.search.optuna import SAMPLERS, Optuna, distribution, sampler_of
from coalesce.search.space import Interval, Space
from run_fakes import experiment
from search_helpers import METRIC, Driver, make

MAX = Metric(METRIC, "max")
SPACE = Space({"optimizer.lr": Interval(1e-4, 1.0, log=True), "task.hidden": [8, 16, 24], "optimizer": ["sgd", "adam"]})
TREE = "optimizer.lr", "task.hidden", "optimizer"


@pytest.fixture(autouse=True)
def _loud() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    yield
    assert optuna.logging.get_verbosity() == before


def member(values: Mapping[str, Any]) -> Experiment:
    """The option of a group is its name."""
    plain = {key: value for key, value in values.items() if key != "optimizer"}
    made = experiment({"steps": 20, "optimizer.name": values.get("optimizer", "sgd"), **plain})
    return Experiment(made.config, dict(values))


def score(of: Experiment, step: int = 20) -> float:
    """Best at a rate of 0.01."""
    return 1 - abs(math.log10(of.config["optimizer"]["lr"]) + 2) / 4 + of.config["task"]["hidden"] / 1000


def search(space: Space = SPACE, samples: int = 20, seed: int = 0, **options: Any) -> Optuna:
    return Optuna(space, member, [], MAX, samples, seed, **options)


def drawn(of: Optuna) -> list[tuple[Any, ...]]:
    """All of a study that matters."""
    trials = of.study.get_trials(deepcopy=False)
    return [(t.number, t.state.name, dict(t.params), t.value, dict(t.user_attrs)) for t in trials]


@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes"])
def test_it_draws_what_optuna_draws(sampler: str) -> None:
    mine = search(samples=24, seed=5, sampler=SAMPLERS[sampler])
    Driver(mine, score, width=4).run()
    # Optuna by itself, four at a time
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    for start in range(0, 24, 4):
        asked = []
        for number in range(start, start + 4):
            study.sampler = SAMPLERS[sampler](integer(5, "sampler", number, below=2**32))
            asked.append(study.ask({axis.name: distribution(axis) for axis in SPACE.axes}))
        for trial in asked:
            study.tell(trial, score(member({**trial.params, "optimizer.lr": float(f"{trial.params[TREE[0]]:.12g}")})))
    optuna.logging.set_verbosity(optuna.logging.INFO)
    assert [t.params for t in mine.study.trials] == [t.params for t in study.trials]
    assert [t.value for t in mine.study.trials] == [t.value for t in study.trials]


def test_distributions() -> None:
    space = Space(
        {
            "a": Interval(1e-4, 1, log=True),
            "b": Interval(0, 1),
            "c": Interval(1, 8, log=True, integer=True),
            "d": [8, 16, 24],
            "e": [8, 16, 32],
            "f": ["x", None, True],
            "g": [1, True],
            "h": [[1, 2], [3, 4]],
            "i": [Space, Interval],
            "j": [0.1, 0.2],
            "k": [None, 5],
            "l": [7],
        },
        [["j", "k"]],
    )
    assert {axis.name: distribution(axis) for axis in space.axes} == {
        "a": FloatDistribution(1e-4, 1, log=True),
        "b": FloatDistribution(0, 1),
        "c": IntDistribution(1, 8, log=True),
        "d": IntDistribution(8, 24, step=8),
        "e": CategoricalDistribution([8, 16, 32]),
        "f": CategoricalDistribution(["x", None, True]),
        "g": CategoricalDistribution(["1", "True"]),
        "h": CategoricalDistribution(["[1, 2]", "[3, 4]"]),
        "i": CategoricalDistribution(["Space", "Interval"]),
        "j+k": CategoricalDistribution(["0.1, null", "0.2, 5"]),
        "l": CategoricalDistribution([7]),
    }


def test_what_belongs_together_is_drawn_together() -> None:
    space = Space({"task.a": [1, 2], "task.b": [10, 20], "task.hidden": [8]}, [["task.a", "task.b"]])
    driver = Driver(search(space, 9), lambda e, step: 0.5).run()
    assert 1 <= len(driver.steps) <= 2
    values = [[e.values[k] for k in space.keys] for e in [t.experiment for t in search(space, 9).ask(9)]]
    assert all(b == 10 * a for a, b, _ in values)


def test_the_same_seed_at_the_same_width_and_no_other() -> None:
    studies = []
    for seed, width in ((0, 4), (0, 4), (1, 4), (0, 5)):
        studies.append(search(seed=seed))
        driver = Driver(studies[-1], score, width).run()
        assert {len(asked) for asked in driver.asked[:-1]} == {width}
    assert drawn(studies[0]) == drawn(studies[1])
    assert drawn(studies[0]) != drawn(studies[2])
    assert drawn(studies[0]) != drawn(studies[3])
    assert len(drawn(studies[3])) == 20


class Killed(Exception):
    """As SIGKILL: whatever was about to be done is not done."""


class Mortal(optuna.storages.InMemoryStorage):
    """A storage that outlives the process, which is killed at its n-th change: before it, or right after."""

    left, before = 10**6, False

    def _change(self, change: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and self.before:
            raise Killed
        result = change()
        if self.left == 0:
            raise Killed
        return result

    def create_new_trial(self, *args: Any, **kwargs: Any) -> int:
        return int(self._change(lambda: super(Mortal, self).create_new_trial(*args, **kwargs)))

    def set_trial_state_values(self, *args: Any, **kwargs: Any) -> bool:
        return bool(self._change(lambda: super(Mortal, self).set_trial_state_values(*args, **kwargs)))


def survive(storage: Mortal, sampler: str, space: Space, width: int) -> list[tuple[Any, ...]]:
    """What a study holds at the end of a run that begins anew, without a snapshot, whenever it is killed: it is told
    what ended, and trains everything else from the start."""
    results: dict[str, Ending] = {}
    while True:
        mine = search(space, 12, sampler=SAMPLERS[sampler], storage=storage)
        try:
            for ending in results.values():
                mine.ended(ending)
            while trials := mine.ask(width):
                for of in (trial.experiment for trial in trials):
                    broken = of.config["optimizer"]["lr"] < 1e-3
                    values = {} if broken else {METRIC: score(of) + of.seed / 100}
                    results[of.id] = Ending(of, "diverged" if broken else "finished", 20, values, values)
                    mine.ended(results[of.id])
            return drawn(mine)
        except Killed:
            pass


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
@pytest.mark.parametrize("seeds", [1, 2])
def test_killed_at_any_change_of_the_study(sampler: str, seeds: int) -> None:
    space = Space({"optimizer.lr": Interval(1e-4, 1.0, log=True), "task.hidden": [8, 16, 24], "seed": range(seeds)})
    plain = survive(Mortal(), sampler, space, 3 * seeds)
    assert {state for _, state, *_ in plain} == {"COMPLETE", "FAIL"}
    assert len(plain) == 12
    # 12 trials enter and are told
    for number in range(1, 25):
        for before in (True, False):
            storage = Mortal()
            storage.left, storage.before = number, before
            assert survive(storage, sampler, space, 3 * seeds) == plain, (number, before)
            assert storage.left <= 0, "it was not killed"


def test_the_study_is_read_by_optunas_own_tools(tmp_path: Path) -> None:
    folder = tmp_path / "what? #1 100% & more"
    folder.mkdir()
    mine = search(samples=8)
    mine.keep(folder / "study.db", "my run/1")
    driver = Driver(mine, score).run()
    assert [f.name for f in folder.iterdir()] == ["study.db"]
    # a copy, since the folder's name would mean something else in a URL
    (tmp_path / "copy.db").write_bytes((folder / "study.db").read_bytes())
    study = optuna.load_study(study_name="my run/1", storage=f"sqlite:///{tmp_path / 'copy.db'}")
    assert study.direction is optuna.study.StudyDirection.MAXIMIZE
    frame = study.trials_dataframe()
    assert set(frame["user_attrs_experiment"]) == set(driver.steps)
    assert study.best_value == max(driver.best.values())
    assert [t.value for t in study.trials] == [driver.best[t.user_attrs["experiment"]] for t in study.trials]
    assert study.user_attrs["coalesce"]["metric"] == METRIC


def test_the_value_is_the_mean_over_seeds_and_any_failure_fails() -> None:
    space = Space({"optimizer.lr": Interval(1e-3, 1.0, log=True), "task.hidden": [8], "seed": [1, 2, 3]})

    def curve(of: Experiment, step: int) -> float | None:
        return None if of.seed == 3 and of.config["optimizer"]["lr"] > 0.1 else score(of) + of.seed

    mine = search(space, samples=6)
    driver = Driver(mine, curve, width=7, reload=None).run()
    assert [len(asked) for asked in driver.asked] == [6, 6, 6]
    assert mine.count == 18
    for trial in mine.study.trials:
        rate = float(f"{trial.params['optimizer.lr']:.12g}")
        names = trial.user_attrs["experiment"].split()
        assert len(names) == 3
        if rate > 0.1:
            assert trial.state is TrialState.FAIL
        else:
            assert trial.value == pytest.approx(sum(driver.best[name] for name in names) / 3, abs=1e-15)
    assert {t.state for t in mine.study.trials} == {TrialState.FAIL, TrialState.COMPLETE}


def test_a_trial_that_is_drawn_again_is_told_again() -> None:
    mine = search(Space({"task.hidden": [8, 16]}), samples=15)
    driver = Driver(mine, lambda e, step: e.config["task"]["hidden"] / 100, width=2).run()
    assert len(driver.steps) == 2
    trials = mine.study.trials
    assert len(trials) == 15
    assert all(t.value == t.params["task.hidden"] / 100 for t in trials)
    assert sum("repeats" in t.user_attrs for t in trials) >= 11


def test_all_nan_or_failing_fails() -> None:
    mine = search(samples=6)
    Driver(mine, lambda e, step: math.nan).run()
    assert {t.state for t in mine.study.trials} == {TrialState.FAIL}
    (trial,) = (other := search(samples=1)).ask(4)
    other.ended(Ending(trial.experiment, "failed", 0, {}, {METRIC: 0.5}))
    assert other.study.trials[0].state is TrialState.FAIL


def test_what_cannot_be_made_fails_and_says_why() -> None:
    def picky(values: Mapping[str, Any]) -> Experiment:
        if values["task.hidden"] == 16:
            raise ConfigError([Problem("task.hidden", 16, "must not be 16")])
        return member(values)

    mine = Optuna(SPACE, picky, [], MAX, 20, 0)
    Driver(mine, score).run()
    failed = [t for t in mine.study.trials if t.state is TrialState.FAIL]
    assert failed
    assert all(t.params["task.hidden"] == 16 for t in failed)
    assert {t.user_attrs["problem"] for t in failed} == {"task.hidden=16: must not be 16"}


def test_stopped_ones_count_with_their_best() -> None:
    mine = search(samples=1)
    (trial,) = mine.ask(1)
    mine.ended(Ending(trial.experiment, "stopped", 10, {METRIC: 0.1}, {METRIC: 0.7}))
    assert mine.study.trials[0].value == 0.7
    # told again after a resume, nothing changes
    mine.ended(Ending(trial.experiment, "stopped", 10, {METRIC: 0.1}, {METRIC: 0.2}))
    assert mine.study.trials[0].value == 0.7
    assert mine.ask(1) == []


def test_a_storage_of_ones_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mine.db'}"
    mine = search(samples=4, storage=url, study="digits")
    mine.keep(tmp_path / "unused.db", "run")
    Driver(mine, score).run()
    assert not (tmp_path / "unused.db").exists()
    # more samples go on with it
    more = search(samples=6, storage=url, study="digits")
    assert sum(len(asked) for asked in Driver(more, score).run().asked) == 2
    with pytest.raises(ConfigError, match=r"search\.study='digits'.* belongs to another search"):
        search(samples=6, seed=1, storage=url, study="digits").ask(1)
    with pytest.raises(ConfigError, match=r"search\.storage='sqlite:////nowhere/at/all\.db': Optuna cannot open it"):
        search(storage="sqlite:////nowhere/at/all.db").ask(1)
    with pytest.raises(ConfigError, match=r"search\.storage='nonsense': Optuna cannot open it"):
        search(storage="nonsense").ask(1)


def test_samplers_of_other_classes() -> None:
    seeded = sampler_of(optuna.samplers.TPESampler, {"n_startup_trials": 2})
    mine, other = (search(samples=6, sampler=seeded) for _ in range(2))
    Driver(mine, score).run()
    Driver(other, score).run()
    assert drawn(mine) == drawn(other)
    quasi = search(samples=6, sampler=sampler_of(optuna.samplers.RandomSampler, {"seed": 4}))
    rates = [t.experiment.values["optimizer.lr"] for t in quasi.ask(3)]
    # a seed that is given is kept: every trial is the first one of its sampler
    assert len(rates) == 1


def test_state_in_between(tmp_path: Path) -> None:
    space = Space({"optimizer.lr": Interval(1e-3, 1.0, log=True), "task.hidden": [8], "seed": [1, 2]})

    def again() -> Optuna:
        found = search(space, samples=5)
        found.keep(tmp_path / "study.db", "run")
        return found

    driver = Driver(again(), score, width=4, reload=again).run()
    plain = search(space, samples=5)
    assert Driver(plain, score, width=4).run().steps == driver.steps
    assert isinstance(driver.search, Optuna)
    assert drawn(driver.search) == drawn(plain)
    assert json.loads(json.dumps(driver.search.state_dict())) == {"values": {}}
    assert make({}).steps == 50
