"""Task classes for the tests of the configuration: what a user writes, and what he gets wrong."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor, nn

import coalesce


class _Complete(coalesce.Task):
    """The four methods; none is called by these tests."""

    def data(self) -> coalesce.Data:
        raise AssertionError("configuration reads no data")

    def model(self) -> nn.Module:
        raise AssertionError("configuration builds no model")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError("configuration trains nothing")

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        raise AssertionError("configuration evaluates nothing")


class Toy(_Complete):
    """Every kind of argument that has an annotation and a default."""

    def __init__(
        self,
        hidden: int = 33,
        dropout: float = 0,
        clip: float | None = None,
        scale: int | float = 1.0,
        activation: Literal["relu", "tanh"] = "relu",
        name: str = "toy",
        bias: bool = True,
        sizes: tuple[int, ...] = (16, 32),
        weights: dict[str, float] | None = None,
        bound: float = float("inf"),
    ):
        pass


class Pairs(_Complete):
    """Two mappings' worth of arguments (case 30 d)."""

    def __init__(self, a: dict[str, int] | None = None, b: int = 0):
        pass


class Bare(_Complete):
    """Arguments without annotations; one without a default."""

    def __init__(self, rate, count=3, power=2.0, extra=None):  # type: ignore[no-untyped-def]
        pass


class Either(_Complete):
    """An argument of two types."""

    def __init__(self, width: float | str = 0.5):
        pass


class Open(_Complete):
    """Takes whatever it is given."""

    def __init__(self, **options: Any):
        pass


class Younger(_Complete):
    """Its argument ``depth`` came later, with the default 2."""

    introduced: ClassVar[dict[str, Any]] = {"depth": 2}

    def __init__(self, hidden: int = 8, depth: int = 2):
        pass


class Static(_Complete):
    """Floats that must not ride: one by itself, and all in a mapping."""

    static: ClassVar[tuple[str, ...]] = ("threshold", "weights")

    def __init__(self, threshold: float = 0.5, rate: float = 0.1, weights: dict[str, float] | None = None):
        pass


class StaticText(_Complete):
    """A comma is missing."""

    static: ClassVar[Any] = "threshold"

    def __init__(self, threshold: float = 0.5):
        pass


class StaticUnknown(_Complete):
    """Names no argument."""

    static: ClassVar[tuple[str, ...]] = ("treshold",)

    def __init__(self, threshold: float = 0.5):
        pass


class HoldsClass(_Complete):
    """A default that no file can hold."""

    def __init__(self, layer: Any = nn.ReLU):
        pass


class ByPosition(_Complete):
    """An argument that cannot be named."""

    def __init__(self, width: int, /):
        pass


class Half(coalesce.Task):
    """Lacks two methods."""

    def data(self) -> coalesce.Data:
        raise AssertionError("configuration reads no data")

    def model(self) -> nn.Module:
        raise AssertionError("configuration builds no model")


class NoTask:
    """Not a subclass of Task."""


def no_class() -> None:
    """Not a class."""
