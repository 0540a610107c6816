"""Twins for the tests of `coalesce.compile_step`: one trains in a plain loop, one by compiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce

Make = Callable[[nn.Module], torch.optim.Optimizer]

#: Both compute in float64 and in another order of operations; 200 steps let the last bits grow (law 2).
TOLERANCE = 1e-10

_stream = torch.Generator().manual_seed(11)
BATCHES = [
    (torch.randn(17, 10, generator=_stream).double(), torch.randint(3, (17,), generator=_stream)) for _ in range(4)
]


def network() -> Any:
    """Always the same weights. No bias in front of the BatchNorm: its gradient is noise (law 2)."""
    torch.manual_seed(3)
    layers = nn.Linear(10, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def two_groups(model: nn.Module, **other: Any) -> list[dict[str, Any]]:
    """Matrices with settings of their own, and the rest."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "lr": 0.02, "weight_decay": 0.1, **other},
        {"params": [p for p in parameters if p.ndim < 2], "lr": 0.01},
    ]


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, loss_fn: Any = cross_entropy, after: Any = None
) -> list[float]:
    """The loop that everybody writes, and its losses."""
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model, BATCHES[i % len(BATCHES)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if after is not None:
            after()
    return losses


def compiled(step: Any, steps: int, after: Any = None) -> list[float]:
    """The same by compiled steps."""
    losses = []
    for i in range(steps):
        losses.append(step(BATCHES[i % len(BATCHES)]).item())
        if after is not None:
            after()
    return losses


def assert_same_weights(one: nn.Module, other: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Buffers too."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=tolerance)


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """The very entries of each other's `state_dict`, to `TOLERANCE` of the entry's size."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, slots in ours["state"].items():
        assert slots.keys() == theirs["state"][index].keys()
        for name, value in slots.items():
            same = theirs["state"][index][name]
            torch.testing.assert_close(value.double(), same.double(), rtol=TOLERANCE, atol=TOLERANCE)


def assert_trains_alike(
    make: Make, steps: int = 20, build: Callable[[], nn.Module] = network, loss_fn: Any = cross_entropy, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Some steps beside a plain loop: losses, weights, buffers and the optimiser's state.

    Returns:
        The model, the optimiser and the step.
    """
    model, twin = build(), build()
    optimizer, ours = make(model), make(twin)
    start = [p.detach().clone() for p in model.parameters()]
    step = coalesce.compile_step(twin, loss_fn, ours, **{"compile": False, **options})
    torch.testing.assert_close(
        compiled(step, steps), plain(model, optimizer, steps, loss_fn), rtol=TOLERANCE, atol=TOLERANCE
    )
    assert_same_weights(twin, model)
    assert_same_state(ours, optimizer)
    assert any(not torch.equal(p, q) for p, q in zip(twin.parameters(), start, strict=True))
    return twin, ours, step
