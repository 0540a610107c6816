"""One plain eager step before a graph is traced: errors are the user's own, and which parameters get a gradient is
seen. It changes nothing but what the user's code keeps in attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from coalesce.engine.instance import Instance
from coalesce.engine.rehearsal import own_code, split_loss
from coalesce.engine.rules import Rules
from coalesce.errors import TaskError


def rehearse(
    instance: Instance,
    batch: Any,
    wanted: Mapping[str, Tensor],
    key: Tensor,
    step: Tensor,
    mixed: Callable[[], AbstractContextManager[Any]],
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Take the step's forward and backward pass.

    Args:
        instance: the user's model and `Code`.
        batch: as the user gave it.
        wanted: the parameters that the optimiser has and that are not frozen.
        key, step: of the stream.
        mixed: makes the context for the user's code.

    Returns:
        The names of those that got a gradient, and of the scalars beside the loss.

    Raises:
        TaskError: with the user's file, line and source.
    """
    code: Any = instance.task
    model = instance.model
    buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    before = {n: (p._version, _size(p)) for n, p in model.named_parameters()}
    born: set[str] = set()
    with torch.enable_grad(), instance.holding(buffers, {}), _aside(wanted, born):
        with mixed(), own_code(code.what), Rules(key, step, {}, watch=True):
            loss, extras = split_loss(code.loss(model, batch), code.what)
        if not loss.requires_grad:
            raise TaskError(f"{code.what} returned a loss that no trainable parameter of the optimizer has a part in")
        with own_code(f"the backward pass of {code.what}"):
            torch.autograd.backward(loss, inputs=list(wanted.values()))
    for name, parameter in model.named_parameters():
        if before[name] != (parameter._version, _size(parameter)):
            raise TaskError(
                f"{code.what} writes into the parameter {name}, which is the optimizer's alone to change. Do so "
                f"between two steps, or work on a copy: w = self.w.clamp(...) instead of self.w.clamp_(...). Weights "
                f"that follow others are buffers: register_buffer(...)."
            )
    if not born:
        raise TaskError(f"{code.what}: no parameter of the optimizer gets a gradient")
    return frozenset(born), tuple(extras)


@contextmanager
def _aside(wanted: Mapping[str, Tensor], born: set[str]) -> Iterator[None]:
    """Note and free each gradient as it is born, and leave those that are there alone."""
    grads = {name: parameter.grad for name, parameter in wanted.items()}
    handles = []

    def note(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise TaskError(f"{name} has a sparse gradient, which a compiled step does not support: sparse=False")
            born.add(name)
            parameter.grad = None

        return hook

    try:
        for name, parameter in wanted.items():
            parameter.grad = None
            handles.append(parameter.register_post_accumulate_grad_hook(note(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, parameter in wanted.items():
            parameter.grad = grads[name]


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Let modules keep nothing of what they put into attributes meanwhile: a trace's tensors are none."""
    before = {module: dict(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, held in before.items():
            vars(module).clear()
            vars(module).update(held)


def _size(parameter: Tensor) -> float:
    # what .data writes shows in no version
    return float(torch.linalg.vector_norm(parameter.detach())) if parameter.is_floating_point() else 0.0
