"""Schedules: one table of schedules, one list of laws.

Oracles: `torch.optim.lr_scheduler` (the warm-up is `LinearLR`, joined to the schedule by `SequentialLR`), over the
whole run, with unequal constants and lengths in every lane; and the formulas in Python's floats, also where torch has
none. A new schedule is one row of `ROWS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from coalesce.engine.lane import hyperparameters, riding_hyperparameters
from coalesce.optim import SCHEDULES
from coalesce.optim.base import Schedule

Config = dict[str, Any]
RATE = 0.3


@dataclass(frozen=True)
class Row:
    """One schedule beside its original.

    Args:
        original: (optimiser, configuration, steps after the warm-up) → torch's scheduler without a warm-up.
        formula: (configuration, share of the steps after the warm-up that is over) → factor.
        constants: further hyperparameters, one mapping per lane.
    """

    original: Callable[[torch.optim.Optimizer, Config, int], LRScheduler]
    formula: Callable[[Config, float], float]
    constants: Sequence[Config]


ROWS = {
    "constant": Row(
        lambda optimizer, config, steps: ConstantLR(optimizer, factor=1.0, total_iters=0),
        lambda config, share: 1.0,
        [{}],
    ),
    "cosine": Row(
        lambda optimizer, config, steps: CosineAnnealingLR(optimizer, T_max=steps, eta_min=config["final"] * RATE),
        lambda config, share: config["final"] + (1 - config["final"]) * (1 + math.cos(math.pi * share)) / 2,
        [{}, {"final": 0.1}, {"final": 1.0}, {"final": 1 / 3}],
    ),
}
#: (steps, warmup, warmup_start)
RUNS = [(200, 0, 0.01), (200, 7, 0.01), (97, 96, 0.3), (150, 150, 0.5), (150, 50, 1.0), (1, 0, 0.01), (1, 1, 0.2)]
rows = pytest.mark.parametrize("name", ROWS)


def test_every_schedule_has_a_row() -> None:
    assert set(ROWS) == set(SCHEDULES)


def lanes_of(name: str) -> list[tuple[int, Config]]:
    """Steps and resolved configuration of every lane of a row."""
    lanes = []
    for steps, warmup, warmup_start in RUNS:
        for constants in ROWS[name].constants:
            given = {"name": name, "warmup": warmup, "warmup_start": warmup_start, **constants}
            config, problems = SCHEDULES[name].check(given, "schedule")
            assert problems == []
            lanes.append((steps, config))
    return lanes


def factors(name: str, lanes: Sequence[tuple[int, Config]], count: int, first: int = 0) -> Tensor:
    """(count, K): the factors of some steps, computed as the engine does it."""
    rule: type[Schedule] = SCHEDULES[name]
    riding = [riding_hyperparameters(rule, config) for _, config in lanes]
    stacked = {key: torch.stack([lane[key] for lane in riding]) for key in riding[0]}
    lengths = torch.tensor([steps for steps, _ in lanes])

    def factor(step: Tensor, steps: Tensor, riding: Mapping[str, Tensor]) -> Tensor:
        return rule.factor(step, steps, hyperparameters(rule, lanes[0][1], riding))

    steps = [torch.full_like(lengths, step) for step in range(first, first + count)]
    return torch.stack([vmap(factor)(step, lengths, stacked) for step in steps])


def original_rates(name: str, steps: int, config: Config) -> list[float]:
    """What torch's schedulers make of the rate at each step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    warmup, after = config["warmup"], steps - config["warmup"]
    scheduler: LRScheduler
    if warmup:
        rising = LinearLR(optimizer, start_factor=config["warmup_start"], total_iters=warmup)
        # after a warm-up that fills the run there is nothing to schedule, which torch cannot say
        falling = ROWS[name].original(optimizer, config, max(after, 1))
        scheduler = SequentialLR(optimizer, [rising, falling], milestones=[warmup])
    else:
        scheduler = ROWS[name].original(optimizer, config, after)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def formula(name: str, steps: int, config: Config, step: int) -> float:
    """The factor, in Python's floats."""
    warmup, start = config["warmup"], config["warmup_start"]
    if step < warmup:
        return float(start + (1 - start) * step / warmup)
    share = (step - warmup) / max(steps - warmup, 1)
    return ROWS[name].formula(config, min(share, 1.0))


