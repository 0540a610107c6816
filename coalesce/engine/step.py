"""One training step of K lanes as one graph: batch, forward, backward, and each parameter's update where its gradient
is born."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import grad_and_value, vmap

from coalesce.data import gather
from coalesce.engine.compiling import lift_constants
from coalesce.engine.instance import Instance
from coalesce.engine.lane import hyperparameters, lane_loss, scheduled
from coalesce.engine.pieces import cut_at, piece_of
from coalesce.engine.recompute import recompute
from coalesce.engine.template import Template
from coalesce.engine.trace import cut_here, example, inline, is_view, label, latest, trace
from coalesce.optim.groups import group_of
from coalesce.optim.options import apply, clip_value

#: Name → tensor (K, …); the name's first part says what it is: trained, fixed, buffer, slot, riding, optimizer,
#: schedule, verdict (what the schedule made of the lane's evaluations), lane, train.
State = Mapping[str, Tensor]

#: Most entries of a parameter that is updated together with others.
_SMALL = 2**12


def part(state: State, prefix: str) -> dict[str, Any]:
    """The entries under a prefix, without it."""
    return {name.removeprefix(f"{prefix}/"): t for name, t in state.items() if name.startswith(f"{prefix}/")}


def build_step(
    template: Template,
    state: State,
    data: Sequence[Tensor],
    pieces: Sequence[str] = (),
    size: int | None = None,
    lowerings: Mapping[str, str] | None = None,
    again: Sequence[str] = (),
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Trace one step.

    Args:
        template: of the cohort.
        state: every tensor of the lanes, in the order in which the graph takes them.
        data: the samples of the lanes' batches, (K, size), which the graph takes after the state; the leaves of the
            training split, (N, …) each; then the table of the folds, where lanes train on folds.
        pieces: names of the modules at which to cut the graph into segments.
        size: samples of the batch, a full one by default. Where several sizes occur, the lanes move whose next batch
            has this one.
        lowerings: how convolutions are lowered, see `engine.measure`.
        again: names of the modules that the backward pass computes again, see `recompute`.

    Returns:
        A graph that takes state, data and constants, and writes the new state into the state's own tensors; and the
        constants.
    """
    names, instance = list(state), template.fresh(lowerings)
    size = template.batches.size if size is None else size
    with cut_at(instance.model, pieces, again):
        module = trace(lambda *i: _gradients(template, instance, pieces, names, i, size), [*state.values(), *data])
    constants = lift_constants(module)
    graph = module.graph
    recompute(graph)
    output = next(n for n in graph.nodes if n.op == "output")
    holders = dict(zip(names, [n for n in graph.nodes if n.op == "placeholder"], strict=False))
    results = dict(zip(_outputs(template, state), output.args[0], strict=True))
    graph.erase_node(output)

    broken = []
    updates: dict[Any, fx.GraphModule] = {}
    for together in _together(template, state, results):
        broken.append(_place_update(template, together, state, graph, holders, results, updates))

    any_broken, last = _any(graph, broken, list(graph.nodes)[-1])
    kept = [n for n in results if n.partition("/")[0] in ("train", "buffer")]
    lanes = [state[f"lane/{n}"] for n in ("alive", "step", "finite", "alive", "alive", "alive")]
    finish = trace(_finish, [*lanes, *(example(results[n]) for n in kept), *(state[n] for n in kept)])
    clock = ["lane/alive", "lane/step", "lane/finite"]
    arguments = [*(holders[n] for n in clock), results["active"], results["good"], any_broken]
    arguments += [*(results[n] for n in kept), *(holders[n] for n in kept)]
    written, last = inline(graph, finish, arguments, last)
    for name, value in zip([*clock, *kept], written, strict=True):
        last = write(graph, holders[name], value, last)
    with graph.inserting_after(last):
        graph.output(())
    graph.lint()
    module.recompile()
    return module, constants


def _outputs(template: Template, state: State) -> list[str]:
    """Names of what `_gradients` returns, in its order."""
    return [
        "good",
        "active",
        *(f"now/{n}" for n in ["step", *part(state, "optimizer")]),
        *(f"gradient/{n}" for n in template.trained),
        *(f"train/{n}" for n in part(state, "train")),
        *(f"buffer/{n}" for n in part(state, "buffer")),
    ]


