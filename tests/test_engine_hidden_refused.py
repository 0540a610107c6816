"""Where a float or a tensor that differs between lanes cannot be followed: refused before anything is traced.

Oracle: by hand, one way of keeping a value per row.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coalesce.errors import TaskError
from engine_helpers import template_of
from hidden_helpers import Net, Small, three


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


def in_config(make: Callable[[float], Any], read: Callable[[Any], Any]) -> type[Small]:
    """A task that holds the float in an attribute, and whose loss reads it from there."""

    class Task(Small):
        def __init__(self, a: float = 0.2):
            self.kept = make(a)

        def factor(self) -> Any:
            return 1 + read(self.kept)

    return Task


class InLocalVariable(Small):
    """The class of the model is made in model(): the float is in a closure of its method, not of an attribute."""

    def model(self) -> nn.Module:
        a = self.a

        class Local(Net):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * a

        return Local()


class TensorInLocalVariable(Small):
    def model(self) -> nn.Module:
        projection = torch.rand(3, dtype=torch.float64)

        class Local(Net):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * projection

        return Local()


class ForwardHook(Small):
    def model(self) -> nn.Module:
        model, a = Net(), self.a
        model.first.register_forward_hook(lambda module, inputs, output: output * a)
        return model


class Global(Small):
    """The constructor leaves the float where every instance sees it."""

    shared: Mapping[str, float] = {}

    def __init__(self, a: float = 0.2):
        type(self).shared = {"a": a}

    def factor(self) -> Any:
        return 1 + self.shared["a"]


class ViewOfParameter(Small):
    def model(self) -> nn.Module:
        model = Net()
        self.transposed = model.first.weight.T
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + self.transposed.square().sum()


class HookOnParameter(Small):
    def model(self) -> nn.Module:
        model = Net()
        model.first.weight.register_hook(lambda gradient: gradient * 2)
        return model


class AsksForType(Small):
    def factor(self) -> Any:
        return self.a if isinstance(self.a, float) else 5.0


class LooksUp(Small):
    def factor(self) -> Any:
        return {0.1: 1.0, 0.2: 2.0, 0.3: 3.0}.get(self.a, 7.0)


class ActivationByFloat(Small):
    def model(self) -> nn.Module:
        return Net(torch.tanh if self.a < 0.15 else torch.sigmoid)


class LayerByFloat(Small):
    def model(self) -> nn.Module:
        return Net(nn.Tanh() if self.a < 0.15 else nn.Sigmoid())


class ShapeByFloat(Small):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), *(nn.Linear(3, 3) for _ in range(round(self.a * 10)))).double()


class IntBySeed(Small):
    def model(self) -> nn.Module:
        return Net(power=int(torch.randint(1000, ())))


class UnseededInit(Small):
    def model(self) -> nn.Module:
        model = Net()
        model.first.weight.data.copy_(torch.from_numpy(np.random.default_rng().random((5, 4))))
        return model


REFUSED: dict[str, tuple[type[Small], str]] = {
    "closure of a method": (InLocalVariable, r"task\.a differs, although every attribute"),
    "tensor in a closure of a method": (TensorInLocalVariable, "seed differs, although every attribute"),
    "forward hook": (ForwardHook, r"task\.a differs, although every attribute"),
    "class attribute": (Global, r"task\.a differs, although every attribute"),
    "view of a parameter": (ViewOfParameter, "when the model gets other weights"),
    "hook on a parameter": (HookOnParameter, r"the gradient of first\.weight .* when the model gets other weights"),
    "asks for the type": (AsksForType, r"when task\.a are 0-d tensors"),
    "looks up in a dict": (LooksUp, r"when task\.a are 0-d tensors"),
    "set": (in_config(lambda a: {a}, lambda c: next(iter(c))), r"task\.kept is \{0\.1\}"),
    "NumPy array": (in_config(lambda a: np.array([a]), lambda c: torch.from_numpy(c)[0]), r"task\.kept is array"),
    "read-only mapping": (
        in_config(lambda a: types.MappingProxyType({"a": a}), lambda c: c["a"]),
        r"task\.kept\['a'\] differs between lanes, but a mappingproxy cannot be changed",
    ),
    "function by float": (ActivationByFloat, r"model\.act is <built-in method"),
    "class by float": (LayerByFloat, r"model\.act is <class 'torch\.nn"),
    "shape by float": (ShapeByFloat, r"another model .*2\.weight has"),
    "int by seed": (IntBySeed, r"model\.power is"),
    "initial weights without a seed": (UnseededInit, r"builds another first\.weight each time"),
}

for _name, (_task, _) in REFUSED.items():
    # a task is found by its name
    _task.__module__, _task.__qualname__ = __name__, f"{_task.__name__} {_name}"
    globals()[_task.__qualname__] = _task


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    task, message = REFUSED[name]
    with pytest.raises(TaskError, match=message):
        template_of(three(task))
