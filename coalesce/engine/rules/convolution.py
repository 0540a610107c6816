"""Convolution: one of several lowerings, the one that was fastest for this shape.

By itself vmap makes one grouped convolution of all lanes. Which way is the fastest depends on the number of channels,
the size of the image, the library and the device (`python -m benchmarks.convolution`, docs/log.md). So it is measured,
once per shape, while a run is planned (`engine.measure`), and the plan says what all jobs take. A shape that was not
measured takes vmap's way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.lowerings import LOWERINGS, Convolution
from coalesce.engine.rules.mode import Rules, rule, shared, transformed

#: What torch takes behind input, weight and bias, in its order.
_FORWARD = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")

_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1}


def _rule(function: Callable[..., Tensor], names: Sequence[str]) -> None:
    """Register what stands for one of torch's functions, whose settings have these names."""

    def convolution(
        rules: Rules, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        settings = {**_DEFAULTS, **dict(zip(names, args, strict=False)), **kwargs}
        torchs = functools.partial(rules.open, function, input, weight, bias, *args, **kwargs)
        return _convolve(rules, torchs, "output_padding" in names, input, weight, bias, **settings)

    rule(function)(convolution)


def _convolve(
    rules: Rules,
    torchs: Callable[[], Tensor],
    transposed: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    output_padding: Any,
    groups: int,
) -> Tensor:
    """Convolve by the lowering that was chosen.

    Args:
        torchs: the same by torch's own function.
    """
    dims = weight.dim() - 2
    if padding == "valid":
        padding = 0
    elif padding == "same":
        reach = [d * (k - 1) for d, k in zip(_each(dilation, dims), weight.shape[2:], strict=True)]
        padding = [r // 2 for r in reach]
        if any(r % 2 for r in reach):
            # torch pads one side more
            return torchs()
    if x.dim() not in (dims + 1, dims + 2):
        return torchs()
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
    # What all lanes have in common (data of an evaluation) makes one large convolution of all of them; and within
    # another transform of the user's own (vmap over samples, jvp) torch knows its own functions best.
    if chosen is None or shared(x) or shared(weight) or transformed():
        return torchs()
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


_FUNCTIONS: dict[Callable[..., Tensor], Sequence[str]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _FORWARD),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _TRANSPOSED),
}
for _function, _names in _FUNCTIONS.items():
    _rule(_function, _names)
