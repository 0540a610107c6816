"""What `coalesce.BackProp` refuses, and what it says then.

Oracle: the plain loop. The way out that a message names is taken; after an error training goes on as in a plain loop.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import coalesce
from backprop_helpers import CLASSES, FEATURES, X, Y, assert_same_weights, network, sgd, train


def wrapped(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network() if model is None else model
    return coalesce.BackProp(model, sgd(model), **options)


def loss(model: nn.Module, part: int = 0) -> Tensor:
    return F.cross_entropy(model(X[part]), Y[part])


# what a loop may get wrong

Misuse = Callable[[nn.Module, torch.optim.Optimizer], Any]


def two_forwards(model: nn.Module, _: Any) -> None:
    (loss(model) + loss(model, 1)).backward()


def l2_before(model: nn.Module, _: Any) -> None:
    (sum(p.square().sum() for p in model.parameters()) + loss(model)).backward()


def l2_behind(model: nn.Module, _: Any) -> None:
    (loss(model) + sum(p.square().sum() for p in model.parameters())).backward()


def twice(model: nn.Module, _: Any) -> None:
    value = loss(model)
    value.backward(retain_graph=True)
    value.backward()


def two_losses(model: nn.Module, _: Any) -> None:
    output = model(X[0])
    output.mean().backward()
    output.square().mean().backward()


def after_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    output = model(X[0])
    output.mean().backward()
    optimizer.step()
    output.square().mean().backward()


def frozen_too_early(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss(model).backward()
    model.get_parameter("0.bias").requires_grad_(False)
    try:
        optimizer.step()
    finally:
        model.requires_grad_(True)


def step_alone(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def two_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss(model).backward()
    optimizer.step()
    optimizer.step()


def step_without_its_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss(model).backward()
    model.zero_grad()
    optimizer.step()


MISUSES: dict[str, tuple[Misuse, type[Exception], str]] = {
    "two forward passes in one loss": (two_forwards, RuntimeError, r"two calls.*one loss.*torch\.cat.*accumulate=2"),
    "a hand-written L2 term": (l2_before, RuntimeError, "depends on a parameter.*weight_decay"),
    "the same, behind the loss": (l2_behind, RuntimeError, "depends on a parameter.*weight_decay"),
    "backward twice": (twice, RuntimeError, r"came twice.*\(first \+ second\)\.backward\(\)"),
    "two losses of one output": (two_losses, RuntimeError, r"came twice.*\(first \+ second\)\.backward\(\)"),
    "backward after the step": (after_the_step, RuntimeError, "graph is gone.*call the model again"),
    "frozen before the step": (frozen_too_early, RuntimeError, r"0\.bias: frozen between backward\(\) and step\(\)"),
    "step without backward": (step_alone, RuntimeError, r"step\(\) without a gradient"),
    "step twice": (two_steps, RuntimeError, r"step\(\) without a gradient"),
    "zero_grad before the step": (step_without_its_gradient, RuntimeError, r"step\(\) without a gradient"),
    "forward in place of a call": (
        lambda model, _: F.cross_entropy(model.forward(X[0]), Y[0]).backward(),
        RuntimeError,
        r"call of model\.forward",
    ),
    "a submodule alone": (
        lambda model, _: model.get_submodule("0")(X[0]).sum().backward(),
        RuntimeError,
        r"\(0\.(weight|bias)\)",
    ),
    "second derivatives": (
        lambda model, _: loss(model).backward(create_graph=True),
        RuntimeError,
        r"create_graph=True.*plain model",
    ),
    "an input that is trained": (
        lambda model, _: model(X[0].clone().requires_grad_()),
        ValueError,
        r"input of shape \(17, 10\) requires grad.*Detach",
    ),
    "a closure": (lambda model, optimizer: optimizer.step(lambda: loss(model).item()), TypeError, r"step\(closure\)"),
    "zeros": (lambda model, optimizer: optimizer.zero_grad(set_to_none=False), ValueError, "set_to_none"),
    "zeros of the model": (lambda model, optimizer: model.zero_grad(set_to_none=False), ValueError, "set_to_none"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_an_error_and_training_goes_on(name: str) -> None:
    """After the error nothing of it is left: five steps more are those of a plain loop."""
    misuse, error, message = MISUSES[name]
    model, optimizer = wrapped(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)))
    with pytest.raises(error, match=message):
        misuse(model, optimizer)
    plain = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    plain.load_state_dict(model.state_dict())
    optimizer.state.clear()
    reference = sgd(plain)
    assert train(model, optimizer, 5) == train(plain, reference, 5)
    assert_same_weights(model, plain)


def test_both_forward_passes_before_both_backward_passes() -> None:
    plain, twin = network(), network()
    reference = sgd(plain)
    model, optimizer = wrapped(twin, accumulate=2)
    for one, step in ((plain, reference), (model, optimizer)):
        torch.manual_seed(1)
        for _ in range(5):
            losses = [loss(one, part) for part in range(2)]
            for value in losses:
                value.backward()
            step.step()
            step.zero_grad()
    assert_same_weights(model, plain)


def test_a_state_loaded_into_the_plain_optimizer_holds() -> None:
    """It has new groups; a rate set in them afterwards steers the step."""
    plain, twin = network(), network()
    reference, given = sgd(plain), sgd(twin)
    model, optimizer = coalesce.BackProp(twin, given)
    for one, step, loading in ((plain, reference, reference), (model, optimizer, given)):
        train(one, step, 2)
        loading.load_state_dict(loading.state_dict())
        step.param_groups[0]["lr"] = 0.01
        train(one, step, 2)
    assert_same_weights(model, plain)


def test_more_backward_passes_than_agreed() -> None:
    model, optimizer = wrapped(accumulate=2)
    for part in range(2):
        loss(model, part).backward()
    with pytest.raises(RuntimeError, match=r"number 3 without a step\(\), with accumulate=2"):
        loss(model, 2).backward()
    train(model, optimizer, 2, accumulate=2)


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]):
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.inner(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: (x, x), r"a tuple of 2 \(Tensor, Tensor\)"),
        (lambda x: {"logits": x, "hidden": x}, "a dict with the keys 'logits', 'hidden'"),
        (lambda x: None, "None"),
        (lambda x: 0.5, "an object of class float"),
    ],
)
def test_only_one_tensor_may_be_returned(make: Callable[[Tensor], Any], message: str) -> None:
    model, _ = wrapped(Returns(make))
    with pytest.raises(TypeError, match=rf"the model returned {message}; .*small nn\.Module"):
        model(X[0])
    with torch.no_grad():
        model(X[0])


def test_reentrant_checkpoints_are_refused() -> None:
    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.second, self.first(x), use_reentrant=True)

    model, _ = wrapped(Old())
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss(model).backward()


@pytest.mark.parametrize("parts", [1, 3])
def test_a_checkpoint_around_the_model(parts: int) -> None:
    """The model is called again in the middle of the walk."""
    plain, twin = network(), network()
    reference = sgd(plain)
    model, optimizer = wrapped(twin, accumulate=parts)
    for one, step in ((plain, reference), (model, optimizer)):
        torch.manual_seed(1)
        for _ in range(5):
            for part in range(parts):
                F.cross_entropy(checkpoint(one, X[part], use_reentrant=False), Y[part]).backward()
            step.step()
            step.zero_grad()
    assert_same_weights(model, plain)


# what cannot be given


class Coupled(torch.optim.SGD):
    """Keeps something in its group, as optimisers that estimate one rate for all parameters do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count = getattr(self, "count", 0) + 1


