"""The contract of a task.

Oracle: the contract of docs/design.md, written out by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coalesce.task import METHODS, Data, Task, missing_methods


class Whole(Task):
    def data(self) -> Data:
        return Data(train=torch.zeros(2, 3))

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"output": model(batch).mean()}


class Inherits(Whole):
    pass


class Attribute(Whole):
    loss = None  # type: ignore[assignment]


class Plain:
    """No subclass of `Task` at all."""

    def data(self) -> None: ...


@pytest.mark.parametrize(
    ("cls", "missing"),
    [
        (Task, ["data", "model", "loss", "metrics"]),
        (Whole, []),
        (Inherits, []),
        (Attribute, ["loss"]),
        (Plain, ["model", "loss", "metrics"]),
    ],
)
def test_missing_methods(cls: type, missing: list[str]) -> None:
    assert missing_methods(cls) == missing


@pytest.mark.parametrize("name", list(METHODS))
def test_a_missing_method_says_what_it_is(name: str) -> None:
    class Half(Task):
        pass

    arguments = () if name in ("data", "model") else (nn.Identity(), torch.zeros(1))
    with pytest.raises(NotImplementedError, match=rf"^Half lacks a method of the task's contract: {name}\(self"):
        getattr(Half(), name)(*arguments)


def test_defaults_of_the_class() -> None:
    assert Task.static == ()
    assert Task.introduced == {}
