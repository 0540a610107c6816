"""`torch.optim`'s optimisers in the terms of the rules: which rule, which hyperparameters, which names of the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coalesce.optim.adadelta import Adadelta
from coalesce.optim.adafactor import Adafactor
from coalesce.optim.adagrad import Adagrad
from coalesce.optim.adam import Adam, AdamW
from coalesce.optim.adamax import Adamax
from coalesce.optim.base import Optimizer, State
from coalesce.optim.common import OPTIONS
from coalesce.optim.nadam import NAdam
from coalesce.optim.radam import RAdam
from coalesce.optim.rmsprop import RMSprop
from coalesce.optim.sgd import SGD

#: The very classes: a subclass may have a step of its own.
RULES: dict[type[torch.optim.Optimizer], type[Optimizer]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.NAdam: NAdam,
    torch.optim.RAdam: RAdam,
    torch.optim.Adamax: Adamax,
    torch.optim.RMSprop: RMSprop,
    torch.optim.Adagrad: Adagrad,
    torch.optim.Adadelta: Adadelta,
    torch.optim.Adafactor: Adafactor,
}

#: Our name of a slot → torch's, where they differ.
_NAMES = {"momentum": "momentum_buffer"}


def supported() -> str:
    """The classes that have a rule, in words."""
    return ", ".join(cls.__name__ for cls in RULES)


def rule_of(cls: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> type[Optimizer]:
    """The rule of one of torch's parameter groups. Adam and AdamW are one class there, with a switch."""
    if issubclass(cls, torch.optim.Adam):
        return AdamW if group["decoupled_weight_decay"] else Adam
    return RULES[cls]


def settings(rule: type[Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """A rule's configuration as one of torch's parameter groups has it; the options are off."""
    found: dict[str, Any] = {"name": rule.name}
    for name, spec in rule.hyper.items():
        if name in OPTIONS:
            found[name] = spec.default
        elif name in ("eps1", "eps2"):
            found[name] = group["eps"][name == "eps2"]
        else:
            found[name] = group[name]
    return {name: _number(value) for name, value in found.items()}


def slots(rule: type[Optimizer], param: Tensor, config: Mapping[str, Any]) -> tuple[State, dict[str, str]]:
    """A parameter's state at the start; and for what torch keeps of it, our name → torch's.

    torch keeps no momentum where its share is 0, and the rule has no use for it there either.
    """
    state = rule.init(param, config)
    kept = [name for name in state if name != "momentum" or config["momentum"] != 0]
    return state, {name: _NAMES.get(name, name) for name in kept}


def counts_steps(rule: type[Optimizer]) -> bool:
    """Whether torch keeps a parameter's number of steps. SGD's first step is the one that finds no momentum."""
    return rule is not SGD


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return tuple(_number(v) for v in value) if isinstance(value, tuple | list) else value
