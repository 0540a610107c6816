"""One rise and one long fall, as `torch.optim.lr_scheduler.OneCycleLR` (Smith and Topin, "Super-convergence", 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.errors import Problem
from coalesce.optim.base import Hyper, Optimizer, State, Word
from coalesce.optim.schedules.warmup import LENGTH, WARMUP, Warmed, after_warmup, between, half_cosine


def _momentum(default: float, text: str) -> Hyper:
    return Hyper(default, low=0.0, high=1.0, open_high=True, text=text)


class OneCycle(Warmed):
    """From 1 / ``div_factor`` to 1 and down to 1 / (``div_factor`` * ``final_div_factor``) over ``length`` steps, with
    the optimiser's momentum, or the first of its betas, going the other way.

    The optimiser's ``lr`` is torch's ``max_lr``, ``length`` its ``total_steps``; the rest is called as there.
    """

    name: ClassVar[str] = "one_cycle"
    hyper: ClassVar[dict[str, Hyper]] = {
        **WARMUP,
        "pct_start": Hyper(0.3, low=0.0, high=1.0, text="share of the steps in which the rate rises"),
        "div_factor": Hyper(25.0, low=0.0, open_low=True, text="highest rate over the first"),
        "final_div_factor": Hyper(1e4, low=0.0, open_low=True, text="first rate over the last"),
        "three_phase": Hyper(False, text="fall as fast as it rose, then to the end"),
        "anneal_strategy": Word("cos", choices=("cos", "linear"), text="along half a cosine, or straight"),
        "cycle_momentum": Hyper(True, text="move the momentum as well"),
        "base_momentum": _momentum(0.85, "momentum where the rate is highest"),
        "max_momentum": _momentum(0.95, "momentum at both ends"),
        "length": LENGTH,
    }

    @classmethod
    def check_together(cls, config: Mapping[str, Any], key: str) -> list[Problem]:
        if config["three_phase"] and config["pct_start"] > 0.5:
            rule = f"must be at most 0.5 with {key}.three_phase=true, which rises and falls for as long"
            return [Problem(f"{key}.pct_start", config["pct_start"], rule, "0 to 0.5")]
        return []

    @classmethod
    def check_beside(cls, config: Mapping[str, Any], optimizer: type[Optimizer], key: str) -> list[Problem]:
        if config["cycle_momentum"] and not optimizer.momentum_keys():
            rule = f"optimizer {optimizer.name!r} has neither momentum nor betas to move"
            return [Problem(f"{key}.cycle_momentum", True, rule, "false, or another optimizer")]
        return []

    @classmethod
    def shape(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace, state: State) -> Tensor:
        first = 1 / hyper.div_factor
        last = first / hyper.final_div_factor
        return _cycle(step, steps, hyper, first, torch.ones_like(first), last)

    @classmethod
    def momentum(cls, step: Tensor, steps: Tensor, hyper: SimpleNamespace) -> Tensor | None:
        if not hyper.cycle_momentum:
            return None
        high, low = hyper.max_momentum, hyper.base_momentum
        return _cycle(*after_warmup(step, steps, hyper), hyper, high, low, high)


def _cycle(step: Tensor, steps: Tensor, hyper: SimpleNamespace, first: Tensor, peak: Tensor, last: Tensor) -> Tensor:
    """From ``first`` to ``peak`` to ``last``; with three phases by way of ``first`` again."""
    total = (steps if hyper.length is None else hyper.length).to(torch.float64)
    # torch's ends of the phases: real numbers, of which only the last is certain to be a step
    ends = [hyper.pct_start * total - 1, total - 1]
    values = [first, peak, last]
    if hyper.three_phase:
        ends.insert(1, 2 * hyper.pct_start * total - 2)
        values.insert(2, first)
    shares, begun = [], torch.zeros_like(total)
    for end in ends:
        # a phase without length is over before it begins; torch divides by zero
        length = torch.where(end > begun, end - begun, 1.0)
        shares.append(torch.clamp((step - begun) / length, 0.0, 1.0))
        begun = end
    if hyper.anneal_strategy == "cos":
        shares = [half_cosine(share) for share in shares]
    pieces = [between(a, b, share) for a, b, share in zip(values, values[1:], shares, strict=False)]
    value = pieces[-1]
    for piece, end in zip(reversed(pieces[:-1]), reversed(ends[:-1]), strict=True):
        value = torch.where(step <= end, piece, value)
    return value