def _gradients(
    template: Template,
    instance: Instance,
    pieces: Sequence[str],
    names: Sequence[str],
    inputs: Sequence[Tensor],
    size: int,
) -> list[Tensor]:
    """Batch, forward and backward of all lanes, and everything of a lane that its updates need."""
    state = dict(zip(names, inputs, strict=False))
    index, *data = inputs[len(names) :]
    batches = template.batches
    key, step, steps = (state[f"lane/{n}"] for n in ("key", "step", "steps"))
    optimizer = part(state, "optimizer")
    move = vmap(lambda *lane: scheduled(template, *lane))
    optimizer |= move(optimizer, part(state, "schedule"), part(state, "verdict"), step, steps)

    leaves = len(template.data.leaves("train"))
    data, table = data[:leaves], data[leaves:]
    samples: int | Tensor = data[0].shape[0]
    if template.folds is not None:
        # out of how many, (K,), and which ones of the whole split
        rows, first, counts = table
        fold = state["lane/fold"]
        samples, index = counts[fold], rows[first[fold][:, None] + index]

    paths = {path: state[f"riding/{i}"] for i, path in enumerate(template.riding)}
    fixed, buffers = part(state, "fixed"), part(state, "buffer")

    now = step + 1
    good = active = state["lane/alive"] & (step < steps)
    if "lane/until" in state:
        good = active = active & (step < state["lane/until"]) & batches.of_size(size, step, samples)

    def loss(
        trained: Any, fixed: Any, buffers: Any, riding: Any, key: Tensor, step: Tensor, batch: Any, good: Tensor
    ) -> Any:
        begun = latest()
        value, (metrics, after) = lane_loss(template, instance, {**trained, **fixed}, buffers, riding, key, step, batch)
        # Here, so that they stand in front of the backward pass, whose updates need the first. Copies, since a metric
        # may be a parameter itself, which will have been updated by the time it is kept.
        good = good & torch.isfinite(value.detach())
        kept = {n: m.to(state[f"train/{n}"].dtype, copy=True) for n, m in metrics.items()}
        label(begun, forward=True)
        return value, (good, kept, after)

    both = vmap(grad_and_value(loss, has_aux=True))
    count, after = template.accumulate, buffers
    gradients: dict[str, Tensor] = {}
    metrics: dict[str, Tensor] = {}
    # of a short batch the last micro-batch may be shorter: each weighs by its samples
    micros = index.split(batches.size // count, dim=1)
    uneven = micros[0].shape[1] != micros[-1].shape[1]
    for number, micro in enumerate(micros):
        batch = template.data.unflatten(gather(leaf, micro) for leaf in data)
        # draws are numbered by micro-batches, or all micro-batches of a step would have the same masks
        moment = step * count + number if count > 1 else step
        mapped = part(state, "trained"), fixed, after, paths, key, moment, batch, good
        found, (_, (good, shown, after)) = both(*mapped)
        if uneven:
            share = micro.shape[1] / size
            shown = {n: t * share for n, t in shown.items()}
            found = _by_piece(pieces, lambda g: g * share, found)  # noqa: B023
        metrics = {n: metrics[n] + t for n, t in shown.items()} if metrics else shown
        # added up as they come, so that no more than two sets of gradients are alive
        gradients = _by_piece(pieces, torch.add, gradients, found) if gradients else found
    if len(micros) > 1 and not uneven:
        metrics = {n: t / len(micros) for n, t in metrics.items()}
        gradients = _by_piece(pieces, lambda g: g / len(micros), gradients)
    clip = optimizer.get("clip_norm")
    if clip is not None:
        if "clip_value" in optimizer:
            gradients = {n: clip_value(g, _lanes(optimizer["clip_value"], g)) for n, g in gradients.items()}
        gradients = clip_norm(gradients, clip, pieces)

    return [
        good,
        active,
        now,
        *optimizer.values(),
        *(gradients[n] for n in template.trained),
        *(metrics[n] for n in part(state, "train")),
        *(after[n] for n in buffers),
    ]


def _lanes(x: Tensor, like: Tensor) -> Tensor:
    """(K,) as (K, 1, …) beside a tensor (K, …)."""
    return x.view(-1, *[1] * (like.dim() - 1))


def _by_piece(
    pieces: Sequence[str], function: Callable[..., Tensor], *gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Apply a function to the gradients of each parameter when all are there, in a segment for each piece.

    The updates will stand there too, so that pieces that look alike share a segment. All gradients are alive at once.
    """
    done: dict[str, Tensor] = {}
    current: str | None = None
    for name in gradients[0]:
        if piece_of(name, pieces) != current:
            current = piece_of(name, pieces)
            cut_here()
        done[name] = function(*(one[name] for one in gradients))
    return done


def clip_norm(gradients: Mapping[str, Tensor], clip: Tensor, pieces: Sequence[str]) -> dict[str, Tensor]:
    """Scale each lane's gradients so that their global norm is at most its ``clip``, as `clip_grad_norm_` does."""
    squares = [g.square().flatten(1).sum(1) if g.dim() > 1 else g.square() for g in gradients.values()]
    norm = torch.stack(squares).sum(0).sqrt()
    # 1e-6 as in torch
    scale = torch.clamp(clip.to(norm.dtype) / (norm + 1e-6), max=1.0)
    return _by_piece(pieces, lambda g: g * _lanes(scale, g).to(g.dtype), gradients)


def _together(template: Template, state: State, results: Mapping[str, fx.Node]) -> list[list[str]]:
    """The trained parameters, from the last to the first, those together that are updated as one.

    These are vectors of which the gradients are born in one segment: as many updates of some entries each would take
    the compiler as long as those of the matrices, and at each step a loop of their own.
    """
    found: dict[Any, list[str]] = {}
    for name in reversed(template.trained):
        param, slots = state[f"trained/{name}"], _slots(state, name)
        alike = all(state[f"slot/{slot}/{name}"].shape == param.shape for slot in slots)
        small = param.dim() <= 2 and param[0].numel() <= _SMALL
        key: Any = name
        if template.optimizer.entrywise and small and alike:
            segment = results[f"gradient/{name}"].meta.get("segment")
            dtypes = param.dtype, *(state[f"slot/{slot}/{name}"].dtype for slot in slots)
            group = group_of(template.optimizer, template.static_hyper, template.names[name])
            key = segment, dtypes, slots, group
        found.setdefault(key, []).append(name)
    return [*found.values()]


def _slots(state: State, name: str) -> tuple[str, ...]:
    """The names of a parameter's slots."""
    return tuple(n.split("/", 2)[1] for n in state if n.startswith("slot/") and n.split("/", 2)[2] == name)


def _place_update(
    template: Template,
    names: Sequence[str],
    state: State,
    graph: fx.Graph,
    holders: Mapping[str, fx.Node],
    results: Mapping[str, fx.Node],
    traced: dict[Any, fx.GraphModule],
) -> fx.Node:
    """Insert the update of a parameter, or of several as one, into the graph, and return the node that tells which
    lanes it broke (K,)."""
    first = names[0]
    slots = _slots(state, first)
    hyper = [n for n in results if n.startswith("now/") and n != "now/step"]
    params = [f"trained/{n}" for n in names]
    moments = [f"slot/{slot}/{n}" for slot in slots for n in names]
    examples = [state[n] for n in (*params, *params, "lane/alive", "lane/step", *moments)]
    examples += [state[f"optimizer/{n.removeprefix('now/')}"] for n in hyper]
    group = group_of(template.optimizer, template.static_hyper, template.names[first])
    shape = tuple((tuple(state[n].shape), state[n].dtype) for n in params), slots, group
    if shape not in traced:
        hyper_names = [n.removeprefix("now/") for n in hyper]

        def update(*inputs: Tensor) -> list[Tensor]:
            return _update(template, names, slots, hyper_names, *inputs)

        traced[shape] = trace(update, examples)
    arguments = [holders[n] for n in params] + [results[f"gradient/{n}"] for n in names]
    arguments += [results["good"], results["now/step"]]
    arguments += [holders[n] for n in moments] + [results[n] for n in hyper]
    (broken,) = insert_update(graph, traced[shape], arguments, [holders[n] for n in (*params, *moments)])
    return broken


def insert_update(
    graph: fx.Graph, update: fx.GraphModule, arguments: Sequence[fx.Node], targets: Sequence[fx.Node]
) -> list[fx.Node]:
    """Insert a parameter's traced update into the graph of a step, as early as it may stand.

    Args:
        arguments: what it takes.
        targets: the placeholders that its first results are written to: parameters and their slots.

    Returns:
        The nodes of its other results.
    """
    # Not before the last read of the parameter or of a view of it: what is read below the place where its gradient is
    # born (w.detach() in a lower layer) must still see the old value.
    anchor = _latest(graph, [*arguments, *(reader for target in targets for reader in _readers(target))])
    results, last = inline(graph, update, arguments, anchor)
    for target, value in zip(targets, results, strict=False):
        last = write(graph, target, value, last)
    return results[len(targets) :]


def _update(
    template: Template, names: Sequence[str], slots: Sequence[str], hyper: Sequence[str], *inputs: Tensor
) -> list[Tensor]:
    """One parameter's update in all lanes, or that of several as one.

    An entry that would turn infinite or NaN keeps its last value, with its optimiser state, and its lane is told to
    have broken: so the state that a diverged lane is frozen in is finite, whichever layer broke first, and no second
    pass over the parameters is needed to find out. State that is not entry by entry the parameter's (Adafactor's rows)
    stands still in a lane that has broken.
    """
    count = len(names)
    params, grads = inputs[:count], inputs[count : 2 * count]
    good, step = inputs[2 * count : 2 * count + 2]
    rest = inputs[2 * count + 2 :]
    held = {slot: rest[i * count : (i + 1) * count] for i, slot in enumerate(slots)}
    riding = dict(zip(hyper, rest[len(slots) * count :], strict=True))
    param, grad = _joined(params), _joined(grads)
    state = {slot: _joined(tensors) for slot, tensors in held.items()}

    def one(param: Tensor, grad: Tensor, state: Any, riding: Any, step: Tensor) -> Any:
        values = hyperparameters(template.optimizer, template.static_hyper, riding)
        return apply(template.optimizer, param, grad, state, values, template.names[names[0]], step)

    new, moments = vmap(one)(param, grad, state, riding, step)
    # as `isfinite`, in two operations and not four: this stands in the code of each update twice
    sound = new.abs() < torch.inf
    kept = sound & _lanes(good, sound)
    broken = good & (~sound).reshape(sound.shape[0], -1).any(1)
    whole = good & ~broken
    masks = {n: kept if state[n].shape == param.shape else _lanes(whole, state[n]) for n in slots}
    found = _parted(torch.where(kept, new, param), params)
    for slot in slots:
        found += _parted(torch.where(masks[slot], moments[slot], state[slot]), held[slot])
    return [*found, broken]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor as it is; of several (K, …) the entries of each lane in a row."""
    return tensors[0] if len(tensors) == 1 else torch.cat([t.reshape(len(t), -1) for t in tensors], 1)


def _parted(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What `_joined` has made one, in its parts again."""
    if len(like) == 1:
        return [joined]
    parts = joined.split([t[0].numel() for t in like], 1)
    return [part.reshape(t.shape) for part, t in zip(parts, like, strict=True)]


def _finish(
    alive: Tensor, step: Tensor, finite: Tensor, active: Tensor, good: Tensor, broken: Tensor, *values: Tensor
) -> list[Tensor]:
    """The lanes' clock after a step; and its metrics and buffers, where it was taken.

    Args:
        finite: (K,) whether the loss of the lane's last step, taken or not, was finite.
        active: (K,) whether a step was to be taken; ``good``: whether the loss was finite; ``broken``: whether a
            parameter would not have been.
        values: the new ones, then the old ones in the same order.
    """
    done = good & ~broken
    pairs = zip(values[: len(values) // 2], values[len(values) // 2 :], strict=True)
    kept = [torch.where(_lanes(done, old), new.to(old.dtype), old) for new, old in pairs]
    return [alive & (done | ~active), step + done.to(step.dtype), torch.where(active, good, finite), *kept]


def _any(graph: fx.Graph, flags: Sequence[fx.Node], last: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The disjunction of some (K,) booleans."""
    total = flags[0]
    for flag in flags[1:]:
        with graph.inserting_after(last):
            total = graph.call_function(torch.ops.aten.logical_or.default, (total, flag))
        total.meta = {"val": flags[0].meta["val"], "segment": last.meta["segment"]}
        last = total
    return total, last


def write(graph: fx.Graph, target: fx.Node, value: fx.Node, last: fx.Node) -> fx.Node:
    """Insert a copy into a placeholder behind a node, in whose segment it stands; and return it."""
    with graph.inserting_after(last):
        copy = graph.call_function(torch.ops.aten.copy_.default, (target, value))
    copy.meta = {"val": target.meta["val"], "segment": last.meta["segment"]}
    return copy


def _readers(node: fx.Node) -> list[fx.Node]:
    """Everything that reads a tensor or a view of it."""
    return [r for user in node.users for r in [user, *(_readers(user) if is_view(user) else [])]]


def _latest(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    wanted = set(nodes)
    return [n for n in graph.nodes if n in wanted][-1]
