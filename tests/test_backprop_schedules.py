"""Learning-rate schedules around `coalesce.BackProp`.

Oracle: the plain loop with `torch.optim`, 50 steps, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import coalesce
from backprop_helpers import (
    Schedule,
    adam,
    assert_same_weights,
    assert_trains_alike,
    network,
    sgd,
    train,
)

SCHEDULES: dict[str, Schedule] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 50),
    "one cycle, the momentum moves too": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=60),
    "cyclic, the momentum moves too": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=7),
    "a function of the step": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "a product": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.97),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 9, 2),
    "warm-up, then a fall": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.95)], [5]
    ),
}


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    assert_trains_alike(make, schedule=SCHEDULES[name])


def test_a_plateau() -> None:
    def plateau(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=2, factor=0.5)
        rates = []
        for seed in range(12):
            scheduler.step(sum(train(model, optimizer, 3, seed=seed)))
            rates += [group["lr"] for group in optimizer.param_groups]
        return rates

    plain, twin = network(), network()
    rates = plateau(plain, sgd(plain))
    assert plateau(*coalesce.BackProp(twin, sgd(twin))) == rates
    assert len(set(rates)) > 1
    assert_same_weights(twin, plain)


def test_a_schedule_that_was_there_before() -> None:
    """Built on the optimiser that is given, it goes on to steer the one that is returned."""
    plain, twin = network(), network()
    reference, given = sgd(plain), sgd(twin)
    schedules = [SCHEDULES["cosine"](reference), SCHEDULES["cosine"](given)]
    model, stepped = coalesce.BackProp(twin, given)
    for seed in range(10):
        for one, step, scheduler in ((plain, reference, schedules[0]), (model, stepped, schedules[1])):
            train(one, step, 1, seed=seed)
            scheduler.step()
    assert stepped.param_groups[0]["lr"] == reference.param_groups[0]["lr"] < 0.1
    assert_same_weights(model, plain)


def test_a_rate_set_by_hand_holds_from_the_next_step() -> None:
    plain, twin = network(), network()
    reference = sgd(plain)
    model, stepped = coalesce.BackProp(twin, sgd(twin))
    for one, step in ((plain, reference), (model, stepped)):
        train(one, step, 2)
        step.param_groups[0]["lr"] = 0.01
        step.param_groups[0]["momentum"] = 0.5
        train(one, step, 2)
    assert_same_weights(model, plain)
