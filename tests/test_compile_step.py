"""`coalesce.compile_step` for every optimiser: numbers, state, groups, schedules.

Oracle: a plain loop with the same class of `torch.optim`, in float64.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import coalesce
from coalesce.optim.stock import RULES
from compile_step_helpers import (
    BATCHES,
    TOLERANCE,
    Make,
    assert_same_state,
    assert_same_weights,
    assert_trains_alike,
    compiled,
    cross_entropy,
    network,
    plain,
    two_groups,
)
from thorough import kept


def row(name: str, **options: Any) -> Make:
    """A class of `torch.optim` over two groups with settings of their own."""
    group = options.pop("group", {})
    return lambda model: getattr(torch.optim, name)(two_groups(model, **group), **options)


ROWS: dict[str, Make] = {
    "SGD": row("SGD", group={"momentum": 0.5, "dampening": 0.3}, momentum=0.9),
    "SGD, no momentum in one group": row("SGD", group={"momentum": 0.0}, momentum=0.9),
    "SGD, no momentum": row("SGD"),
    "SGD, Nesterov": row("SGD", momentum=0.9, nesterov=True),
    "Adam": row("Adam", group={"betas": (0.8, 0.9)}),
    "Adam, AMSGrad in one group": row("Adam", group={"amsgrad": True}),
    "AdamW": row("AdamW", group={"eps": 1e-3}),
    "AdamW, decoupled in one group": row("Adam", group={"decoupled_weight_decay": True}),
    "NAdam": row("NAdam", group={"momentum_decay": 0.1}),
    "NAdam, decoupled": row("NAdam", decoupled_weight_decay=True),
    "RAdam": row("RAdam", group={"betas": (0.9, 0.8)}),
    "Adamax": row("Adamax", group={"betas": (0.5, 0.9)}),
    "RMSprop": row("RMSprop", group={"alpha": 0.9}),
    # by eps, since the deviation of a gradient that hardly moves is what cancellation left of it
    "RMSprop, centred, momentum in one group": row("RMSprop", group={"momentum": 0.5}, centered=True, eps=1e-3),
    "Adagrad": row("Adagrad", group={"lr_decay": 0.1}, initial_accumulator_value=0.5),
    "Adadelta": row("Adadelta", group={"rho": 0.5}),
    "Adafactor": row("Adafactor", group={"eps": (1e-3, 1e-2)}),
}


@pytest.fixture(autouse=True)
def double() -> None:
    """torch counts steps and NAdam's momenta in the default dtype. The products are tiny: one thread."""
    # `conftest.py` puts both back
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)


def test_every_rule_has_a_row() -> None:
    assert {type(make(network())) for make in ROWS.values()} == set(RULES)


#: Of the rows that differ in a switch alone, one stands for all before every change.
NAMES = [pytest.param(n, marks=[pytest.mark.thorough] if "," in n else []) for n in ROWS]


@pytest.mark.parametrize("name", NAMES)
def test_as_the_plain_loop(name: str) -> None:
    """200 steps (law 2) of one rule of each kind, fewer of the others."""
    assert_trains_alike(ROWS[name], 200 if name in KINDS else 40)


#: Rules with state of each kind: none, one slot, two, factors, a schedule of its own.
KINDS = ("SGD", "RMSprop", "AdamW", "Adafactor", "NAdam")


