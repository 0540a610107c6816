"""Rows of the table of modules: attention and transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from module_table import Row, rows

TIME, WIDTH = 4, 6


class Attends(nn.Module):
    """`scaled_dot_product_attention` in as many ways as are given, two heads each, after another."""

    def __init__(self, *ways: Callable[[Any, Tensor], dict[str, Any]], heads: int = 2):
        super().__init__()
        self.ways, self.heads = ways, heads
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in ways])
        self.head, self.bias = nn.Linear(WIDTH, 2), nn.Parameter(torch.randn(TIME, TIME))

    def forward(self, x: Tensor) -> Tensor:
        for way, layer in zip(self.ways, self.qkv, strict=True):
            q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, **way(self, x)).transpose(1, 2).flatten(2)
        return self.head(x.mean(1))


def causal(net: Any, x: Tensor) -> dict[str, Any]:
    return {"is_causal": True, "scale": 0.7}


def shared(net: Any, x: Tensor) -> dict[str, Any]:
    """One mask for all samples."""
    return {"attn_mask": torch.ones(TIME, TIME, dtype=torch.bool).tril(1)}


def own(net: Any, x: Tensor) -> dict[str, Any]:
    """A mask of each sample's own, which in a lane is the lane's own: no first key for some."""
    seen = torch.arange(TIME) >= (x[:, 0, :1] > 0).long()
    return {"attn_mask": seen[:, None, None, :].expand(-1, -1, TIME, -1)}


def learned(net: Any, x: Tensor) -> dict[str, Any]:
    return {"attn_mask": net.bias}


def constant(net: Any, x: Tensor) -> dict[str, Any]:
    """A parameter as a mask that gets no gradient: the lane's own, the same for all samples."""
    return {"attn_mask": net.bias.detach()}


class Grouped(nn.Module):
    """Two heads of queries for one of keys, which one head of values answers; without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.head = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = (z.unsqueeze(1) for z in self.kv(x).chunk(2, -1))
        h = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        single = F.scaled_dot_product_attention(q[0], q[0], q[0])
        return self.head((h + single).transpose(1, 2).flatten(2).mean(1))


class Multihead(nn.Module):
    def __init__(self, dropout: Any):
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)
        self.second = nn.MultiheadAttention(WIDTH, 3, dropout=dropout, kdim=WIDTH, vdim=2, bias=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(TIME).expand(len(x), TIME) >= TIME - 1
        h, weights = self.first(x, x.tanh(), x, key_padding_mask=padding)
        h = h.transpose(0, 1)
        h = h + self.second(h, h, h[..., :2], need_weights=False)[0]
        return self.head(h.mean(0)) * (1 + weights.square().mean())


class Coder(nn.Module):
    """An encoder of two layers with padding, and a decoder that looks at what it gives."""

    def __init__(self, dropout: Any):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 5, dropout, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(TIME).expand(len(x), TIME) >= TIME - 1
        # what stands at the padding is another number in torch's fast path, and nobody's business
        seen = self.encoder(x, src_key_padding_mask=padding)[:, :-1]
        mask = nn.Transformer.generate_square_subsequent_mask(TIME, dtype=x.dtype)
        return self.head(self.decoder(x.flip(1), seen, tgt_mask=mask, tgt_is_causal=True).mean(1))


def row(name: str, model: Any, **options: Any) -> Row:
    return Row(name, model, (TIME, WIDTH), **options)


rows(
    row("Attention", lambda a: Attends(causal, shared, own, constant), compiled=True, thorough=True),
    row("Attention, learned mask", lambda a: Attends(learned)),
    row("Attention, dropout", lambda a: Attends(lambda net, x: {"dropout_p": a if net.training else 0.0})),
    row("Attention, grouped", lambda a: Grouped()),
    row("MultiheadAttention", Multihead),
    row("Transformer", Coder),
)
