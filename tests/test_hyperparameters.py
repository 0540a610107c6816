"""What a hyperparameter may be, and what is said of one that may not.

Oracles: tables of right and wrong values with the texts that they get; what `torch.optim` refuses.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from coalesce.optim import OPTIMIZERS, SCHEDULES
from coalesce.optim.base import Hyper, Rule

KINDS = {
    "free": Hyper(0.0),
    "low": Hyper(0.1, low=0.0),
    "open": Hyper(0.1, low=0.0, open_low=True, optional=True),
    "share": Hyper(0.5, low=0.0, high=1.0),
    "decay": Hyper(0.9, low=0.0, high=1.0, open_high=True),
    "pair": Hyper((0.9, 0.999), low=0.0, high=1.0, open_high=True),
    "length": Hyper(0, low=0, length=True),
    "flag": Hyper(False),
}


@pytest.mark.parametrize(
    ("kind", "valid"),
    [
        ("free", "a finite number"),
        ("low", "a finite number at least 0"),
        ("open", "a finite number above 0, or null"),
        ("share", "a finite number at least 0 and at most 1"),
        ("decay", "a finite number at least 0 and below 1"),
        ("pair", "2 finite numbers at least 0 and below 1"),
        ("length", "an integer at least 0"),
        ("flag", "true or false"),
    ],
)
def test_says_what_is_valid(kind: str, valid: str) -> None:
    assert KINDS[kind].valid() == valid


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("free", -1e300, -1e300),
        ("free", 3, 3.0),
        ("low", 0, 0.0),
        ("low", 10**22, 1e22),
        ("open", None, None),
        ("open", 5e-324, 5e-324),
        ("share", 1, 1.0),
        ("share", 0.0, 0.0),
        ("decay", 0.9999999999999999, 0.9999999999999999),
        ("pair", (0, 0.5), [0.0, 0.5]),
        ("pair", [0.9, 0.999], [0.9, 0.999]),
        ("length", 7, 7),
        ("length", 7.0, 7),
        ("length", 2**63 - 1, 2**63 - 1),
        ("flag", True, True),
    ],
)
def test_takes_what_is_valid(kind: str, given: Any, expected: Any) -> None:
    value, problems = KINDS[kind].check("optimizer.x", given)
    assert problems == []
    assert value == expected
    # 7 and 7.0, 1 and True are equal, but not the same
    assert type(value) is type(expected)
    if isinstance(value, list):
        assert {type(v) for v in value} == {float}


@pytest.mark.parametrize(
    ("kind", "given", "key", "rule"),
    [
        ("free", math.nan, "x", "must be finite"),
        ("free", math.inf, "x", "must be finite"),
        ("free", -math.inf, "x", "must be finite"),
        ("free", 10**400, "x", "must be finite"),
        ("free", "0.1", "x", "must be a number"),
        ("free", None, "x", "must be a number"),
        ("free", [0.1], "x", "must be a number"),
        ("free", True, "x", "must be a number"),
        ("free", 1j, "x", "must be a number"),
        ("low", -5e-324, "x", "out of range"),
        ("open", 0, "x", "out of range"),
        ("open", -0.0, "x", "out of range"),
        ("share", 1.0000000000000002, "x", "out of range"),
        ("decay", 1, "x", "out of range"),
        ("pair", 0.9, "x", "must be a list of 2 numbers"),
        ("pair", "ab", "x", "must be a list of 2 numbers"),
        ("pair", [0.9], "x", "must be a list of 2 numbers"),
        ("pair", [0.9, 0.99, 0.999], "x", "must be a list of 2 numbers"),
        ("pair", [0.9, 1.0], "x.1", "out of range"),
        ("pair", [False, 0.9], "x.0", "must be a number"),
        ("length", -1, "x", "out of range"),
        ("length", 1.5, "x", "must be a whole number"),
        ("length", math.nan, "x", "must be finite"),
        ("length", False, "x", "must be a number"),
        ("length", 2**63, "x", "must fit into 64 bits"),
        ("length", 1e30, "x", "must fit into 64 bits"),
        ("flag", 1, "x", "must be a boolean"),
        ("flag", "true", "x", "must be a boolean"),
        ("flag", None, "x", "must be a boolean"),
    ],
)
def test_refuses_what_is_not(kind: str, given: Any, key: str, rule: str) -> None:
    (problem,) = KINDS[kind].check("optimizer.x", given)[1]
    assert problem.key == f"optimizer.{key}"
    assert problem.rule == rule
    assert problem.valid == KINDS[kind].valid()
    item = given[int(key[-1])] if "." in key else given
    assert problem.value is item


def test_every_wrong_item_of_a_list_is_named() -> None:
    problems = KINDS["pair"].check("optimizer.betas", [-1, math.nan])[1]
    assert [str(p) for p in problems] == [
        "optimizer.betas.0=-1: out of range; valid: 2 finite numbers at least 0 and below 1",
        "optimizer.betas.1=nan: must be finite; valid: 2 finite numbers at least 0 and below 1",
    ]


@pytest.mark.parametrize("rule", [*OPTIMIZERS.values(), *SCHEDULES.values()], ids=lambda rule: rule.name)
def test_defaults_are_filled_in(rule: type[Rule]) -> None:
    config, problems = rule.check({"name": rule.name}, "key")
    assert problems == []
    assert list(config) == ["name", *rule.hyper]
    assert config["name"] == rule.name
    # what was resolved once is resolved
    assert rule.check(config, "key") == (config, [])


def test_unknown_names_get_the_nearest() -> None:
    valid = ", ".join(OPTIMIZERS["adamw"].hyper)
    config, problems = OPTIMIZERS["adamw"].check({"name": "adamw", "weight_dacay": 0.1, "zzz": 1}, "optimizer")
    assert [str(p) for p in problems] == [
        f"optimizer.weight_dacay=0.1: unknown key for optimizer 'adamw'; valid: {valid}; did you mean 'weight_decay'?",
        f"optimizer.zzz=1: unknown key for optimizer 'adamw'; valid: {valid}",
    ]
    assert "weight_dacay" not in config


def test_all_problems_come_together() -> None:
    given = {"name": "sgd", "lr": -1, "momentum": math.nan, "nesterov": "yes", "clip_norm": 0, "speed": 1}
    problems = OPTIMIZERS["sgd"].check(given, "optimizer")[1]
    assert {p.key for p in problems} == {f"optimizer.{k}" for k in ("lr", "momentum", "nesterov", "clip_norm", "speed")}


@pytest.mark.parametrize("wrong", [{"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}, {}])
def test_nesterov_needs_momentum_as_in_torch(wrong: dict[str, Any]) -> None:
    (problem,) = OPTIMIZERS["sgd"].check({"name": "sgd", "nesterov": True, **wrong}, "optimizer")[1]
    assert problem.key == "optimizer.nesterov"
    assert problem.rule == "needs optimizer.momentum above 0 and optimizer.dampening=0"
    with pytest.raises(ValueError, match="Nesterov"):
        torch.optim.SGD([torch.zeros(1)], lr=0.1, nesterov=True, **wrong)
