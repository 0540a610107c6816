"""What one lane holds and computes, written for one lane: its state, its loss, its metrics, its scheduled
hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from coalesce.engine.instance import Instance
from coalesce.engine.objects import Path, spell
from coalesce.engine.precision import autocast
from coalesce.engine.rehearsal import check_outputs, check_scalars, own_code, split_loss
from coalesce.engine.rules import Rules
from coalesce.engine.rules.leaves import require_grad
from coalesce.engine.template import Template
from coalesce.experiment import Experiment
from coalesce.optim.base import Count, Factors, Patterns, Rule, State, Word
from coalesce.random import key_of


def initial_state(template: Template, experiment: Experiment) -> dict[str, Tensor]:
    """One lane's state before its first step, in the order in which the graph takes it.

    Raises:
        TaskError: the experiment's own code fails, or it does not fit the graph.
    """
    model, riding = template.lane(experiment)
    tensors = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    state = {f"trained/{n}": tensors[n] for n in template.trained}
    state |= {f"fixed/{n}": tensors[n] for n in template.fixed}
    state |= {f"buffer/{n}": t.detach() for n, t in model.named_buffers()}
    for name in template.trained:
        slots = template.slots(name, tensors[name], experiment)
        state |= {f"slot/{slot}/{name}": t for slot, t in slots.items()}
    for i, value in enumerate(riding.values()):
        rides = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=template.dtype)
        state[f"riding/{i}"] = rides
    for kind, rule in (("optimizer", template.optimizer), ("schedule", template.schedule)):
        found = riding_hyperparameters(rule, experiment.config[kind])
        state |= {f"{kind}/{n}": t for n, t in found.items()}
    verdict = template.schedule.init(experiment.config["schedule"])
    state |= {f"verdict/{n}": t for n, t in verdict.items()}
    state["lane/key"] = key_of(experiment.seed)
    state["lane/step"] = torch.tensor(0)
    state["lane/steps"] = torch.tensor(experiment.steps)
    state["lane/alive"] = torch.tensor(True)
    state["lane/finite"] = torch.tensor(True)
    if template.folds is not None:
        state["lane/fold"] = torch.tensor(experiment.fold)
    if len(template.batch_sizes) > 1:
        # how far the lane goes in this `advance`: its graphs are called more often than it moves
        state["lane/until"] = torch.tensor(0)
    for name in ("loss", *template.rehearsal.extras):
        state[f"train/{name}"] = torch.tensor(float("nan"), dtype=torch.float64)
    return state


def lane_loss(
    template: Template,
    instance: Instance,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    riding: Mapping[Path, Tensor],
    key: Tensor,
    step: Tensor,
    batch: Any,
) -> tuple[Tensor, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The training loss of one lane.

    Args:
        instance: whose code runs: `template.fresh` of this trace.
        weights, buffers: name → tensor of the model, without a lane dimension.
        riding: path → 0-d tensor (or a tensor attribute's own shape).
        key, step: of the lane's stream.
        batch: one lane's batch.

    Returns:
        The loss, and (all training metrics by name, the buffers after the forward pass).
    """
    returned, tensors = _run(template, instance, "loss", weights, buffers, riding, key, step, batch)
    loss, extras = split_loss(returned, f"{instance.name}.loss()")
    return loss, ({"loss": loss.detach(), **extras}, {n: tensors[n] for n in buffers})


def lane_metrics(
    template: Template,
    instance: Instance,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    riding: Mapping[Path, Tensor],
    key: Tensor,
    step: Tensor,
    batch: Any,
) -> dict[str, Tensor]:
    """The evaluation metrics of one lane on one batch. Arguments as `lane_loss`'s."""
    what = f"{instance.name}.metrics()"
    lane = weights, buffers, riding, key, step, batch
    return _evaluated(template, instance, "metrics", lane, lambda found: check_scalars(found, what))


def lane_outputs(
    template: Template,
    instance: Instance,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    riding: Mapping[Path, Tensor],
    key: Tensor,
    step: Tensor,
    batch: Any,
    size: int,
) -> dict[str, Tensor]:
    """What the task gives for each of a batch's samples, for its summary. Arguments as `lane_loss`'s."""
    what = f"{instance.name}.outputs()"
    lane = weights, buffers, riding, key, step, batch
    return _evaluated(template, instance, "outputs", lane, lambda found: check_outputs(found, what, size))


