"""Attention: the lanes are folded into the batch, so that one call of the flash kernel does for all; its dropout draws
from the lane's own stream.

vmap has no rule for the flash kernel of the CPU: it calls it lane by lane. Folded, a step of a GPT with 4 layers takes
8 % less time, and compiles in a third of it (`python -m benchmarks.attention`, docs/log.md). With dropout torch has no
fused kernel on the CPU either, and attention is written out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.dropout import Rate, carried, drop
from coalesce.engine.rules.mode import AROUND, Rules, rule

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    rules: Rules,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float | Tensor = 0.0,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    dropout_p = carried(dropout_p)
    if isinstance(scale, Tensor):
        # the kernel takes only a Python number: what differs from its default goes into the queries
        query, scale = query * (scale * query.shape[-1] ** 0.5).to(query.dtype), None
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (z.repeat_interleave(repeats, -3) for z in (key, value))
    if isinstance(dropout_p, Tensor) or dropout_p != 0:
        weights = _weights(query, key, attn_mask, is_causal, scale)
        return drop(rules, weights, dropout_p, weights.shape) @ value
    if not rules.stacked or not _fits(query, key, value, attn_mask, is_causal):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
    q, k, v = (z[None] if z.dim() == 3 else z for z in (query, key, value))
    mask = attn_mask
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
        mask = mask[(None,) * (4 - mask.dim())]
    return Flash.apply(q, k, v, mask, is_causal, scale)[0].view(query.shape)


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """Attention written out: how much each query takes from each key."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if hidden else scores + mask
    return scores.softmax(-1)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether torch would take the flash kernel for one lane, as its documentation says; and there is a batch to fold
    the lanes into."""
    shapes = [z.shape for z in (query, key, value)]
    same = len({(*s[:-2], s[-1]) for s in shapes}) == 1 and shapes[1] == shapes[2] and all(all(s) for s in shapes)
    bare = mask is None or (not mask.requires_grad and not is_causal and mask.dim() in (2, 4))
    return same and bare and query.dim() in (3, 4) and query.device.type == "cpu" and query.is_floating_point()


class Flash(torch.autograd.Function):
    """The flash kernel: (B, heads, T, D) each and a mask of 4 dimensions → (output, logarithm of the sums)."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Any:
        return _FLASH(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, mask, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, *output, mask)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        q, k, v, output, sums, mask = ctx.saved_tensors
        return *FlashBackward.apply(gradient, q, k, v, output, sums, mask, ctx.causal, ctx.scale), None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> Any:
        found = Flash.apply(*_fold(args[:3], dims, info.batch_size), *_fold_mask(args, dims, 3, info.batch_size))
        return tuple(f.unflatten(0, (info.batch_size, -1)) for f in found), (0, 0)


class FlashBackward(torch.autograd.Function):
    """The flash kernel's gradient. Its own, which only a second derivative asks for, is that of attention written out:
    output and sums follow from the rest, so that nothing flows through them."""

    @staticmethod
    def forward(
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        sums: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> Any:
        return _FLASH_BACKWARD(gradient, q, k, v, output, sums, 0.0, causal, attn_mask=mask, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, _, _, mask, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors, mask)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *tensors, mask = ctx.saved_tensors

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _weights(q, k, mask, ctx.causal, ctx.scale) @ v

        def first(gradient: Tensor, *qkv: Tensor) -> Any:
            return torch.func.vjp(attend, *qkv)[1](gradient)

        return *torch.func.vjp(first, *tensors)[1](gradients), *[None] * 5

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> Any:
        found = FlashBackward.apply(
            *_fold(args[:6], dims, info.batch_size), *_fold_mask(args, dims, 6, info.batch_size)
        )
        return tuple(f.unflatten(0, (info.batch_size, -1)) for f in found), (0, 0, 0)


def _fold(tensors: Any, dims: Any, lanes: int) -> list[Tensor]:
    """Lanes into the batch, (B, …) or a lane's dimension more → (K·B, …)."""
    pairs = zip(tensors, dims, strict=False)
    return [(t.expand(lanes, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1) for t, d in pairs]


def _fold_mask(args: Any, dims: Any, place: int, lanes: int) -> list[Any]:
    """The mask beside folded tensors, and what follows it. One that all lanes and samples share stays as it is."""
    mask, dim, batch = args[place], dims[place], args[0].shape[1 if dims[0] == 0 else 0]
    if mask is not None and (dim is not None or mask.shape[0] > 1):
        mask = mask.expand(lanes, *mask.shape) if dim is None else mask.movedim(dim, 0)
        mask = mask.expand(lanes, batch, *mask.shape[2:]).flatten(0, 1)
    return [mask, *args[place + 1 :]]


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@rule(F.multi_head_attention_forward)
def multi_head_attention_forward(rules: Rules, *args: Any, **kwargs: Any) -> Any:
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    if isinstance(given["dropout_p"], Tensor):
        # compared with 0 on its way to the dropout
        given["dropout_p"] = Rate(given["dropout_p"])
    return rules.open(F.multi_head_attention_forward, **given)


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """In evaluation, attention and encoder layers take a path of their own in torch that vmap does not know, and that
    asks for the values of a padding mask."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


AROUND.append(_no_fast_path)
