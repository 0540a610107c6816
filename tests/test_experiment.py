"""What an experiment is: its id, and which experiments share a graph.

Oracles: a recorded id; the rule of ids in words, by what must and what must not change one; for `group`, the definition
of a cohort, applied to pairs of experiments one by one.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalesce.experiment import KEYS, Cohort, Experiment, experiment_id, group, leaves

CONFIG: dict[str, Any] = {
    "task": {
        "_target_": "coalesce.tasks.Digits",
        "hidden": [64, 64],
        "dropout": 0.1,
        "label_smoothing": 0.0,
        "weights": {"a": 1.0, "b": [0.5, None]},
        "name": "größer",
        "bias": True,
    },
    "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "clip_norm": None},
    "schedule": {"name": "cosine", "warmup": 100, "warmup_start": 0.01, "final": 0.0},
    "steps": 2000,
    "batch_size": 64,
    "seed": 7,
}


def change(key: str, value: Any, config: Mapping[str, Any] = CONFIG) -> dict[str, Any]:
    """The configuration with another value at a dotted key."""
    changed = deepcopy(dict(config))
    inner: Any = changed
    *path, last = key.split(".")
    for name in path:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    inner[int(last) if isinstance(inner, list) else last] = value
    return changed


# ids


def test_the_id_is_what_it_was() -> None:
    # recorded when the rule was made; if this fails, every run folder that exists has lost its experiments
    assert experiment_id(CONFIG) == "1bf5b8794928"


def test_the_rule_in_full() -> None:
    # written out by hand, so that it can be computed without this package
    text = (
        '["coalesce-1",{"batch_size":2,"optimizer":{"lr":{"float":"0.001"},"name":"sgd"},"schedule":{"name":"constant"},'
        '"seed":0,"steps":1,"task":{"_target_":"T","a":[1,{"float":"1.0"},null,true,"\\u00f6"]}}]'
    )
    config = {
        "seed": 0,
        "steps": 1,
        "batch_size": 2,
        "task": {"a": [1, 1.0, None, True, "ö"], "_target_": "T"},
        "schedule": {"name": "constant"},
        "optimizer": {"name": "sgd", "lr": 1e-3},
    }
    assert experiment_id(config) == hashlib.sha256(text.encode()).hexdigest()[:12]


@given(st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(random: Any) -> None:
    def shuffle(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: shuffle(value[k]) for k in random.sample(list(value), len(value))}
        return value

    assert experiment_id(shuffle(CONFIG)) == experiment_id(CONFIG)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", float("0.001")),
        ("optimizer.lr", 1 / 1000),
        ("optimizer.lr", np.float64(1e-3)),
        ("optimizer.betas", (0.9, 0.999)),
        ("task.label_smoothing", -0.0),
        ("task.weights.b", (0.5, None)),
    ],
)
def test_one_value_has_one_id(key: str, value: Any) -> None:
    assert experiment_id(change(key, value)) == experiment_id(CONFIG)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("task.hidden", [1, 1.0, True, "1", [1], [1.0], {"0": 1}, [[1]]]),
        ("task.hidden", [0, 0.0, False, "0", None, "", [], {}, "None", [None], "[]"]),
        ("task.hidden", [math.inf, -math.inf, math.nan, "inf", "nan", "NaN", "Infinity"]),
        ("optimizer.lr", [1e-3, 0.0010000000000000002, 1e-4, "0.001"]),
        ("optimizer.betas", [[0.9, 0.999], [0.999, 0.9], [0.9], [0.9, 0.999, 0.0], [[0.9, 0.999]]]),
        ("task.weights", [{"a": 1}, {"a": 1.0}, {"b": 1}, {"a": {"a": 1}}, {"a": 1, "b": None}, "a"]),
        ("seed", [0, 1, 2**53, 2**53 + 1, 2**63 - 1]),
        ("steps", [1999, 2000]),
        ("batch_size", [63, 64]),
        ("schedule.name", ["cosine", "constant"]),
    ],
)
def test_other_values_have_other_ids(key: str, values: list[Any]) -> None:
    found = {experiment_id(change(key, value)) for value in values}
    assert len(found) == len(values)


@given(st.floats(), st.floats())
def test_floats_have_one_id_if_they_are_one(a: float, b: float) -> None:
    same = a == b or (math.isnan(a) and math.isnan(b))
    assert (experiment_id(change("optimizer.lr", a)) == experiment_id(change("optimizer.lr", b))) == same


@pytest.mark.parametrize("value", [object(), {1, 2}, b"text", 1j, np.float32(1.0), np.arange(3)])
def test_what_has_no_id_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        experiment_id(change("task.hidden", value))


def test_an_id_is_twelve_hexadecimal_digits() -> None:
    found = Experiment(CONFIG).id
    assert len(found) == 12
    assert set(found) <= set("0123456789abcdef")
    assert found == experiment_id(CONFIG)


@pytest.mark.parametrize(
    ("key", "default", "written"),
    [
        ("optimizer.amsgrad", False, False),
        ("optimizer.betas", [0.9, 0.999], (0.9, 0.999)),  # a rule writes its defaults as tuples
        ("optimizer.clip_norm", None, None),
        ("task.bonus", 1.0, 1),  # rate: float = 1
        ("task.bonus", math.nan, math.nan),
        ("task.weights.c", {"x": 1.0}, {"x": 1.0}),
        ("schedule.warmup", 100, 100),
        ("accumulate", 1, 1),
    ],
)
def test_a_younger_key_changes_ids_only_off_its_first_default(key: str, default: Any, written: Any) -> None:
    path, _, last = key.rpartition(".")
    older = deepcopy(CONFIG)
    inner = older
    for name in path.split(".") if path else []:
        inner = inner[name]
    inner.pop(last, None)
    introduced = {key: written}
    assert experiment_id(change(key, default, older), introduced) == experiment_id(older, introduced)
    assert experiment_id(older, introduced) == experiment_id(older)
    other = "another"
    assert experiment_id(change(key, other, older), introduced) == experiment_id(change(key, other, older))
    assert experiment_id(change(key, other, older), introduced) != experiment_id(older)


def test_a_first_default_is_not_what_merely_equals_it() -> None:
    # True == 1 and False == 0 in Python
    for default, value in ((False, 0), (True, 1), (0, False), (1.0, True), (None, 0), (0.0, None), ("1", 1)):
        introduced = {"task.younger": default}
        assert experiment_id(change("task.younger", value), introduced) != experiment_id(CONFIG)


def test_a_younger_mapping_is_left_out_with_all_that_is_in_it() -> None:
    introduced = {"data.other": None}
    for younger in ({"remainder": "straddle"}, {"remainder": "straddle", "other": None, "fold": None}):
        assert experiment_id({**CONFIG, "data": younger}, introduced) == "1bf5b8794928"
    assert experiment_id({**CONFIG, "data": {"remainder": "drop"}}, introduced) != "1bf5b8794928"
    # an empty mapping that was there from the start stays: it is a value
    empty = change("task.weights", {})
    assert experiment_id(empty, introduced) not in (experiment_id(CONFIG), "1bf5b8794928")


def test_an_experiment_says_what_it_is() -> None:
    experiment = Experiment(CONFIG, {"optimizer.lr": 1e-3, "seed": 7})
    assert (experiment.seed, experiment.steps, experiment.batch_size) == (7, 2000, 64)
    assert str(experiment) == f"{experiment.id} (optimizer.lr=0.001, seed=7)"
    assert str(Experiment(CONFIG)) == Experiment(CONFIG).id
    # made before there were these keys, which may be left out
    assert {*CONFIG, "data", "precision"} == set(KEYS)
    assert experiment.remainder == "straddle"
    assert Experiment({**CONFIG, "data": {"remainder": "short"}}).remainder == "short"


def test_leaves() -> None:
    config = {"a": {"b": [1, [2.0, None]], "empty": {}, "none": []}, "c": "text"}
    assert list(leaves(config)) == [
        ("a.b.0", 1),
        ("a.b.1.0", 2.0),
        ("a.b.1.1", None),
        ("a.empty", {}),
        ("a.none", []),
        ("c", "text"),
    ]


# cohorts


def rides(experiment: Experiment, key: str, value: Any) -> bool:
    """Law 3 for the tests: floats, the seed and the steps ride, except a float that the experiment calls static."""
    return key in ("seed", "steps") or (isinstance(value, float) and not key.startswith("task.static"))


def experiments_of(key: str, values: list[Any]) -> list[Experiment]:
    return [Experiment(change(key, value), {key: value}) for value in values]


def members(cohorts: list[Cohort], experiments: list[Experiment]) -> list[list[int]]:
    """The numbers of each cohort's experiments."""
    number = {id(experiment): i for i, experiment in enumerate(experiments)}
    return [[number[id(e)] for e in cohort.experiments] for cohort in cohorts]


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("optimizer.lr", [1e-3, 1e-2, 1.0], [[0, 1, 2]]),
        ("seed", [3, 1, 2], [[0, 1, 2]]),
        ("steps", [10, 20], [[0, 1]]),
        ("batch_size", [64, 32, 64], [[0, 2], [1]]),
        ("task.bias", [True, False, True], [[0, 2], [1]]),
        ("task.name", ["a", "b"], [[0], [1]]),
        ("optimizer.clip_norm", [None, 1.0, None, 2.0], [[0, 2], [1, 3]]),
        ("optimizer.betas", [[0.9, 0.999], [0.5, 0.9], (0.1, 0.2)], [[0, 1, 2]]),
        ("optimizer.betas", [[0.9, 0.999], [0.9], [0.9, 0.999, 0.9], []], [[0], [1], [2], [3]]),
        ("task.hidden", [[64, 64], [64], (64, 64), 64], [[0, 2], [1], [3]]),
        ("task.weights", [{"a": 1.0}, {"b": 1.0}, {"a": 2.0}, {}], [[0, 2], [1], [3]]),
        ("task.weights", [{"a": 1.0, "b": 2.0}, {"b": 1.0, "a": 2.0}], [[0, 1]]),
        # the leaves of a list and of a mapping have the same dotted keys
        ("task.weights", [[0.5, 1.0], {"0": 0.5, "1": 1.0}], [[0], [1]]),
        ("task.hidden", [1, 1.0, True, "1"], [[0], [1], [2], [3]]),
        ("task.dropout", [0.1, math.nan, math.inf], [[0, 1, 2]]),
        ("task.static", [0.1, 0.2, 0.1, -0.0, 0.0], [[0, 2], [1], [3, 4]]),
    ],
)
def test_floats_ride_and_the_rest_splits(key: str, values: list[Any], expected: list[list[int]]) -> None:
    experiments = experiments_of(key, values)
    assert members(group(experiments, rides), experiments) == expected


