"""The table of update rules: each beside its original, with unequal hyperparameters in every lane.

Originals are the classes of `torch.optim`; for Lion and Muon, the algorithms of their papers in plain PyTorch, written
here from the papers' pseudocode, in the dtype that they are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from coalesce.optim.common import OPTIONS

Config = dict[str, Any]


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al., "Symbolic discovery of optimization algorithms"."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for theta in group["params"]:
                if theta.grad is None:
                    continue
                state, g = self.state[theta], theta.grad
                m = state.get("exp_avg", torch.zeros_like(theta))
                c = beta1 * m + (1 - beta1) * g
                theta.copy_(theta - group["lr"] * (torch.sign(c) + group["weight_decay"] * theta))
                state["exp_avg"] = beta2 * m + (1 - beta2) * g


class Muon(torch.optim.Optimizer):
    """Jordan et al., "Muon": the blog's algorithm with Liu et al.'s weight decay; groups with ``adamw`` go to AdamW.

    Args:
        match_rms_adamw: Liu et al.'s scale, 0.2 sqrt(max(A, B)), in place of sqrt(max(1, A / B)).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        nesterov: bool = True,
        match_rms_adamw: bool = False,
        ns_coefficients: Sequence[float] = (3.4445, -4.775, 2.0315),
        ns_steps: int = 5,
        eps: float = 1e-7,
    ):
        options = {k: v for k, v in locals().items() if k not in ("self", "params") and not k.startswith("__")}
        super().__init__(params, {**options, "adamw": False})
        self.beside = {
            id(group): torch.optim.AdamW(
                group["params"], betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"]
            )
            for group in self.param_groups
            if group["adamw"]
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["adamw"]:
                optimizer = self.beside[id(group)]
                optimizer.param_groups[0]["lr"] = group["lr"]
                optimizer.step()
                self.state.update(optimizer.state)
                continue
            for param in group["params"]:
                if param.grad is not None:
                    self._muon(param, param.grad, group)

    def _muon(self, param: Tensor, g: Tensor, group: Mapping[str, Any]) -> None:
        mu, lr, (a, b, c) = group["momentum"], group["lr"], group["ns_coefficients"]
        state = self.state[param]
        m = mu * state.get("momentum", torch.zeros_like(g)) + (1 - mu) * g
        state["momentum"] = m
        x = (mu * m + (1 - mu) * g if group["nesterov"] else m).reshape(len(g), -1)
        rows, columns = x.shape
        x = x / (torch.sqrt((x * x).sum()) + group["eps"])
        for _ in range(group["ns_steps"]):
            # a tall matrix is turned over in the paper for its speed alone: (X X^T) X = X (X^T X)
            gram = x.T @ x
            x = a * x + b * x @ gram + c * x @ gram @ gram
        scale = 0.2 * math.sqrt(max(rows, columns)) if group["match_rms_adamw"] else math.sqrt(max(1, rows / columns))
        param.copy_(param - lr * group["weight_decay"] * param - lr * scale * x.reshape(param.shape))


@dataclass(frozen=True)
class Row:
    """One rule beside its original.

    Args:
        rule: its name.
        original: the class, whose arguments have our names.
        lanes: hyperparameters that ride, one mapping per lane.
        static: hyperparameters that do not.
        slots: our names of the state → the original's, where they differ.
        arguments: our configuration → the original's arguments, where names differ.
        optional: our names of state that the original does not keep where it has no use for it.
    """

    rule: str
    original: Callable[..., torch.optim.Optimizer]
    lanes: Sequence[Config]
    static: Config = field(default_factory=dict)
    slots: Mapping[str, str] = field(default_factory=dict)
    arguments: Callable[[Config], Config] = dict
    optional: Sequence[str] = ()

    def build(self, named: Mapping[str, nn.Parameter], config: Config) -> torch.optim.Optimizer:
        """The original over named parameters, each a group of its own, as a user would write it.

        Args:
            config: ours, resolved.
        """
        arguments = self.arguments({k: v for k, v in config.items() if k not in ("name", *OPTIONS)})
        adamw = {k.removeprefix("adamw_"): arguments.pop(k) for k in list(arguments) if k.startswith("adamw_")}
        by_adamw = arguments.pop("adamw", [])
        groups = []
        for name, param in named.items():
            group: dict[str, Any] = {"params": [param]}
            # only Muon has these
            if adamw and (param.dim() < 2 or any(fnmatch(name, p) for p in by_adamw)):
                group |= {**adamw, "adamw": True}
            group.setdefault("lr", arguments["lr"])
            for pattern, factor in config.get("lr_factors", {}).items():
                group["lr"] *= factor if fnmatch(name, pattern) else 1.0
            if any(fnmatch(name, p) for p in config.get("no_decay", ())):
                group["weight_decay"] = 0.0
            groups.append({**group, "initial_lr": group["lr"]})
        return self.original(groups, **arguments)


def _adafactor(config: Config) -> Config:
    config["eps"] = config.pop("eps1"), config.pop("eps2")
    return config


MOMENTS: list[Config] = [
    {},
    {"lr": 0.05, "betas": [0.5, 0.9], "weight_decay": 0.0},
    {"lr": 0.02, "betas": [0.0, 0.99], "weight_decay": 0.3},
    {"lr": 0.02, "betas": [0.9, 0.0], "eps": 0.1},
    {"lr": 0.01, "betas": [0.0, 0.0], "eps": 1e-3, "weight_decay": 1e-3},
    {"lr": 0.03, "betas": [0.99, 0.5], "eps": 0.0},
    {"lr": 0.0, "weight_decay": 0.1},
]
RMS: list[Config] = [
    {},
    {"lr": 0.02, "alpha": 0.9, "weight_decay": 0.1},
    {"lr": 0.005, "alpha": 0.5, "eps": 1e-3, "momentum": 0.9},
    {"lr": 0.02, "alpha": 0.7, "eps": 0.1, "momentum": 0.3, "weight_decay": 1e-3},
    {"lr": 0.01, "momentum": 1.0, "eps": 1.0},
    {"lr": 0.0, "momentum": 0.5},
]
MUON: list[Config] = [
    {},
    {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.3, "adamw_lr": 0.01, "adamw_weight_decay": 0.0},
    {"lr": 0.03, "momentum": 0.0, "weight_decay": 0.0, "adamw_lr": 0.03, "adamw_weight_decay": 0.2},
    {"lr": 0.01, "eps": 1e-2, "ns_coefficients": [2.0, -1.5, 0.5], "adamw_betas": [0.5, 0.9], "adamw_eps": 1e-3},
    {"lr": 0.0, "adamw_lr": 0.02, "adamw_betas": [0.0, 0.99]},
]

ROWS = {
    "sgd": Row(
        "sgd",
        torch.optim.SGD,
        [
            {},
            {"lr": 0.05, "momentum": 0.9},
            {"lr": 0.03, "momentum": 0.0, "weight_decay": 0.1},
            {"lr": 0.02, "momentum": 0.5, "dampening": 0.3},
            {"lr": 0.04, "momentum": 0.0, "dampening": 0.7},
            {"lr": 0.01, "momentum": 0.95, "dampening": 1.0, "weight_decay": 1e-3},
            {"lr": 0.02, "momentum": 0.3, "dampening": -0.5},
            {"lr": 0.0, "momentum": 0.9},
        ],
        slots={"momentum": "momentum_buffer"},
        optional=("momentum",),
    ),
    "sgd-nesterov": Row(
        "sgd",
        torch.optim.SGD,
        [{"momentum": 0.9, "lr": 0.02}, {"momentum": 0.1, "weight_decay": 0.2}, {"momentum": 1e-6, "lr": 0.3}],
        {"nesterov": True},
        {"momentum": "momentum_buffer"},
    ),
    "adam": Row("adam", torch.optim.Adam, MOMENTS),
    "adam-amsgrad": Row(
        "adam",
        torch.optim.Adam,
        MOMENTS,
        {"amsgrad": True},
        {"max_exp_avg_sq": "max_exp_avg_sq"},
    ),
    "adamw": Row("adamw", torch.optim.AdamW, MOMENTS),
    "adamw-amsgrad": Row("adamw", torch.optim.AdamW, MOMENTS, {"amsgrad": True}),
    "nadam": Row(
        "nadam",
        torch.optim.NAdam,
        [
            *MOMENTS,
            {"lr": 0.03, "momentum_decay": 0.0, "weight_decay": 0.1},
            {"lr": 0.03, "momentum_decay": 3.0, "betas": [0.95, 0.8]},
        ],
    ),
    "nadam-decoupled": Row("nadam", torch.optim.NAdam, MOMENTS[:4], {"decoupled_weight_decay": True}),
    # beta2 decides when rho exceeds 5: after 5 steps, after more, after 21 (0.8), never (0.5, 0.0)
    "radam": Row("radam", torch.optim.RAdam, [*MOMENTS, {"lr": 0.02, "betas": [0.9, 0.8], "eps": 0.0}]),
    "radam-decoupled": Row("radam", torch.optim.RAdam, MOMENTS[:4], {"decoupled_weight_decay": True}),
    "adamax": Row("adamax", torch.optim.Adamax, MOMENTS),
    "rmsprop": Row("rmsprop", torch.optim.RMSprop, RMS, {}, {"momentum": "momentum_buffer"}, optional=("momentum",)),
    "rmsprop-centered": Row(
        "rmsprop",
        torch.optim.RMSprop,
        RMS,
        {"centered": True},
        {"momentum": "momentum_buffer"},
        optional=("momentum",),
    ),
    "adagrad": Row(
        "adagrad",
        torch.optim.Adagrad,
        [
            {"lr": 0.05},
            {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1},
            {"lr": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3},
            {"lr": 0.2, "lr_decay": 1.0, "initial_accumulator_value": 3.0, "weight_decay": 1e-3},
            {"lr": 0.0},
        ],
    ),
    "adadelta": Row(
        "adadelta",
        torch.optim.Adadelta,
        [
            {},
            {"lr": 0.5, "rho": 0.5, "weight_decay": 0.1},
            {"lr": 2.0, "rho": 0.99, "eps": 1e-3},
            {"rho": 0.0, "eps": 1e-4},
            {"rho": 1.0, "lr": 0.03},
            {"lr": 0.0},
        ],
    ),
    "adafactor": Row(
        "adafactor",
        torch.optim.Adafactor,
        [
            {"lr": 0.05},
            {"lr": 0.3, "beta2_decay": -0.3, "d": 1.5, "weight_decay": 0.05},
            {"lr": 2.0, "eps2": 0.5, "beta2_decay": -1.0},
            {"lr": 0.1, "beta2_decay": 0.0, "d": 3.0},
            {"lr": 0.0, "weight_decay": 0.1},
        ],
        arguments=_adafactor,
    ),
    "adafactor-eps": Row(
        "adafactor",
        torch.optim.Adafactor,
        [{"lr": 0.05, "eps1": 1e-3}, {"lr": 0.1, "eps1": 0.7}, {"lr": 0.1, "eps1": 1e-12, "eps2": 0.1}],
        arguments=_adafactor,
    ),
    "lion": Row(
        "lion",
        Lion,
        [
            {"lr": 1e-3},
            {"lr": 0.01, "betas": [0.5, 0.9], "weight_decay": 0.3},
            {"lr": 0.02, "betas": [0.0, 0.0]},
            {"lr": 0.005, "betas": [0.95, 0.98], "weight_decay": 1e-3},
            {"lr": 0.0, "weight_decay": 0.1},
        ],
    ),
    "muon": Row("muon", Muon, MUON),
    "muon-matched": Row("muon", Muon, MUON, {"match_rms_adamw": True, "nesterov": False, "ns_steps": 3}),
    "muon-adamw": Row("muon", Muon, MUON, {"adamw": ["w*"]}),
}

#: Rule → one of its rows.
BY_RULE = {row.rule: row for row in reversed(ROWS.values())}
