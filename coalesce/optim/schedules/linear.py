"""A straight line, as `torch.optim.lr_scheduler.LinearLR`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from torch import Tensor

from coalesce.optim.base import Hyper, State
from coalesce.optim.schedules.warmup import FINAL, LENGTH, WARMUP, Warmed, between, progress


class Linear(Warmed):
    """From ``start`` to ``final`` over ``length`` steps, and constant from there on.

    torch's ``start_factor``, ``end_factor`` and ``total_iters``.
    """

    name: ClassVar[str] = "linear"
    hyper: ClassVar[dict[str, Hyper]] = {
        **WARMUP,
        "start": Hyper(1.0, low=0.0, high=1.0, text="factor at the start"),
        "final": FINAL,
        "length": LENGTH,
    }

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        return between(hyper.start, hyper.final, progress(step, steps, hyper))
