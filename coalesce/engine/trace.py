"""Tracing: a Python function of tensors as a flat list of aten operations without mutation.

The private parts of torch that the engine stands on are used here, in `compiling.py` and in `inductor.py` only. Here
they are `make_fx`, its mode, and the compiler's decomposition table. Tried on torch 2.13.0.

Every node of a trace has a number in `meta["segment"]`: how often `cut_here` was called before it was made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from coalesce.engine.keyed import expand

#: What `label` may note: that a node belongs to a forward pass, and the number of the region that is to be computed
#: again (see `recompute`).
LABELS = ("forward", "region")


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function of tensors.

    Args:
        function: takes the inputs one by one, returns a list of tensors.
        inputs: real tensors; only their shapes, strides, dtypes and devices matter.

    Returns:
        A graph with one placeholder per input, in order, and one list as its output, in which no operation writes
        to another's tensor. Tensors that the function closed over are constants of the graph module.
    """
    # one of the decompositions, max pooling's, reaches for it as an attribute of its package
    import torch._inductor.lowering

    table = select_decomp_table()
    # A tensor given twice would be one input to the tracer, and the second placeholder would have no user.
    distinct: dict[int, Tensor] = {}
    inputs = [torch.empty_like(t) if id(t) in distinct else distinct.setdefault(id(t), t) for t in inputs]
    with torch.no_grad():
        make = make_fx(function, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)
        traced = make(*inputs)
        if _writes(traced):
            number(traced.graph)
            # Mutations inside (BatchNorm's statistics, h[:, 0] = 0.5) need a pass of their own: functionalised
            # together with vmap and the decompositions, BatchNorm loses its statistics, since the schema of
            # native_batch_norm hides that it writes.
            pure = functionalize(_Cutting(traced).run, remove="mutations")
            make = make_fx(pure, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)
            traced = make(*inputs)
    number(traced.graph)
    expand(traced, trace)
    traced.graph.eliminate_dead_code()
    left = _writes(traced)
    if left:
        raise AssertionError(f"operations that write remain in the trace: {left}")
    return traced


def cut_here() -> None:
    """Begin a new segment of the trace that is being made. Outside of a trace nothing happens."""
    mode = get_proxy_mode()
    if mode is not None:
        number(mode.tracer.graph)


def number(graph: fx.Graph) -> None:
    """Give the nodes at a graph's end that have no segment yet the next one."""
    fresh = []
    latest = -1
    for node in reversed(graph.nodes):
        if node.op == "placeholder":
            break
        if "segment" in node.meta:
            latest = node.meta["segment"]
            break
        fresh.append(node)
    for node in fresh:
        node.meta["segment"] = latest + 1


def latest() -> fx.Node | None:
    """The last operation of the trace that is being made; None outside of a trace."""
    mode = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def label(since: fx.Node | None, **labels: Any) -> None:
    """Note something in the ``meta`` of what was traced behind a node. Outside of a trace nothing happens."""
    mode = get_proxy_mode()
    if mode is not None:
        for node in reversed(mode.tracer.graph.nodes):
            if node is since or node.op == "placeholder":
                break
            node.meta |= labels


class _Cutting(fx.Interpreter):
    """Runs a trace, cuts the one that is made of it in the same places, and gives it the same labels."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "placeholder" and n.prev.meta.get("segment", n.meta["segment"]) != n.meta["segment"]:
            cut_here()
        before = latest()
        result = super().run_node(n)
        label(before, **{name: n.meta[name] for name in LABELS if name in n.meta})
        return result


def _writes(module: fx.GraphModule) -> list[fx.Node]:
    def writes(node: fx.Node) -> bool:
        return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable

    return [n for n in module.graph.nodes if n.op == "call_function" and writes(n)]


def is_view(node: fx.Node) -> bool:
    """Whether an operation returns another look at its first argument's memory, or one of several such looks."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    # the unsafe ones are views that say they were none
    unsafe = str(node.target).startswith(("aten._unsafe_view", "aten.unsafe_"))
    return unsafe or bool(getattr(node.target, "is_view", False))


def example(node: fx.Node) -> Tensor:
    """A real tensor that looks like a traced value. Nobody writes into it, so that it takes no memory on a CPU."""
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def inline(
    graph: fx.Graph, module: fx.GraphModule, arguments: Sequence[fx.Node], after: fx.Node
) -> tuple[list[fx.Node], fx.Node]:
    """Copy a traced function into a graph.

    Args:
        graph: where to.
        module: as `trace` made it, without constants.
        arguments: for its placeholders.
        after: the node behind which, and in whose segment, the copy stands.

    Returns:
        The nodes of its outputs, and the last node that was inserted (``after``, if there was none).
    """
    places, segment = iter(arguments), after.meta["segment"]
    copies: dict[fx.Node, fx.Node] = {}
    outputs: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(places)
        elif node.op == "output":
            outputs = [copies[n] for n in node.args[0]]
        elif node.op == "call_function":
            with graph.inserting_after(after):
                after = copies[node] = graph.node_copy(node, lambda n: copies[n])
            after.meta["segment"] = segment
        else:
            raise AssertionError(f"a rule may hold no constant tensor: {node.format_node()}")
    return outputs, after
