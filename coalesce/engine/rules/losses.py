"""Losses whose constants ride (margins, Huber's delta, …): the formulas written out. And GaussianNLL, which looks at
the values of its variances.

Where the constants are Python numbers, torch's own function is called.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.mode import Rules, rule


def _reduce(loss: Tensor, reduction: str, size_average: bool | None = None, reduce: bool | None = None) -> Tensor:
    """The mean, the sum or all; torch's older two arguments count where they are given."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


@rule(F.huber_loss, numbers=("delta",))
def huber_loss(
    rules: Rules, input: Tensor, target: Tensor, reduction: str = "mean", delta: Any = 1.0, weight: Any = None
) -> Tensor:
    far = (input - target).abs()
    loss = torch.where(far <= delta, 0.5 * far.square(), delta * (far - 0.5 * delta))
    return _reduce(loss if weight is None else loss * weight, reduction)


@rule(F.smooth_l1_loss, numbers=("beta",))
def smooth_l1_loss(
    rules: Rules,
    input: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    beta: Any = 1.0,
) -> Tensor:
    far = (input - target).abs()
    # at beta = 0 no distance lies below it, and 0 / 0 must not make a NaN of a gradient
    near = torch.where(beta > 0, beta, torch.ones_like(beta))
    loss = torch.where(far < beta, 0.5 * far.square() / near, far - 0.5 * beta)
    return _reduce(loss, reduction, size_average, reduce)


