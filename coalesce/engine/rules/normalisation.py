"""Normalisations whose `eps` and `momentum` ride: the formulas written out.

Where both are Python numbers, torch's own function is called, but for BatchNorm in lanes: vmap makes the lanes channels
of one large image, for which they are moved in memory, and adds their gradient up over the samples four times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coalesce.engine.rules.mode import Rate, Rules, rule

#: Computed in float32.
_HALF = (torch.bfloat16, torch.float16)


class CumulativeMomentum(Rate):
    """What stands in a BatchNorm's ``momentum=None`` inside a lane: the factor of a cumulative average.

    torch computes it as ``1.0 / float(self.num_batches_tracked)``, which asks for the value of a tensor.
    """

    module: Any

    def __new__(cls, module: nn.Module) -> CumulativeMomentum:
        momentum = float.__new__(cls, 0.5)
        momentum.module = module
        return momentum

    @property
    def tensor(self) -> Tensor:  # type: ignore[override]
        """0-d, in the dtype in which it weighs the statistics."""
        dtype = self.module.running_mean.dtype
        return 1 / self.module.num_batches_tracked.to(torch.float32 if dtype in _HALF else dtype)


def _normalise(x: Tensor, dims: tuple[int, ...], eps: Any) -> Tensor:
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return (x - mean) * (variance + eps).rsqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    if weight is not None:
        x = x * weight.view(*shape)
    return x if bias is None else x + bias.view(*shape)


def _track(running: Tensor, now: Tensor, momentum: Any) -> None:
    with torch.no_grad():
        # those of half precision are rounded once, when all is done, as torch's are
        dtype = torch.float32 if running.dtype in _HALF else running.dtype
        running.copy_(running.to(dtype) * (1 - momentum) + now.to(dtype) * momentum)


@rule(torch.layer_norm, numbers=("eps",))
def layer_norm(
    rules: Rules,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: Any = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    dims = range(-len(normalized_shape), 0)
    return _affine(_normalise(input, tuple(dims), eps), weight, bias, normalized_shape)


@rule(torch.rms_norm, numbers=("eps",))
def rms_norm(
    rules: Rules, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    scaled = input * (input.square().mean(dims, keepdim=True) + eps).rsqrt()
    return _affine(scaled, weight, None, normalized_shape)


@rule(torch.group_norm, numbers=("eps",))
def group_norm(
    rules: Rules,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: Any = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    grouped = input.reshape(input.shape[0], num_groups, -1)
    scaled = _normalise(grouped, (2,), eps).reshape(input.shape)
    return _affine(scaled, weight, bias, (-1, *[1] * (input.dim() - 2)))


def _fit(x: Tensor, vectors: Sequence[Tensor], eps: Any) -> bool:
    """Whether torch's own BatchNorm would take these: what it refuses, a formula might compute."""
    dtypes = {x.dtype, torch.float32} if x.dtype in _HALF else {x.dtype}
    channels = all(v.shape == x.shape[1:2] and v.dtype in dtypes for v in vectors)
    return channels and x.is_floating_point() and x.dim() > 1 and (isinstance(eps, Tensor) or eps > 0)


@rule(F.batch_norm, numbers=("momentum", "eps"), stacked=True)
def batch_norm(
    rules: Rules,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Tensor:
    statistics = [t for t in (running_mean, running_var) if t is not None]
    vectors = [*statistics, *(t for t in (weight, bias) if t is not None)]
    if not _fit(input, vectors, eps) or not (training or len(statistics) == 2):
        # which says what is wrong
        given = input, running_mean, running_var, weight, bias, training, momentum, eps
        refused: Tensor = rules.open(F.batch_norm, *given)
        return refused
    x = input.float() if input.dtype in _HALF else input
    shape = (-1, *[1] * (input.dim() - 2))
    if not training:
        mean, variance = (t.detach().to(x.dtype).view(shape) for t in statistics)
        return _affine((x - mean) * (variance + eps).rsqrt(), weight, bias, shape).to(input.dtype)
    dims = [0, *range(2, input.dim())]
    count = input.numel() // input.shape[1]
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    # The mean is a constant, by which no gradient goes, and the little that it is off. So rounding is no larger than
    # torch's, which adds up in float64; and the gradient is added up twice over the samples, once for what scales and
    # once for what shifts, where vmap's is four times.
    constant = x.detach().mean(dims)
    centred = x - constant.view(shape)
    rest = centred.mean(dims)
    mean = constant + rest
    variance = centred.square().mean(dims) - rest.square()
    if running_mean is not None:
        _track(running_mean, mean, momentum)
    if running_var is not None:
        _track(running_var, variance * (count / (count - 1)), momentum)
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -rest * scale if bias is None else bias - rest * scale
    return (centred * scale.view(shape) + shift.view(shape)).to(input.dtype)


@rule(F.instance_norm, numbers=("momentum", "eps"))
def instance_norm(
    rules: Rules,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return batch_norm(rules, input, running_mean, running_var, weight, bias, False, 0.0, eps)
    dims, count = list(range(2, input.dim())), math.prod(input.shape[2:])
    if count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {input.size()}")
    variance, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    # the average over the samples of what each would have moved the statistics by
    if running_mean is not None:
        _track(running_mean, mean.mean(0).flatten(), momentum)
    if running_var is not None:
        _track(running_var, variance.mean(0).flatten() * (count / (count - 1)), momentum)
    shape = (-1, *[1] * (input.dim() - 2))
    return _affine((input - mean) * (variance + eps).rsqrt(), weight, bias, shape)
