"""The learning rate as it is, as `torch.optim.lr_scheduler.ConstantLR` with ``factor=1``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import State
from coalesce.optim.schedules.warmup import Warmed


class Constant(Warmed):
    """1."""

    name: ClassVar[str] = "constant"

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        return torch.ones_like(hyper.warmup_start)
