"""The optimiser's side of a compiled step: what it must be, its hyperparameters as inputs, its state as slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coalesce.engine.lane import riding_hyperparameters
from coalesce.engine.single.graph import Update
from coalesce.optim.stock import RULES, counts_steps, rule_of, settings, slots, supported


def check(model: nn.Module, optimizer: Any) -> None:
    """Refuse what cannot be compiled.

    Raises:
        TypeError: the optimiser is none of torch's that have a rule.
        ValueError: it has a setting that no rule has, or parameters that are not the model's.
    """
    kind = type(optimizer)
    if kind not in RULES:
        reason = ""
        if kind is torch.optim.Muon:
            reason = " torch's Muon computes in bfloat16, whatever the parameters are, and the rule here does not."
        raise TypeError(
            f"optimizer is a {kind.__module__}.{kind.__qualname__}; compile_step takes these classes of torch.optim "
            f"themselves, no subclasses: {supported()}.{reason} For any other there is coalesce.BackProp."
        )
    for name, hooks in (("pre", optimizer._optimizer_step_pre_hooks), ("post", optimizer._optimizer_step_post_hooks)):
        if hooks:
            raise ValueError(
                f"the optimizer has a step {name}-hook, but a compiled step does not call optimizer.step(): do what "
                f"the hook does beside step(batch)"
            )
    known = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for name in ("maximize", "differentiable"):
            if group.get(name):
                way = "return the negative loss" if name == "maximize" else "leave it out"
                raise ValueError(f"param_groups[{number}][{name!r}] is True, which no rule has: {way}")
        for parameter in group["params"]:
            if parameter not in known:
                raise ValueError(
                    f"param_groups[{number}] has a parameter of shape {tuple(parameter.shape)} that is not the "
                    f"model's. If one was replaced after the optimizer was made, make the optimizer anew; the weights "
                    f"of a loss belong into one module with its own: nn.ModuleDict({{'model': model, 'loss': loss}})"
                )
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise ValueError(
                    f"{known[parameter]} has a gradient hook, which a compiled step does not call: change the loss "
                    f"instead, or use coalesce.BackProp"
                )


class Group:
    """One parameter group: its rule, and its numbers as inputs of the graph.

    Attributes:
        rule, config: see `coalesce.optim.stock`.
        riding: name → (1,) float64.
        fixed: what of the configuration does not ride; another one is another graph.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], group: Mapping[str, Any], device: torch.device):
        self.rule = rule_of(kind, group)
        self.config = settings(self.rule, group)
        self.riding = {n: t.to(device)[None] for n, t in riding_hyperparameters(self.rule, self.config).items()}
        self.fixed = self._fixed(self.config)

    def follow(self, group: Mapping[str, Any]) -> bool:
        """Take up the group's numbers as they stand now.

        Returns:
            Whether it is the same graph.
        """
        config = settings(self.rule, group)
        if config == self.config:
            return True
        if self._fixed(config) != self.fixed:
            return False
        self.config = config
        for name, value in riding_hyperparameters(self.rule, config).items():
            self.riding[name].fill_(value.item())
        return True

    def update(self, number: int, parameter: Tensor) -> tuple[Update, dict[str, str]]:
        """How a parameter of the group is updated; and its slots' names, ours → torch's."""
        state, names = slots(self.rule, torch.empty_like(parameter, device="meta"), self.config)
        absent = [name for name in state if name not in names]
        return Update(number, self.rule, self.config, self.fixed, list(names), absent), names

    def _fixed(self, config: Mapping[str, Any]) -> Any:
        rides = {n.partition(".")[0] for n in riding_hyperparameters(self.rule, config)}
        others = tuple((n, repr(v)) for n, v in config.items() if n not in rides)
        # whether there is a momentum at all decides whether torch keeps one
        return others, config.get("momentum") == 0


def take_up(optimizer: torch.optim.Optimizer, group: Group, name: str, parameter: Tensor) -> None:
    """Complete a parameter's state in the optimiser, as its first step would.

    Raises:
        RuntimeError: what is there does not fit the parameter.
    """
    like, names = slots(group.rule, torch.empty_like(parameter, device="meta"), group.config)
    counts = counts_steps(group.rule)
    if not names and not counts:
        return
    state = optimizer.state[parameter]
    started: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        if state.get(theirs) is None:
            started = started or slots(group.rule, parameter.detach(), group.config)[0]
            state[theirs] = started[ours]
        elif ours == "mu_product":
            # torch keeps it in its default dtype, which for float32 is 1e-7 off
            state[theirs] = state[theirs].to(parameter.device, torch.float64)
        held, wanted = state[theirs], like[ours]
        if held.shape != wanted.shape or held.dtype != wanted.dtype or held.device != parameter.device:
            raise RuntimeError(
                f"the optimizer's {theirs} of {name} is {_described(held)}, but the parameter is "
                f"{_described(parameter)}. After model.to(...), optimizer.load_state_dict(optimizer.state_dict()) "
                f"brings the state behind the parameters; after a change of shape make the optimizer anew."
            )
    if counts and "step" not in state:
        setting = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        there = parameter.device if setting.get("capturable") or setting.get("fused") else "cpu"
        wide = torch.get_default_dtype() == torch.float64
        state["step"] = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=there)


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
