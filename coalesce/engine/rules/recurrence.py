"""The loop over time of a recurrent layer, for any number of directions and lanes at once, with its gradient.

Unrolled into the graph, forty time steps of a GRU are 7,000 operations, and the compiler makes a kernel of its own for
each time step, forwards and backwards, since each reads at another offset. So the loop is one operator (`recurrence`),
and its gradient another (`recurrence_backward`). Compiled, each runs one small compiled graph, the cell, once per time
step. GRU of 40 steps, 10 lanes: traced and compiled in 33 processor seconds, unrolled in 400; a step of all ten in the
time of three steps alone (`python -m benchmarks.recurrent`, docs/log.md).

The gradient is written by hand. What a cell computed is computed again from the states that it returned, for all time
steps in one product, and only what truly follows step by step is looped over. The gradients of the weights are one
product over all time steps, where autograd would add up one per time step.

Shapes: N directions times lanes, H hidden, G gates times H, T time, B batch; in this order, which leaves the products
over all time steps without a copy, and the values of a gate beside each other for the vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from coalesce import kernels
from coalesce.engine.compiling import PREPARE, Runner, compile_graph
from coalesce.engine.trace import trace

States = tuple[Tensor, ...]


class Cell(NamedTuple):
    """A kind of recurrent cell. Gates lie along dimension 1.

    Args:
        step: (input's part of the gates, states, hidden's part of the gates) → new states. The first state is the
            cell's output.
        factors: (input's part, hidden's part, states before, states after) → what `back` needs, H wide each. For all
            time steps at once.
        back: (gradients of the new states, one step's factors) → (gradient of the gates, what of the gradients of the
            states before does not pass through the gates). Where the gradients of the input's and of the hidden's part
            differ, the gates are both, in this order.
    """

    step: Callable[[Tensor, States, Tensor], States]
    factors: Callable[[Tensor, Tensor, States, States], States]
    back: Callable[[States, States], tuple[States, tuple[Tensor | None, ...]]]


def _gru_gates(inputs: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (rx, zx, nx), (rh, zh, nh) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    reset, update = (rx + rh).sigmoid(), (zx + zh).sigmoid()
    return reset, update, (nx + reset * nh).tanh(), nh


def _gru_step(inputs: Tensor, states: States, hidden: Tensor) -> States:
    _, update, new, _ = _gru_gates(inputs, hidden)
    return (new + update * (states[0] - new),)


def _gru_factors(inputs: Tensor, hidden: Tensor, before: States, after: States) -> States:
    reset, update, new, nh = _gru_gates(inputs, hidden)
    to_new = (1 - update) * (1 - new * new)
    to_update = (before[0] - new) * update * (1 - update)
    return to_new * nh * reset * (1 - reset), to_update, to_new, reset, update


def _gru_back(gradients: States, factors: States) -> tuple[States, tuple[Tensor | None, ...]]:
    to_reset, to_update, to_new, reset, update = factors
    (gradient,) = gradients
    r, z, n = to_reset * gradient, to_update * gradient, to_new * gradient
    return (torch.cat([r, z, n], 1), torch.cat([r, z, n * reset], 1)), (update * gradient,)


def _lstm_step(inputs: Tensor, states: States, hidden: Tensor) -> States:
    i, f, g, o = (inputs + hidden).chunk(4, 1)
    memory = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * memory.tanh(), memory


def _lstm_factors(inputs: Tensor, hidden: Tensor, before: States, after: States) -> States:
    i, f, g, o = (inputs + hidden).chunk(4, 1)
    i, f, g, o, memory = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid(), after[1].tanh()
    gates = g * i * (1 - i), before[1] * f * (1 - f), i * (1 - g * g), memory * o * (1 - o)
    return *gates, o * (1 - memory * memory), f


def _lstm_back(gradients: States, factors: States) -> tuple[States, tuple[Tensor | None, ...]]:
    to_i, to_f, to_g, to_o, to_memory, forget = factors
    memory = gradients[1] + gradients[0] * to_memory
    gates = torch.cat([to_i * memory, to_f * memory, to_g * memory, to_o * gradients[0]], 1)
    return (gates,), (None, forget * memory)


def _rnn_back(gradients: States, factors: States) -> tuple[States, tuple[Tensor | None, ...]]:
    gates = gradients[0] * factors[0]
    return (gates,), (None,)


CELLS = {
    "gru": Cell(_gru_step, _gru_factors, _gru_back),
    "lstm": Cell(_lstm_step, _lstm_factors, _lstm_back),
    "rnn_tanh": Cell(
        lambda inputs, states, hidden: ((inputs + hidden).tanh(),),
        lambda inputs, hidden, before, after: (1 - after[0] * after[0],),
        _rnn_back,
    ),
    "rnn_relu": Cell(
        lambda inputs, states, hidden: ((inputs + hidden).relu(),),
        lambda inputs, hidden, before, after: ((after[0] > 0).to(after[0].dtype),),
        _rnn_back,
    ),
}

#: Kinds whose gradients of the input's and of the hidden's part of the gates differ.
_TWO = ("gru",)


def _forwards(kind: str, inputs: Tensor, states: States, weight: Tensor, bias: Tensor) -> States:
    """One time step: the new states (N, H, B)."""
    return CELLS[kind].step(inputs, states, torch.baddbmm(bias, weight, states[0]))


def _backwards(kind: str, later: States, outside: States, factors: States, weight: Tensor) -> States:
    """One time step back: the gradients of the gates (one or both) and of the states before.

    Args:
        later: gradients of the new states from the later time step.
        outside: gradients of the new states from elsewhere.
    """
    gradients = tuple(a + b for a, b in zip(later, outside, strict=True))
    gates, passed = CELLS[kind].back(gradients, factors)
    through = weight.mT @ gates[-1]
    return *gates, *(g for g in (through if passed[0] is None else passed[0] + through, *passed[1:]) if g is not None)


@torch.library.custom_op("coalesce::recurrence", mutates_args=())
def recurrence(
    kind: str, inputs: Tensor, states: Sequence[Tensor], weight: Tensor, bias: Tensor, compiled: bool
) -> list[Tensor]:
    """All time steps.

    Args:
        kind: of `CELLS`.
        inputs: (N, G, T, B) the input's part of the gates.
        states: (N, H, B) before the first step.
        weight: (N, G, H) of the hidden's part.
        bias: (N, G, 1) of the hidden's part.
        compiled: run the cell compiled.

    Returns:
        The states before the first and after each time step, (N, H, T + 1, B) each.
    """
    found = [_empty_states(s, inputs.shape[2]) for s in states]
    for target, state in zip(found, states, strict=True):
        target[:, :, 0].copy_(state)
    weight, bias = weight.contiguous(), bias.contiguous()
    now, *later = zip(*(f.unbind(2) for f in found), strict=True)
    cell = None
    for given, new in zip(inputs.contiguous().unbind(2), later, strict=True):
        if compiled and cell is None:
            cell = _compiled(kind, _forwards, (given, now, weight, bias), new)
        if cell is not None:
            cell(given, *now, weight, bias, *new)
        else:
            for target, value in zip(new, _forwards(kind, given, now, weight, bias), strict=True):
                target.copy_(value)
        now = new
    return found


@recurrence.register_fake
def _(
    kind: str, inputs: Tensor, states: Sequence[Tensor], weight: Tensor, bias: Tensor, compiled: bool
) -> list[Tensor]:
    return [_empty_states(s, inputs.shape[2]) for s in states]


def _empty_states(state: Tensor, time: int) -> Tensor:
    lanes, hidden, batch = state.shape
    return state.new_empty((lanes, hidden, time + 1, batch))


@torch.library.custom_op("coalesce::recurrence_backward", mutates_args=())
def recurrence_backward(
    kind: str, outside: Sequence[Tensor], factors: Sequence[Tensor], weight: Tensor, compiled: bool
) -> list[Tensor]:
    """The gradients of all time steps.

    Args:
        outside: (N, H, T + 1, B) each, of the states before the first and after each step, from outside the loop.
        factors: (N, H, T, B) each, as `Cell.factors` makes them.
        weight: (N, G, H).

    Returns:
        The gradients of the gates, one or both, (N, G, T, B) each, and of the states before the first step, (N, H, B)
        each, without what comes from outside for these.
    """
    gates = _empty_gates(kind, factors[0], weight)
    first = [o[:, :, 0].contiguous() for o in outside]
    now: States = tuple(torch.zeros_like(s) for s in first)
    # of two sets, one is read while the other is written
    spare = [tuple(torch.empty_like(s) for s in first) for _ in range(2)]
    weight = weight.contiguous()
    steps = [
        list(zip(*(t.contiguous().unbind(2) for t in tensors), strict=True)) for tensors in (outside, factors, gates)
    ]
    cell = None
    for time, (given, known, out) in enumerate(reversed(list(zip(steps[0][1:], *steps[1:], strict=True)))):
        new = spare[time % 2]
        if compiled and cell is None:
            cell = _compiled(kind, _backwards, (now, given, known, weight), (*out, *new))
        if cell is not None:
            cell(*now, *given, *known, weight, *out, *new)
        else:
            for target, value in zip((*out, *new), _backwards(kind, now, given, known, weight), strict=True):
                target.copy_(value)
        now = new
    return [*gates, *now]


@recurrence_backward.register_fake
def _(kind: str, outside: Sequence[Tensor], factors: Sequence[Tensor], weight: Tensor, compiled: bool) -> list[Tensor]:
    lanes, hidden, _, batch = outside[0].shape
    return [*_empty_gates(kind, factors[0], weight), *(o.new_empty((lanes, hidden, batch)) for o in outside)]


def _empty_gates(kind: str, factor: Tensor, weight: Tensor) -> list[Tensor]:
    lanes, _, time, batch = factor.shape
    return [factor.new_empty((lanes, weight.shape[1], time, batch)) for _ in range(1 + (kind in _TWO))]


class Recurrence(torch.autograd.Function):
    """`recurrence` with its gradient: (kind, inputs, weight, bias, *states) → as it returns."""

    @staticmethod
    def forward(kind: str, inputs: Tensor, weight: Tensor, bias: Tensor, *states: Tensor) -> States:
        return tuple(recurrence(kind, inputs, states, weight, bias, False))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kind = inputs[0]
        ctx.save_for_backward(*inputs[1:4], *output)

    @staticmethod
    def backward(ctx: Any, *outside: Tensor) -> Any:
        # in operations that have gradients themselves, so that a gradient of the gradient is right too
        inputs, weight, bias, *states = ctx.saved_tensors
        before, after = (tuple(s[:, :, part] for s in states) for part in (slice(None, -1), slice(1, None)))
        rows = before[0].flatten(2)
        hidden = torch.baddbmm(bias, weight, rows).unflatten(2, inputs.shape[2:])
        factors = CELLS[ctx.kind].factors(inputs, hidden, before, after)
        found = RecurrenceBackward.apply(ctx.kind, len(factors), weight, *factors, *outside)
        gates, first = found[: -len(states)], found[-len(states) :]
        own = gates[-1].flatten(2)
        first = tuple(f + o[:, :, 0] for f, o in zip(first, outside, strict=True))
        return None, gates[0], own @ rows.mT, own.sum(2, keepdim=True), *first

    @staticmethod
    def vmap(info: Any, dims: Any, kind: str, *tensors: Tensor) -> Any:
        found = Recurrence.apply(kind, *_fold(tensors, dims[1:], info.batch_size))
        return tuple(f.unflatten(0, (info.batch_size, -1)) for f in found), (0,) * len(found)


class RecurrenceBackward(torch.autograd.Function):
    """`recurrence_backward`: (kind, number of factors, weight, *factors, *outside) → as it returns.

    Its own gradient, which only a second derivative asks for, is autograd's of the plain loop.
    """

    @staticmethod
    def forward(kind: str, count: int, weight: Tensor, *rest: Tensor) -> States:
        return tuple(recurrence_backward(kind, rest[count:], rest[:count], weight, False))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kind, ctx.count = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        def loop(weight: Tensor, *rest: Tensor) -> States:
            factors, outside = rest[: ctx.count], rest[ctx.count :]
            now: States = tuple(torch.zeros_like(o[:, :, 0]) for o in outside)
            found = []
            for time in reversed(range(factors[0].shape[2])):
                given, known = tuple(o[:, :, time + 1] for o in outside), tuple(f[:, :, time] for f in factors)
                new = _backwards(ctx.kind, now, given, known, weight)
                found.append(new[: -len(now)])
                now = new[-len(now) :]
            return *(torch.stack(gates[::-1], 2) for gates in zip(*found, strict=True)), *now

        return None, None, *torch.func.vjp(loop, *ctx.saved_tensors)[1](gradients)

    @staticmethod
    def vmap(info: Any, dims: Any, kind: str, count: int, *tensors: Tensor) -> Any:
        found = RecurrenceBackward.apply(kind, count, *_fold(tensors, dims[2:], info.batch_size))
        return tuple(f.unflatten(0, (info.batch_size, -1)) for f in found), (0,) * len(found)


def _fold(tensors: Sequence[Tensor], dims: Sequence[int | None], lanes: int) -> list[Tensor]:
    """Lanes as further directions."""
    pairs = zip(tensors, dims, strict=True)
    moved = [t.unsqueeze(0).expand(lanes, *t.shape) if d is None else t.movedim(d, 0) for t, d in pairs]
    return [t.flatten(0, 1) for t in moved]


_cells: dict[Any, Runner] = {}


def _compiled(kind: str, cell: Callable[..., States], given: tuple[Any, ...], out: States) -> Runner:
    """One time step, compiled: takes the tensors of ``given`` one by one, and then ``out``, which it writes."""
    leaves = [t for g in given for t in (g if isinstance(g, tuple) else [g])]
    looks = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in (*leaves, *out)]
    key = kind, cell.__name__, torch.get_num_threads(), *kernels.backends(), *looks
    if key not in _cells:
        # made anew: what the loop gives are views of one tensor, which would count as aliases
        examples = [torch.empty_strided(s, stride, dtype=d, device=v) for s, stride, d, v in looks]

        def flat(*leaves: Tensor) -> list[Tensor]:
            rest = iter(leaves)
            return [*cell(kind, *(tuple(next(rest) for _ in g) if isinstance(g, tuple) else next(rest) for g in given))]

        module = trace(flat, examples[: len(leaves)])
        _end_in_writes(module.graph)
        _cells[key] = compile_graph(module, examples)
    return _cells[key]


def _end_in_writes(graph: fx.Graph) -> None:
    """Let a graph write what it would return into further placeholders."""
    output = graph.output_node()
    (results,) = output.args
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for place, result in enumerate(results):  # type: ignore[arg-type]
        with graph.inserting_after(last):
            last = graph.placeholder(f"out_{place}")
        with graph.inserting_before(output):
            graph.call_function(torch.ops.aten.copy_.default, (last, result))
    output.args = ([],)
    graph.lint()


def _prepare(module: fx.GraphModule) -> None:
    """Let the loops of a graph that is to be compiled run compiled cells, and compile these."""
    for node in module.graph.nodes:
        if node.target not in (torch.ops.coalesce.recurrence.default, torch.ops.coalesce.recurrence_backward.default):
            continue
        node.args = (*node.args[:-1], True)
        # once, on one time step of zeros
        kind, *given = fx.node.map_arg(node.args, _zeros)
        node.target(kind, *given)


def _zeros(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


PREPARE.append(_prepare)
