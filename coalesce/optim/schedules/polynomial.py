"""A power of the share of the steps that is left, as `torch.optim.lr_scheduler.PolynomialLR`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from torch import Tensor

from coalesce.optim.base import Hyper, State
from coalesce.optim.schedules.warmup import FINAL, LENGTH, WARMUP, Warmed, between, progress


class Polynomial(Warmed):
    """From 1 to ``final`` over ``length`` steps (torch's ``total_iters``), and constant from there on.

    torch's always ends at 0.
    """

    name: ClassVar[str] = "polynomial"
    hyper: ClassVar[dict[str, Hyper]] = {
        **WARMUP,
        "power": Hyper(1.0, low=0.0, text="power of the share that is left"),
        "final": FINAL,
        "length": LENGTH,
    }

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        return between(hyper.final, 1.0, (1 - progress(step, steps, hyper)) ** hyper.power)