@pytest.mark.parametrize(("kind", "name"), [(Coupled, "seen"), (Counting, "count")])
def test_an_optimizer_that_couples_parameters_is_refused_at_its_first_update(kind: Any, name: str) -> None:
    model = network()
    model, optimizer = coalesce.BackProp(model, kind(model.parameters(), lr=0.1))
    loss(model).backward()
    with pytest.raises(RuntimeError, match=rf"{kind.__name__}\.step\(\) writes {name}"):
        optimizer.step()


def test_a_class_of_ones_own() -> None:
    class Sign(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(group["lr"] * p.grad.sign())

    plain, twin = network(), network()
    model, optimizer = coalesce.BackProp(twin, Sign(twin.parameters(), 0.01))
    assert train(model, optimizer) == train(plain, Sign(plain.parameters(), 0.01))
    assert_same_weights(model, plain)


def given(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    model = network()
    optimizer = sgd(model)
    if kind == "LBFGS":
        return model, torch.optim.LBFGS(model.parameters()), {}
    if kind == "differentiable":
        return model, torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True), {}
    if kind == "another model":
        return network(), optimizer, {}
    if kind == "gradients":
        loss(model).backward()
    if kind == "no module":
        return lambda x: x, optimizer, {}
    if kind == "no optimizer":
        return model, list(model.parameters()), {}
    if kind == "scripted":
        return torch.jit.trace(model.eval(), X[0]), optimizer, {}
    if kind == "parallel":
        averaged = type("DistributedDataParallel", (nn.Sequential,), {})(model)
        return averaged, sgd(averaged), {}
    if "=" in kind:
        name, value = kind.split("=")
        return model, optimizer, {name: {"0": 0, "-1.0": -1.0, "True": True, "nan": math.nan, "2.0": 2.0}[value]}
    return model, optimizer, {}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("LBFGS", TypeError, "LBFGS .* needs a closure"),
        ("differentiable", ValueError, "differentiable=True"),
        ("another model", ValueError, "made for another instance"),
        ("gradients", ValueError, r"call optimizer\.zero_grad\(\) first"),
        ("no module", TypeError, r"model must be an nn\.Module, not function"),
        ("no optimizer", TypeError, r"optimizer must be a torch\.optim\.Optimizer, not list"),
        ("parallel", TypeError, "DistributedDataParallel: it averages gradients"),
        ("accumulate=0", ValueError, "accumulate=0: must be an integer"),
        ("accumulate=True", ValueError, "accumulate=True: must be an integer"),
        ("accumulate=2.0", ValueError, r"accumulate=2\.0: must be an integer"),
        ("clip_norm=0", ValueError, "clip_norm=0: must be a positive number"),
        ("clip_norm=nan", ValueError, "clip_norm=nan: must be a positive number"),
        ("clip_value=-1.0", ValueError, r"clip_value=-1\.0: must be a positive number"),
    ],
)
def test_what_cannot_be_given(kind: str, error: type[Exception], message: str) -> None:
    model, optimizer, options = given(kind)
    with pytest.raises(error, match=message):
        coalesce.BackProp(model, optimizer, **options)


