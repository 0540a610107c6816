"""Half cosines one after another, as `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts` (Loshchilov and Hutter,
"SGDR: stochastic gradient descent with warm restarts", ICLR 2017)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, State
from coalesce.optim.schedules.warmup import FINAL, WARMUP, Warmed, between, half_cosine


class CosineRestarts(Warmed):
    """From 1 down to ``final``, again and again: cycle i has ``period * growth**i`` steps.

    torch's ``T_0``, ``T_mult`` and ``eta_min = final * lr``. Here ``growth`` may be any float from 1 on, and rides.
    """

    name: ClassVar[str] = "cosine_restarts"
    hyper: ClassVar[dict[str, Hyper]] = {
        **WARMUP,
        "period": Hyper(500, low=1, length=True, text="steps of the first cycle"),
        "growth": Hyper(1.0, low=1.0, text="how many times longer each cycle is than the one before"),
        "final": FINAL,
    }

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        # an integer tensor and a Python float make a float32
        step, period, even = step.to(torch.float64), hyper.period.to(torch.float64), hyper.growth == 1
        # a lane whose cycles are equal counts with 2 in the branch that it does not take
        growth = torch.where(even, 2.0, hyper.growth)
        rate = torch.log(growth)

        def start(cycle: Tensor) -> Tensor:
            # period * (growth**cycle - 1) / (growth - 1), which would cancel for a growth near 1
            return period * torch.expm1(cycle * rate) / torch.expm1(rate)

        cycle = torch.floor(torch.log1p(step / period * torch.expm1(rate)) / rate)
        # A quotient of logarithms misses whole numbers by its rounding: log(243) / log(3) is below 5. The tolerance is
        # some times that of `start`, and much less than a step.
        later = step + 1e-9 >= start(cycle + 1) * (1 - 4e-14)
        cycle = torch.where(later, cycle + 1, cycle)
        begun = torch.where(even, torch.floor(step / period) * period, start(cycle))
        length = torch.where(even, period, period * growth**cycle)
        return between(1.0, hyper.final, half_cosine(torch.clamp((step - begun) / length, 0.0, 1.0)))
