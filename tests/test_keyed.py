"""Draws as one operation of a trace. Oracle: a trace in which their chains are recorded one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.func import grad, vmap

from coalesce.engine import keyed
from coalesce.engine.trace import cut_here, label, latest, trace
from coalesce.random import Purpose, bits, key_of

KEYS = torch.stack([key_of(seed) for seed in (0, 2**40 + 3, 7)])
STEPS = torch.tensor([0, 5, 2**31])


def call() -> Tensor:
    """As a rule makes it, in the trace."""
    return torch.tensor(3)


def masked(key: Tensor, step: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        since = latest()
        kept = keyed.bits(key, step, call(), 7) > 2**31
        cut_here()
        value = (x * kept).square().sum()
        label(since, forward=True, region=2)
        return value

    return grad(loss)(torch.ones(7))


def written(key: Tensor, step: Tensor) -> Tensor:
    """What writes is traced twice."""
    words = keyed.bits(key, step, call(), 6)
    total = torch.zeros_like(words)
    total[1:] = words[:-1]
    return total


#: What is drawn, of one lane's key and step, and what it equals.
DRAWS: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "bits": (
        lambda key, step: keyed.bits(key, step, call(), 9),
        lambda key, step: bits(key, Purpose.DRAW, step, call(), 9),
    ),
    "a step that all lanes share": (
        lambda key, step: keyed.bits(key, torch.tensor(4), call(), 2),
        lambda key, step: bits(key, Purpose.DRAW, torch.tensor(4), call(), 2),
    ),
    "within a second vmap": (
        lambda key, step: vmap(lambda s: keyed.bits(key, s, call(), 3))(step + torch.arange(4)),
        lambda key, step: vmap(lambda s: bits(key, Purpose.DRAW, s, call(), 3))(step + torch.arange(4)),
    ),
    "under a gradient": (masked, None),
    "where something writes": (written, None),
}


def rows(module: fx.GraphModule) -> list[Any]:
    """Operations, wiring, marks and looks of a trace."""
    place = {node: number for number, node in enumerate(module.graph.nodes)}
    found = []
    for node in module.graph.nodes:
        wiring = fx.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}")
        marks = {name: node.meta.get(name) for name in ("segment", "forward", "region")}
        value = node.meta.get("val")
        look = (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else None
        found.append((node.op, "" if node.op == "placeholder" else str(node.target), repr(wiring), marks, look))
    return found


@pytest.mark.parametrize("lanes", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_a_trace_is_the_one_of_the_chains(name: str, lanes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, plain = DRAWS[name]
    function = vmap(draw) if lanes else draw
    given = (KEYS, STEPS) if lanes else (KEYS[1], STEPS[1])
    traced = trace(lambda *inputs: [function(*inputs)], given)
    assert not any("coalesce" in str(node.target) for node in traced.graph.nodes)
    (found,) = traced(*given)
    with torch.no_grad():
        assert torch.equal(found, function(*given)), "outside of a trace"
    if plain is not None:
        assert torch.equal(found, (vmap(plain) if lanes else plain)(*given))

    monkeypatch.setattr(keyed, "get_proxy_mode", lambda: None)
    expected = trace(lambda *inputs: [function(*inputs)], given)
    if name in ("a step that all lanes share", "within a second vmap"):
        # the step is spread over the lanes before: other operations, the same numbers
        (other,) = expected(*given)
        assert torch.equal(found, other)
    else:
        assert rows(traced) == rows(expected)


def test_chains_are_traced_once() -> None:
    def two(keys: Tensor, steps: Tensor) -> list[Tensor]:
        return [vmap(lambda key, step: keyed.bits(key, step, call(), 11))(keys, steps + n) for n in range(2)]

    before = keyed._traced.cache_info()
    trace(two, (KEYS, STEPS))
    trace(two, (KEYS, STEPS))
    after = keyed._traced.cache_info()
    assert after.misses - before.misses == 1
    assert after.hits - before.hits == 3


def test_operations_compute_outside_of_a_trace() -> None:
    """As torch's own interpreters call them."""
    operation = torch.ops.coalesce.words.default
    found = operation(KEYS, STEPS, call(), 6)
    expected = vmap(lambda key, step: bits(key, Purpose.DRAW, step, call(), 6))(KEYS, STEPS)
    assert torch.equal(found, expected)
    assert torch.equal(operation(KEYS[0], STEPS[0], call(), 6), found[0])
