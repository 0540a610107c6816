"""`coalesce.compile_step` for what models and loss functions do.

Oracle: a plain loop with `torch.optim`, in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import coalesce
from compile_step_helpers import (
    BATCHES,
    TOLERANCE,
    assert_same_state,
    assert_same_weights,
    assert_trains_alike,
    compiled,
    cross_entropy,
    network,
    plain,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


class Odd(nn.Module):
    """Tied, frozen and unused weights; a buffer that counts, one that nothing writes, one that is not saved."""

    calls: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(10, 10)
        self.tied = nn.Linear(10, 10)
        self.tied.weight = self.first.weight
        self.listed = [self.tied.weight]
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.last = nn.Linear(10, 3)
        self.unused = nn.Linear(10, 3)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scale", torch.full((10,), 1.5), persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.tanh(self.first(x)) * self.scale
        x = self.frozen(torch.tanh(self.tied(x)))
        return self.last(x) + 0.01 * self.listed[0].square().sum()


def test_tied_frozen_and_unused_parameters_and_buffers() -> None:
    model, optimizer, _ = assert_trains_alike(adamw, build=Odd)
    assert isinstance(model, Odd)
    assert model.tied.weight is model.first.weight
    assert model.calls == 20
    assert model.unused.weight not in optimizer.state
    assert model.frozen.weight not in optimizer.state


def test_thawing() -> None:
    """requires_grad is as it stands at the call."""
    model, twin = network(), network()
    optimizer, ours = adamw(model), adamw(twin)
    step = coalesce.compile_step(twin, cross_entropy, ours, compile=False)
    for frozen in (True, False, True):
        for one in (model, twin):
            one[0].requires_grad_(not frozen)
        plain(model, optimizer, 3)
        compiled(step, 3)
    assert step.graphs == 2
    assert_same_weights(twin, model)


def test_gradients_of_the_user_stay_as_they_are() -> None:
    model = network()
    step = coalesce.compile_step(model, cross_entropy, adamw(model), compile=False)
    model[0].weight.grad = mine = torch.ones_like(model[0].weight)
    compiled(step, 2)
    assert model[0].weight.grad is mine
    assert mine.eq(1).all()
    assert model[3].weight.grad is None


def test_the_models_mode_is_that_of_the_call() -> None:
    """In evaluation BatchNorm's statistics stand still; an evaluation between two steps changes no graph."""
    model, twin = network(), network()
    optimizer, ours = adamw(model), adamw(twin)
    step = coalesce.compile_step(twin, cross_entropy, ours, compile=False)
    for training in (True, False, True):
        model.train(training)
        twin.train(training)
        plain(model, optimizer, 3)
        compiled(step, 3)
        assert twin.training is training
        twin.eval()(BATCHES[0][0])
    assert step.graphs == 2
    assert_same_weights(twin, model)


def test_two_shapes_of_batch() -> None:
    """The short one at the end of an epoch; the two graphs share weights, state and steps done."""
    x, y = BATCHES[0]
    for make in (adamw, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)):
        model, twin = network(), network()
        optimizer, ours = make(model), make(twin)
        step = coalesce.compile_step(twin, cross_entropy, ours, compile=False)
        for i in range(12):
            batch = (x[:5], y[:5]) if i % 3 == 2 else (x, y)
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            optimizer.step()
            assert step(batch).item() == pytest.approx(loss.item(), abs=TOLERANCE)
        assert step.graphs == 2
        assert_same_weights(twin, model)
        assert_same_state(ours, optimizer)


