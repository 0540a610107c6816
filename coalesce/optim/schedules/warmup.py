"""The linear warm-up that stands in front of every schedule, and arithmetic that schedules share.

The warm-up equals `torch.optim.lr_scheduler.LinearLR` with ``total_iters=warmup``, joined to the schedule by
`SequentialLR`; a warm-up of 0 steps leaves it out. It rises to the rate with which the schedule begins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, Schedule, State

WARMUP = {
    "warmup": Hyper(0, low=0, length=True, text="steps over which the rate rises linearly"),
    "warmup_start": Hyper(0.01, low=0.0, high=1.0, text="factor at step 0 of the warm-up"),
}
FINAL = Hyper(0.0, low=0.0, high=1.0, text="factor at the end")
LENGTH = Hyper(None, low=1, length=True, optional=True, text="steps until the end is reached; null: all of them")


class Warmed(Schedule):
    """A schedule behind a warm-up: subclasses say what comes after it."""

    hyper: ClassVar[dict[str, Hyper]] = WARMUP

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        """The factor without the warm-up.

        Args:
            step: 0-d int64, steps since the warm-up's end, 0 during it.
            steps: 0-d int64, steps from there to the training's end, at least 1.
        """
        raise NotImplementedError

    @classmethod
    def factor(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        # a lane without warm-up divides by 1, not by 0, in the branch that it does not take
        share = quotient(step, torch.clamp(hyper.warmup, min=1))
        rising = hyper.warmup_start + (1 - hyper.warmup_start) * share
        shape = cls.shape(*after_warmup(step, steps, hyper), hyper, state)
        return torch.where(step < hyper.warmup, rising, 1.0) * shape


def after_warmup(step: Tensor, steps: Tensor, hyper: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Steps since the warm-up's end, at least 0, and from there to the training's end, at least 1."""
    return torch.clamp(step - hyper.warmup, min=0), torch.clamp(steps - hyper.warmup, min=1)


def quotient(part: Tensor, whole: Tensor) -> Tensor:
    """The quotient of two integers in float64. That of two integer tensors has torch's default dtype: float32, 1e-8
    away from what Python computes."""
    return part.to(torch.float64) / whole


def progress(step: Tensor, steps: Tensor, hyper: SimpleNamespace) -> Tensor:
    """The share of ``hyper.length`` (or, if that is None, of ``steps``) that is over, 0 to 1."""
    return torch.clamp(quotient(step, steps if hyper.length is None else hyper.length), max=1.0)


def between(start: Tensor | float, end: Tensor | float, share: Tensor) -> Tensor:
    """From ``start`` at a share of 0 to ``end`` at 1, both of them exactly."""
    way = end - start
    return torch.where(share < 0.5, start + way * share, end - way * (1 - share))


def half_cosine(share: Tensor) -> Tensor:
    """From 0 at a share of 0 along half a cosine to 1 at 1."""
    return (1 - torch.cos(torch.pi * share)) / 2
