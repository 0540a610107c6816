"""New tensors that a lane may write into.

``scores = torch.zeros(B, C); scores[:, 0] = h`` fails under vmap: the zeros are one tensor for all lanes, and cannot
hold what differs between them. So a lane's new tensors are its own from the start. (Once compiled they cost nothing: a
constant is not stored, with or without a lane dimension.)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.leaves import require_grad
from coalesce.engine.rules.lines import user_line
from coalesce.engine.rules.mode import Rules, rule, shared
from coalesce.errors import TaskError

#: What `new_zeros` and its like understand; any other option leaves the call to torch.
_OPTIONS = {"dtype", "device", "requires_grad", "pin_memory", "layout"}


def _plain(rules: Rules, options: dict[str, Any]) -> bool:
    """Whether a call is to be left to torch: alone, or with an option of its own."""
    memory = options.get("memory_format")
    usual = memory in (None, torch.contiguous_format, torch.preserve_format, torch.legacy_contiguous_format)
    return not rules.stacked or not usual or bool(set(options) - _OPTIONS - {"memory_format", "size"})


def _create(name: str) -> None:
    function, of = getattr(torch, name), getattr(Tensor, f"new_{name}")

    @rule(function)
    def handler(rules: Rules, *args: Any, **options: Any) -> Tensor:
        if _plain(rules, options):
            return function(*args, **options)
        options.pop("memory_format", None)
        size = (options.pop("size"),) if "size" in options else args
        options["dtype"] = options.get("dtype") or torch.get_default_dtype()
        options["device"] = options.get("device") or torch.get_default_device()
        return of(rules.key, *size, **options)


def _create_like(name: str) -> None:
    function, of = getattr(torch, f"{name}_like"), getattr(Tensor, f"new_{name}")

    @rule(function)
    def handler(rules: Rules, input: Tensor, **options: Any) -> Tensor:
        if _plain(rules, options) or not shared(input):
            return function(input, **options)
        options.pop("memory_format", None)
        options["dtype"] = options.get("dtype") or input.dtype
        options["device"] = options.get("device") or input.device
        return of(rules.key, input.shape, **options)

    method = of

    @rule(method)
    def new(rules: Rules, self: Tensor, *size: Any, **options: Any) -> Tensor:
        if _plain(rules, options) or not shared(self):
            return method(self, *size, **options)
        options["dtype"] = options.get("dtype") or self.dtype
        options["device"] = options.get("device") or self.device
        return of(rules.key, *size, **options)


for _name in ("empty", "zeros", "ones"):
    _create(_name)
    _create_like(_name)


def full(rules: Rules, size: Any, value: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    """A tensor of one value, which may ride."""
    if isinstance(value, Tensor):
        # torch looks at the number alone: every float is of the default dtype
        usual = torch.get_default_dtype() if value.is_floating_point() else value.dtype
        return value.to(dtype or usual).expand(tuple(size)).clone()
    dtype = dtype or torch.tensor(value).dtype
    return rules.key.new_full(tuple(size), value, dtype=dtype, device=device or torch.get_default_device())


def _rides_or_stacked(rules: Rules, value: Any, options: dict[str, Any]) -> bool:
    return not set(options) and (isinstance(value, Tensor) or rules.stacked)


@rule(torch.full)
def full_rule(
    rules: Rules, size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Tensor:
    if _rides_or_stacked(rules, fill_value, options):
        return full(rules, size, fill_value, dtype, device)
    return torch.full(size, fill_value, dtype=dtype, device=device, **options)


@rule(torch.full_like)
def full_like(
    rules: Rules,
    input: Tensor,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **options: Any,
) -> Tensor:
    if isinstance(fill_value, Tensor) or (_rides_or_stacked(rules, fill_value, options) and shared(input)):
        return full(rules, input.shape, fill_value, dtype or input.dtype, device or input.device)
    return torch.full_like(input, fill_value, dtype=dtype, device=device, **options)


@rule(Tensor.new_full)
def new_full(
    rules: Rules,
    self: Tensor,
    size: Any,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **options: Any,
) -> Tensor:
    if isinstance(fill_value, Tensor) or (_rides_or_stacked(rules, fill_value, options) and shared(self)):
        return full(rules, size, fill_value, dtype or self.dtype, device or self.device)
    return self.new_full(size, fill_value, dtype=dtype, device=device, **options)


@rule(torch.clone, Tensor.clone)
def clone(rules: Rules, input: Tensor, *, memory_format: Any = torch.preserve_format) -> Tensor:
    copy = torch.clone(input, memory_format=memory_format)
    if not rules.stacked or not shared(input):
        return copy
    return rules.key.new_empty(input.shape, dtype=input.dtype, device=input.device).copy_(copy)


@rule(F.one_hot)
def one_hot(rules: Rules, tensor: Tensor, num_classes: int = -1) -> Tensor:
    if not rules.stacked:
        return F.one_hot(tensor, num_classes)
    if num_classes < 0:
        raise TaskError(
            f"one_hot() without num_classes gives a result whose shape depends on the values of a tensor: give "
            f"num_classes.\n{user_line()}"
        )
    # torch looks at the values; the plain step before the trace has done so
    return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


@rule(Tensor.__setitem__)
def set_item(rules: Rules, input: Tensor, index: Any, value: Any) -> None:
    """``x[mask] = value``: how many entries a lane's mask has may differ, which vmap refuses, but need not matter."""
    mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0 and rules.stacked
    rest = input.dim() - index.dim() if mask else 0
    if not mask or (isinstance(value, Tensor) and value.dim() > rest):
        input[index] = value
        return
    value = torch.as_tensor(value, dtype=input.dtype)
    input.copy_(torch.where(index.view(*index.shape, *[1] * rest), value, input))


@rule(torch.tensor)
def tensor(rules: Rules, data: Any, **options: Any) -> Tensor:
    """``torch.tensor([1.0, self.weight])``, where an entry rides."""
    if not _holds_tensor(data):
        return torch.tensor(data, **options)
    dtype, device = options.pop("dtype", None), options.pop("device", None)
    wanted = dtype or _dtype(rules, data)
    value = _stack(data, wanted).to(device=device).detach()
    return require_grad(value) if options.pop("requires_grad", False) else value


def _holds_tensor(data: Any) -> bool:
    return isinstance(data, Tensor) or (isinstance(data, list | tuple) and any(map(_holds_tensor, data)))


def _leaves(data: Any) -> list[Any]:
    return [leaf for item in data for leaf in _leaves(item)] if isinstance(data, list | tuple) else [data]


def _dtype(rules: Rules, data: Any) -> torch.dtype:
    """What torch would choose, did numbers stand where something rides."""

    def one(leaf: Any) -> torch.dtype:
        if isinstance(leaf, Tensor) and not any(leaf is value for value in rules.riding.values()):
            return leaf.dtype
        return torch.get_default_dtype() if isinstance(leaf, Tensor) else torch.tensor(leaf).dtype

    return functools.reduce(torch.promote_types, map(one, _leaves(data)))


def _stack(data: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stack(item, dtype) for item in data])
    return data.to(dtype) if isinstance(data, Tensor) else torch.tensor(data, dtype=dtype)
