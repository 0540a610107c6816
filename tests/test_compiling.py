"""Compiling a graph: what of TorchInductor is mended, and what it keeps.

Oracle: the same function run as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.exc import InductorError
from torch._inductor.utils import fresh_inductor_cache
from torch.fx.experimental.proxy_tensor import make_fx

from coalesce.engine import compiling
from coalesce.engine.compiling import _DRAWN, compile_graph


@pytest.mark.slow
def test_a_state_that_is_written_behind_fused_kernels() -> None:
    """TorchInductor of torch 2.13.0 raised a KeyError here: see `inductor._none_for_no_load`."""

    def step(state: Tensor, x: Tensor) -> Tensor:
        inner = torch.softmax(state * x, -1)
        return state.copy_(state - torch.softmax(inner.exp() * x, -1))

    generator = torch.Generator().manual_seed(0)
    state, x = (torch.randn(64, 64, generator=generator) for _ in range(2))
    before = state.clone()
    module = make_fx(step)(state.clone(), x)
    # if this does not raise, torch is mended and our mending can go
    with pytest.raises(InductorError, match="KeyError"):
        torch._inductor.compile(copy.deepcopy(module), [state.clone(), x], options=_DRAWN)
    run = compile_graph(module, [state.clone(), x])
    run(state, x)
    # float32, sums of 64 terms in another order
    torch.testing.assert_close(state, step(before, x), rtol=1e-5, atol=1e-6)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiling, "_compiled", {})
    with fresh_inductor_cache(dir=str(tmp_path)):
        yield


def test_code_is_kept_on_disk_for_each_number_of_threads(empty_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchInductor's own cache is asked, though no Dynamo is there. Its key must have all that the code depends on."""

    def traced() -> fx.GraphModule:
        # another object each time, as another process has it
        return make_fx(lambda x: (torch.softmax(x * 2, -1),))(torch.ones(40, 50))

    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    found = []
    for threads, expected in ((1, "miss"), (2, "miss"), (1, "hit"), (2, "hit")):
        torch.set_num_threads(threads)
        # what a new process knows
        monkeypatch.setattr(compiling, "_compiled", {})
        counters.clear()
        (result,) = compile_graph(traced(), [x])(x)
        found.append(result)
        said = {name: count for name, count in counters["inductor"].items() if name.startswith("fxgraph_cache_")}
        assert said == {f"fxgraph_cache_{expected}": 1}
    torch.testing.assert_close(found[0], torch.softmax(x * 2, -1))
    # the kept code is the code
    assert found[2].equal(found[0])
    assert found[3].equal(found[1])


def graph_of(factor: float) -> tuple[fx.GraphModule, list[Tensor]]:
    x = torch.linspace(-1, 1, 60)
    return make_fx(lambda x: (torch.softmax(x * factor, -1),))(x), [x]


def test_graphs_that_are_compiled_together(empty_cache: None) -> None:
    """The second one is lowered before the first one's kernels are waited for; then both do what they should."""
    events: list[str] = []
    original = AsyncCompile._wait_futures

    def wait(self: AsyncCompile, scope: dict[str, Any]) -> None:
        events.append("waited")
        original(self, scope)

    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(compile_threads=2):
        patch.setattr(AsyncCompile, "_wait_futures", wait)
        with compiling.together(torch.device("cpu")):
            found = []
            for factor in (2.0, 3.0):
                module, inputs = graph_of(factor)
                found.append(compile_graph(module, inputs))
                events.append("lowered")
    assert events == ["lowered", "lowered", "waited", "waited"]
    for factor, run in zip((2.0, 3.0), found, strict=True):
        module, inputs = graph_of(factor)
        torch.testing.assert_close(run(*inputs), module(*inputs))


def test_what_failed_together_is_not_kept(empty_cache: None) -> None:
    """Kernels that nobody waited for are no functions: whoever wants the same graph later compiles it anew."""
    module, inputs = graph_of(2.0)
    before = AsyncCompile.wait

    def interrupted() -> None:
        with compiling.together(torch.device("cpu")):
            compile_graph(module, inputs)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert compiling.compilations() == 0
    assert AsyncCompile.wait is before
    torch.testing.assert_close(compile_graph(module, inputs)(*inputs), module(*inputs))


def test_the_table_of_dtypes_is_made_once(empty_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one object, but torch 2.13.0 makes it anew for each operation: if not, torch is mended and ours can go."""
    made: list[object] = []
    original = DtypePropagationOpsHandler.__init__

    def make(self: DtypePropagationOpsHandler) -> None:
        made.append(self)
        original(self)

    monkeypatch.setattr(DtypePropagationOpsHandler, "__init__", make)
    counted = DtypePropagationOpsHandler.__init__
    module, inputs = graph_of(2.0)
    compile_graph(module, inputs)
    assert len(made) == 1
    assert DtypePropagationOpsHandler.__init__ is counted
    made.clear()
    module, inputs = graph_of(3.0)
    torch._inductor.compile(module, [*inputs])
    assert len(made) > 5


def test_what_is_compiled_while_another_graph_is_prepared_can_be_called(
    empty_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the cell of an operator that loops is."""
    inner, inputs = graph_of(2.0)
    found: list[Tensor] = []

    def prepare(module: fx.GraphModule) -> None:
        if module is not inner:
            found.extend(compile_graph(inner, inputs)(*inputs))

    monkeypatch.setattr(compiling, "PREPARE", [prepare])
    outer, _ = graph_of(3.0)
    with torch._inductor.config.patch(compile_threads=2), compiling.together(torch.device("cpu")):
        run = compile_graph(outer, inputs)
    torch.testing.assert_close(found, [*inner(*inputs)])
    torch.testing.assert_close(run(*inputs), outer(*inputs))