@pytest.mark.parametrize("name", kept(ROWS, of=["SGD", "AdamW", "NAdam"]))
def test_state_goes_both_ways(name: str) -> None:
    """Plain, compiled and plain again, by `state_dict`, against plain throughout; and taken up between two steps."""
    make, straight, first, second, third = ROWS[name], *(network() for _ in range(4))
    optimizer = make(straight)
    plain(straight, optimizer, 12)

    one, two, three = make(first), make(second), make(third)
    plain(first, one, 4)
    step = coalesce.compile_step(second, cross_entropy, two, compile=False)
    compiled(step, 1)  # what it has begun must be forgotten
    second.load_state_dict(first.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    compiled(step, 4)
    assert step.graphs == 1
    third.load_state_dict(second.state_dict())
    three.load_state_dict(copy.deepcopy(two.state_dict()))
    plain(third, three, 4)
    assert_same_weights(third, straight)
    assert_same_state(three, optimizer)


def test_the_state_is_torchs_own() -> None:
    """The tensors of the optimiser's state are those that the graph writes: no copy that could come apart."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = coalesce.compile_step(model, cross_entropy, optimizer, compile=False)
    compiled(step, 1)
    weight = model[0].weight
    held, pointer = optimizer.state[weight]["exp_avg"], weight.data_ptr()
    before = held.clone()
    compiled(step, 1)
    assert optimizer.state[weight]["exp_avg"] is held
    assert not torch.equal(held, before)
    assert weight.data_ptr() == pointer
    assert optimizer.state[weight]["step"].item() == 2


SCHEDULES: dict[str, Any] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=25),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=4, cycle_momentum=True),
}


@pytest.mark.parametrize(
    ("name", "schedule"),
    kept(
        itertools.product(["SGD", "AdamW"], SCHEDULES),
        of=[("SGD", "one cycle"), ("SGD", "cyclic"), ("AdamW", "cosine")],
    ),
)
def test_schedulers_of_torch_compile_nothing(name: str, schedule: str) -> None:
    """Betas and momentum that they move included; they come before the first step without a warning."""
    model, twin = network(), network()
    optimizer, ours = ROWS[name](model), ROWS[name](twin)
    step = coalesce.compile_step(twin, cross_entropy, ours, compile=False)
    theirs, mine = SCHEDULES[schedule](optimizer), SCHEDULES[schedule](ours)
    plain(model, optimizer, 20, after=theirs.step)
    compiled(step, 20, after=mine.step)
    assert ours.param_groups[0]["lr"] != 0.02
    assert step.graphs == 1
    assert_same_weights(twin, model)
    assert_same_state(ours, optimizer)


def test_settings_that_are_no_numbers_make_another_graph() -> None:
    model, twin = network(), network()
    optimizer, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    step = coalesce.compile_step(twin, cross_entropy, ours, compile=False)
    for change in ({"momentum": 0.9}, {"nesterov": True}, {"nesterov": False, "momentum": 0.5}, {"momentum": 0}):
        plain(model, optimizer, 3)
        compiled(step, 3)
        for one in (optimizer, ours):
            one.param_groups[0].update(change)
    plain(model, optimizer, 3)
    compiled(step, 3)
    assert_same_weights(twin, model)


def test_a_group_that_is_added() -> None:
    """As a model is thawed layer by layer."""
    model, twin = network(), network()
    optimizer, ours = (torch.optim.AdamW(m[3].parameters(), lr=0.01) for m in (model, twin))
    step = coalesce.compile_step(twin, cross_entropy, ours, compile=False)
    for layer in (1, 0):
        plain(model, optimizer, 3)
        compiled(step, 3)
        optimizer.add_param_group({"params": model[layer].parameters(), "lr": 0.002})
        ours.add_param_group({"params": twin[layer].parameters(), "lr": 0.002})
    plain(model, optimizer, 3)
    compiled(step, 3)
    assert_same_weights(twin, model)
    assert_same_state(ours, optimizer)


def test_plain_steps_in_between() -> None:
    """On the same model and optimiser; and an `optimizer.step()` by mistake, without gradients, does nothing."""
    model, twin = network(), network()
    optimizer, ours = ROWS["NAdam"](model), ROWS["NAdam"](twin)
    step = coalesce.compile_step(twin, cross_entropy, ours, compile=False)
    plain(model, optimizer, 12)
    compiled(step, 4)
    ours.step()
    plain(twin, ours, 4)
    ours.zero_grad()
    ours.step()
    compiled(step, 4)
    assert_same_weights(twin, model)
    assert_same_state(ours, optimizer)


def test_clipping_by_the_norm() -> None:
    model, twin = network(), network()
    optimizer, ours = ROWS["SGD"](model), ROWS["SGD"](twin)
    step = coalesce.compile_step(twin, cross_entropy, ours, clip_norm=0.6, compile=False)
    norms = []
    for i in range(20):
        optimizer.zero_grad()
        loss = cross_entropy(model, BATCHES[i % 4])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.6).item())
        optimizer.step()
        assert step(BATCHES[i % 4]).item() == pytest.approx(loss.item(), abs=TOLERANCE)
    assert min(norms) < 0.6 < max(norms)
    assert_same_weights(twin, model)


def test_a_nan_goes_on_as_in_a_plain_loop() -> None:
    """In a sweep the lane would be frozen in its last finite state."""
    model, twin = network(), network()
    make = functools.partial(torch.optim.SGD, lr=0.1)
    step = coalesce.compile_step(twin, cross_entropy, make(twin.parameters()), compile=False)
    bad = BATCHES[0][0].clone()
    bad[0, 0] = torch.nan
    optimizer = make(model.parameters())
    cross_entropy(model, (bad, BATCHES[0][1])).backward()
    optimizer.step()
    assert step((bad, BATCHES[0][1])).isnan()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert theirs.isnan().any()
        assert torch.equal(ours.isnan(), theirs.isnan())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("AdamW", marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("SGD", "Adafactor")),
    ],
)
def test_compiled(name: str) -> None:
    """As one segment, and cut into segments."""
    assert_trains_alike(ROWS[name], 200, compile=True)
    _, _, step = assert_trains_alike(ROWS[name], 200, compile=True, pieces=["0", "3"])
    assert step.graphs == 1