def _evaluated(
    template: Template,
    instance: Instance,
    method: str,
    lane: tuple[Any, ...],
    check: Callable[[Any], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """What a method of the task returns in evaluation, for which `torch.func.grad` stands around it as it does in
    training: under ``torch.enable_grad()`` a task may take gradients there as well."""
    trainable = [n for n, p in template.model.named_parameters() if p.requires_grad]

    def aside(zero: Tensor, weights: Mapping[str, Tensor], *rest: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            for name in trainable:
                require_grad(weights[name])
            found, _ = _run(template, instance, method, weights, *rest)
            # a metric may be a weight itself
            return zero, {n: t.detach() for n, t in check(found).items()}

    return grad(aside, has_aux=True)(torch.zeros(()), *lane)[1]


def _run(
    template: Template,
    instance: Instance,
    method: str,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    riding: Mapping[Path, Tensor],
    key: Tensor,
    step: Tensor,
    batch: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """What a method of the task returns, "loss" in training and any other in evaluation; and weights and buffers by
    name as they stand behind it."""
    # Cloned, since layers write into their buffers, and the caller's must not change before the step is taken.
    tensors = {**weights, **{n: b.clone() for n, b in buffers.items()}}
    instance.model.train(method == "loss")
    named = {spell(path): value for path, value in riding.items()}
    origins = {spell(path): origin for path, origin in template.origins.items()}
    rules = Rules(key, step, named, origins=origins, lowerings=instance.lowerings)
    mixed = autocast(template.experiment, key.device)
    with traced_lane(instance, tensors, riding, rules, mixed, f"{instance.name}.{method}()"):
        return getattr(instance.task, method)(instance.model, batch), tensors


@contextmanager
def traced_lane(
    instance: Instance,
    tensors: MutableMapping[str, Tensor],
    riding: Mapping[Path, Tensor],
    rules: Rules,
    mixed: AbstractContextManager[Any],
    what: str,
) -> Iterator[None]:
    """Trace a lane's own code in the block.

    Args:
        tensors, riding: as `Instance.holding` takes them.
        rules: of the lane.
        mixed: its autocast.
        what: the code, for messages.
    """
    code = own_code(what, [spell(path) for path in riding])
    with instance.holding(tensors, riding, traced=True), _unchecked_distributions(), mixed, rules, code:
        yield


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """`torch.distributions` compare their arguments' values with what is allowed, which a trace cannot; the plain step
    before it has done so."""
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


def hyperparameters(rule: type[Rule], static: Mapping[str, Any], riding: Mapping[str, Any]) -> SimpleNamespace:
    """A rule's hyperparameters for one lane: what rides as tensors, the rest as configured.

    Args:
        static: the configuration, of which what does not ride is used.
        riding: name, ``name.index`` or ``name.pattern`` → 0-d tensor.
    """
    values = {}
    for name, spec in rule.hyper.items():
        if isinstance(spec, Count | Patterns | Word):
            values[name] = static[name]
        elif isinstance(spec.default, tuple):
            values[name] = tuple(riding[f"{name}.{i}"] for i in range(len(static[name])))
        elif isinstance(spec, Factors):
            values[name] = {pattern: riding[f"{name}.{pattern}"] for pattern in static[name]}
        else:
            values[name] = riding.get(name, static[name])
    return SimpleNamespace(**values)


def riding_hyperparameters(rule: type[Rule], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that ride for one experiment: floats as 0-d float64, lengths as 0-d int64.

    Returns:
        name, or ``name.index`` for an item of a list, ``name.pattern`` for one of a mapping, → 0-d tensor. Booleans,
        None, words, counts and patterns do not ride.
    """
    found: dict[str, Tensor] = {}
    for name, spec in rule.hyper.items():
        value, dtype = config[name], torch.int64 if spec.length else torch.float64
        if isinstance(spec, Count | Patterns | Word):
            continue
        if isinstance(spec.default, tuple | dict):
            items = sorted(value.items()) if isinstance(value, Mapping) else enumerate(value)
            found |= {f"{name}.{i}": torch.tensor(v, dtype=dtype) for i, v in items}
        elif value is not None and not isinstance(value, bool):
            found[name] = torch.tensor(value, dtype=dtype)
    return found


def scheduled(
    template: Template,
    optimizer: Mapping[str, Tensor],
    schedule: Mapping[str, Tensor],
    verdict: State,
    step: Tensor,
    steps: Tensor,
) -> dict[str, Tensor]:
    """What the schedule makes of the optimiser's riding hyperparameters at one step of one lane.

    Args:
        optimizer, schedule: riding hyperparameters by name, as configured.
        verdict: what the schedule made of the lane's evaluations, see `Schedule.observe`.
        step, steps: 0-d int64; 0 at the first update.

    Returns:
        Those that the schedule moves: the rates, and the momentum where it does.
    """
    rule = template.schedule
    hyper = hyperparameters(rule, template.experiment.config["schedule"], schedule)
    factor = rule.factor(step, steps, hyper, verdict)
    moved = {rate: optimizer[rate] * factor for rate in template.optimizer.rates}
    momentum = rule.momentum(step, steps, hyper)
    if momentum is not None:
        moved |= dict.fromkeys(template.optimizer.momentum_keys(), momentum)
    return moved


def observed(
    template: Template, verdict: State, value: Tensor, step: Tensor, lr: Tensor, schedule: Mapping[str, Tensor]
) -> State:
    """The schedule's verdict on one lane after an evaluation. Arguments as `Schedule.observe`'s."""
    hyper = hyperparameters(template.schedule, template.experiment.config["schedule"], schedule)
    return template.schedule.observe(verdict, value, step, lr, hyper)
