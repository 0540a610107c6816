"""The same ratio at every step, as `torch.optim.lr_scheduler.ExponentialLR`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from torch import Tensor

from coalesce.optim.base import Hyper, State
from coalesce.optim.schedules.warmup import WARMUP, Warmed


class Exponential(Warmed):
    """``gamma`` to the power of the steps done. A ``gamma`` above 1 rises: a test of the range of learning rates."""

    name: ClassVar[str] = "exponential"
    hyper: ClassVar[dict[str, Hyper]] = {
        **WARMUP,
        "gamma": Hyper(0.999, low=0.0, open_low=True, text="factor at every step"),
    }

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        return hyper.gamma**step
