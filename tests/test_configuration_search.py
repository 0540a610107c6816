"""Searches as they are configured: settings, what a sweep's values mean to them, and the search that comes of it.

Oracle: laws (what `check_search` accepts is what the documented keys hold; every search of a seed is the same), the
cohorts that `group` makes of what a search asks for, and counts written down by hand.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from coalesce.configuration import check_search, make_search, rides
from coalesce.configuration.search import COMMON, SEARCHES
from coalesce.errors import ConfigError
from coalesce.experiment import Experiment, group
from coalesce.runner.plan import Trainer
from coalesce.search.base import Listed, Search
from coalesce.search.halving import Asha, Halving
from coalesce.search.optuna import Optuna
from coalesce.search.population import Population
from coalesce.search.space import Interval
from coalesce.search.stopping import Stopping
from test_configuration_sweep import base

TRAINER = Trainer(every=10, evaluate_every=20)
RATES = Interval(1e-4, 1e-1, log=True)
CONF = Path(__file__).parent.parent / "conf" / "search"


def made(
    search: str | Mapping[str, Any], params: Mapping[str, Any], zips: Any = (), limit: int = 10_000, **changes: Any
) -> Search:
    settings = check_search(search, TRAINER)
    return make_search(base(**changes), params, zips, limit, settings=settings, trainer=TRAINER)[0]


def problems(search: Any, params: Mapping[str, Any] | None = None, **how: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        made(search, {"optimizer.lr": [0.1, 0.2]} if params is None else params, **how)
    return [str(problem) for problem in caught.value.problems]


def values(search: Search) -> list[tuple[Any, ...]]:
    return [tuple(experiment.values.values()) for experiment in search.known()]


# settings


@pytest.mark.parametrize("name", SEARCHES)
def test_the_files_hold_every_key_and_its_default(name: str) -> None:
    text = (CONF / f"{name}.yaml").read_text(encoding="utf-8")
    written = yaml.safe_load(text)
    assert list(written) == ["name", *SEARCHES[name], *COMMON]
    expected = {k: list(s.default) if isinstance(s.default, tuple) else s.default for k, s in written_of(name)}
    assert written == {"name": name, **expected}
    # each has its comment right above it
    lines = text.splitlines()
    assert all(lines[n - 1].startswith("#") for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert check_search(written, TRAINER) == check_search(name, TRAINER)


def written_of(name: str) -> list[tuple[str, Any]]:
    return [*SEARCHES[name].items(), *COMMON.items()]


def test_steps_are_those_of_a_measurement() -> None:
    assert check_search("asha", TRAINER).min_steps == 20
    assert check_search("asha", Trainer(every=10, evaluate_every=20, monitor="train/loss")).min_steps == 10
    assert check_search({"name": "pbt", "interval": "40"}, TRAINER).interval == 40
    (text,) = problems({"name": "halving", "min_steps": 30})
    assert text == (
        "search.min_steps=30: val/accuracy is not measured there: must be a multiple of trainer.evaluate_every, which "
        "is 20; valid: 20, 40, 60, …, or null: 20"
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (3, ["search=3: must be a name or a mapping"]),
        ("ahsa", ["search.name='ahsa': unknown search", "did you mean 'asha'?"]),
        ({"name": ["asha"]}, ["unknown search"]),
        (
            {"name": "asha", "min_step": 5},
            ["search.min_step=5: unknown key for search=asha", "did you mean 'min_steps'"],
        ),
        (
            {"name": "grid", "samples": 5},
            ["unknown key for search=grid (it is one of random, halving, asha, pbt, optuna)"],
        ),
        ({"name": "random", "samples": 0}, ["search.samples=0: out of range; valid: an integer, at least 1"]),
        ({"name": "random", "samples": None}, ["search.samples=None: must not be null; valid: an integer, at least 1"]),
        ({"name": "random", "samples": 2.5}, ["search.samples=2.5: must be an integer"]),
        ({"name": "random", "seed": -1}, ["search.seed=-1: out of range"]),
        ({"name": "asha", "factor": 1}, ["search.factor=1: out of range; valid: an integer, at least 2"]),
        (
            {"name": "asha", "min_steps": 0},
            ["search.min_steps=0: out of range; valid: an integer, at least 1, or null"],
        ),
        (
            {"name": "pbt", "fraction": 0},
            ["search.fraction=0: out of range; valid: a finite number, above 0, at most 0.5"],
        ),
        ({"name": "pbt", "fraction": 0.6}, ["search.fraction=0.6: out of range"]),
        ({"name": "pbt", "resample": 1.5}, ["search.resample=1.5: out of range"]),
        ({"name": "pbt", "factors": []}, ["search.factors=[]: must not be empty"]),
        ({"name": "pbt", "factors": [0.8, -1]}, ["search.factors=-1.0: must be above 0"]),
        ({"name": "pbt", "factors": 0.8}, ["search.factors=0.8: must be a list"]),
        ({"name": "optuna", "sampler": "tpee"}, ["search.sampler='tpee': unknown sampler", "did you mean 'tpe'?"]),
        ({"name": "optuna", "sampler": 3}, ["search.sampler=3: must be a name or a mapping with _target_"]),
        ({"name": "optuna", "sampler": {"_target_": "optuna.samplers.TPESampleur"}}, ["makes no sampler"]),
        ({"name": "optuna", "sampler": {"_target_": "optuna.study.Study"}}, ["no subclass of optuna.samplers"]),
        ({"name": "optuna", "sampler": {"_target_": "nowhere.Sampler"}}, ["No module named 'nowhere'"]),
        ({"name": "optuna", "sampler": {"_target_": "tpe"}}, ["makes no sampler"]),
        ({"name": "optuna", "sampler": {"_target_": "optuna.samplers.TPESampler", "n": 1}}, ["unexpected keyword"]),
        ({"name": "optuna", "storage": 5}, ["search.storage=5: must be text"]),
        ({"name": "grid", "patience": 0}, ["search.patience=0: out of range"]),
        ({"name": "grid", "min_delta": -1}, ["search.min_delta=-1: out of range"]),
        ({"name": "grid", "target": "high"}, ["search.target='high': must be a number"]),
    ],
    ids=str,
)
def test_what_is_no_setting(settings: Any, says: list[str]) -> None:
    (text,) = problems(settings)
    assert all(part in text for part in says), text


def test_all_problems_together() -> None:
    found = problems({"name": "asha", "min_steps": 30, "factor": 1, "patience": 0, "sede": 3})
    assert len(found) == 4


@pytest.mark.parametrize(
    ("settings", "package"), [("optuna", "optuna"), ({"name": "optuna", "sampler": "cmaes"}, "cmaes")]
)
def test_a_missing_package_is_named_with_the_command(
    settings: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    (text,) = problems(settings)
    assert f"needs the package {package}, which is not installed; valid: pip install 'coalesce[optuna]'" in text


# the searches that come of it


def test_which_search() -> None:
    params = {"optimizer.lr": [0.1, 0.2], "seed": range(3)}
    grid = made("grid", params)
    assert type(grid) is Listed
    for name, kind in {"random": Listed, "halving": Halving, "asha": Asha, "pbt": Population}.items():
        search = made(name, params)
        assert type(search) is kind
        # whatever is asked for first, the results stand in the sweep's order
        assert {e.id for e in search.known()} == {e.id for e in grid.known()}
        assert search.lists
        assert search.count == 6
    assert values(made("asha", params)) == values(grid)
    assert type(made("optuna", params)) is Optuna
    stopping = made({"name": "asha", "patience": 3}, params)
    assert isinstance(stopping, Stopping)
    assert isinstance(stopping.inner, Asha)
    assert isinstance(made({"name": "grid", "target": 0.9}, params), Stopping)
    # the improvement that counts means nothing without patience
    assert type(made({"name": "grid", "min_delta": 0.1}, params)) is Listed


def test_random_samples_with_every_seed() -> None:
    params = {"optimizer.lr": RATES, "task.hidden": [8, 16], "seed": range(2)}
    search = made({"name": "random", "samples": 5, "seed": 1}, params)
    assert search.count == 10
    assert [seed for _, _, seed in values(search)] == [0, 1] * 5
    assert len({v[:2] for v in values(search)}) == 5
    assert values(search) == values(made({"name": "random", "samples": 5, "seed": 1}, params))
    assert values(search) != values(made({"name": "random", "samples": 5, "seed": 2}, params))
    # all in two graphs, by the width of their model
    assert len(group(search.known(), rides)) == 2


@pytest.mark.parametrize("name", ["halving", "asha", "pbt"])
def test_samples_of_other_searches(name: str) -> None:
    search = made({"name": name, "samples": 7}, {"optimizer.lr": RATES})
    assert search.count == 7
    assert values(search) == values(made({"name": "random", "samples": 7}, {"optimizer.lr": RATES}))


def test_intervals_are_of_the_kind_of_their_key() -> None:
    params = {
        "optimizer.momentum": Interval(0, 1),
        "task.hidden": Interval(8, 64, integer=True),
        "schedule.warmup": Interval(0, 50, integer=True),
    }
    search = made({"name": "random", "samples": 20}, params)
    for momentum, hidden, warmup in values(search):
        assert (type(momentum), type(hidden), type(warmup)) == (float, int, int)
    # one that is wrong is told once, with the way out
    (text,) = problems({"name": "random", "samples": 20}, {"task.hidden": Interval(8, 64)})
    assert "task.hidden='interval(8.0, 64.0)': must be an integer" in text
    assert "int(interval(8.0, 64.0))" in text
    # an end that is out of range is found, though it is hardly ever drawn
    (text,) = problems({"name": "random", "samples": 3}, {"optimizer.lr": Interval(-1e-9, 1)})
    assert "optimizer.lr=-1e-09: out of range" in text
    (text,) = problems("optuna", {"optimizer.momentum": Interval(-1, 1)})
    assert "optimizer.momentum=-1.0: out of range" in text


def test_the_grid_takes_no_interval() -> None:
    (text,) = problems("grid", {"optimizer.lr": RATES, "seed": [1, 2]})
    assert "is a continuous range, which search=random or search=optuna draw; search=grid needs values" in text
    assert "${logspace:0.0001,0.1,8}" in text
    (text,) = problems("asha", {"optimizer.lr": RATES})
    assert "which search=asha draws from if it has search.samples; search=asha needs values" in text


def test_intervals_where_they_have_no_place() -> None:
    random = {"name": "random", "samples": 3}
    (text,) = problems(random, {"optimizer": Interval(0, 1)})
    assert "optimizer='interval(0.0, 1.0)': has options" in text
    (text,) = problems(
        random, {"optimizer.lr": RATES, "schedule.warmup": [1, 2]}, zips=[["optimizer.lr", "schedule.warmup"]]
    )
    assert "has an interval, which cannot belong to other values" in text
    (text,) = problems(random, {"optimiser.lr": RATES})
    assert "unknown key" in text


def test_what_is_too_much() -> None:
    (text,) = problems({"name": "random", "samples": 40}, {"optimizer.lr": RATES, "seed": range(5)}, limit=100)
    assert text == "sweep.limit=100: the sweep has 200 experiments; valid: fewer values, or a higher sweep.limit"
    (text,) = problems({"name": "random", "samples": 4}, {"task.hidden": range(1, 10**15)})
    assert "int(interval(low, high))" in text
    (text,) = problems("asha", {"task.hidden": range(1, 10**15)})
    assert "the sweep has 999999999999999 experiments" in text


def test_what_a_search_cannot_do_with_a_sweep() -> None:
    (text,) = problems({"name": "asha", "min_steps": 100})
    assert "search.min_steps=100: asha never looks at an experiment before its end: the longest has 100 steps" in text
    (text,) = problems("pbt", {"optimizer.lr": [0.1, 0.2], "task.hidden": [8, 16]})
    assert "this sweep has 2, by task.hidden" in text
    (text,) = problems("pbt", {"seed": [1, 2]})
    assert "has nothing to change: no float is swept" in text
    (text,) = problems("pbt", {"optimizer.lr": [0.1, 0.2], "steps": [100, 200]})
    assert "needs experiments of equally many steps, not [100, 200]" in text
    (text,) = problems("optuna", {"seed": [1, 2]})
    assert "optuna has nothing to draw" in text
    with pytest.raises(ConfigError, match=r"trainer\.stack=False: search=pbt"):
        make_search(
            base(), {"optimizer.lr": [0.1, 0.2]}, settings=check_search("pbt"), trainer=Trainer(stack=False)
        )  # fmt: skip


def test_keys_that_belong_to_one_option_are_drawn_with_it() -> None:
    params = {"optimizer": ["sgd", "adam"], "optimizer.momentum": [0.9, None], "optimizer.lr": RATES}
    zips = [["optimizer", "optimizer.momentum"]]
    for count in (1, 20):
        search = made({"name": "random", "samples": count}, params, zips)
        assert {v[:2] for v in values(search)} <= {("sgd", 0.9), ("adam", None)}
    optuna = made({"name": "optuna", "samples": 8}, params, zips)
    assert {tuple(t.experiment.values.values())[:2] for t in optuna.ask(8)} == {("sgd", 0.9), ("adam", None)}


# what is known of a search that decides later


def cohorts(experiments: Any) -> dict[str, tuple[str, ...]]:
    """What makes a graph, in words → what rides there."""
    found = {}
    for cohort in group(experiments, rides):
        first = cohort.experiments[0].config
        clips = first["optimizer"]["clip_norm"] is not None
        found[f"{first['optimizer']['name']} {first['task']['hidden']} {clips}"] = cohort.riding
    return found


def test_probes_show_every_graph_and_what_rides_there() -> None:
    params = {
        "optimizer": ["sgd", "adam"],
        "task.hidden": Interval(8, 10, integer=True),
        "optimizer.clip_norm": [None, 1.0, 2.0],
        "optimizer.lr": RATES,
        "task.dropout": [0.1, 0.1, 0.2],
        "schedule.warmup": [0, 10],
        "schedule.final": [0.0, 0.1],
        "seed": range(4),
    }
    search = made(
        {"name": "optuna", "samples": 40}, params, [["schedule.warmup", "schedule.final"]], schedule={"name": "cosine"}
    )
    assert not search.lists
    known = cohorts(search.known())
    graphs = itertools.product(("sgd", "adam"), (8, 9, 10), (False, True))
    assert set(known) == {f"{optimizer} {hidden} {clips}" for optimizer, hidden, clips in graphs}
    moving = {"optimizer.lr", "task.dropout", "schedule.warmup", "schedule.final", "seed"}
    assert all(moving <= set(riding) for riding in known.values())
    assert all("optimizer.clip_norm" in riding for name, riding in known.items() if name.endswith("True"))
    # whatever is asked for fits one of them
    asked: list[Experiment] = [trial.experiment for trial in search.ask(40)]
    assert len(asked) == 40
    for name, riding in cohorts(asked).items():
        assert set(riding) <= set(known[name])


def test_too_many_graphs_are_refused() -> None:
    (text,) = problems(
        "optuna", {"task.hidden": Interval(1, 33, integer=True), "batch_size": [4, 8], "optimizer.lr": RATES}
    )
    assert "may need 66 graphs, by what does not ride (task.hidden: 33, batch_size: 2); valid: " in text
    (text,) = problems("optuna", {"task.hidden": Interval(1, 10**15, integer=True)})
    assert "may need 1000000000000000 graphs" in text


def test_a_combination_that_cannot_be_made() -> None:
    shown = {"batch_size": [4, 8], "optimizer.accumulate": [1, 8]}
    (text,) = problems("optuna", shown)
    assert "optimizer.accumulate=8: must divide batch_size=4" in text
    # where it cannot be known beforehand, it fails its trial
    search = made({"name": "optuna", "samples": 8}, {"optimizer.lr": RATES, "optimizer.momentum": [0.0, 0.9]})
    assert isinstance(search, Optuna)
    with pytest.raises(ConfigError, match=r"optimizer\.lr=-1\.0: out of range"):
        search._make({"optimizer.lr": -1.0, "optimizer.momentum": 0.0})
    with pytest.raises(ConfigError, match=r"^1 problem in"):
        search._make({"optimizer.lr": -1.0, "optimizer.momentum": 0.0})
    assert len(search.ask(8)) == 8
