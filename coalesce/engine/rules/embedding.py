"""Embeddings that write into their weight."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.lines import user_line
from coalesce.engine.rules.mode import Rules, rule
from coalesce.errors import TaskError


def _check(name: str, max_norm: float | None) -> None:
    if max_norm is not None:
        raise TaskError(
            f"{name}() with max_norm={max_norm} writes into its weight, but in a graph a parameter is the "
            f"optimiser's alone. Leave max_norm away, and scale what was looked up: "
            f"h * (max_norm / h.norm(dim=-1, keepdim=True)).clamp(max=1).\n{user_line()}"
        )


@rule(F.embedding)
def embedding(
    rules: Rules,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    _check("embedding", max_norm)
    return rules.open(F.embedding, input, weight, padding_idx, None, *args, **kwargs)


@rule(F.embedding_bag)
def embedding_bag(
    rules: Rules,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    _check("embedding_bag", max_norm)
    return rules.open(F.embedding_bag, input, weight, offsets, None, *args, **kwargs)
