"""The user's contract: a task is an ordinary class, and its constructor's arguments are its configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, TypeAlias

from torch import Tensor, nn

from coalesce.data import Data

__all__ = ["METHODS", "Data", "Loss", "Task", "missing_methods"]

#: What `Task.loss` returns: a scalar, or a scalar and more scalars to record.
Loss: TypeAlias = Tensor | tuple[Tensor, dict[str, Tensor]]

#: What a task must define: the method and what it is for.
METHODS = {
    "data": "data(self) -> coalesce.Data: the splits",
    "model": "model(self) -> nn.Module: a new model, built under the experiment's seed",
    "loss": "loss(self, model, batch) -> Tensor: the training loss of one batch, a scalar",
    "metrics": "metrics(self, model, batch) -> dict: scalars for evaluation, averaged over a split",
}


class Task:
    """One training task, written for ONE experiment in plain PyTorch.

    The constructor's arguments are the task's configuration: store what you need on ``self``. One instance exists
    per experiment. A float argument may differ between the lanes of one graph: it is a float outside the graph and
    a 0-d tensor inside `loss` and `metrics`. Everything else (int, bool, string) picks another graph.

    Attributes:
        static: names of float arguments that must not ride, because they steer Python control flow
            (``if self.threshold > 0.5``). They pick another graph, as integers do.
        introduced: constructor arguments younger than the task, and the default that each came with. An experiment
            that leaves such an argument at that default keeps the id that it had before.

    >>> import torch
    >>> from torch import nn
    >>> from torch.nn import functional as F
    >>> class Line(Task):
    ...     def __init__(self, noise: float = 0.1):
    ...         self.noise = noise
    ...
    ...     def data(self):
    ...         x = torch.linspace(-1, 1, 100)[:, None]
    ...         return Data(train=(x, 2 * x), val=(x[:10], 2 * x[:10]))
    ...
    ...     def model(self):
    ...         return nn.Linear(1, 1)
    ...
    ...     def loss(self, model, batch):
    ...         x, y = batch
    ...         return F.mse_loss(model(x), y + self.noise)
    ...
    ...     def metrics(self, model, batch):
    ...         x, y = batch
    ...         return {"error": (model(x) - y).abs().mean()}
    >>> missing_methods(Line)
    []
    >>> task = Line(noise=0.2)
    >>> task.loss(task.model(), task.data().batch("train", torch.arange(4))).shape
    torch.Size([])
    """

    static: ClassVar[tuple[str, ...]] = ()
    introduced: ClassVar[dict[str, Any]] = {}

    def data(self) -> Data:
        """The splits, shared by all experiments whose arguments make the same data."""
        raise NotImplementedError(_lacks(type(self), "data"))

    def model(self) -> nn.Module:
        """A new model in its initial state, as ``torch.manual_seed(seed)`` before the call makes it."""
        raise NotImplementedError(_lacks(type(self), "model"))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The training loss.

        Args:
            model: in training mode.
            batch: as `Data.batch` makes it; the first dimension of every leaf is B.

        Returns:
            A scalar; or a scalar and a dict of more scalars, which are recorded beside it.
        """
        raise NotImplementedError(_lacks(type(self), "loss"))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Scalars for evaluation: each the mean over the batch's samples, so that they can be averaged over a split.

        Args:
            model: in evaluation mode.
            batch: as in `loss`; the last batch of a split may be shorter.
        """
        raise NotImplementedError(_lacks(type(self), "metrics"))

    def folds(self, data: Data) -> Iterable[tuple[Any, Any]]:
        """The folds of a cross-validation; needed only where ``data.fold`` is set.

        Fold i of ``data.fold=i`` trains on its own samples of the training split, and is validated on others of them;
        the test split is shared. Every fold rides: folds, seeds and rates share one graph.

        Args:
            data: as `data` returned it, without a validation split.

        Returns:
            For each fold its training and its validation indices, 0 to N - 1. What scikit-learn's ``split`` returns
            fits: ``return KFold(5, shuffle=True, random_state=0).split(y)``.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no folds(self, data)")

    def outputs(self, model: nn.Module, batch: Any) -> Tensor | dict[str, Tensor]:
        """What `summary` has to know of every sample; needed only for metrics that are no averages over samples.

        Args:
            model, batch: as in `metrics`, in whose graph this stands.

        Returns:
            A tensor (B, ...), or a dict of such: predictions, scores.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no outputs(self, model, batch)")

    def summary(self, outputs: Any, split: Any) -> dict[str, float]:
        """Metrics of a split's whole output (F1, area under a curve), recorded beside those of `metrics`.

        It runs on the host, for one experiment at a time: any library will do. ``self`` holds plain floats.

        Args:
            outputs: what `outputs` returned, (N, ...): of all samples, in the split's order, on the CPU.
            split: the split itself, with the structure of a batch; the first dimension of every leaf is N.

        Returns:
            name → a number. It is not called for outputs that hold NaN: the metrics are NaN then.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no summary(self, outputs, split)")


def missing_methods(cls: type) -> list[str]:
    """The names of the methods that a class lacks to be a task.

    >>> class Half(Task):
    ...     def data(self): ...
    ...     def model(self): ...
    >>> missing_methods(Half)
    ['loss', 'metrics']
    """
    return [name for name in METHODS if not defines(cls, name)]


def defines(cls: type, name: str) -> bool:
    """Whether a class has a method of its own where `Task` only has a place for it."""
    method = getattr(cls, name, None)
    return callable(method) and method is not getattr(Task, name)


def _lacks(cls: type, name: str) -> str:
    return f"{cls.__name__} lacks a method of the task's contract: {METHODS[name]}"
