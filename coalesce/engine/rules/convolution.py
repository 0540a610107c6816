"""Convolution: one of several lowerings, the one that was fastest for this shape.

By itself vmap makes one grouped convolution of all lanes. Which way is the fastest differs by a factor of ten either
way: with the number of channels, the size of the image, the library and the device (`python -m benchmarks.convolution`,
docs/log.md). So it is measured, once per shape, while a run is planned (`engine.measure`), and the plan says what all
jobs take. A shape that was not measured takes vmap's way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.lowerings import LOWERINGS, Convolution
from coalesce.engine.rules.mode import Rules, rule, shared


def _convolve(
    rules: Rules,
    function: Callable[..., Tensor],
    given: tuple[Any, ...],
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> Tensor:
    """Call a function of torch's, or what stands for it.

    Args:
        function: of torch's, and ``given`` all of its arguments: input, weight and bias first.
    """
    x, weight, bias = given[:3]
    dims = weight.dim() - 2
    transposed = function in _TRANSPOSED
    if padding == "valid":
        padding = 0
    elif padding == "same":
        reach = [d * (k - 1) for d, k in zip(_each(dilation, dims), weight.shape[2:], strict=True)]
        padding = [r // 2 for r in reach]
        if any(r % 2 for r in reach):
            # torch pads one side more
            return rules.open(function, *given)
    if x.dim() not in (dims + 1, dims + 2):
        return rules.open(function, *given)
    batch = x if x.dim() == dims + 2 else x[None]
    convolution = Convolution(
        input=tuple(batch.shape[1:]),
        weight=tuple(weight.shape),
        stride=_each(stride, dims),
        padding=_each(padding, dims),
        dilation=_each(dilation, dims),
        output_padding=_each(output_padding, dims),
        groups=groups,
        transposed=transposed,
        dtype=_dtype(x),
    )
    rules.saw_convolution(convolution, batch.shape[0], x.requires_grad)
    chosen = LOWERINGS.get(rules.lowerings.get(str(convolution), ""))
    # what all lanes have in common (data of an evaluation) makes one large convolution of all of them
    if chosen is None or shared(x) or shared(weight):
        return rules.open(function, *given)
    result = chosen.run(batch, weight, convolution)
    if bias is not None:
        result = result + bias.view(-1, *[1] * dims)
    return result if x.dim() == dims + 2 else result[0]


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """A setting for each spatial dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _dtype(x: Tensor) -> str:
    """What is computed in: in a plain step torch's own autocast has not come yet."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return str(dtype).removeprefix("torch.")


def _forward(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def convolution(
        rules: Rules,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        given = input, weight, bias, stride, padding, dilation, groups
        return _convolve(rules, function, given, stride, padding, 0, groups, dilation)

    return convolution


def _transposed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def convolution(
        rules: Rules,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        given = input, weight, bias, stride, padding, output_padding, groups, dilation
        return _convolve(rules, function, given, stride, padding, output_padding, groups, dilation)

    return convolution


_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)

_FORWARD = (F.conv1d, F.conv2d, F.conv3d)

for _function in (*_FORWARD, *_TRANSPOSED):
    rule(_function)(_forward(_function) if _function in _FORWARD else _transposed(_function))
