"""Attention whose dropout draws from the lane's own stream."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.dropout import Rate, carried, drop
from coalesce.engine.rules.mode import Rules, rule


@rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    rules: Rules,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float | Tensor = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    dropout_p = carried(dropout_p)
    if not isinstance(dropout_p, Tensor) and dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (z.repeat_interleave(repeats, -3) for z in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if hidden else scores + attn_mask
    weights = scores.softmax(-1)
    return drop(rules, weights, dropout_p, weights.shape) @ value


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@rule(F.multi_head_attention_forward)
def multi_head_attention_forward(rules: Rules, *args: Any, **kwargs: Any) -> Any:
    # A mode is off inside its own handler, so the dropout within would escape it; and under the mode the function
    # would dispatch to this handler for ever. So its body runs under the mode with its dispatch switched off.
    function = F.multi_head_attention_forward
    body = types.FunctionType(
        function.__code__,
        function.__globals__ | {"has_torch_function": lambda *_: False},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    if isinstance(given["dropout_p"], Tensor):
        given["dropout_p"] = Rate(given["dropout_p"])
    with rules:
        return body(**given)
