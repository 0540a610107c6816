"""Models, losses and schedules under `coalesce.BackProp`.

Oracle: the plain loop with `torch.optim`, 50 steps, bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import coalesce
from backprop_helpers import (
    CLASSES,
    FEATURES,
    X,
    Y,
    assert_same_state,
    assert_same_weights,
    assert_trains_alike,
    network,
    sgd,
    train,
    watch,
)
from thorough import kept


class Tied(nn.Module):
    """One matrix three times: twice as a layer, and transposed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return (torch.tanh(x) @ self.first.weight)[:, :CLASSES]


class Checkpointed(nn.Module):
    """Its pieces are computed again on the way back; one shares a weight with the other."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def piece(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.shared(x)), 0.2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.piece, x, use_reentrant=False)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x[..., None])[0][:, -1])


class Derivative(nn.Module):
    """Takes a derivative with respect to its input on the way, as networks that solve differential equations do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        value = self.inner(x)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return torch.cat([value, slope[:, : CLASSES - 1]], 1)


def normed(affine: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)),
        nn.Conv1d(1, 4, 3),
        nn.GELU(),
        nn.AvgPool1d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 16, batch_first=True)
    return nn.Sequential(nn.Unflatten(0, (1, -1)), layer, nn.Flatten(0, 1), nn.Linear(FEATURES, CLASSES))


def frozen() -> nn.Sequential:
    model = network()
    model[0].requires_grad_(False)
    return model


def unused() -> nn.Module:
    model = network()
    model.spare = nn.Linear(3, 3)  # in the optimiser, in no forward pass
    return model


def parametrised() -> nn.Module:
    model = network()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[3])
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "checkpointed": Checkpointed,
    "recurrent": Recurrent,
    "normed": normed,
    "convolutions": convolutions,
    "derivative": Derivative,
    "transformer": transformer,
    "frozen": frozen,
    "unused": unused,
    "parametrised": parametrised,
    "one layer": lambda: nn.Linear(FEATURES, CLASSES),
    "normed, in evaluation": lambda: normed().eval(),
}


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def again() -> nn.Module:
        torch.set_num_threads(1)
        torch.manual_seed(7)
        return build()

    return again


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


#: Models whose gradients come in ways of their own: accumulating and clipping are tried on these.
TRIED = ("transformer", "derivative", "unused")


@pytest.mark.parametrize(
    ("name", "options"),
    kept(
        itertools.product(MODELS, [{}, {"accumulate": 3}, {"clip_norm": 0.3}]),
        of=[
            *((name, {}) for name in MODELS),
            *itertools.product(TRIED, [{"accumulate": 3}, {"clip_norm": 0.3}]),
        ],
    ),
    ids=str,
)
def test_models(name: str, options: dict[str, Any]) -> None:

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])

    how = {"accumulate": options.get("accumulate", 1), "clip": clip if "clip_norm" in options else None}
    assert_trains_alike(adamw, seeded(MODELS[name]), options=options, **how)


def test_freezing_and_thawing_in_the_middle() -> None:
    """Frozen from the start, thawed, frozen again: as in a plain loop, moments and decay too."""
    plain, twin = frozen(), frozen()
    reference = adamw(plain)
    model, stepped = coalesce.BackProp(twin, adamw(twin))
    for one, step in ((plain, reference), (model, stepped)):
        for seed, trained in enumerate([(3,), (0, 3), (0,), (0, 3)]):
            for layer in (0, 3):
                one[layer].requires_grad_(layer in trained)
            before = one.get_parameter("0.weight").clone()
            train(one, step, 5, seed=seed)
            assert torch.equal(before, one.get_parameter("0.weight")) is (0 not in trained)
    assert_same_weights(model, plain)
    assert_same_state(stepped, reference)


def test_a_group_that_is_added_later() -> None:
    plain, twin = network(), network()
    pairs: list[tuple[nn.Sequential, torch.optim.Optimizer]] = []
    for one in (plain, twin):
        one[5].requires_grad_(False)
        pairs.append((one, torch.optim.Adam([p for p in one.parameters() if p.requires_grad], lr=0.01)))
    pairs[1] = coalesce.BackProp(*pairs[1])
    for one, step in pairs:
        train(one, step, 5)
        one[5].requires_grad_(True)
        one.more = nn.Parameter(torch.ones(CLASSES))
        one.register_forward_hook(lambda module, _, output: output * module.more)
        step.add_param_group({"params": [*one[5].parameters(), one.more], "lr": 0.1})
        alive = watch(one)
        train(one, step, 5)
    assert max(alive) == 0, "a gradient of the new group outlives its birth"
    assert plain.get_parameter("more")[0] != 1
    assert_same_weights(twin, plain)
    assert_same_state(pairs[1][1], pairs[0][1])


