"""Twins for the tests of `coalesce.BackProp`: one trains in a plain loop with `torch.optim`, one under `BackProp`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce

Make = Callable[[nn.Module], torch.optim.Optimizer]
Schedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

SAMPLES, FEATURES, CLASSES = 17, 10, 3
_stream = torch.Generator().manual_seed(11)
X = torch.randn(4, SAMPLES, FEATURES, generator=_stream)
Y = torch.randint(CLASSES, (4, SAMPLES), generator=_stream)


def network() -> nn.Sequential:
    """Always the same weights; dropout, so that the order of draws shows."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    )


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices at a rate of their own, and the rest."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "lr": 0.02},
        {"params": [p for p in parameters if p.ndim < 2]},
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 50,
    schedule: Schedule | None = None,
    accumulate: int = 1,
    clip: Callable[[], Any] | None = None,
    seed: int = 5,
) -> list[float]:
    """The loop that everybody writes, and its losses.

    Args:
        clip: what a plain loop does to the gradients before the step.
    """
    torch.set_num_threads(1)  # several would only wait for each other
    torch.manual_seed(seed)
    scheduler = schedule(optimizer) if schedule else None
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            loss = F.cross_entropy(model(X[part]), Y[part]) / accumulate
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            clip()
        optimizer.step()
        if scheduler:
            scheduler.step()
    return losses


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    """Bit for bit, buffers too."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """`state_dict`s alike, bit for bit, but for the two switches that BackProp turns off."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for group, same in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert group == same
    assert ours["state"].keys() == theirs["state"].keys()
    for index, slots in ours["state"].items():
        assert slots.keys() == theirs["state"][index].keys()
        for name, value in slots.items():
            same = theirs["state"][index][name]
            assert torch.equal(value, same) if isinstance(value, Tensor) else value == same, (index, name)


def assert_trains_alike(make: Make, build: Callable[[], nn.Module] = network, **how: Any) -> None:
    """50 steps beside a plain loop: losses, weights, buffers and the optimiser's state are the same bits.

    Args:
        how: for `train`; ``options`` go to BackProp, ``clip`` is called with the plain model.
    """
    options, clip = how.pop("options", {}), how.pop("clip", None)
    plain, twin = build(), build()
    optimizer, stepped = make(plain), make(twin)
    start = [p.detach().clone() for p in plain.parameters()]
    model, stepped = coalesce.BackProp(twin, stepped, **options)
    expected = train(plain, optimizer, clip=clip and (lambda: clip(plain)), **how)
    assert train(model, stepped, **how) == expected
    assert_same_weights(model, plain)
    assert_same_state(stepped, optimizer)
    assert any(not torch.equal(p, q) for p, q in zip(plain.parameters(), start, strict=True))


def watch(model: nn.Module) -> list[int]:
    """How many earlier gradients there still are, noted whenever one is born: as attributes, and as memory."""
    born: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def note(gradient: Tensor) -> None:
        alive.append(sum(parameter.grad is not None for parameter in model.parameters()))
        alive.append(sum(one() is not None for one in born))
        # the memory's, not the tensor's, which may be handed on as another one over the same memory
        born.append(weakref.ref((gradient._values() if gradient.is_sparse else gradient).untyped_storage()))

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(note)
    return alive