def test_batches_of_any_structure_and_scalars_beside_the_loss() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        scores = model(batch["x"][0]) * batch["temperature"]
        loss = F.cross_entropy(scores, batch["y"])
        return loss, {"accuracy": (scores.argmax(1) == batch["y"]).double().mean(), "weight": model[3].bias[0]}

    model, twin = network(), network()
    optimizer = adamw(model)
    step = coalesce.compile_step(twin, loss_fn, adamw(twin), compile=False)
    for i in range(8):
        x, y = BATCHES[i % 4]
        # slices of other strides are the same graph
        batch = {"x": [torch.stack([x, x], 2)[:, :, 0]], "y": y, "temperature": torch.tensor(1.0 + i).double()}
        optimizer.zero_grad()
        expected, scalars = loss_fn(model, batch)
        # the weight as the loss saw it, not as the update leaves it
        scalars = {name: value.item() for name, value in scalars.items()}
        expected.backward()
        optimizer.step()
        loss, found = step(batch)
        assert not loss.requires_grad
        assert loss.shape == ()
        assert loss.item() == pytest.approx(expected.item(), abs=TOLERANCE)
        assert {n: v.item() for n, v in found.items()} == pytest.approx(scalars, abs=TOLERANCE)
    assert step.graphs == 1


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_dropout_follows_the_seed_alone() -> None:
    """And a run that is interrupted goes on with the stream by `count`."""

    def run(seed: int, stop: int = 8) -> list[float]:
        model = Noisy()
        optimizer = adamw(model)
        step = coalesce.compile_step(model, cross_entropy, optimizer, seed=seed, compile=False)
        losses = compiled(step, stop)
        if stop < 8:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = Noisy()
            optimizer = adamw(model)
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            step = coalesce.compile_step(model, cross_entropy, optimizer, seed=seed, compile=False)
            step.count = stop
            losses += compiled(step, 8 - stop)
        return losses

    first = run(1)
    torch.rand(5)
    assert run(1) == first == run(1, stop=4)
    assert run(2) != first


