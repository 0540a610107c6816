"""Custom `torch.autograd.Function` of every style, and `torch.utils.checkpoint`, in lanes.

Oracle: the gradients that the case says, and the plain loop with stock PyTorch.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import coalesce
from coalesce.engine.rules import Rules
from coalesce.errors import TaskError
from coalesce.random import key_of
from engine_helpers import experiment, lanes_of, train_alone, worst


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


class Old(torch.autograd.Function):
    """Sign forwards, ten times the incoming gradient backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 10 * gradient


class NoRule(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 10 * gradient


class Generated(NoRule):
    generate_vmap_rule = True


class HandWritten(NoRule):
    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, Any]:
        return HandWritten.apply(x), dims[0]


class Rich(torch.autograd.Function):
    """(x k).tanh() with three times its gradient, and where x k is positive. Saves an input, an output, something in
    between and nothing, and keeps a tensor and a number as attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x * k * w
        y, positive = h.tanh(), h > 0
        ctx.k, ctx.scaled = k, {"w": k * w}
        ctx.save_for_backward(x, None, y, h.cosh())
        ctx.mark_non_differentiable(positive)
        return y, positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        x, nothing, y, cosh = ctx.saved_tensors
        assert nothing is None
        assert ctx.needs_input_grad == (True, False, True)
        inner = 3 * gradient / cosh / cosh
        torch.testing.assert_close(y.shape, x.shape)
        return inner * ctx.scaled["w"], None, (inner * x * ctx.k).sum(0)


# names taken before any lane runs
old, rich = Old.apply, Rich.apply


class Small(coalesce.Task):
    """What each model makes of Linear(4, 5)'s output, in float64."""

    def __init__(self, kind: str, a: float = 0.1):
        self.kind, self.a = kind, a

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(13, 4, generator=generator, dtype=torch.float64)
        return coalesce.Data(train=(x, x[:, 0].sin()), val=(x[:3], x[:3, 0]))

    def model(self) -> nn.Module:
        return Model(self.kind, self.a).double()

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return (model(x).sum(1) - y).square().mean()

    def metrics(self, model: Any, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


class Model(nn.Module):
    def __init__(self, kind: str, a: float):
        super().__init__()
        self.kind = kind
        self.first, self.last, self.w = nn.Linear(4, 5), nn.Linear(5, 2), nn.Parameter(torch.ones(5))
        self.block = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(a), nn.Linear(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "rich":
            y, positive = rich(h, 1.5, self.w)
            h = torch.where(positive, y, 0.1 * y)
        elif self.kind == "new":
            h = h.tanh() + 0.1 * NoRule.apply(h) + 0.1 * old(h)
        elif self.kind == "plain":
            h = self.block(h)
        elif self.kind == "sequential":
            h = checkpoint_sequential(self.block, 2, h, use_reentrant=False)
        else:
            h = checkpoint(self.block, h, use_reentrant=self.kind == "reentrant")
        return self.last(h)


def pair(kind: str) -> list[Any]:
    return [
        experiment(Small, {"kind": kind, "a": 0.1 * i}, {"name": "sgd", "lr": 0.1 * i}, steps=3, batch_size=4, seed=i)
        for i in (1, 2)
    ]


def check(kind: str, compile: bool, **options: Any) -> None:
    lanes = lanes_of(pair(kind), compile=compile, **options)
    lanes.advance(3)
    found = lanes.evaluate("val")["loss"]
    # a second pass of the plain loop would draw other masks, outside the stream: it has no checkpoint
    kind = kind if kind in ("rich", "new") else "plain"
    for lane, one in enumerate(pair(kind)):
        alone = train_alone(one)
        assert worst(lanes, lane, alone.model) < 1e-12
        alone.model.eval()
        expected = alone.task.metrics(alone.model, alone.task.data().splits["val"])["loss"]
        assert found[lane] == pytest.approx(expected.item(), abs=1e-12)


def test_functions_equal_the_plain_loop() -> None:
    check("rich", compile=False)
    check("new", compile=False)


@pytest.mark.parametrize("kind", ["reentrant", "other", "sequential"])
def test_checkpoints_equal_the_plain_loop(kind: str) -> None:
    check(kind, compile=False)


def test_case_18_pieces_of_our_own_on_the_same_net() -> None:
    check("plain", compile=False, checkpoint=("block",))


@pytest.mark.slow
def test_compiled() -> None:
    check("rich", compile=True)


class Scalar(coalesce.Task):
    """Case 20: loss = sum of Function(w · ones(3)); the gradient is 30 at every w."""

    def __init__(self, function: str, w: float = 0.5):
        self.function, self.w = function, w

    def data(self) -> coalesce.Data:
        return coalesce.Data(train=torch.ones(2, 1))

    def model(self) -> nn.Module:
        module = nn.Module()
        module.w = nn.Parameter(torch.tensor(self.w, dtype=torch.float64))
        return module

    def loss(self, model: Any, batch: Any) -> Tensor:
        return FUNCTIONS[self.function].apply(model.w * torch.ones(3, dtype=torch.float64)).sum()

    def metrics(self, model: Any, batch: Any) -> dict[str, Tensor]:
        return {}


class Writes(Old):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.sign_()


class Asks(NoRule):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().copy())


FUNCTIONS: dict[str, Any] = {f.__name__: f for f in (Old, NoRule, Generated, HandWritten, Writes, Asks)}


def scalars(function: str) -> list[Any]:
    return [
        experiment(Scalar, {"function": function, "w": w}, {"name": "sgd", "lr": 0.01}, steps=1, batch_size=1)
        for w in (0.5, 2.0)
    ]


_CASES = [(f, False) for f in ("Old", "NoRule", "Generated", "HandWritten")]
_SLOW = [pytest.param(f, True, marks=pytest.mark.slow) for f in ("Old", "HandWritten")]


@pytest.mark.parametrize(("function", "compile"), [*_CASES, *_SLOW])
def test_straight_through(function: str, compile: bool) -> None:
    lanes = lanes_of(scalars(function), compile=compile)
    lanes.advance(1)
    assert [lanes.state_dict(lane)["w"].item() for lane in range(2)] == pytest.approx([0.2, 1.7], abs=1e-12)


@pytest.mark.parametrize("function", ["Writes", "Asks"])
def test_what_cannot_run_is_named(function: str) -> None:
    lanes = lanes_of(scalars(function))
    with pytest.raises(TaskError, match=f"{function}, a torch.autograd.Function, cannot run.*vmap(.|\n)*FUNCTIONS"):
        lanes.advance(1)


def test_nothing_stays_behind() -> None:
    before = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    cell = checkpoint.__closure__[0].cell_contents  # type: ignore[index]
    with suppress(ZeroDivisionError), Rules(key_of(0), torch.tensor(0), {}) as rules, rules:
        assert torch.autograd.Function.apply.__func__.__code__ is not before  # type: ignore[attr-defined]
        assert checkpoint.__closure__[0].cell_contents is not cell  # type: ignore[index]
        raise ZeroDivisionError
    assert torch.autograd.Function.apply.__func__.__code__ is before  # type: ignore[attr-defined]
    assert checkpoint.__closure__[0].cell_contents is cell  # type: ignore[index]
