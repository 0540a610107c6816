"""Schedules of the learning rate, each with a linear warm-up in front.

The warm-up equals `torch.optim.lr_scheduler.LinearLR` with ``total_iters=warmup``, followed by the schedule through
`SequentialLR`; a warm-up of 0 steps leaves it out.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, Schedule

WARMUP = {
    "warmup": Hyper(0, low=0, length=True, text="steps over which the rate rises linearly"),
    "warmup_start": Hyper(0.01, low=0.0, high=1.0, text="factor at step 0 of the warm-up"),
}


def _warmed(step: Tensor, hyper: SimpleNamespace, factor: Tensor) -> Tensor:
    # a lane without warm-up divides by 1, not by 0, in the branch that it does not take
    share = _share(step, torch.clamp(hyper.warmup, min=1))
    rising = hyper.warmup_start + (1 - hyper.warmup_start) * share
    return torch.where(step < hyper.warmup, rising, factor)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    # the quotient of two integer tensors has torch's default dtype: float32, 1e-8 away from what Python computes
    return part.to(torch.float64) / whole


class Constant(Schedule):
    """The learning rate as it is."""

    name: ClassVar[str] = "constant"
    hyper: ClassVar[dict[str, Hyper]] = WARMUP

    @classmethod
    def factor(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace) -> Tensor:
        return _warmed(step, hyper, torch.ones_like(hyper.warmup_start))


class Cosine(Schedule):
    """Half a cosine from 1 down to ``final``, over the steps after the warm-up.

    As `torch.optim.lr_scheduler.CosineAnnealingLR` with ``T_max = steps - warmup`` and ``eta_min = final * lr``
    (Loshchilov and Hutter, "SGDR", ICLR 2017).
    """

    name: ClassVar[str] = "cosine"
    hyper: ClassVar[dict[str, Hyper]] = {
        **WARMUP,
        "final": Hyper(0.0, low=0.0, high=1.0, text="factor at the end"),
    }

    @classmethod
    def factor(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace) -> Tensor:
        length = torch.clamp(steps - hyper.warmup, min=1)
        share = torch.clamp(_share(step - hyper.warmup, length), 0.0, 1.0)
        falling = hyper.final + (1 - hyper.final) * (1 + torch.cos(math.pi * share)) / 2
        return _warmed(step, hyper, falling)
