"""Compiling a graph: what of TorchInductor is mended.

Oracle: the same function run as it is.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch._inductor.exc import InductorError
from torch.fx.experimental.proxy_tensor import make_fx

from coalesce.engine.compiling import _OPTIONS, compile_graph


@pytest.mark.slow
def test_a_state_that_is_written_behind_fused_kernels() -> None:
    """TorchInductor of torch 2.13.0 raised a KeyError here: see `_without_loads_that_are_none`."""

    def step(state: Tensor, x: Tensor) -> Tensor:
        inner = torch.softmax(state * x, -1)
        return state.copy_(state - torch.softmax(inner.exp() * x, -1))

    generator = torch.Generator().manual_seed(0)
    state, x = (torch.randn(64, 64, generator=generator) for _ in range(2))
    before = state.clone()
    module = make_fx(step)(state.clone(), x)
    # if this does not raise, torch is mended and our mending can go
    with pytest.raises(InductorError, match="KeyError"):
        torch._inductor.compile(copy.deepcopy(module), [state.clone(), x], options=_OPTIONS)
    run = compile_graph(module, [state.clone(), x])
    run(state, x)
    # float32, sums of 64 terms in another order
    torch.testing.assert_close(state, step(before, x), rtol=1e-5, atol=1e-6)