def test_a_gradient_that_is_used_twice_and_a_batch_without_some_layer() -> None:
    """Accumulation where the last micro-batch leaves out a layer: what earlier ones gave it still counts."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))
            self.turn: Iterator[int] = itertools.cycle([0, 1, 1, 2])

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[next(self.turn)](x)

    assert_trains_alike(adamw, Routed, accumulate=3, options={"accumulate": 3})


def test_a_loss_with_weights_of_its_own() -> None:
    """Tensors of the optimiser that are not the model's get their gradient in backward() itself."""

    def run(wrapped: bool, **options: Any) -> tuple[nn.Module, Tensor]:
        model, scale = network(), nn.Parameter(torch.zeros(()))
        optimizer: torch.optim.Optimizer = torch.optim.Adam([*model.parameters(), scale], lr=0.01)
        called = model
        if wrapped:
            called, optimizer = coalesce.BackProp(model, optimizer, **options)
        torch.manual_seed(0)
        for _ in range(20):
            for part in range(2):
                (F.cross_entropy(called(X[part]), Y[part]) * torch.exp(-scale) + scale).backward()
                if not options:
                    break
            optimizer.step()
            optimizer.zero_grad()
        return model, scale

    model, scale = run(wrapped=True)
    plain, reference = run(wrapped=False)
    assert scale.item() == reference.item() != 0
    assert_same_weights(model, plain)
    assert run(wrapped=True, accumulate=2)[1].item() != scale.item()


def test_losses_that_do_what_they_like_with_the_output() -> None:
    """In place, several times, as a view, under autocast; with a hook on it, and its own gradient asked for."""

    def in_place(output: Tensor, y: Tensor) -> Tensor:
        output -= output.detach().max()
        return F.cross_entropy(output.tanh_(), y)

    def several_times(output: Tensor, y: Tensor) -> Tensor:
        (own,) = torch.autograd.grad(output.square().sum(), output, retain_graph=True)
        output.retain_grad()
        output.register_hook(lambda gradient: gradient * 2)
        return F.cross_entropy(output, y) + output[:, 0].square().mean() + (output.T @ own.detach()).mean()

    def summed(output: Tensor, y: Tensor) -> Tensor:
        return output.sum(1).exp().mean()  # its gradient comes expanded, without memory of its own

    for loss in (in_place, several_times, summed):
        for autocast in (False, True):
            plain, twin = network(), network()
            reference = sgd(plain)
            model, stepped = coalesce.BackProp(twin, sgd(twin))
            for one, step in ((plain, reference), (model, stepped)):
                torch.manual_seed(1)
                for _ in range(10):
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                        value = loss(one(X[0]), Y[0])
                    value.backward()
                    step.step()
                    step.zero_grad()
            assert_same_weights(model, plain)


def test_a_model_that_returns_its_loss() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
            penalty = sum(p.square().sum() for p in self.inner.parameters())
            return F.cross_entropy(self.inner(x), y) + 1e-2 * penalty

    plain, twin = Loss(), Loss()
    reference = sgd(plain)
    model, stepped = coalesce.BackProp(twin, sgd(twin))
    for one, step in ((plain, reference), (model, stepped)):
        torch.manual_seed(1)
        for _ in range(20):
            one(X[0], y=Y[0]).backward()
            step.step()
            step.zero_grad()
    assert_same_weights(model, plain)


def test_lazy_modules_find_their_sizes_under_it() -> None:
    """The parameters are there before they have a shape."""
    plain, twin = lazy(), lazy()
    reference = sgd(plain)
    model, stepped = coalesce.BackProp(twin, sgd(twin))
    for one, step in ((plain, reference), (model, stepped)):
        train(one, step, 5)
    assert_same_weights(model, plain)


class Detached(nn.Module):
    """Reads its last matrix a second time, where it brings it no gradient, and needs it on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        fixed = self.last.weight.detach()
        return self.last(torch.tanh(F.linear(self.first(x), fixed) @ fixed))


def test_a_parameter_that_is_read_past_its_update() -> None:
    twin = Detached()
    model, stepped = coalesce.BackProp(twin, sgd(twin))
    F.cross_entropy(model(X[0]), Y[0]).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        stepped.step()
    assert "clip_norm=math.inf" in caught.value.__notes__[1]
    # the way out
    assert_trains_alike(sgd, seeded(Detached), options={"clip_norm": math.inf})


class Stop(torch.autograd.Function):
    """Passes no gradient on, as a function with a branch that does not depend on its input may do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        return None


def test_no_gradient_is_not_a_gradient_of_zeros() -> None:
    """Nothing may decay."""
    model, stepped = coalesce.BackProp(given := network(), adamw(given))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Stop.apply(model(X[0])).sum().backward()
    stepped.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