@rule(F.margin_ranking_loss, numbers=("margin",))
def margin_ranking_loss(
    rules: Rules,
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: Any = 0.0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    return _reduce((-target * (input1 - input2) + margin).clamp(min=0), reduction, size_average, reduce)


@rule(F.hinge_embedding_loss, numbers=("margin",))
def hinge_embedding_loss(
    rules: Rules,
    input: Tensor,
    target: Tensor,
    margin: Any = 1.0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    unlike = torch.where(target != 1, (margin - input).clamp(min=0), 0.0)
    return _reduce(unlike + torch.where(target != -1, input, 0.0), reduction, size_average, reduce)


@rule(F.cosine_embedding_loss, numbers=("margin",))
def cosine_embedding_loss(
    rules: Rules,
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: Any = 0.0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    # ATen's own epsilon, added to the squares
    squares = [(x * x).sum(-1) + 1e-12 for x in (input1, input2)]
    cosine = (input1 * input2).sum(-1) / (squares[0] * squares[1]).sqrt()
    like = torch.where(target == 1, 1 - cosine, 0.0)
    unlike = torch.where(target == -1, (cosine - margin).clamp(min=0), 0.0)
    return _reduce(like + unlike, reduction, size_average, reduce)


@rule(F.cosine_similarity, numbers=("eps",))
def cosine_similarity(rules: Rules, x1: Tensor, x2: Tensor, dim: int = 1, eps: Any = 1e-8) -> Tensor:
    x1, x2 = torch.broadcast_tensors(x1, x2)
    norms = [torch.linalg.vector_norm(x, dim=dim, keepdim=True) for x in (x1, x2)]
    lengths = [_bounded(norm, eps) for norm in norms]
    return (x1 / lengths[0] * (x2 / lengths[1])).sum(dim)


def _bounded(x: Tensor, least: Any) -> Tensor:
    """Not below a bound, which as in ATen is no part of what is differentiated."""
    return x + (x.clamp(min=least) - x).detach()


def _norm(x: Tensor, p: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Of an order that rides, above 0 and finite. Zeros have a gradient of zero, as in ATen."""
    if not isinstance(p, Tensor):
        return torch.linalg.vector_norm(x, p, dim, keepdim)
    size = x.abs()
    none = size == 0
    powers = torch.where(none, 0.0, torch.where(none, 1.0, size) ** p)
    total = powers.sum(dim, keepdim) if dim is not None else powers.sum()
    empty = total == 0
    return torch.where(empty, 0.0, torch.where(empty, 1.0, total) ** (1 / p))


@rule(torch.norm, numbers=("p",))
def norm(
    rules: Rules,
    input: Tensor,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: None = None,
    dtype: Any = None,
) -> Tensor:
    return _norm(input if dtype is None else input.to(dtype), p, dim, keepdim)


@rule(Tensor.norm, numbers=("p",))
def norm_method(
    rules: Rules, input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    return norm(rules, input, p, dim, keepdim, None, dtype)


@rule(torch.linalg.vector_norm, numbers=("ord",))
def vector_norm(
    rules: Rules, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    return _norm(x if dtype is None else x.to(dtype), ord, dim, keepdim)


@rule(F.pairwise_distance, numbers=("p", "eps"))
def pairwise_distance(
    rules: Rules, x1: Tensor, x2: Tensor, p: Any = 2.0, eps: Any = 1e-6, keepdim: bool = False
) -> Tensor:
    return _norm(x1 - x2 + eps, p, -1, keepdim)


@rule(F.triplet_margin_loss, numbers=("margin", "p", "eps"))
def triplet_margin_loss(
    rules: Rules,
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: Any = 1.0,
    p: Any = 2.0,
    eps: Any = 1e-6,
    swap: bool = False,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    def distance(x: Tensor, y: Tensor) -> Tensor:
        return _norm(x - y + eps, p, -1)

    far = distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    loss = (distance(anchor, positive) - far + margin).clamp(min=0)
    return _reduce(loss, reduction, size_average, reduce)


@rule(F.triplet_margin_with_distance_loss, numbers=("margin",))
def triplet_margin_with_distance_loss(
    rules: Rules,
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Any = None,
    margin: Any = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    distance = distance_function or F.pairwise_distance
    with rules:
        near, far = distance(anchor, positive), distance(anchor, negative)
        if swap:
            far = torch.minimum(far, distance(positive, negative))
    return _reduce((near - far + margin).clamp(min=0), reduction)


@rule(F.multi_margin_loss)
def multi_margin_loss(
    rules: Rules,
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: Any = 1.0,
    weight: Tensor | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    if not rules.stacked and not isinstance(margin, Tensor):
        return rules.open(F.multi_margin_loss, input, target, p, margin, weight, size_average, reduce, reduction)
    # torch's own has no rule for lanes: it would be done lane by lane
    scores, labels = (input[None], target.reshape(1)) if input.dim() == 1 else (input, target)
    chosen = scores.gather(1, labels[:, None])
    short = (margin - chosen + scores).clamp(min=0) ** p
    if weight is not None:
        short = short * weight[labels][:, None]
    others = torch.arange(scores.shape[1], device=scores.device) != labels[:, None]
    loss = torch.where(others, short, 0.0).sum(1) / scores.shape[1]
    return _reduce(loss if input.dim() > 1 else loss[0], reduction, size_average, reduce)


@rule(F.multilabel_margin_loss)
def multilabel_margin_loss(
    rules: Rules,
    input: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    if not rules.stacked:
        return rules.open(F.multilabel_margin_loss, input, target, size_average, reduce, reduction)
    # torch's own has no rule for lanes: it would be done lane by lane
    scores, labels = (input[None], target[None]) if input.dim() == 1 else (input, target)
    # the labels of a sample end at the first that is below 0
    counted = (labels >= 0).to(torch.int64).cumprod(-1).bool()
    labels = torch.where(counted, labels, 0)
    classes = torch.arange(scores.shape[1], device=scores.device)
    among = ((labels[..., None] == classes) & counted[..., None]).any(1)
    short = (1 - scores.gather(1, labels)[:, :, None] + scores[:, None, :]).clamp(min=0)
    loss = torch.where(counted[:, :, None] & ~among[:, None, :], short, 0.0).sum((1, 2)) / scores.shape[1]
    return _reduce(loss if input.dim() > 1 else loss[0], reduction, size_average, reduce)


@rule(torch.poisson_nll_loss, numbers=("eps",))
def poisson_nll_loss(
    rules: Rules, input: Tensor, target: Tensor, log_input: bool, full: bool, eps: Any, reduction: int
) -> Tensor:
    loss = input.exp() - target * input if log_input else input - target * (input + eps).log()
    if full:
        safe = torch.where(target > 1, target, 2.0)
        stirling = safe * safe.log() - safe + 0.5 * (2 * math.pi * safe).log()
        loss = loss + torch.where(target > 1, stirling, 0.0)
    return _reduce(loss, ("none", "mean", "sum")[reduction])


@rule(F.gaussian_nll_loss)
def gaussian_nll_loss(
    rules: Rules,
    input: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: Any = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    if not rules.stacked:
        return rules.open(F.gaussian_nll_loss, input, target, var, full, eps, reduction)
    # torch asks here whether a variance is negative; the plain step before the trace has asked it
    var = torch.as_tensor(var, dtype=input.dtype)
    if var.shape != input.shape and input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    bounded = _bounded(var, eps)
    loss = 0.5 * (bounded.log() + (input - target) ** 2 / bounded)
    return _reduce(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)