def test_twice_is_refused() -> None:
    plain = network()
    model, optimizer = wrapped(plain)
    for one, step in ((model, sgd(plain)), (plain, sgd(plain)), (plain, optimizer), (nn.Sequential(plain), sgd(plain))):
        with pytest.raises((TypeError, ValueError), match=r"coalesce\.BackProp"):
            coalesce.BackProp(one, step)
    train(model, optimizer, 2)


def test_the_plain_pair_does_not_train_beside_it() -> None:
    plain = network()
    given = sgd(plain)
    model, optimizer = coalesce.BackProp(plain, given)
    with pytest.raises(RuntimeError, match="depends on a parameter"):
        loss(plain).backward()
    loss(model).backward()
    with pytest.raises(RuntimeError, match="the one that it returned"):
        given.step()
    optimizer.step()


def test_parameters_that_the_optimizer_lacks_stay_and_a_second_optimizer_is_told() -> None:
    plain, twin = network(), network()
    reference = torch.optim.SGD(plain[5].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"lacks these .*: 0\.weight, 0\.bias, 3\.weight, 3\.bias\."):
        model, optimizer = coalesce.BackProp(twin, torch.optim.SGD(twin[5].parameters(), lr=0.1))
    second = torch.optim.SGD(twin[0].parameters(), lr=0.1)
    assert train(model, optimizer, 5) == train(plain, reference, 5)
    assert_same_weights(model, plain)
    # in either order
    loss(model).backward()
    with pytest.raises(RuntimeError, match="the optimizer does not have get none at all"):
        second.step()
    optimizer.step()
    with pytest.raises(RuntimeError, match="the optimizer does not have get none at all"):
        second.step()


def test_frozen_parameters_outside_the_optimizer_need_no_word() -> None:
    twin = network()
    twin[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coalesce.BackProp(twin, torch.optim.SGD([*twin[3].parameters(), *twin[5].parameters()], lr=0.1))
