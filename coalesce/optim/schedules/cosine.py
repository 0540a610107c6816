"""Half a cosine, as `torch.optim.lr_scheduler.CosineAnnealingLR` (Loshchilov and Hutter, "SGDR", ICLR 2017)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor

from coalesce.optim.base import Hyper, State
from coalesce.optim.schedules.warmup import FINAL, LENGTH, WARMUP, Warmed, between, half_cosine, progress


class Cosine(Warmed):
    """From 1 down to ``final`` over ``length`` steps, and constant from there on.

    torch's ``T_max = length`` and ``eta_min = final * lr``; torch's rises again after ``T_max``.
    """

    name: ClassVar[str] = "cosine"
    hyper: ClassVar[dict[str, Hyper]] = {**WARMUP, "final": FINAL, "length": LENGTH}
    introduced: ClassVar[dict[str, Any]] = {"length": None}

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        return between(1.0, hyper.final, half_cosine(progress(step, steps, hyper)))
