"""A fall wherever a metric has stopped getting better, as `torch.optim.lr_scheduler.ReduceLROnPlateau`."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, State, Word
from coalesce.optim.schedules.warmup import WARMUP, Warmed


class Plateau(Warmed):
    """Each lane is judged by its own metric, evaluated after each ``every`` of its own steps.

    The names are torch's, but ``every`` and ``monitor``. ``patience`` and ``cooldown`` count evaluations. Those before
    the warm-up's end do not count. State: ``factor``, ``best`` in the metric's unit, ``bad`` and ``cooling``, counted
    in evaluations.
    """

    name: ClassVar[str] = "plateau"
    judges: ClassVar[bool] = True
    hyper: ClassVar[dict[str, Hyper]] = {
        **WARMUP,
        "factor": Hyper(0.1, low=0.0, high=1.0, open_high=True, text="factor at each fall"),
        "patience": Hyper(10, low=0, length=True, text="evaluations without an improvement that are borne"),
        "threshold": Hyper(1e-4, low=0.0, text="what counts as an improvement"),
        "threshold_mode": Word("rel", choices=("rel", "abs"), text="as a share of the best value, or in its unit"),
        "cooldown": Hyper(0, low=0, length=True, text="evaluations after a fall that do not count"),
        "min_lr": Hyper(0.0, low=0.0, text="learning rate below which it does not fall"),
        "eps": Hyper(1e-8, low=0.0, text="a smaller fall of the learning rate is left out"),
        "monitor": Word(None, optional=True, follows="monitor", text="the metric"),
        "mode": Word(None, optional=True, choices=("max", "min"), follows="mode", text="which values are better"),
        "every": Hyper(None, low=1, optional=True, length=True, follows="evaluate_every", text="steps between two"),
    }

    @classmethod
    def init(cls, hyper: Mapping[str, Any]) -> State:
        return {
            "factor": torch.tensor(1.0, dtype=torch.float64),
            "best": torch.tensor(torch.inf if hyper["mode"] == "min" else -torch.inf, dtype=torch.float64),
            "bad": torch.tensor(0),
            "cooling": torch.tensor(0),
        }

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        return state["factor"]

    @classmethod
    def observe(cls, state: State, value: Tensor, step: Tensor, lr: Tensor, hyper: SimpleNamespace) -> State:
        better = _better(value, state["best"], hyper)
        cooling = state["cooling"] > 0
        bad = torch.where(better | cooling, 0, state["bad"] + 1)
        falls = bad > hyper.patience
        rate = lr * state["factor"]
        lower = torch.maximum(rate * hyper.factor, hyper.min_lr)
        # not where lr is 0: a rate of 0 cannot fall
        moves = falls & (rate - lower > hyper.eps)
        new = {
            "factor": torch.where(moves, lower / lr, state["factor"]),
            "best": torch.where(better, value, state["best"]),
            "bad": torch.where(falls, 0, bad),
            "cooling": torch.where(falls, hyper.cooldown, state["cooling"] - cooling.to(torch.int64)),
        }
        counts = step >= hyper.warmup
        return {name: torch.where(counts, tensor, state[name]) for name, tensor in new.items()}


def _better(value: Tensor, best: Tensor, hyper: SimpleNamespace) -> Tensor:
    if hyper.threshold_mode == "rel":
        margin = 1 - hyper.threshold if hyper.mode == "min" else 1 + hyper.threshold
        wanted = best * margin
    else:
        wanted = best - hyper.threshold if hyper.mode == "min" else best + hyper.threshold
    return value < wanted if hyper.mode == "min" else value > wanted
