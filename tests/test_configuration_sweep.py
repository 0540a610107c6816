"""Sweeps expanded into experiments and cohorts.

Oracle: the counts and values that CASES.md states for its cases 29 (numbers), 30 (grids) and 31 (structure), written
down here by hand, and laws of the product.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coalesce.configuration import DuplicateExperimentWarning, make_experiments, rides
from coalesce.errors import ConfigError
from coalesce.experiment import KEYS, Experiment, group
from coalesce.optim import OPTIMIZERS

TOY = "tasks_for_tests.Toy"


def base(**changes: Any) -> dict[str, Any]:
    return {
        "task": {"_target_": TOY},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "schedule": {"name": "constant"},
        "steps": 100,
        "batch_size": 17,
        "seed": 0,
        **changes,
    }


def expand(
    params: Mapping[str, Any], zips: Sequence[Sequence[str]] = (), changes: Mapping[str, Any] | None = None
) -> list[Experiment]:
    return make_experiments(base(**(changes or {})), params, zips)[0]


def column(experiments: list[Experiment], key: str) -> list[Any]:
    return [experiment.values[key] for experiment in experiments]


def problems(params: Mapping[str, Any], zips: Any = (), **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make_experiments(base(**changes), params, zips)
    return [str(problem) for problem in caught.value.problems]


# case 29: numbers


def test_case_29_every_spelling_of_a_number_is_the_number() -> None:
    # as OmegaConf reads the file, and as a shell or another YAML reader would pass it
    experiments = expand({"optimizer.lr": ["1e-3", 3e-4, 1.0e-2, "1e4", 1]}, changes={"optimizer": SGD_CASE_29})
    rates = column(experiments, "optimizer.lr")
    assert rates == [0.001, 0.0003, 0.01, 10000.0, 1.0]
    assert {type(rate) for rate in rates} == {float}
    assert {e.config["optimizer"]["clip_norm"] for e in experiments} == {None}
    assert {e.config["optimizer"]["nesterov"] for e in experiments} == {False}
    assert len(group(experiments, rides)) == 1


SGD_CASE_29 = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": "None", "nesterov": "off"}


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "123E456", "nan", "-inf", "fast", "", "1e", True, "010"])
def test_case_29_what_is_no_number_is_refused(value: Any) -> None:
    (text,) = problems({"optimizer.lr": [0.1, value]})
    assert text.startswith(f"optimizer.lr={value!r}: must be ")
    assert "a finite number" in text


@given(st.floats(0, 1e300))
def test_a_number_in_quotes_is_that_number(rate: float) -> None:
    assert column(expand({"optimizer.lr": [repr(rate)]}), "optimizer.lr") == [rate]


def test_integers_ride_where_floats_do() -> None:
    experiments = expand({"task.dropout": [0, 0.5, 1]})
    assert [type(value) for value in column(experiments, "task.dropout")] == [float] * 3
    assert len(group(experiments, rides)) == 1


# case 30: grids, zips, lists, mappings


def test_case_30_a_product() -> None:
    experiments = expand({"optimizer.lr": [0.1, 0.01], "seed": [0, 1, 2]})
    assert [tuple(e.values.values()) for e in experiments] == [(lr, s) for lr in (0.1, 0.01) for s in (0, 1, 2)]
    assert len(group(experiments, rides)) == 1


def test_case_30_b_zip() -> None:
    params = {"optimizer.lr": [0.1, 0.01, 0.001], "schedule.warmup": [0, 10, 20]}
    experiments = expand(params, [["optimizer.lr", "schedule.warmup"]])
    assert [tuple(e.values.values()) for e in experiments] == [(0.1, 0), (0.01, 10), (0.001, 20)]
    # warm-up steps ride, although they are integers
    (cohort,) = group(experiments, rides)
    assert cohort.riding == ("optimizer.lr", "schedule.warmup")


def test_case_30_c_lists_are_values() -> None:
    adam = {"optimizer": {"name": "adam"}}
    experiments = expand({"optimizer.betas": [[0.9, 0.999], [0.5, 0.9]]}, changes=adam)
    assert column(experiments, "optimizer.betas") == [[0.9, 0.999], [0.5, 0.9]]
    (cohort,) = group(experiments, rides)
    assert cohort.riding == ("optimizer.betas.0", "optimizer.betas.1")


@pytest.mark.parametrize(
    "params",
    [
        {"task": {"a": {"x": [1, 2], "y": [10, 20]}}},
        {"task.a": {"x": [1, 2], "y": [10, 20]}},
        {"task.a.x": [1, 2], "task": {"a": {"y": [10, 20]}}},
        {"task": {"a.x": [1, 2], "a": {"y": [10, 20]}}},
    ],
)
def test_case_30_d_keys_of_one_mapping(params: dict[str, Any]) -> None:
    experiments = expand(params, changes={"task": {"_target_": "tasks_for_tests.Pairs", "a": {"z": 5}}})
    mappings = [e.config["task"]["a"] for e in experiments]
    assert mappings == [{"z": 5, "x": x, "y": y} for x in (1, 2) for y in (10, 20)]
    assert [tuple(e.values.values()) for e in experiments] == [(1, 10), (1, 20), (2, 10), (2, 20)]


def test_case_30_d_mappings_are_values() -> None:
    pairs = {"task": {"_target_": "tasks_for_tests.Pairs"}}
    experiments = expand({"task.a": [{"x": 1}, {"x": 2}]}, changes=pairs)
    assert column(experiments, "task.a") == [{"x": 1}, {"x": 2}]


def test_case_30_e_unequal_zip() -> None:
    params = {"optimizer.lr": [0.1, 0.01], "schedule.warmup": [0, 10, 20]}
    (text,) = problems(params, [["optimizer.lr", "schedule.warmup"]])
    assert "optimizer.lr has 2" in text
    assert "schedule.warmup has 3" in text


def test_case_30_f_the_same_experiment_twice() -> None:
    with pytest.warns(DuplicateExperimentWarning) as caught:
        experiments = expand({"optimizer.lr": [0.1, 0.01, "0.1", 1e-1]})
    assert column(experiments, "optimizer.lr") == [0.1, 0.01]
    assert len(caught) == 1
    assert experiments[0].id in str(caught[0].message)
    assert "optimizer.lr=0.1" in str(caught[0].message)


# case 31: structure


def test_case_31_structure_splits_and_floats_ride() -> None:
    experiments, keys = make_experiments(
        base(), {"task.hidden": [16, 32], "optimizer.lr": [1e-2, 1e-3], "optimizer": ["sgd", "adam"]}
    )
    assert keys == ("task.hidden", "optimizer.lr", "optimizer")
    expected = [(h, lr, o) for h in (16, 32) for lr in (1e-2, 1e-3) for o in ("sgd", "adam")]
    assert [tuple(e.values.values()) for e in experiments] == expected
    cohorts = group(experiments, rides)
    assert [len(cohort.experiments) for cohort in cohorts] == [2, 2, 2, 2]
    assert {cohort.riding for cohort in cohorts} == {("optimizer.lr",)}


def test_an_option_brings_its_own_defaults() -> None:
    # the base's SGD settings do not leak into Adam
    sgd = {"optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9}}
    experiments = expand({"optimizer": ["sgd", "adam"]}, changes=sgd)
    assert [e.config["optimizer"]["lr"] for e in experiments] == [0.1, 0.001]
    assert list(experiments[1].config["optimizer"]) == ["name", *OPTIMIZERS["adam"].hyper]


def test_options_are_composed_where_there_is_a_composer() -> None:
    asked = []

    def compose(chosen: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append(dict(chosen))
        return base(optimizer={"name": chosen["optimizer"], "lr": 0.5}, steps=7)

    experiments, _ = make_experiments(base(), {"optimizer": ["sgd", "adam"], "seed": [1, 2]}, compose=compose)
    assert asked == [{"optimizer": "sgd"}, {"optimizer": "adam"}]
    assert [(e.steps, e.config["optimizer"]["lr"], e.seed) for e in experiments] == [(7, 0.5, 1), (7, 0.5, 2)] * 2


def test_tasks_are_swept_by_class_or_name() -> None:
    from tasks_for_tests import Pairs

    experiments = expand({"task": [Pairs, TOY]})
    assert column(experiments, "task") == ["tasks_for_tests.Pairs", TOY]
    assert experiments[0].config["task"] == {"_target_": "tasks_for_tests.Pairs", "a": None, "b": 0}


def test_keys_that_belong_to_one_option() -> None:
    """Zipped with its group, null leaves a key out where the option has no such key; elsewhere it is a value."""
    from tasks_for_tests import Pairs

    params = {
        "optimizer": ["sgd", "sgd", "adam"],
        "steps": [10, 20, 30],
        "optimizer.momentum": [0.5, 0.9, None],
        "optimizer.betas.0": [None, None, 0.5],
        "optimizer.clip_norm": [None, 1, None],
        "seed": [0, 1],
    }
    experiments = expand(params, [list(params)[:-1]])
    rows = [("sgd", 10, 0.5, None, None), ("sgd", 20, 0.9, None, 1.0), ("adam", 30, None, 0.5, None)]
    assert [tuple(e.values.values()) for e in experiments] == [(*row, seed) for row in rows for seed in (0, 1)]
    assert "momentum" not in experiments[-1].config["optimizer"]
    assert experiments[-1].config["optimizer"]["betas"] == [0.5, 0.999]
    # the same experiment as one that was never offered the key
    (alone,) = expand({}, changes={"optimizer": {"name": "adam", "betas": [0.5, 0.999]}, "steps": 30})
    assert experiments[-2].id == alone.id
    tasks = expand({"task": [Pairs, TOY], "task.hidden": [None, 5]}, [["task", "task.hidden"]])
    assert column(tasks, "task.hidden") == [None, 5]
    # who takes arguments of any name takes this one too
    assert expand({"task": ["tasks_for_tests.Open"], "task.x": [None]})[0].config["task"]["x"] is None


# the kinds of values, and what is swept


def test_items_of_lists_are_keys() -> None:
    adam = {"optimizer": {"name": "adam"}}
    experiments = expand({"optimizer.betas.0": [0.5, 0.8], "task.sizes.1": [64]}, changes=adam)
    assert [e.config["optimizer"]["betas"] for e in experiments] == [[0.5, 0.999], [0.8, 0.999]]
    # a tuple stays a tuple for the task, and is a list in the table
    assert experiments[0].config["task"]["sizes"] == (16, 64)
    assert column(expand({"task.sizes": [[1, 2]]}), "task.sizes") == [[1, 2]]


def test_values_may_come_from_numpy_and_ranges() -> None:
    import numpy as np

    experiments = expand(
        {"optimizer.lr": np.array([0.1, 0.01]), "seed": range(3), "task.hidden": list(np.arange(1, 3))}
    )
    assert len(experiments) == 12
    assert {type(v) for e in experiments for v in e.values.values()} == {float, int}


def test_null_takes_a_key_out_of_the_sweep() -> None:
    assert len(expand({"optimizer.lr": [0.1, 0.2], "seed": None})) == 2


def test_without_params_there_is_one_experiment() -> None:
    (experiment,) = expand({})
    assert tuple(experiment.config) == KEYS
    assert experiment.values == {}


def test_the_sweep_leaves_its_input_alone() -> None:
    given = base(task={"_target_": TOY, "weights": {"a": 1.0}})
    before = repr(given)
    make_experiments(given, {"task.weights.a": [2, 3], "optimizer.lr": [1]})
    assert repr(given) == before


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True),
)
def test_every_combination_once_in_order(rates: list[float], seeds: list[int], hiddens: list[int]) -> None:
    experiments = expand({"optimizer.lr": rates, "task.hidden": hiddens, "seed": seeds})
    expected = [(lr, h, s) for lr in rates for h in hiddens for s in seeds]
    assert [tuple(e.values.values()) for e in experiments] == expected
    assert [(e.config["optimizer"]["lr"], e.config["task"]["hidden"], e.seed) for e in experiments] == expected
    assert len({e.id for e in experiments}) == len(experiments)
    # integers split, floats and seeds ride: one cohort for each width, none larger or smaller
    cohorts = group(experiments, rides)
    assert [len(c.experiments) for c in cohorts] == [len(rates) * len(seeds)] * len(hiddens)


# ids


def test_an_id_is_what_it_was() -> None:
    # recorded when the rule was made; if this fails, every run folder that exists has lost its experiments
    digits = {"_target_": "coalesce.tasks.Digits"}
    (experiment,) = expand(
        {},
        changes={
            "task": digits,
            "optimizer": "adamw",
            "schedule": {"name": "cosine", "warmup": 100},
            "steps": 2000,
            "batch_size": 64,
        },
    )
    assert experiment.id == "db28fff83186"


def test_defaults_and_spelling_do_not_change_an_id() -> None:
    short = expand({}, changes={"optimizer": "sgd", "task": {"_target_": TOY}})
    long = expand(
        {},
        changes={
            "optimizer": {"nesterov": "false", "lr": "1e-1", "name": "sgd", "momentum": 0},
            "task": {"dropout": 0.0, "_target_": TOY, "hidden": "33"},
            "steps": 1e2,
        },
    )
    assert short[0].id == long[0].id


def test_a_younger_argument_leaves_ids_alone_at_its_first_default() -> None:
    younger = "tasks_for_tests.Younger"
    experiments = expand({"task.depth": [2, 3]}, changes={"task": {"_target_": younger}})
    assert experiments[0].introduced["task.depth"] == 2
    # the keys of other sections that are younger than their rules stay so
    others = {k: v for k, v in experiments[0].introduced.items() if k != "task.depth"}
    with_key, without = dict(experiments[0].config), dict(experiments[0].config)
    without["task"] = {k: v for k, v in without["task"].items() if k != "depth"}
    assert experiments[0].id == Experiment(without, introduced=others).id
    assert experiments[1].id != Experiment(with_key, introduced=others).id


# what rides


def test_what_rides() -> None:
    task = {"_target_": "tasks_for_tests.Static", "weights": {"a": 1.0}}
    adam = {"name": "adam", "clip_norm": 1.0}
    (experiment,) = expand({}, changes={"task": task, "optimizer": adam, "schedule": {"name": "cosine", "warmup": 5}})
    riding = {
        key
        for key, value in (
            ("seed", 0),
            ("steps", 100),
            ("batch_size", 17),
            ("optimizer.lr", 0.1),
            ("optimizer.betas.0", 0.9),
            ("optimizer.clip_norm", 1.0),
            ("optimizer.name", "adam"),
            ("schedule.warmup", 5),
            ("schedule.final", 0.0),
            ("task.rate", 0.1),
            ("task.threshold", 0.5),
            ("task.weights.a", 1.0),
            ("task._target_", "tasks_for_tests.Static"),
        )
        if rides(experiment, key, value)
    }
    assert riding == {
        "seed",
        "steps",
        "optimizer.lr",
        "optimizer.betas.0",
        "optimizer.clip_norm",
        "schedule.warmup",
        "schedule.final",
        "task.rate",
    }
    # a boolean is an integer to Python, and no float
    assert not rides(experiment, "optimizer.nesterov", True)
    # off is not a number that could differ
    assert not rides(experiment, "optimizer.clip_norm", None)


def test_static_floats_split() -> None:
    static = {"task": {"_target_": "tasks_for_tests.Static"}}
    assert len(group(expand({"task.threshold": [0.1, 0.2], "task.rate": [0.1, 0.2]}, changes=static), rides)) == 2


def test_no_warning_without_a_duplicate() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(expand({"seed": range(50)})) == 50
