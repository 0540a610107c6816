"""Lazy modules: their sizes, and so their initial weights, come with the first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from coalesce.engine.rehearsal import own_code
from coalesce.errors import TaskError
from coalesce.task import Data, Task

#: Two training samples of a task, by its class and those of its arguments that its data can depend on.
_samples: dict[Any, Any] = {}


def is_lazy(module: nn.Module) -> bool:
    """Whether a module by itself still waits for its first call."""
    kept: list[Any] = [*module._parameters.values(), *module._buffers.values()]
    return any(map(nn.parameter.is_lazy, kept))


def finish(task: Task, model: nn.Module, arguments: Mapping[str, Any], data: Callable[[], Any]) -> None:
    """Let lazy modules find their sizes: the loss of two samples, as in evaluation, so that no buffer changes. What
    they draw follows in the generator on what model() drew, as at a first call right behind it.

    Args:
        arguments: of the task.
        data: the data of another instance of the task. Called once for all experiments that share their data.

    Raises:
        TaskError: a module was not called.
    """
    if not any(map(is_lazy, model.modules())):
        return
    name = type(task).__name__
    # a float that rides is nothing that data() may read
    fixed = {k: v for k, v in arguments.items() if not isinstance(v, float) or k in type(task).static}
    key = type(task), repr(sorted(fixed.items()))
    if key not in _samples:
        found = data()
        _samples[key] = found.batch("train", torch.arange(min(2, found.sizes["train"]))) if _is_data(found) else None
    if _samples[key] is not None:
        model.eval()
        with torch.no_grad(), own_code(f"{name}.loss(), called once for the sizes of lazy modules"):
            task.loss(model, _samples[key])
        model.train()
    for path, module in model.named_modules():
        if is_lazy(module):
            raise TaskError(
                f"{name}.model(): {path} has no shape, since loss() does not call it in evaluation. Call the model "
                f"once in model(), model(torch.zeros(1, ...)), before you return it."
            )


def _is_data(found: Any) -> bool:
    return isinstance(found, Data)
