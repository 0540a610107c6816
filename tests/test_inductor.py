"""What is done to TorchInductor while a graph is compiled: that it still does what we think, and changes no result.

Oracle: the same graph compiled without it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.cpp import CppVecKernel, OuterLoopFusedSchedulerNode
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.utils import fresh_inductor_cache
from torch.fx.experimental.proxy_tensor import make_fx

from coalesce.engine import inductor
from coalesce.engine.compiling import compile_graph


def kernels(function: Callable[..., Any], inputs: list[Tensor], how: AbstractContextManager[Any], folder: Path) -> Any:
    """The C++ code of a function, and what it computes."""
    folder.mkdir()
    examples: list[Any] = [*inputs]
    with fresh_inductor_cache(dir=str(folder)), torch.no_grad(), how:
        run = torch._inductor.compile(make_fx(function)(*inputs), examples, options={"cpp.threads": 1})
        found = run(*[t.clone() for t in inputs])
        texts = [path.read_text() for path in sorted(folder.rglob("*.main.cpp"))]
    # without the comments that say where it was
    return sorted(re.sub(r"/[^\s\"]*\.h", "", text) for text in texts), found


@pytest.mark.parametrize("columns", [64, 67])
def test_only_empty_tails_are_left_out(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tails = []
    original = CppVecKernel.__init__

    def counted(self: Any, args: Any, threads: Any, factor: Any, index: Any, tail: Any = None) -> None:
        tails.append(tail)
        original(self, args, threads, factor, index, tail)

    monkeypatch.setattr(CppVecKernel, "__init__", counted)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.softmax(x.tanh(), -1),)

    x = torch.linspace(-2, 2, 5 * columns).view(5, columns)
    code, (found,) = kernels(function, [x], inductor._no_empty_tails(), tmp_path / "with")
    some = [tail for tail in tails if tail is not None]
    stock, (expected,) = kernels(function, [x], nullcontext(), tmp_path / "without")
    assert code
    assert code == stock
    assert torch.equal(found, expected)
    # the columns are what vectors run along
    assert any(tail == columns % 8 or tail == columns % 16 for tail in some) == (columns == 67)
    # what the user has set stands again
    assert config.cpp.enable_loop_tail_vec


def update(good: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """An update, and one number for each lane that follows: a loop over lanes with nothing within."""
    new = weight - 0.1 * gradient
    broken = good & (~torch.isfinite(new)).any(1)
    return torch.where(broken[:, None], weight, new), broken, good & ~broken


def scaled(good: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Two loops over lanes, each with one within."""
    return (weight - gradient / gradient.square().sum(1, keepdim=True),)


@pytest.mark.parametrize(
    ("function", "size", "vain"), [(update, 64, True), (update, 5000, True), (scaled, 5000, True), (scaled, 64, False)]
)
def test_only_fusions_that_are_given_up_are_not_begun(
    function: Callable[..., Any], size: int, vain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    original = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr

    def told(self: Any, kernels: Any, depth: int) -> bool:
        ends.append(original(self, kernels, depth))
        return ends[-1]

    monkeypatch.setattr(OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", told)
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(8, size, generator=generator) for _ in range(2))
    inputs = [torch.arange(8) % 3 > 0, weight, gradient]
    _, expected = kernels(function, inputs, nullcontext(), tmp_path / "without")
    # if nothing is given up where it was in vain, torch is mended and our mending can go
    assert ends == [not vain]
    ends.clear()
    _, found = kernels(function, inputs, inductor._no_vain_fusions(), tmp_path / "with")
    assert ends == ([] if vain else [True])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.library.custom_op("coalesce_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format).t()


@turned.register_fake
def _(x: Tensor) -> Tensor:
    # of other strides than the result's
    return torch.empty_like(x)


def test_what_operations_return_that_are_not_compiled_is_looked_at() -> None:
    """Without this a wrong description of an operation would be wrong numbers."""
    x = torch.arange(12.0).view(3, 4)
    run = compile_graph(make_fx(lambda x: (turned(x) + x,), tracing_mode="fake")(x), [x])
    with pytest.raises(AssertionError, match="stride"):
        run(x)


def test_a_tiling_without_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch before 2.13 gives it."""
    monkeypatch.setattr(inductor.TilingSelect, "select_tiling", lambda self, functions, sizes: ([8], [1]))
    with inductor._no_empty_tails():
        for columns, left in ((64, False), (67, True)):
            found: object = inductor.TilingSelect().select_tiling([], [((5, columns), ())])
            assert found == ([8], [1])
            assert config.cpp.enable_loop_tail_vec == left


def test_a_kernel_is_built_while_the_next_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    submit, generate = AsyncCompile.submit, PythonWrapperCodegen.generate

    def submitted(task: Callable[..., Any]) -> Any:
        events.append("begun")
        return submit(task)

    def generated(self: Any, *arguments: Any) -> Any:
        # the module that calls the kernels, of which all are written now
        events.append("all written")
        return generate(self, *arguments)

    monkeypatch.setattr(AsyncCompile, "submit", staticmethod(submitted))
    monkeypatch.setattr(PythonWrapperCodegen, "generate", generated)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (((x.exp() @ x).tanh() @ x).sin(),)

    x = torch.linspace(-1, 1, 64).view(8, 8)
    code, (expected,) = kernels(function, [x], nullcontext(), tmp_path / "without")
    assert len(code) == 3
    # if they are begun earlier here, torch does it itself and ours can go
    assert events == ["all written", *["begun"] * 3]
    events.clear()
    mended, (found,) = kernels(function, [x], inductor._built_at_once(), tmp_path / "with")
    # each once
    assert events == [*["begun"] * 3, "all written"]
    assert mended == code
    assert torch.equal(found, expected)


def test_kernels_that_a_c_module_calls_are_left_alone(tmp_path: Path) -> None:
    """`TORCHINDUCTOR_CPP_WRAPPER`, with which a user may have all of his compiled."""
    x = torch.linspace(-1, 1, 64).view(8, 8)
    with config.patch({"cpp_wrapper": True}):
        _, (found,) = kernels(lambda x: ((x.exp() @ x).tanh(),), [x], inductor.mended(), tmp_path / "with")
    torch.testing.assert_close(found, (x.exp() @ x).tanh())


def test_afterwards_torch_is_as_it_was() -> None:
    owners: tuple[type, ...] = (inductor.LoopBody, inductor.TilingSelect, inductor.CppScheduling)
    owners += (inductor.CppPythonBindingsCodeCache, inductor.PythonWrapperCodegen)
    before = [dict(vars(owner)) for owner in owners]
    with inductor.mended():
        during = [dict(vars(owner)) for owner in owners]
    assert all(a != b for a, b in zip(during, before, strict=True))
    assert [dict(vars(owner)) for owner in owners] == before


def test_kernels_let_other_threads_run() -> None:
    """TorchInductor's kernels of torch 2.13.0 keep the interpreter's lock: see `inductor._unlocked`."""
    assert inductor.kernels_unlock()
    x = torch.linspace(-3, 3, 2**24)
    run = compile_graph(
        make_fx(lambda x: (x.tan().atan().tan().atan().exp().log().tan().atan(),))(torch.ones(2**24)), [x]
    )
    # one thread makes the call as long as it can be
    (expected,) = run(x)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(run(x)[0]))
    # before it is started: it may take the lock at once
    longest, last = 0.0, time.perf_counter()
    started = last
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    took = time.perf_counter() - started
    assert torch.equal(found[0], expected)
    # with the lock held, this thread would have waited for the whole kernel
    assert took > 0.05
    assert longest < took / 2
