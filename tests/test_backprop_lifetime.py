"""How long graphs, gradients and hooks live under `coalesce.BackProp`.

Oracle: weak references to what must be gone, without a collection of cycles; torch's own account of live tensors; a
process's memory.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from backprop_helpers import FEATURES, X, Y, adam, assert_same_weights, network, sgd, train


@pytest.fixture(autouse=True)
def _without_collections() -> Iterator[None]:
    """What is not freed by counting references is not freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Wide(nn.Module):
    """Its graph keeps 4 MB; each of them is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.kept: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        wide = (x * self.w).expand(1000, 1000).exp()
        self.kept.append(weakref.ref(wide.untyped_storage()))
        return wide.mean()

    def alive(self) -> int:
        return sum(one() is not None for one in self.kept)


def wide() -> tuple[Wide, nn.Module, torch.optim.Optimizer]:
    plain = Wide()
    model, optimizer = coalesce.BackProp(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    return plain, model, optimizer


ONE = torch.ones(())


def test_an_output_that_is_dropped_frees_its_graph() -> None:
    plain, model, _ = wide()
    output = model(ONE)
    assert plain.alive() == 1
    del output
    assert plain.alive() == 0


def test_a_loss_keeps_the_graph_and_a_step_frees_it() -> None:
    plain, model, optimizer = wide()
    loss = model(ONE).square()
    assert plain.alive() == 1
    loss.backward()
    assert plain.alive() == 1
    optimizer.step()
    # a list of losses, which people keep without .item(), keeps no graphs
    assert plain.alive() == 0
    assert loss.requires_grad


def test_the_gradient_alone_keeps_the_graph_until_the_step() -> None:
    plain, model, optimizer = wide()
    model(ONE).square().backward()
    assert plain.alive() == 1
    optimizer.zero_grad()
    assert plain.alive() == 0


def test_micro_batches_do_not_pile_up() -> None:
    plain = Wide()
    model, optimizer = coalesce.BackProp(plain, torch.optim.SGD(plain.parameters(), lr=0.01), accumulate=4)
    for _ in range(4):
        loss = model(ONE)
        assert plain.alive() == 1
        loss.backward()
    optimizer.step()
    assert plain.alive() == 0


@pytest.mark.parametrize("train_mode", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_1000_forwards_of_evaluation_leave_nothing(grad: bool, train_mode: bool) -> None:
    torch.set_num_threads(1)
    twin = network()
    model, optimizer = coalesce.BackProp(twin, adam(twin))
    train(model, optimizer, 2)
    model.train(train_mode)

    def tensors() -> int:
        return sum(issubclass(type(entry), Tensor) for entry in gc.get_objects())

    def resident() -> int:
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else ["VmRSS: 0"]
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    batch = torch.randn(2000, FEATURES)
    with torch.set_grad_enabled(grad):
        for _ in range(20):
            model(batch)
        before, memory = tensors(), resident()
        for _ in range(1000):
            model(batch)
    assert tensors() == before
    # one graph of this batch keeps about 700 kB; the bound is that of 30 of them
    assert resident() - memory < 20e6
    train(model, optimizer, 2)


def test_evaluation_between_backward_and_step() -> None:
    """Under no_grad or not, it changes nothing, and clipping in the old way still raises."""
    plain, twin = network().eval(), network().eval()
    reference = adam(plain)
    model, optimizer = coalesce.BackProp(twin, adam(twin))
    for _ in range(5):
        F.cross_entropy(plain(X[0]), Y[0]).backward()
        reference.step()
        reference.zero_grad()
        F.cross_entropy(model(X[0]), Y[0]).backward()
        model(X[1])
        with torch.no_grad():
            model(X[1])
        with pytest.raises(RuntimeError, match="does not exist yet"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert_same_weights(model, plain)


def test_when_both_are_gone_the_model_is_plain_again() -> None:
    plain, given = network(), network()
    optimizer = sgd(given)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    model, stepped = coalesce.BackProp(given, optimizer)
    train(model, stepped, 3)
    F.cross_entropy(model(X[0]), Y[0]).backward()  # and no step
    del model, stepped
    assert [p.grad for p in given.parameters()] == [None] * 6
    reference = sgd(plain)
    train(plain, reference, 3)
    for one, step in ((plain, reference), (given, optimizer)):
        train(one, step, 3)
    assert_same_weights(given, plain)
    assert len(seen) == 6
    # and may be given again
    given.zero_grad()
    model, stepped = coalesce.BackProp(given, sgd(given))
    train(model, stepped, 1)


def test_an_error_in_the_middle_of_a_walk_leaves_no_gradients() -> None:
    plain, model, optimizer = wide()

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError("mine")

    handle = plain.w.register_hook(fail)
    model(ONE).backward()
    with pytest.raises(ZeroDivisionError, match="mine"):
        optimizer.step()
    assert plain.alive() == 0
    assert plain.w.grad is None
    handle.remove()
    model(ONE).backward()
    optimizer.step()
    assert plain.w.item() < 1


class Failing(torch.optim.SGD):
    """Its update of one parameter fails as often as it is told to."""

    def __init__(self, model: nn.Module, name: str):
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.fails, self.left = model.get_parameter(name), [0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (parameter,) = (p for group in self.param_groups for p in group["params"])
        if parameter is self.fails and self.left[0]:
            self.left[0] -= 1
            raise ZeroDivisionError("mine")
        super().step()


@pytest.mark.parametrize("options", [{}, {"clip_norm": math.inf}, {"accumulate": 2}], ids=str)
def test_an_update_that_fails_half_way_says_so_and_the_saved_state_goes_on(options: dict[str, Any]) -> None:
    given, plain = network(), network()
    model, optimizer = coalesce.BackProp(given, failing := Failing(given, "3.weight"), **options)
    parts = options.get("accumulate", 1)
    reference = sgd(plain)
    train(model, optimizer, 2, accumulate=parts)
    train(plain, reference, 2, accumulate=parts)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    failing.left[0] = 1
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        train(model, optimizer, 1, accumulate=parts)
    (note,) = caught.value.__notes__
    assert "some parameters may be updated, others not" in note
    assert "Load the last saved state to go on" in note
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, saved[0][name])}
    # from the last layer to the first, or, clipped, in the model's order
    assert moved == ({"0.weight", "0.bias"} if options == {"clip_norm": math.inf} else {"5.weight", "5.bias", "3.bias"})
    assert all(parameter.grad is None for parameter in given.parameters())
    # not even the gradients are left to step on
    with pytest.raises(RuntimeError, match="without a gradient"):
        optimizer.step()

    # the way out
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert train(model, optimizer, 5, accumulate=parts) == train(plain, reference, 5, accumulate=parts)
    assert_same_weights(model, plain)


def test_what_fails_before_the_first_update_leaves_nothing_half_done() -> None:
    """Nothing is said of a step half way where no step has begun."""
    given = network()
    _, optimizer = coalesce.BackProp(given, sgd(given))
    with pytest.raises(RuntimeError, match="without a gradient") as caught:
        optimizer.step()
    assert not hasattr(caught.value, "__notes__")


def test_copies_and_pickles_are_refused_with_the_way_out() -> None:
    given = network()
    model, optimizer = coalesce.BackProp(given, adam(given))
    for copied in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"model\.state_dict\(\)"):
            copied(model)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"optimizer\.state_dict\(\)"):
            copied(optimizer)
    # the way out
    twin = copy.deepcopy(model)
    assert type(twin) is nn.Sequential
    train(twin, adam(twin), 2)
    assert twin(X[0]).sum() != given(X[0]).sum()
