"""Computing again instead of keeping: the backward pass takes its own copy of a region of the forward pass.

What is kept of a region are the values that enter it, and those that other parts of the forward pass read. The copy
stands in front of the first operation that needs any of it, and so in the segment of the region's backward pass. It is
made before the updates find their places: it reads parameters, and an update comes after every read.

A copy gives the same bits, run operation by operation: a trace holds no operation that writes, and draws are keyed, so
that a dropout mask that is drawn again is the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from coalesce.engine.trace import is_view


def recompute(graph: fx.Graph) -> None:
    """Let the backward pass compute the labelled regions of a graph again.

    Args:
        graph: a traced step whose nodes are labelled, "forward" and by "region" (see `trace.label`); its constants are
            placeholders.
    """
    regions: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        # constants, which were traced in a region, are inputs by now
        if "region" in node.meta and node.op == "call_function":
            regions.setdefault(node.meta["region"], []).append(node)
    wanted = {number: _wanted(nodes) for number, nodes in regions.items()}
    for number, users in _runs(graph, wanted):
        read = [n for n in wanted[number] if any(u in users for u in n.users)]
        _copy(graph, _closure(regions[number], read, wanted), users)


def _copy(graph: fx.Graph, nodes: Sequence[fx.Node], users: Sequence[fx.Node]) -> None:
    """Compute some nodes again in front of the first of their users, for all of these."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        with graph.inserting_before(users[0]):
            copy = graph.node_copy(node, lambda n: copies.get(n, n))
        copy.meta = {"val": node.meta["val"], "segment": users[0].meta["segment"]}
        copies[node] = copy
    for user in users:
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: copies.get(n, n))


def _wanted(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The nodes of a region that need not be kept: the backward pass and the region itself alone read them."""
    inside = set(nodes)
    kept = {n for n in nodes if any(u.op == "output" or (u not in inside and "forward" in u.meta) for u in n.users)}
    for node in reversed(nodes):
        if node in kept and is_view(node):
            # the same memory
            kept.add(node.args[0])  # type: ignore[arg-type]
    return dict.fromkeys(n for n in nodes if n not in kept)


def _runs(graph: fx.Graph, wanted: dict[int, dict[fx.Node, None]]) -> Iterator[tuple[int, list[fx.Node]]]:
    """For each region the operations of the backward pass that read it, in runs that no other region's interrupt.

    The usual region has one. Where a loss reads every block (a sum of squared activations), the backward pass visits
    all of them first: each visit has a copy of its own, or all of them would be alive from then on.
    """
    found: list[tuple[int, list[fx.Node]]] = []
    for node in graph.nodes:
        if "forward" in node.meta or node.op == "output":
            continue
        read = dict.fromkeys(
            a.meta["region"] for a in node.all_input_nodes if a in wanted.get(a.meta.get("region", -1), {})
        )
        for number in read:
            if found and found[-1][0] == number:
                found[-1][1].append(node)
            else:
                found.append((number, [node]))
    yield from found


def _closure(
    region: Sequence[fx.Node], nodes: Sequence[fx.Node], wanted: dict[int, dict[fx.Node, None]]
) -> list[fx.Node]:
    """Some nodes of a region and what they need of it that is not kept, in order."""
    needed, inside = set(nodes), set(region)
    for node in reversed(region):
        if node in needed:
            mine = wanted[node.meta["region"]]
            needed |= {a for a in node.all_input_nodes if a in inside and a in mine}
    return [n for n in region if n in needed]
