"""Compiling traced graphs, each distinct one once per process."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch import Tensor, fx
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from coalesce import kernels
from coalesce.engine import inductor, preparing

Runner = Callable[..., Sequence[Tensor]]

# The compiler expands a value at each of its uses until the expression has this many operations or reads, and then
# writes it to memory. Draws are chains of some hundred integer operations whose values are used two or three times, so
# that the time to compile them grows like a power of the first number; with too few the step is slow. Both by
# `python -m benchmarks.step --realize 4 12 20 30`.
_DRAWN = {"realize_opcount_threshold": 20}
# Where nothing is drawn: a parameter's new value, which is looked at and kept, is no larger than this, and would stand
# in memory beside the gradient (`python -m benchmarks.memory --widths 1 --size 1024`: 0.24 in place of 0.15).
_UNDRAWN = {"realize_opcount_threshold": 50, "realize_reads_threshold": 20, "realize_acc_reads_threshold": 40}

#: What is done to a graph before it is compiled: operators that loop are told to run compiled code themselves.
PREPARE: list[Callable[[fx.GraphModule], None]] = []

_compiled: dict[str, Runner] = {}
# what is done to the compiler meanwhile is done to the process
_lock = threading.RLock()
_wanted_at_once = False


def compilations() -> int:
    """How many graphs this process has compiled."""
    return len(_compiled)


def cache_folder() -> Path:
    """Where the compiler keeps on disk what it has made (``TORCHINDUCTOR_CACHE_DIR``)."""
    return Path(cache_dir())


def compile_graph(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Runner:
    """Compile a graph with TorchInductor, or take the same graph's code if this process has it.

    Args:
        module: a traced graph without constants; it may end in copies into its inputs.
        inputs: real tensors of the shapes, strides, dtypes and devices that it will be called with.

    Returns:
        A function of the same inputs.
    """
    with _lock:
        return _compile(module, inputs)


def _compile(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Runner:
    with _at_once():
        for prepare in PREPARE:
            prepare(module)
    kernels.keep_memory()
    key = _signature(module, inputs)
    if key not in _compiled:
        preparing.finish()
        mode = FakeTensorMode(shape_env=ShapeEnv())
        examples: list[Any] = [mode.from_tensor(t, static_shapes=True) for t in inputs]
        with torch.no_grad(), inductor.mended():
            # torch._inductor.compile is private by its name and documented. It looks into its cache on disk, and keeps
            # there what it has made, only where shapes might be symbols, as for torch.compile: so the examples are fake
            # tensors of a mode that has them. Here none is one, and nothing is guarded. The number of threads stands in
            # the code; as an option it stands in the cache's key too, in every version. Tried on torch 2.13.0.
            drawn = any(node.target is torch.ops.aten.bitwise_xor.Tensor for node in module.graph.nodes)
            options = {
                **(_DRAWN if drawn else _UNDRAWN),
                "cpp.threads": torch.get_num_threads(),
            }
            _compiled[key] = torch._inductor.compile(module, examples, options=options)
    return _compiled[key]


@contextmanager
def _at_once() -> Iterator[None]:
    """Here graphs are compiled and called while another one is prepared: `together` does not put off their kernels."""
    global _wanted_at_once
    before, _wanted_at_once = _wanted_at_once, True
    try:
        yield
    finally:
        _wanted_at_once = before


@contextmanager
def together(device: torch.device) -> Iterator[None]:
    """Have the C++ compiler build one graph's kernels while the next graph is lowered.

    What `compile_graph` returns meanwhile may be called only afterwards. TorchInductor starts the C++ compiler beside
    itself, but ends each graph by waiting for its kernels; here that is done for all graphs at the end. AsyncCompile is
    private; tried on torch 2.13.0. On other devices, where kernels are timed while they are built, nothing changes.
    """
    if device.type != "cpu":
        yield
        return
    # here, since the import starts processes
    from torch._inductor.async_compile import AsyncCompile

    before = set(_compiled)
    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []
    original = AsyncCompile.wait

    def wait(self: AsyncCompile, scope: dict[str, Any]) -> None:
        if _wanted_at_once:
            original(self, scope)
        else:
            waiting.append((self, scope))

    AsyncCompile.wait = wait  # type: ignore[method-assign]
    try:
        try:
            yield
        finally:
            AsyncCompile.wait = original  # type: ignore[method-assign]
        for compiler, scope in waiting:
            original(compiler, scope)
    except BaseException:
        # their kernels are not there
        for key in set(_compiled) - before:
            del _compiled[key]
        raise


def lift_constants(module: fx.GraphModule) -> list[Tensor]:
    """Turn the constants of a graph into further placeholders, and return their values in order."""
    graph = module.graph
    values: list[Tensor] = []
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op == "get_attr":
            value = getattr(module, node.target)
            with graph.inserting_after(last):
                last = graph.placeholder(f"constant_{len(values)}")
            last.meta = dict(node.meta)
            node.replace_all_uses_with(last)
            graph.erase_node(node)
            values.append(value.detach())
    module.recompile()
    return values


def _signature(module: fx.GraphModule, inputs: Sequence[Tensor]) -> str:
    """A hash of what decides the compiled code: operations, wiring, shapes, strides, dtypes, devices, threads, and
    how exactly products are computed."""
    place: dict[fx.Node, int] = {}
    rows: list[Any] = [torch.get_num_threads(), *kernels.backends()]
    rows += [(tuple(t.shape), t.stride(), str(t.dtype), str(t.device)) for t in inputs]
    for index, node in enumerate(module.graph.nodes):
        place[node] = index
        wiring = fx.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}")
        rows.append((node.op, "" if node.op == "placeholder" else str(node.target), repr(wiring)))
    return hashlib.sha256(repr(rows).encode()).hexdigest()
