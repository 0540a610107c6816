"""Warm-up, stable, decay (Hu et al., "MiniCPM", 2024, arXiv:2404.06395; the decay by the square root: Hägele et al.,
"Scaling laws and compute-optimal training beyond fixed training durations", 2024, arXiv:2405.18392)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, State, Word
from coalesce.optim.schedules.warmup import FINAL, WARMUP, Warmed, between, half_cosine, quotient


class WarmupStableDecay(Warmed):
    """1, and in the last ``decay`` steps of the training down to ``final``.

    A decay that is longer than what the warm-up leaves takes that. Of the shapes, "linear" is
    `torch.optim.lr_scheduler.LinearLR`, "cosine" `CosineAnnealingLR`, and "sqrt" 1 minus the share's root.
    """

    name: ClassVar[str] = "wsd"
    hyper: ClassVar[dict[str, Hyper]] = {
        **WARMUP,
        "decay": Hyper(200, low=0, length=True, text="steps at the end in which the rate falls"),
        "shape": Word("linear", choices=("linear", "cosine", "sqrt"), text="how it falls"),
        "final": FINAL,
    }

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        decay = torch.minimum(hyper.decay, steps)
        over = torch.minimum(torch.clamp(step - (steps - decay), min=0), decay)
        share = quotient(over, torch.clamp(decay, min=1))
        if hyper.shape == "cosine":
            share = half_cosine(share)
        elif hyper.shape == "sqrt":
            share = torch.sqrt(share)
        return between(1.0, hyper.final, share)
