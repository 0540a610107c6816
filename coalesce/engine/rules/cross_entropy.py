"""Cross-entropy with a label smoothing that rides; torch takes it only as a Python float."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.mode import Rules, rule


@rule(F.cross_entropy)
def cross_entropy(
    rules: Rules,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float | Tensor = 0.0,
) -> Tensor:
    rules.saw_labels(input, target, ignore_index)
    if not isinstance(label_smoothing, Tensor):
        return F.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing=label_smoothing
        )
    axis = 0 if input.dim() == 1 else 1
    classes = input.shape[axis]
    smoothing = label_smoothing.to(input.dtype)
    if target.is_floating_point():
        spread = target * (1 - smoothing) + smoothing / classes
        return F.cross_entropy(input, spread, weight, reduction=reduction)
    hard = F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    log_probability = F.log_softmax(input, axis)
    if weight is not None:
        log_probability = log_probability * weight.view(-1, *[1] * (input.dim() - 1 - axis))
    counted = target != ignore_index
    smooth = torch.where(counted, -log_probability.sum(axis), 0.0)
    if reduction == "sum":
        smooth = smooth.sum()
    elif reduction == "mean":
        share = counted.to(input.dtype)
        if weight is not None:
            share = torch.where(counted, weight[torch.where(counted, target, 0)], 0.0)
        smooth = smooth.sum() / share.sum()
    return (1 - smoothing) * hard + smoothing / classes * smooth


@rule(F.nll_loss)
def nll_loss(
    rules: Rules, input: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    rules.saw_labels(input, target, kwargs.get("ignore_index", -100))
    return F.nll_loss(input, target, weight, *args, **kwargs)
