"""A character-level language model: a small GPT on the reference that Python ships with (`help("if")` prints of it)."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.errors import Problem
from coalesce.tasks.checks import check_shares, check_sizes


class CharLM(coalesce.Task):
    """The next character of Python's language reference, some 370,000 characters of about 100 kinds.

    The text differs a little from one version of Python to the next. Its first 80 % are to train on, then 10 % each
    for validation and for the test. A sample is a window of ``context + 1`` characters within one part: each character
    but the first is to be told from those before it in the window. Windows for validation and test begin every
    ``context`` characters, so that each character is told once; what fills no window at a part's end is left out.

    Args:
        layers: blocks of attention and MLP.
        width: D, the size of a token's vector.
        heads: of attention; a divisor of the width.
        context: T, the characters that the model sees.
        stride: characters between the beginnings of two windows to train on: a part's N windows overlap where it is
            less than the context.
        tied: whether the last layer shares its weights with the embedding of tokens.
        dropout: probability with which an embedding, an attention weight, or a feature that a block adds is dropped,
            0 to 1.

    Raises:
        ConfigError: arguments are out of range, or do not fit each other.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 64,
        heads: int = 4,
        context: int = 64,
        stride: int = 16,
        tied: bool = False,
        dropout: float = 0.0,
    ):
        problems = check_sizes(layers=layers, width=width, heads=heads, context=context, stride=stride)
        problems += check_shares(dropout=dropout)
        if not problems and width % heads:
            divisors = ", ".join(str(n) for n in range(1, width + 1) if width % n == 0)
            problems.append(Problem("task.heads", heads, f"must divide task.width={width}", divisors))
        if problems:
            raise coalesce.ConfigError(problems)
        self.layers = layers
        self.width = width
        self.heads = heads
        self.context = context
        self.stride = stride
        self.tied = tied
        self.dropout = dropout

    def data(self) -> coalesce.Data:
        tokens, _ = encoded(reference())
        train, val, test = np.split(tokens, [len(tokens) * 8 // 10, len(tokens) * 9 // 10])
        least = min(len(val), len(test))
        if self.context >= least:
            rule = f"must be less than the {least} characters of the smallest split"
            raise coalesce.ConfigError([Problem("task.context", self.context, rule, f"1 to {least - 1}")])
        return coalesce.Data(
            train=self._windows(train, self.stride),
            val=self._windows(val, self.context),
            test=self._windows(test, self.context),
        )

    def _windows(self, tokens: np.ndarray, stride: int) -> np.ndarray:
        """(N, T + 1), a byte per character: embeddings and losses want 8 of them, but only for a batch."""
        return np.lib.stride_tricks.sliding_window_view(tokens, self.context + 1)[::stride]

    def model(self) -> nn.Module:
        _, vocabulary = encoded(reference())
        sizes = (len(vocabulary), self.context, self.layers, self.width, self.heads)
        return GPT(*sizes, tied=self.tied, dropout=self.dropout)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss, _ = self._told(model, batch)
        return loss

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        loss, hits = self._told(model, batch)
        return {"loss": loss, "bits_per_character": loss / math.log(2), "accuracy": hits.float().mean()}

    def _told(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Nats per character, and which characters (B, T) got the highest score."""
        x, y = batch[:, :-1].long(), batch[:, 1:].long()
        logits = model(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits.argmax(-1) == y


class GPT(nn.Module):
    """Tokens (B, T) to scores of the next token (B, T, C), as GPT-2 has it, without biases in its last layer.

    Args:
        vocabulary: C.
        context: the largest T.
        layers, width, heads, tied, dropout: see `CharLM`.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        width: int,
        heads: int,
        tied: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.apply(_initialise)
        # what the blocks add to the residual stream grows with their number: GPT-2 divides by its root
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Block(nn.Module):
    """Causal attention, then an MLP, each behind a LayerNorm and beside a shortcut: (B, T, D) to (B, T, D)."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.rate = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        # (B, heads, T, D / heads) each
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(x).chunk(3, dim=-1))
        rate = self.rate if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        out: Tensor = self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return out


class MLP(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.hidden = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.out(F.gelu(self.hidden(x))))
        return out


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@cache
def reference() -> str:
    """Python's language reference: the topics of `help`, in their order, each paragraph once.

    A fifth of it stands in several topics (that on compound statements holds those on ``if``, ``with``, ...): what is
    to be told in the test split must not have been there to learn by heart.
    """
    from pydoc_data.topics import topics

    kept: dict[str, str] = {}
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            kept.setdefault(" ".join(paragraph.split()), paragraph.strip("\n"))
    return "\n\n".join(text for text in kept.values() if text.strip())


def encoded(text: str) -> tuple[np.ndarray, str]:
    """Characters as numbers, in as few bytes as their kinds allow, and the kinds that there are, in order."""
    kinds, tokens = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
    return tokens.astype(np.min_scalar_type(len(kinds) - 1)), "".join(map(chr, kinds))
