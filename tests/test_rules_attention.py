"""Attention in lanes: what the table of modules does not show.

Oracle: finite differences; the operations of the trace.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from coalesce.engine.rules import Rules
from coalesce.engine.rules.attention import Flash
from coalesce.engine.trace import trace
from coalesce.random import key_of

SHAPE = (2, 2, 3, 4)


@pytest.mark.parametrize("mask", [None, torch.randn(1, 1, 3, 3, dtype=torch.float64)])
def test_gradients_of_gradients(mask: Tensor | None) -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def attend(*t: Tensor) -> Tensor:
        return Flash.apply(*t, mask, mask is None, 0.4)[0]

    torch.autograd.gradcheck(attend, qkv)
    torch.autograd.gradgradcheck(attend, qkv)


def test_one_call_of_the_kernel_for_all_lanes() -> None:
    def lane(key: Tensor, q: Tensor, masked: Tensor) -> Tensor:
        with Rules(key, torch.tensor(0), {}):
            return F.scaled_dot_product_attention(q, q, q, attn_mask=masked > 0).square().sum()

    def step(keys: Tensor, q: Tensor, masked: Tensor) -> list[Tensor]:
        return [vmap(grad(lane, argnums=1))(keys, q, masked)]

    keys = torch.stack([key_of(seed) for seed in range(5)])
    module = trace(step, [keys, torch.randn(5, *SHAPE), torch.randn(5, 2, 1, 3, 3)])
    calls = [str(n.target) for n in module.graph.nodes if "attention" in str(n.target)]
    assert calls == [
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    ]


def test_the_fast_path_comes_back() -> None:
    assert torch.backends.mha.get_fastpath_enabled()
    with Rules(key_of(0), torch.tensor(0), {}):
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