def test_a_cohort_says_what_differs_in_it() -> None:
    experiments = [
        Experiment(change("optimizer.betas.1", beta, change("seed", seed, change("batch_size", size))))
        for size, beta, seed in [(64, 0.9, 0), (32, 0.9, 0), (64, 0.99, 0), (32, 0.9, 1), (16, 0.9, 5)]
    ]
    cohorts = group(experiments, rides)
    assert [(c.index, c.riding) for c in cohorts] == [(0, ("optimizer.betas.1",)), (1, ("seed",)), (2, ())]


def test_nothing_makes_no_cohort() -> None:
    assert group([], rides) == []


SCALARS = st.sampled_from([0, 1, True, None, "a", 0.0, 0.5, 2.0])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "0"]), inner, max_size=2),
    max_leaves=4,
)


def experiment_strategy() -> st.SearchStrategy[Experiment]:
    def build(task: Any, clip: Any, batch_size: int, seed: int) -> Experiment:
        config = change("task.weights", task, change("optimizer.clip_norm", clip))
        return Experiment({**config, "batch_size": batch_size, "seed": seed})

    return st.builds(build, VALUES, st.sampled_from([None, 0.5, 1.0]), st.integers(1, 2), st.integers(0, 1))


def could_merge(a: Any, b: Any, experiment: Experiment, key: str = "") -> bool:
    """Whether two configurations differ only in leaves that ride, from the definition, part by part."""
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(could_merge(a[k], b[k], experiment, f"{key}.{k}" if key else k) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(
            could_merge(x, y, experiment, f"{key}.{i}") for i, (x, y) in enumerate(zip(a, b, strict=True))
        )
    if isinstance(a, list | dict) or isinstance(b, list | dict):
        return False
    if rides(experiment, key, a) or rides(experiment, key, b):
        return rides(experiment, key, a) and rides(experiment, key, b)
    return type(a) is type(b) and bool(a == b)


@given(st.lists(experiment_strategy(), max_size=12))
def test_every_experiment_is_placed_once_and_no_two_cohorts_could_merge(experiments: list[Experiment]) -> None:
    cohorts = group(experiments, rides)
    placed = members(cohorts, experiments)
    assert sorted(itertools.chain(*placed)) == list(range(len(experiments)))
    # order kept, cohorts numbered by their first experiment
    assert all(cohort == sorted(cohort) for cohort in placed)
    assert [c.index for c in cohorts] == list(range(len(cohorts)))
    assert [cohort[0] for cohort in placed] == sorted(cohort[0] for cohort in placed)
    where = {i: n for n, cohort in enumerate(placed) for i in cohort}
    for i, j in itertools.combinations(range(len(experiments)), 2):
        a, b = experiments[i], experiments[j]
        assert could_merge(a.config, b.config, a) == (where[i] == where[j])
    # what rides in a cohort is what differs in it
    for cohort in cohorts:
        values = [dict(leaves(e.config)) for e in cohort.experiments]
        assert set(cohort.riding) == {k for k in values[0] if any(v[k] != values[0][k] for v in values)}


@given(st.lists(experiment_strategy(), max_size=8), st.randoms(use_true_random=False))
def test_the_order_changes_no_cohort(experiments: list[Experiment], random: Any) -> None:
    def sets(given: list[Experiment]) -> set[frozenset[int]]:
        return {frozenset(cohort) for cohort in members(group(given, rides), experiments)}

    shuffled = random.sample(experiments, len(experiments))
    assert sets(shuffled) == sets(experiments)


@given(experiment_strategy(), experiment_strategy())
def test_one_id_means_one_configuration(a: Experiment, b: Experiment) -> None:
    def frozen(value: Any) -> Any:
        if isinstance(value, dict):
            return "mapping", frozenset((k, frozen(v)) for k, v in value.items())
        if isinstance(value, list):
            return "list", tuple(frozen(v) for v in value)
        return type(value).__name__, value

    assert (a.id == b.id) == (frozen(a.config) == frozen(b.config))
