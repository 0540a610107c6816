"""What `coalesce.BackProp` returns is a model and an optimiser.

Oracle: `torch.nn.Module` and `torch.optim.Optimizer`, and the plain pair.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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


@pytest.mark.parametrize("bound", [None, 0.01])
def test_a_measured_norm(bound: float | None) -> None:
    plain, twin = network(), network()
    model, optimizer = wrapped(twin, clip_norm=math.inf, clip_value=bound)
    for one in (plain, model):
        torch.manual_seed(1)
        loss(one).backward()
    optimizer.step()
    if bound is not None:
        nn.utils.clip_grad_value_(plain.parameters(), bound)
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


def test_the_guides_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    """The sign of a product of two numbers, 256 samples: guessing has a loss of 0.69."""
    text = (Path(coalesce.__file__).parent.parent / "docs" / "guide.md").read_text(encoding="utf-8")
    section = text[text.index("## One model, less memory: BackProp") :]
    code = section[section.index("```python\n") + len("```python\n") :]
    torch.set_num_threads(1)
    exec(code[: code.index("```")], {})
    assert float(capsys.readouterr().out) < 0.2


def test_an_average_of_the_weights_that_is_made_afterwards() -> None:
    """`AveragedModel` copies the model: the copy is plain, evaluates as such, and follows as in a plain loop."""
    plain, (model, stepped) = network(), wrapped()
    reference = sgd(plain)
    ours, theirs = (AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in (model, plain))
    assert type(ours.module) is type(plain)
    for _ in range(5):
        for one, step, average in ((model, stepped, ours), (plain, reference, theirs)):
            train(one, step, 1)
            average.update_parameters(one)
            step.zero_grad()
    assert_same_weights(ours, theirs)
    assert torch.equal(ours.eval()(X[0]), theirs.eval()(X[0]))
    assert not torch.equal(ours(X[0]), model.eval()(X[0]))


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=str)
def test_hooks_on_complete_gradients_whenever_they_come(options: dict[str, Any]) -> None:
    """Registered before or after, a hook sees the gradient that a plain loop's would, once per step."""
    seen: list[dict[str, list[Tensor]]] = []

    def hook(parameter: nn.Parameter, kept: list[Tensor]) -> Any:
        def note(tensor: Tensor) -> None:
            assert tensor.grad is not None
            kept.append(tensor.grad.clone())

        return parameter.register_post_accumulate_grad_hook(note)

    plain, given = network(), network()
    for one in (plain, given):
        kept: dict[str, list[Tensor]] = {"before": [], "after": []}
        seen.append(kept)
        handle = hook(one.get_parameter("3.weight"), kept["before"])
        model, optimizer = wrapped(one, **options) if one is given else (one, sgd(one))
        hook(one.get_parameter("3.weight"), kept["after"])
        clip = (lambda: nn.utils.clip_grad_norm_(plain.parameters(), 1.0)) if options and one is plain else None
        train(model, optimizer, 2, clip=clip)
        handle.remove()
        train(model, optimizer, 1, clip=clip)
    ours, theirs = seen[1], seen[0]
    assert [len(ours[when]) for when in ("before", "after")] == [2, 3]
    for when in ("before", "after"):
        assert all(torch.equal(a, b) for a, b in zip(ours[when], theirs[when], strict=True))
    assert_same_weights(given, plain)


def lacking(model: nn.Module) -> None:
    coalesce.BackProp(model, torch.optim.SGD(list(model.parameters())[1:], lr=0.1))


def batched(model: nn.Module) -> None:
    coalesce.BackProp(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))


def batched_later(model: nn.Module) -> None:
    _, optimizer = wrapped(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "foreach": True})


def batched_when_loaded(model: nn.Module) -> None:
    _, optimizer = wrapped(model)
    state = optimizer.state_dict()
    state["param_groups"][0]["foreach"] = True
    optimizer.load_state_dict(state)


def backward_twice(model: nn.Module) -> None:
    model, _ = wrapped(model)
    loss(model).backward()
    loss(model).backward()


@pytest.mark.parametrize("cause", [lacking, batched, batched_later, batched_when_loaded, backward_twice])
def test_warnings_point_to_the_users_line(cause: Callable[[nn.Module], None]) -> None:
    model = network()
    with pytest.warns(UserWarning, match=r"lacks these|switched off|two backward\(\)") as caught:
        cause(model)
    (warning,) = caught
    lines, first = inspect.getsourcelines(cause)
    # the last line of each
    assert (warning.filename, warning.lineno) == (__file__, first + len(lines) - 1)
