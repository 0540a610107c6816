"""Each schedule as stock PyTorch makes it: `torch.optim.lr_scheduler`, joined by `SequentialLR`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

Config = Mapping[str, Any]
#: torch's schedulers one after another, each with the number of steps that it lasts; the last one's does not matter.
Parts = list[tuple[LRScheduler, int]]


def _rate(optimizer: Optimizer) -> float:
    return float(optimizer.defaults["lr"])


def _held(optimizer: Optimizer, factor: float) -> LRScheduler:
    return ConstantLR(optimizer, factor=factor, total_iters=10**9)


def _constant(optimizer: Optimizer, config: Config, steps: int) -> Parts:
    return [(ConstantLR(optimizer, factor=1.0, total_iters=0), steps)]


def _linear(optimizer: Optimizer, config: Config, steps: int) -> Parts:
    length = config["length"] or steps
    return [(LinearLR(optimizer, config["start"], config["final"], total_iters=length), steps)]


def _polynomial(optimizer: Optimizer, config: Config, steps: int) -> Parts:
    length, final, power = config["length"] or steps, config["final"], config["power"]
    if final == 0:
        return [(PolynomialLR(optimizer, total_iters=length, power=power), steps)]
    # torch's always ends at 0
    return [(LambdaLR(optimizer, lambda t: final + (1 - final) * (1 - min(t / length, 1)) ** power), steps)]


def _exponential(optimizer: Optimizer, config: Config, steps: int) -> Parts:
    return [(ExponentialLR(optimizer, config["gamma"]), steps)]


def _step(optimizer: Optimizer, config: Config, steps: int) -> Parts:
    return [(StepLR(optimizer, config["step_size"], config["gamma"]), steps)]


def _multi_step(optimizer: Optimizer, config: Config, steps: int) -> Parts:
    return [(MultiStepLR(optimizer, config["milestones"], config["gamma"]), steps)]


def _cosine(optimizer: Optimizer, config: Config, steps: int) -> Parts:
    length = config["length"] or steps
    least = config["final"] * _rate(optimizer)
    # torch's would rise again
    return [
        (CosineAnnealingLR(optimizer, T_max=length, eta_min=least), length),
        (_held(optimizer, config["final"]), steps),
    ]


def _cosine_restarts(optimizer: Optimizer, config: Config, steps: int) -> Parts:
    growth = int(config["growth"])
    assert growth == config["growth"], "torch takes integers alone"
    least = config["final"] * _rate(optimizer)
    return [(CosineAnnealingWarmRestarts(optimizer, config["period"], growth, eta_min=least), steps)]


def _one_cycle(optimizer: Optimizer, config: Config, steps: int) -> Parts:
    same = ("pct_start", "div_factor", "final_div_factor", "three_phase", "anneal_strategy", "cycle_momentum")
    options = {name: config[name] for name in (*same, "base_momentum", "max_momentum")}
    length = config["length"] or steps
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    cycle = OneCycleLR(optimizer, rates, total_steps=length, **options)
    # torch's takes no more steps than its own
    return [(cycle, length), (_held(optimizer, 1 / config["final_div_factor"]), steps)]


def _wsd(optimizer: Optimizer, config: Config, steps: int) -> Parts:
    final, decay = config["final"], min(config["decay"], steps)
    stable = _constant(optimizer, config, steps - decay)
    if decay == 0:
        return stable
    falling: LRScheduler
    if config["shape"] == "linear":
        falling = LinearLR(optimizer, 1.0, final, total_iters=decay)
    elif config["shape"] == "cosine":
        falling = CosineAnnealingLR(optimizer, T_max=decay, eta_min=final * _rate(optimizer))
    else:
        falling = LambdaLR(optimizer, lambda t: 1 - (1 - final) * math.sqrt(min(t / decay, 1)))
    return [*(stable if decay < steps else []), (falling, decay)]


ORIGINALS: dict[str, Callable[[Optimizer, Config, int], Parts]] = {
    "constant": _constant,
    "linear": _linear,
    "polynomial": _polynomial,
    "exponential": _exponential,
    "step": _step,
    "multi_step": _multi_step,
    "cosine": _cosine,
    "cosine_restarts": _cosine_restarts,
    "one_cycle": _one_cycle,
    "wsd": _wsd,
    # until it is told of an evaluation
    "plateau": _constant,
}


def make_scheduler(optimizer: Optimizer, config: Config, steps: int) -> LRScheduler:
    """torch's scheduler for an experiment of so many steps, the warm-up in front."""
    warmup = config["warmup"]
    # after a warm-up that fills the run there is nothing to schedule, which torch cannot say
    parts = ORIGINALS[config["name"]](optimizer, config, max(steps - warmup, 1))
    if warmup:
        # it rises to where the schedule begins: torch's OneCycleLR sets that rate by itself, when it is made
        first = config.get("start", 1.0)
        rise = LinearLR(optimizer, config["warmup_start"] * first, first, total_iters=warmup)
        parts = [(rise, warmup), *parts]
    ends = [sum(length for _, length in parts[: i + 1]) for i in range(len(parts) - 1)]
    return SequentialLR(optimizer, [scheduler for scheduler, _ in parts], milestones=ends)


def make_plateau(optimizer: Optimizer, config: Config) -> ReduceLROnPlateau:
    """torch's own for a configuration of ``plateau``."""
    ours = ("name", "warmup", "warmup_start", "monitor", "every")
    return ReduceLROnPlateau(optimizer, **{name: value for name, value in config.items() if name not in ours})
