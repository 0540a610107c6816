"""A fall at each of some steps, as `torch.optim.lr_scheduler.MultiStepLR`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, Lengths, State
from coalesce.optim.schedules.step import GAMMA
from coalesce.optim.schedules.warmup import WARMUP, Warmed


class MultiStep(Warmed):
    """``gamma`` to the power of the milestones reached. They may stand in any order; one that comes twice counts
    twice."""

    name: ClassVar[str] = "multi_step"
    hyper: ClassVar[dict[str, Hyper]] = {
        **WARMUP,
        "milestones": Lengths((1000, 1500), low=1, text="steps after the warm-up, of the falls"),
        "gamma": GAMMA,
    }

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        return hyper.gamma ** (step >= torch.stack(hyper.milestones)).sum()
