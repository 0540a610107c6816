"""Every schedule once: its formula in Python's floats, and constants to try it with. A new one is one row of `ROWS`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

Config = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One schedule.

    Args:
        formula: (configuration, steps since the warm-up, steps from there to the end) → factor without the warm-up.
        constants: further hyperparameters, one mapping per lane, where torch has them too.
        drawn: further hyperparameters, drawn.
        only: hyperparameters of lanes that torch has no word for.
    """

    formula: Callable[[Config, int, int], float]
    constants: Sequence[Config]
    drawn: Mapping[str, st.SearchStrategy[Any]] = field(default_factory=dict)
    only: Sequence[Config] = ()


def share(config: Config, t: int, n: int) -> float:
    return min(t / (config["length"] or n), 1.0)


def cosine(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2


def between(final: float, part: float) -> float:
    return final + (1 - final) * part


def restarts(config: Config, t: int, n: int) -> float:
    growth, begun, length = Fraction(config["growth"]), Fraction(0), Fraction(config["period"])
    if growth == 1:
        begun = t // length * length
    while t >= begun + length:
        begun, length = begun + length, length * growth
    return between(config["final"], cosine(float((t - begun) / length)))


def one_cycle(config: Config, t: int, n: int) -> float:
    return cycle(config, t, n, 1 / config["div_factor"], 1.0, 1 / config["div_factor"] / config["final_div_factor"])


def cycle(config: Config, t: int, n: int, first: float, peak: float, last: float) -> float:
    total = config["length"] or n
    rise = config["pct_start"] * total
    places = [(0.0, first), (rise - 1, peak), (total - 1, last)]
    if config["three_phase"]:
        places.insert(2, (2 * rise - 2, first))
    for (begun, start), (end, to) in itertools.pairwise(places):
        if t <= end or (end, to) == places[-1]:
            part = min(max(t - begun, 0) / (end - begun), 1.0) if end > begun else min(max(t - begun, 0), 1)
            return to + (start - to) * (cosine(part) if config["anneal_strategy"] == "cos" else 1 - part)
    raise AssertionError


def stable_decay(config: Config, t: int, n: int) -> float:
    decay = min(config["decay"], n)
    over = t - (n - decay)
    if over <= 0:
        return 1.0
    part = min(over / decay, 1.0) if decay else 0.0
    falls = {"linear": 1 - part, "cosine": cosine(part), "sqrt": 1 - math.sqrt(part)}
    return between(config["final"], falls[config["shape"]])


unit = st.floats(0, 1, allow_subnormal=False)
below_one = st.floats(0, 0.999, allow_subnormal=False)
length = st.none() | st.integers(1, 2**40)
FINALS: list[Config] = [{}, {"final": 0.1}, {"final": 1.0}, {"final": 1 / 3}]
LENGTHS: list[Config] = [{"length": 60, "final": 0.2}, {"length": 1}, {"length": 1000}]

ROWS = {
    "constant": Row(lambda c, t, n: 1.0, [{}]),
    "linear": Row(
        lambda c, t, n: c["start"] + (c["final"] - c["start"]) * share(c, t, n),
        [*FINALS, *LENGTHS, {"start": 1 / 3, "final": 1.0}, {"start": 0.5, "final": 0.25, "length": 80}],
        {"start": unit, "final": unit, "length": length},
        [{"start": 0.0, "final": 1.0}],
    ),
    "polynomial": Row(
        lambda c, t, n: between(c["final"], (1 - share(c, t, n)) ** c["power"]),
        [*FINALS, *LENGTHS, {"power": 0.5}, {"power": 2.0}, {"power": 0.0}, {"power": 3.3, "final": 0.01}],
        {"power": st.floats(0, 5), "final": unit, "length": length},
    ),
    "exponential": Row(
        lambda c, t, n: c["gamma"] ** t,
        [{}, {"gamma": 0.9}, {"gamma": 1.0}, {"gamma": 1.01}, {"gamma": 1e-3}],
        {"gamma": st.floats(1e-3, 1)},
    ),
    "step": Row(
        lambda c, t, n: c["gamma"] ** (t // c["step_size"]),
        [{}, {"step_size": 1, "gamma": 0.99}, {"step_size": 7, "gamma": 0.5}, {"step_size": 50, "gamma": 2.0}],
        {"step_size": st.integers(1, 2**40), "gamma": st.floats(1e-3, 1)},
    ),
    "multi_step": Row(
        lambda c, t, n: c["gamma"] ** sum(t >= m for m in c["milestones"]),
        [
            {},
            {"milestones": [1], "gamma": 0.5},
            {"milestones": [30, 60, 90], "gamma": 0.3},
            {"milestones": [90, 30, 30, 500], "gamma": 0.7},
        ],
        {"milestones": st.lists(st.integers(1, 2**40), min_size=1, max_size=5), "gamma": st.floats(1e-3, 1)},
    ),
    "cosine": Row(
        lambda c, t, n: between(c["final"], cosine(share(c, t, n))),
        [*FINALS, *LENGTHS],
        {"final": unit, "length": length},
    ),
    "cosine_restarts": Row(
        restarts,
        [
            {},
            {"period": 1},
            {"period": 10, "final": 0.1},
            {"period": 1, "growth": 3, "final": 0.5},
            {"period": 7, "growth": 2},
        ],
        {
            "period": st.integers(1, 2**20),
            "growth": st.integers(1, 10) | st.sampled_from([1.0625, 1.25, 1.5, 2.5]),
            "final": unit,
        },
        [{"period": 3, "growth": 1.5}, {"period": 20, "growth": 1.125, "final": 0.3}],
    ),
    "one_cycle": Row(
        one_cycle,
        [
            {},
            {"pct_start": 0.0},
            {"pct_start": 1.0, "div_factor": 3.0},
            {"pct_start": 0.45, "div_factor": 7.0, "final_div_factor": 11.0, "anneal_strategy": "linear"},
            {"pct_start": 0.2, "three_phase": True, "base_momentum": 0.7, "max_momentum": 0.9},
            {"pct_start": 0.5, "three_phase": True, "anneal_strategy": "linear"},
            {"length": 60, "base_momentum": 0.6},
            {"length": 1000, "three_phase": True},
        ],
        {
            "pct_start": st.floats(0, 0.5),
            "div_factor": st.floats(1, 100),
            "final_div_factor": st.floats(1, 1e4),
            "three_phase": st.booleans(),
            "anneal_strategy": st.sampled_from(["cos", "linear"]),
            "base_momentum": below_one,
            "max_momentum": below_one,
            "length": length,
        },
    ),
    "wsd": Row(
        stable_decay,
        [
            {},
            {"decay": 0},
            {"decay": 1, "final": 0.3},
            {"decay": 40, "final": 0.1},
            {"decay": 60, "shape": "cosine", "final": 0.2},
            {"decay": 33, "shape": "sqrt", "final": 0.05},
        ],
        {"decay": st.integers(0, 2**40), "shape": st.sampled_from(["linear", "cosine", "sqrt"]), "final": unit},
    ),
    "plateau": Row(lambda c, t, n: 1.0, [{"mode": "min", "monitor": "val/loss", "every": 10}]),
}
#: (steps, warmup, warmup_start)
RUNS = [(200, 0, 0.01), (200, 7, 0.01), (97, 96, 0.3), (150, 150, 0.5), (150, 50, 1.0), (1, 0, 0.01), (1, 1, 0.2)]
