"""What `coalesce.BackProp` returns, what it refuses, and what it says then.

Oracle: `torch.nn.Module` and `torch.optim.Optimizer`; the way out that a message names is taken.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import coalesce
from backprop_helpers import CLASSES, FEATURES, X, Y, adam, assert_same_weights, network, sgd, train


def wrapped(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network() if model is None else model
    return coalesce.BackProp(model, sgd(model), **options)


def loss(model: nn.Module, part: int = 0) -> Tensor:
    return F.cross_entropy(model(X[part]), Y[part])


class Own(nn.Sequential):
    """A user's class with methods, a property and a `train` of its own, which keeps a register of its subclasses."""

    register: list[type] = []  # noqa: RUF012

    def __init_subclass__(cls, *, key: str) -> None:
        Own.register.append(cls)

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
        self.temperature = 1.0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    @property
    def width(self) -> int:
        return self.get_parameter("0.weight").shape[0]

    def train(self, mode: bool = True) -> Own:
        super().train(mode)
        self[1].eval()  # statistics stay frozen
        return self

    def predict(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)


def test_the_model_is_the_model() -> None:
    given = Own()
    model, _ = wrapped(given)
    assert isinstance(model, Own)
    assert isinstance(model, nn.Module)
    assert Own.register == []
    assert list(model.state_dict()) == list(given.state_dict()) == list(Own().state_dict())
    assert [id(p) for p in model.parameters()] == [id(p) for p in given.parameters()]
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "2"]
    assert repr(model) == repr(given)
    assert (model.width, len(model), model[2]) == (8, 3, given[2])
    model.train()
    assert model.training
    assert not model[1].training
    model.eval()
    assert not given.training
    model.temperature = 2.0
    assert given.temperature == 2.0
    assert torch.equal(model.predict(X[0]), given(X[0]).argmax(-1))
    other = Own()
    model.load_state_dict(other.state_dict())
    assert_same_weights(given, other)
    other.load_state_dict(model.state_dict())
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'lode'"):
        model.lode  # noqa: B018


def test_without_gradients_it_is_the_plain_model() -> None:
    model, _ = wrapped(Own())
    with torch.no_grad():
        assert not model(X[0]).requires_grad
    with torch.inference_mode():
        assert model(X[0]).is_inference()
    model.requires_grad_(False)
    output = model(X[0])
    assert output.grad_fn is None
    with pytest.raises(RuntimeError, match="does not require grad"):
        output.sum().backward()


def test_the_optimizer_is_an_optimizer() -> None:
    model = network()
    given = adam(model)
    _, optimizer = coalesce.BackProp(model, given)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is given.param_groups
    assert optimizer.state is given.state
    assert optimizer.defaults is given.defaults
    assert repr(optimizer).splitlines()[1:] == repr(given).splitlines()[1:]
    assert optimizer.gradient_norm is None


def test_hooks_run_once_per_step() -> None:
    seen: list[str] = []
    model = network()
    given = sgd(model)
    given.register_step_pre_hook(lambda *_: seen.append("before"))
    handle = given.register_step_post_hook(lambda *_: seen.append("after"))
    model, optimizer = coalesce.BackProp(model, given)
    everywhere = register_optimizer_step_post_hook(lambda one, *_: seen.append(type(one).__name__))
    optimizer.register_step_post_hook(lambda *_: seen.append("mine"))
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append("saved"))
    train(model, optimizer, 1)
    handle.remove()
    train(model, optimizer, 1)
    everywhere.remove()
    optimizer.state_dict()
    assert seen == ["before", "after", "mine", "BackPropOptimizer", "before", "mine", "BackPropOptimizer", "saved"]


def test_hooks_of_the_model_see_what_is_handed_out() -> None:
    model, optimizer = wrapped()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append((module is model, output.shape)))
    train(model, optimizer, 1)
    assert seen == [(True, (*Y[0].shape, CLASSES))]


def test_a_measured_norm() -> None:
    plain, twin = network(), network()
    model, optimizer = wrapped(twin, clip_norm=math.inf)
    for one in (plain, model):
        torch.manual_seed(1)
        loss(one).backward()
    optimizer.step()
    assert optimizer.gradient_norm == nn.utils.clip_grad_norm_(plain.parameters(), math.inf)  # type: ignore[attr-defined]


def test_clip_value_alone_keeps_gradients_apart() -> None:
    plain, twin = network(), network()
    reference = sgd(plain)
    model, optimizer = wrapped(twin, clip_value=0.01)
    alive: list[int] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: alive.append(sum(p.grad is not None for p in model.parameters())))
    assert train(model, optimizer) == train(
        plain, reference, clip=lambda: nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    )
    assert max(alive) == 0
    assert_same_weights(model, plain)


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


def test_a_checkpoint_around_the_model() -> None:
    """The model is called again in the middle of the walk."""
    plain, twin = network(), network()
    reference = sgd(plain)
    model, optimizer = wrapped(twin)
    for one, step in ((plain, reference), (model, optimizer)):
        torch.manual_seed(1)
        for _ in range(5):
            F.cross_entropy(checkpoint(one, X[0], use_reentrant=False), Y[0]).backward()
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
    gc.collect()


def test_the_guides_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    """The sign of a product of two numbers, 256 samples: guessing has a loss of 0.69."""
    text = (Path(coalesce.__file__).parent.parent / "docs" / "guide.md").read_text(encoding="utf-8")
    section = text[text.index("## One model, less memory: BackProp") :]
    code = section[section.index("```python\n") + len("```python\n") :]
    torch.set_num_threads(1)
    exec(code[: code.index("```")], {})
    assert float(capsys.readouterr().out) < 0.2
