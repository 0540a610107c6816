"""Keyed random numbers as one operation of a trace, until the trace is made.

Philox is a chain of 160 operations. Recorded one by one, under `vmap` and the gradient, and once more where mutations
are taken out, they took most of the time in which a small model's step is traced. So a trace holds one operation of
ours for each draw, and `expand` puts the chain in its place, which is traced once per process and shape. The graph that
comes out is the one that would have been traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from coalesce import random

Chain = Callable[..., Tensor]
Trace = Callable[..., fx.GraphModule]

_LIBRARY = torch.library.Library("coalesce", "DEF")

#: Operation → what computes it for one lane, or for all of them.
_CHAINS: dict[Any, Chain] = {}


def _operation(name: str, arguments: str, chain: Chain, shared: tuple[int, ...], fake: Chain) -> Any:
    """Define an operation whose first argument is a key: (2,), or (K, 2) for K lanes.

    Args:
        arguments: the others, as a schema has them.
        chain: computes it for one lane.
        shared: places of the arguments that are the same in all lanes; the other tensors have K in front as the key
            has.
        fake: an empty tensor of the chain's shape and strides.
    """
    _LIBRARY.define(f"{name}(Tensor key, {arguments}) -> Tensor")
    operation = getattr(torch.ops.coalesce, name).default

    def lanes(*given: Any) -> Tensor:
        dims = tuple(0 if isinstance(g, Tensor) and place not in shared else None for place, g in enumerate(given))
        function = chain
        for _ in range(given[0].dim() - 1):
            function = vmap(function, in_dims=dims)
        return function(*given)

    def mapped(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[Tensor, int]:
        def in_front(place: int, given: Any, dim: int | None) -> Any:
            if not isinstance(given, Tensor) or place in shared:
                assert dim is None
                return given
            if dim is None:
                return given.expand(info.batch_size, *given.shape)
            # no operation where there is nothing to be moved
            return given.movedim(dim, 0) if dim else given

        numbered = enumerate(zip(given, in_dims, strict=True))
        return operation(*(in_front(place, *pair) for place, pair in numbered)), 0

    _LIBRARY.impl(name, lanes, "CompositeExplicitAutograd")
    torch.library.register_fake(f"coalesce::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"coalesce::{name}", mapped, lib=_LIBRARY)
    _CHAINS[operation] = lanes
    return operation


_words = _operation(
    "words",
    "Tensor step, Tensor call, int count",
    lambda key, step, call, count: random.bits(key, random.Purpose.DRAW, step, call, count),
    shared=(2,),
    # cut out of a whole number of blocks
    fake=lambda key, step, call, count: key.new_empty((*key.shape[:-1], (count + 3) // 4 * 4))[..., :count],
)


def bits(key: Tensor, step: Tensor, call: Tensor, count: int) -> Tensor:
    """`random.bits` of the draw stream; one operation of the trace that is being made, if one is."""
    if get_proxy_mode() is None:
        return random.bits(key, random.Purpose.DRAW, step, call, count)
    return _words(key, step, call, count)


def expand(module: fx.GraphModule, trace: Trace) -> None:
    """Put the chains in the place of the operations that stand for them.

    Args:
        module: a trace, whose nodes have their ``meta``; also within the graphs that its operators call.
        trace: `engine.trace.trace`.
    """
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule) and _expand(inner.graph, trace):
            inner.recompile()


def _expand(graph: fx.Graph, trace: Trace) -> bool:
    found = [node for node in graph.nodes if node.op == "call_function" and node.target in _CHAINS]
    for node in found:
        looks = tuple(_look(a) if isinstance(a, fx.Node) else a for a in node.args)
        chain = _traced(node.target, looks, trace)
        given = iter([a for a in node.args if isinstance(a, fx.Node)])
        copies: dict[fx.Node, fx.Node] = {}
        meta = {name: value for name, value in node.meta.items() if name != "val"}
        with graph.inserting_before(node):
            for inner in chain.graph.nodes:
                if inner.op == "placeholder":
                    copies[inner] = next(given)
                elif inner.op == "output":
                    node.replace_all_uses_with(copies[inner.args[0][0]])
                else:
                    assert inner.op == "call_function", inner.format_node()
                    copies[inner] = graph.node_copy(inner, copies.__getitem__)
                    copies[inner].meta = {**meta, "val": inner.meta["val"]}
        graph.erase_node(node)
    return bool(found)


#: How a tensor looks: shape, strides, dtype, device.
_Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def _look(node: fx.Node) -> _Look:
    value = node.meta["val"]
    return tuple(value.shape), value.stride(), value.dtype, value.device


@functools.cache
def _traced(operation: Any, arguments: tuple[_Look | int, ...], trace: Trace) -> fx.GraphModule:
    """A chain as a graph of its tensors."""

    def function(*tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        return [_CHAINS[operation](*(a if isinstance(a, int) else next(given) for a in arguments))]

    looks = [a for a in arguments if not isinstance(a, int)]
    return trace(function, [torch.empty_strided(shape, s, dtype=t, device=d) for shape, s, t, d in looks])
