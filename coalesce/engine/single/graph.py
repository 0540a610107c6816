"""The training step of one plain model as a graph: the engine's step at width 1, whose state is the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import grad_and_value, vmap

from coalesce.engine.compiling import lift_constants
from coalesce.engine.instance import Instance
from coalesce.engine.lane import hyperparameters, traced_lane
from coalesce.engine.pieces import cut_at
from coalesce.engine.recompute import recompute
from coalesce.engine.rehearsal import split_loss
from coalesce.engine.rules import Rules
from coalesce.engine.step import clip_norm, insert_update, part, write
from coalesce.engine.trace import label, latest, trace
from coalesce.optim.base import Optimizer
from coalesce.optim.options import apply
from coalesce.task import Loss, Task

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default)


class Code(Task):
    """A loss function in the place of a task.

    Args:
        function: of the model and a batch.
    """

    def __init__(self, function: Callable[[nn.Module, Any], Loss]):
        self.function = function
        self.what = f"{getattr(function, '__name__', type(function).__name__)}()"

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self.function(model, batch)


@dataclass(frozen=True)
class Update:
    """How one parameter is updated.

    Args:
        group: number of its parameter group.
        rule, config: the group's rule and configuration.
        fixed: what of the configuration does not ride.
        slots: the rule's names of the state that is kept.
        absent: and of the state that torch does not keep, since it is of no account.
    """

    group: int
    rule: type[Optimizer]
    config: Mapping[str, Any]
    fixed: Any
    slots: Sequence[str]
    absent: Sequence[str]


def build(
    instance: Instance,
    state: Mapping[str, Tensor],
    leaves: Sequence[Tensor],
    batch: Callable[[Sequence[Tensor]], Any],
    updates: Mapping[str, Update],
    extras: Sequence[str],
    pieces: Sequence[str],
    again: Sequence[str],
    mixed: Callable[[], AbstractContextManager[Any]],
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Trace one step.

    Args:
        instance: the user's model and `Code`.
        state: name → tensor (1, …), in the order in which the graph takes them. The name's first part says what it
            is: trained, fixed, buffer, slot, clock (steps done), optimizer, clip, lane.
        leaves: the batch's tensors, (1, …) each, which the graph takes after the state.
        batch: puts the leaves, without the lane dimension, into the batch's structure.
        updates: trained parameter → how.
        extras: names of the scalars beside the loss.
        pieces: names of the modules at which to cut.
        again: names of those that the backward pass computes again, see `recompute`.
        mixed: makes the context for the user's code.

    Returns:
        A graph that takes state, leaves and constants, writes the new state into the state's own tensors, and returns
        the loss and the extras, (1,) each; and the constants.
    """
    names = list(state)

    def gradients(*inputs: Tensor) -> list[Tensor]:
        now = dict(zip(names, inputs, strict=False))
        lane = [part(now, kind) for kind in ("trained", "fixed", "buffer")]
        both = vmap(grad_and_value(lambda *a: _loss(instance, mixed, batch, *a), has_aux=True))
        mapped = *lane, now["lane/key"], now["lane/step"], list(inputs[len(names) :])
        found, (_, (shown, after)) = both(*mapped)
        if "clip/norm" in now:
            found = clip_norm(found, now["clip/norm"], pieces)
        return [*(shown[n] for n in ("loss", *extras)), *(found[n] for n in updates), *after.values()]

    with cut_at(instance.model, pieces, again):
        module = trace(gradients, [*state.values(), *leaves])
    constants = lift_constants(module)
    graph = module.graph
    recompute(graph)
    output = next(n for n in graph.nodes if n.op == "output")
    holders = dict(zip(names, [n for n in graph.nodes if n.op == "placeholder"], strict=False))
    shown = [f"shown/{n}" for n in ("loss", *extras)]
    kept = [n for n in names if n.startswith("buffer/")]
    outputs = [*shown, *(f"gradient/{n}" for n in updates), *kept]
    results = dict(zip(outputs, output.args[0], strict=True))
    graph.erase_node(output)

    traced: dict[Any, fx.GraphModule] = {}
    for name in reversed(list(updates)):
        _place(name, updates[name], state, graph, holders, results[f"gradient/{name}"], traced)
    last = list(graph.nodes)[-1]
    for name in kept:
        # one that no layer writes into would be copied into itself
        if _origin(results[name]) is not holders[name]:
            last = write(graph, holders[name], results[name], last)
    with graph.inserting_after(last):
        graph.output([results[n] for n in shown])
    graph.lint()
    module.recompile()
    return module, constants


def _loss(
    instance: Instance,
    mixed: Callable[[], AbstractContextManager[Any]],
    batch: Callable[[Sequence[Tensor]], Any],
    trained: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    key: Tensor,
    step: Tensor,
    leaves: Sequence[Tensor],
) -> tuple[Tensor, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The loss of the one lane; and (all scalars by name, the buffers after the forward pass)."""
    # cloned, since layers write into their buffers
    begun = latest()
    tensors = {**trained, **fixed, **{n: b.clone() for n, b in buffers.items()}}
    code: Any = instance.task
    with traced_lane(instance, tensors, {}, Rules(key, step, {}, lowerings=instance.lowerings), mixed(), code.what):
        returned = code.loss(instance.model, batch(leaves))
    loss, extras = split_loss(returned, code.what)
    # copies, since a scalar may be a parameter itself, which will have been updated by the time it is returned
    shown = {n: t.detach().clone() for n, t in {"loss": loss, **extras}.items()}
    label(begun, forward=True)
    return loss, (shown, {n: tensors[n] for n in buffers})


def _place(
    name: str,
    update: Update,
    state: Mapping[str, Tensor],
    graph: fx.Graph,
    holders: Mapping[str, fx.Node],
    gradient: fx.Node,
    traced: dict[Any, fx.GraphModule],
) -> None:
    """Insert one parameter's update into the graph."""
    param, clock = f"trained/{name}", f"clock/{name}"
    slots = [f"slot/{slot}/{name}" for slot in update.slots]
    prefix = f"optimizer/{update.group}/"
    hyper = [n for n in state if n.startswith(prefix)]
    examples = [state[n] for n in (param, param, clock, *slots, *hyper)]
    alike = *((tuple(t.shape), t.stride(), t.dtype) for t in examples), update.fixed
    if alike not in traced:
        riding = [n.removeprefix(prefix) for n in hyper]
        traced[alike] = trace(lambda *inputs: _update(update, riding, *inputs), examples)
    arguments = [holders[param], gradient, *(holders[n] for n in (clock, *slots, *hyper))]
    insert_update(graph, traced[alike], arguments, [holders[n] for n in (param, *slots)])


def _update(update: Update, hyper: Sequence[str], *inputs: Tensor) -> list[Tensor]:
    """The new parameter and its new state."""
    param, grad, clock = inputs[:3]
    slots = dict(zip(update.slots, inputs[3 : 3 + len(update.slots)], strict=True))
    riding = dict(zip(hyper, inputs[3 + len(slots) :], strict=True))

    def one(param: Tensor, grad: Tensor, clock: Tensor, slots: Any, riding: Any) -> Any:
        values = hyperparameters(update.rule, update.config, riding)
        state = {**slots, **{name: torch.zeros_like(param) for name in update.absent}}
        return apply(update.rule, param, grad, state, values, (), clock.to(torch.int64) + 1)

    new, moved = vmap(one)(param, grad, clock, slots, riding)
    return [new, *(moved[name].to(slots[name].dtype) for name in update.slots)]


def _origin(node: fx.Node) -> fx.Node:
    """What a value is a mere copy of."""
    while node.target in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node