@rows
def test_equals_torch_over_the_run(name: str) -> None:
    lanes = lanes_of(name)
    found = RATE * factors(name, lanes, max(steps for steps, _ in lanes))
    for lane, (steps, config) in enumerate(lanes):
        expected = torch.tensor(original_rates(name, steps, config), dtype=torch.float64)
        torch.testing.assert_close(found[:steps, lane], expected, rtol=0, atol=1e-12, msg=f"{steps} steps of {config}")


@rows
def test_equals_its_formula_within_and_beyond_the_run(name: str) -> None:
    lanes = lanes_of(name)
    found = factors(name, lanes, max(steps for steps, _ in lanes) + 20)
    for lane, (steps, config) in enumerate(lanes):
        expected = [formula(name, steps, config, step) for step in range(len(found))]
        assert found[:, lane].tolist() == pytest.approx(expected, rel=0, abs=1e-15)


@rows
@given(st.data())
def test_any_run_equals_its_formula(name: str, data: st.DataObject) -> None:
    unit = st.floats(0, 1, allow_subnormal=False)
    steps, warmup = data.draw(st.integers(1, 2**40)), data.draw(st.integers(0, 2**40))
    given = {key: data.draw(unit, label=key) for key in SCHEDULES[name].hyper if key != "warmup"}
    config, problems = SCHEDULES[name].check({"name": name, "warmup": warmup, **given}, "schedule")
    assert problems == []
    step = data.draw(st.integers(0, 2 * steps))
    found = factors(name, [(steps, config)], 1, step).item()
    assert found == pytest.approx(formula(name, steps, config, step), rel=0, abs=1e-14)
    assert 0 <= found <= 1 + 1e-15


@rows
@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_factors_are_float64_whatever_the_default(name: str, default: torch.dtype) -> None:
    lanes = lanes_of(name)
    expected = factors(name, lanes, 200)
    assert expected.dtype == torch.float64
    assert expected.shape == (200, len(lanes))
    torch.set_default_dtype(default)
    found = factors(name, lanes, 200)
    assert found.dtype == torch.float64
    assert found.equal(expected)


@rows
def test_a_neighbour_changes_nothing(name: str) -> None:
    lanes = lanes_of(name)
    usual = factors(name, lanes, 100)
    for sick in range(len(lanes)):
        config = {key: math.nan if isinstance(value, float) else value for key, value in lanes[sick][1].items()}
        others = [lane for lane in range(len(lanes)) if lane != sick]
        changed = factors(name, [*lanes[:sick], (3, config), *lanes[sick + 1 :]], 100)
        assert changed[:, others].equal(usual[:, others])


@rows
def test_without_warmup_the_start_does_not_matter(name: str) -> None:
    runs = [(50, {**lanes_of(name)[0][1], "warmup": 0, "warmup_start": start}) for start in (0.0, 0.5, 1.0)]
    found = factors(name, runs, 50)
    assert (found == found[:, :1]).all()
    assert found[0, 0] == 1


@rows
def test_a_warmup_longer_than_the_run_only_rises(name: str) -> None:
    config = {**lanes_of(name)[0][1], "warmup": 100, "warmup_start": 0.0}
    found = factors(name, [(10, config)], 10)
    assert found[:, 0].tolist() == pytest.approx([step / 100 for step in range(10)], abs=1e-15)


def test_cosine_by_hand() -> None:
    config = {"name": "cosine", "warmup": 2, "warmup_start": 0.5, "final": 0.2}
    found = factors("cosine", [(6, config)], 9)[:, 0].tolist()
    falling = [0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, 0.6, 0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2]
    assert found == pytest.approx([0.5, 0.75, 1.0, *falling, 0.2, 0.2, 0.2], abs=1e-15)


@pytest.mark.parametrize(
    ("given", "key", "rule", "valid"),
    [
        ({"warmup": -1}, "warmup", "out of range", "an integer at least 0"),
        ({"warmup": 0.5}, "warmup", "must be a whole number of steps", "an integer at least 0"),
        ({"warmup_start": 1.5}, "warmup_start", "out of range", "a finite number at least 0 and at most 1"),
        ({"final": math.nan}, "final", "must be finite", "a finite number at least 0 and at most 1"),
        ({"finale": 0.1}, "finale", "unknown key for schedule 'cosine'", "warmup, warmup_start, final"),
    ],
)
def test_wrong_constants_are_refused(given: Config, key: str, rule: str, valid: str) -> None:
    (problem,) = SCHEDULES["cosine"].check({"name": "cosine", **given}, "schedule")[1]
    assert (problem.key, problem.rule, problem.valid) == (f"schedule.{key}", rule, valid)
    assert problem.nearest == ("final" if key == "finale" else "")
