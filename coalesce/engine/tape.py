"""The tape: a traced graph as segments that run one after the other.

What one segment computes and no later one needs is gone before the next one runs, and the compiler, to which a segment
is all there is, cannot undo that. Segments that are alike are compiled once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx, nn

from coalesce.engine.compiling import Runner, compile_graph, together
from coalesce.engine.trace import example, is_view

#: Elements per lane from which a value that follows from the keys alone is rather computed again than kept.
_LARGE = 64


@dataclass(frozen=True)
class Segment:
    """A part of a graph.

    Args:
        module: computes it; ends in a list of results.
        inputs, outputs: nodes of the whole graph, for the module's placeholders and results.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


class Tape:
    """A graph, cut into segments and ready to run.

    Args:
        module: traced, its nodes numbered by segment, as `trace` does it; it may end in copies into its inputs.
        inputs: real tensors that look like those it will be called with.
        compile: compile the segments, or run them operation by operation.
        cheap: numbers of the inputs that hold keys, steps and rates, see `cut`.
    """

    #: Who looks on, for all tapes: calls a segment's function with its arguments, and returns the results.
    around: ClassVar[Callable[[Segment, Runner, Sequence[Tensor]], Sequence[Tensor]] | None] = None

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Tensor], compile: bool, cheap: Iterable[int] = ()):
        holders = [n for n in module.graph.nodes if n.op == "placeholder"]
        lanes = next((t.shape[0] for t in inputs if t.dim()), 1)
        self.segments = cut(module, {holders[i] for i in cheap}, lanes)
        examples = dict(zip(holders, inputs, strict=True))
        place = {holder: i for i, holder in enumerate(holders)}
        last_use = {n: i for i, segment in enumerate(self.segments) for n in segment.inputs}
        (output,) = (n for n in module.graph.nodes if n.op == "output")
        results = list(output.args[0])
        self._calls: list[tuple[Callable[..., Sequence[Tensor]], list[int], list[int], list[int]]] = []
        runners: list[Runner] = [segment.module for segment in self.segments]
        if compile:
            with together(inputs[0].device):
                runners = [
                    compile_graph(segment.module, [examples.get(n, example(n)) for n in segment.inputs])
                    for segment in self.segments
                ]
        for i, (segment, run) in enumerate(zip(self.segments, runners, strict=True)):
            for node in segment.outputs:
                place[node] = len(place)
            done = [n for n in segment.inputs if last_use[n] == i and n not in examples and n not in results]
            self._calls.append(
                (run, [place[n] for n in segment.inputs], [place[n] for n in segment.outputs], [place[n] for n in done])
            )
        self._results = [place[n] for n in results]
        self._size = len(place) - len(holders)

    @classmethod
    def of_lanes(
        cls, module: fx.GraphModule, inputs: Sequence[Tensor], names: Sequence[str], constants: int, compile: bool
    ) -> Tape:
        """A graph that takes some of the lanes' state, data, and constants.

        Args:
            names: of the state's entries.
            constants: how many.
        """
        kinds = ("lane/", "riding/", "optimizer/", "schedule/", "verdict/")
        cheap = [i for i, name in enumerate(names) if name.startswith(kinds)]
        return cls(module, inputs, compile, [*cheap, *range(len(inputs) - constants, len(inputs))])

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Run the segments. Writes into the inputs that the graph copies into."""
        values: list[Tensor | None] = [*inputs, *[None] * self._size]
        for segment, (run, taken, given, done) in zip(self.segments, self._calls, strict=True):
            arguments = [values[i] for i in taken]
            results = run(*arguments) if Tape.around is None else Tape.around(segment, run, arguments)  # type: ignore[arg-type]
            del arguments
            for i in done:
                values[i] = None
            for i, result in zip(given, results, strict=True):
                values[i] = result
            # else the last segment's results would live until the next one's are there
            del results
        return [values[i] for i in self._results]  # type: ignore[misc]


def cut(module: fx.GraphModule, cheap: set[fx.Node], lanes: int) -> list[Segment]:
    """Cut a graph at its segment numbers. The graph's own nodes are rewired and copied, and it is used up.

    Args:
        cheap: placeholders that hold keys, steps and rates. What follows from these alone is computed in a segment of
            its own, in front of all others, where it is a number for each lane (a rate that is scheduled, a bias
            correction): within an update the compiler would compute it for every vector of the parameter anew. Where
            it is large (a dropout mask), it is computed again in each segment that uses it, since it takes less to
            draw it twice than to keep it from the forward pass to the backward pass.
        lanes: K.
    """
    graph = module.graph
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    home = {n: n.meta["segment"] for n in nodes}
    written = {n.args[0] for n in nodes if n.target is torch.ops.aten.copy_.default}
    drawn: set[fx.Node] = set()
    for node in nodes:
        if all(a in drawn or a in cheap for a in node.all_input_nodes) and node.op == "call_function":
            drawn.add(node)
    fixed = {n for n in drawn if not n.all_input_nodes}
    front = min(home.values()) - 1
    clock = _clock(nodes, drawn - fixed, cheap | fixed, lanes)
    for node in _merged(nodes, clock):
        clock.remove(node)
        drawn.remove(node)
        nodes.remove(node)
        del home[node]
    for node in clock:
        home[node] = front

    def own(node: fx.Node, segment: int, copies: dict[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
        """The node, or its copy in a segment, if it must not come from outside."""
        if node in copies:
            return copies[node]
        foreign = home.get(node, segment) != segment
        # A view of what an update writes: the compiler could not know that it is the same memory, and would update
        # before the view's last read. Several results of one operation (x.split) are no value that can cross.
        several = isinstance(node.meta.get("val"), tuple | list)
        if not foreign or not (node in again or several or (is_view(node) and _root(node) in written)):
            return node
        arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: own(n, segment, copies, before))
        with graph.inserting_before(before):
            copy = copies[node] = graph.node_copy(node, lambda n: n)
        copy.args, copy.kwargs = arguments, keywords
        home[copy] = segment
        return copy

    again = fixed | {n for n in drawn if _elements(n) > _LARGE * lanes}
    copies: dict[int, dict[fx.Node, fx.Node]] = {}
    for node in nodes:
        mine = copies.setdefault(home[node], {})
        replaced = {n: own(n, home[node], mine, node) for n in node.all_input_nodes}
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), replaced.__getitem__)
    for node in reversed(graph.nodes):
        if node in home and not node.users and node.target is not torch.ops.aten.copy_.default:
            graph.erase_node(node)
    (output,) = (n for n in graph.nodes if n.op == "output")
    parts: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in home:
            parts.setdefault(home[node], []).append(node)
    return [_segment(part, home, output) for _, part in sorted(parts.items())]


def _clock(nodes: Sequence[fx.Node], drawn: set[fx.Node], known: set[fx.Node], lanes: int) -> set[fx.Node]:
    """What is a number for each lane, and can be computed before anything else is.

    Args:
        nodes: of the graph, in their order.
        drawn: those that follow from what is known.
        known: the placeholders and the constants that are.
    """
    found: set[fx.Node] = set()
    written: set[fx.Node] = set()
    for node in nodes:
        if node.target is torch.ops.aten.copy_.default:
            # whoever reads it from here on sees another value
            written.add(node.args[0])  # type: ignore[arg-type]
        elif (
            node in drawn
            and 0 < _elements(node) <= lanes
            and all((a in found or a in known) and a not in written for a in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _merged(nodes: Sequence[fx.Node], clock: set[fx.Node]) -> list[fx.Node]:
    """Have what is computed of the clock several times be computed once: each parameter's update has its own rates and
    bias corrections. The compiler would merge them within a kernel, but give each of them memory of its own.

    Args:
        nodes: of the graph, in their order.
        clock: see `_clock`.

    Returns:
        Those that are no longer in the graph.
    """
    kept: dict[str, fx.Node] = {}
    gone = []
    for node in nodes:
        if node in clock:
            same = kept.setdefault(_spelled(node, clock), node)
            if same is not node:
                node.replace_all_uses_with(same)
                node.graph.erase_node(node)
                gone.append(node)
    return gone


def _spelled(node: fx.Node, clock: set[fx.Node]) -> str:
    """What a node computes, in words: of others it is named by name, of constants by what they are."""

    def spell(other: fx.Node) -> str:
        named = other in clock or other.op == "placeholder"
        return f"%{other.name}" if named else _spelled(other, clock)

    return f"{node.target} {fx.map_arg((node.args, node.kwargs), spell)!r}"


def _segment(nodes: Sequence[fx.Node], home: dict[fx.Node, int], output: fx.Node) -> Segment:
    here = home[nodes[0]]
    inputs = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if home.get(a) != here)
    outputs = [n for n in nodes if any(u is output or home[u] != here for u in n.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input_{i}")
        copies[node].meta = {"val": node.meta["val"]}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output([copies[n] for n in outputs])
    return Segment(fx.GraphModule(nn.Module(), graph), tuple(inputs), tuple(outputs))


def _root(node: fx.Node) -> fx.Node:
    """What a view is a view of, in the end."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return math.prod(value.shape) if isinstance(value, Tensor) else 0