def test_dropout_drops_its_share() -> None:
    """Every call another mask, each entry with probability p."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
            self.drop = nn.Dropout(0.25)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x) * self.w

    def loss_fn(model: Any, batch: Tensor) -> Any:
        out = model(batch)
        return out.mean(), {"kept": (out != 0).float().mean(), "first": out[0, 0]}

    model = Shares()
    step = coalesce.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), compile=False)
    found = [step(torch.ones(100, 100))[1] for _ in range(20)]
    shares = torch.stack([f["kept"] for f in found])
    # 10^4 entries each: a deviation of 0.0043; six of them
    assert (shares - 0.75).abs().max() < 0.026
    assert len({f["first"].item() for f in found}) == 2
    model.eval()
    assert step(torch.ones(100, 100))[1]["kept"] == 1.0


def test_numbers_that_change_in_attributes_and_closures() -> None:
    """Baked into the graph, and so another one."""
    weight = 1.0

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return weight * cross_entropy(model, batch) + model.penalty * model[0].weight.square().sum()

    model, twin = network(), network()
    optimizer, ours = adamw(model), adamw(twin)
    model.penalty = twin.penalty = 0.1
    step = coalesce.compile_step(twin, loss_fn, ours, compile=False)
    for penalty, weight in ((0.1, 1.0), (0.3, 1.0), (0.3, 0.5), (0.1, 1.0)):  # noqa: B007
        model.penalty = twin.penalty = penalty
        plain(model, optimizer, 2, loss_fn)
        compiled(step, 2)
    assert step.graphs == 3
    assert_same_weights(twin, model)


def test_tensors_in_attributes_and_closures() -> None:
    """Changed in place, or replaced by others: both are seen."""
    classes = torch.ones(3).double()
    teacher = network()

    def loss_fn(model: Any, batch: Any) -> Tensor:
        x, y = batch
        scores = model(x)
        return F.cross_entropy(scores, y, weight=classes) + (scores - teacher(x)).square().mean()

    teacher.eval()
    model, twin = network(), network()
    optimizer, ours = adamw(model), adamw(twin)
    step = coalesce.compile_step(twin, loss_fn, ours, compile=False)
    for round_ in range(3):
        plain(model, optimizer, 2, loss_fn)
        compiled(step, 2)
        if round_ == 0:
            classes[1] = 3.0
            with torch.no_grad():
                teacher[3].weight.mul_(2.0)
        else:
            classes = torch.tensor([0.5, 1.0, 2.0]).double()
    assert_same_weights(twin, model)
    assert all(p.grad is None for p in twin.parameters())


def test_moving_the_model_and_new_memory() -> None:
    """`.data` of another tensor is taken up; `.float()` makes another graph, once the state is brought behind."""
    model, twin = network(), network()
    optimizer, ours = adamw(model), adamw(twin)
    step = coalesce.compile_step(twin, cross_entropy, ours, compile=False)
    plain(model, optimizer, 3)
    compiled(step, 3)
    twin[3].weight.data = twin[3].weight.data.clone()
    twin[1].running_mean = twin[1].running_mean.clone()
    plain(model, optimizer, 3)
    compiled(step, 3)
    assert step.graphs == 1
    assert_same_weights(twin, model)

    for one, its in ((model, optimizer), (twin, ours)):
        one.float()
        its.load_state_dict(its.state_dict())
    for i in range(3):
        batch = BATCHES[i][0].float(), BATCHES[i][1]
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
        step(batch)
    assert twin[0].weight.dtype == torch.float32
    # float32, three steps of size 0.01 or less
    assert_same_weights(twin, model, 1e-5)


def test_a_weight_that_is_turned_round_in_its_place() -> None:
    """A square one: the same memory and the same shape."""

    def square() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 10, bias=False), nn.Tanh(), nn.Linear(10, 3)).double()

    model, twin = square(), square()
    optimizer, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    step = coalesce.compile_step(twin, cross_entropy, ours, compile=False)
    for _ in range(3):
        plain(model, optimizer, 2)
        compiled(step, 2)
        for linear in (model[0], twin[0]):
            assert isinstance(linear, nn.Linear)
            linear.weight.data = linear.weight.data.t()
    assert_same_weights(twin, model)


def test_autocast_around_the_call() -> None:
    model, twin = network().float(), network().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = coalesce.compile_step(twin, cross_entropy, torch.optim.SGD(twin.parameters(), lr=0.1), compile=False)
    batch = BATCHES[0][0].float(), BATCHES[0][1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model, batch)
    loss.backward()
    optimizer.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = step(batch)
    assert found.dtype == loss.dtype
    # bfloat16 has 8 bits
    torch.testing.assert_close(found, loss.detach(), rtol=0.01, atol=0)
    with torch.no_grad():
        exact = cross_entropy(network().float(), batch)
    assert found != exact
    assert_same_weights(twin, model, 2e-3)
    step(batch)
    assert step.graphs == 2


def test_what_forward_leaves_in_attributes_is_no_tracer() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.inner(x)
            return self.last

    model = Keeps()
    compiled(coalesce.compile_step(model, cross_entropy, adamw(model), compile=False), 1)
    assert type(model.last) is Tensor
    assert model.last.sum().isfinite()


class Checkpointed(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpoints() -> None:
    """What is computed again has the same masks; the user's own checkpoints, too."""
    losses = []
    for kind, again in ((Noisy, None), (Noisy, ["inner"]), (Checkpointed, None)):
        model = kind()
        step = coalesce.compile_step(model, cross_entropy, adamw(model), compile=False, checkpoint=again)
        losses.append(compiled(step, 6))
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.thorough
def test_compiled_with_shared_segments() -> None:
    """Blocks of one kind share code; buffers, dropout, clipping and tied weights across the cuts."""

    class Blocks(nn.Module):
        first: Any

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            block = [
                nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.GELU(), nn.Linear(20, 10)) for _ in range(3)
            ]
            self.blocks = nn.Sequential(*block).double()
            self.first = block[0][0]
            self.head = nn.Linear(10, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.blocks(x)) + self.first.weight.sum()

    def make(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    # biases in front of the BatchNorm have no gradient in mathematics, and SGD leaves what noise there is alone
    assert_trains_alike(make, 200, Blocks, compile=True)
