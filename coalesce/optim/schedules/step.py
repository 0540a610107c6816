"""A fall at every so many steps, as `torch.optim.lr_scheduler.StepLR`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from torch import Tensor

from coalesce.optim.base import Hyper, State
from coalesce.optim.schedules.warmup import WARMUP, Warmed

GAMMA = Hyper(0.1, low=0.0, open_low=True, text="factor at each fall")


class Step(Warmed):
    """``gamma`` to the power of the falls so far, one after each ``step_size`` steps."""

    name: ClassVar[str] = "step"
    hyper: ClassVar[dict[str, Hyper]] = {
        **WARMUP,
        "step_size": Hyper(1000, low=1, length=True, text="steps between two falls"),
        "gamma": GAMMA,
    }

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        return hyper.gamma ** (step // hyper.step_size)
