"""What of TorchInductor is mended, made faster or made otherwise while a graph is compiled for the CPU.

All of it is private: methods that are replaced for as long as one graph is compiled. Tried on torch 2.13.0; where
another version has no such method, nothing is replaced. None of it changes what a kernel computes.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from torch._inductor import config
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.codegen.cpp import CppScheduling, OuterLoopFusedSchedulerNode, TilingSelect
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.loop_body import LoopBody

#: How TorchInductor's module of a C++ kernel calls it, and how it does here. The arguments are read under the
#: interpreter's lock, and the kernel runs without it, as torch's own operations do.
_CALL = "kernel({}); Py_RETURN_NONE;"
_UNLOCKED_CALL = (
    "struct Unlocked {{ PyThreadState* state = PyEval_SaveThread(); ~Unlocked() {{ PyEval_RestoreThread(state); }} }}; "
    "[](auto... arguments) {{ Unlocked unlocked; kernel(arguments...); }}({}); Py_RETURN_NONE;"
)

#: How many times as long as all loops around it a loop is that TorchInductor rather runs in several threads.
_LONGER = 300


@contextmanager
def mended() -> Iterator[None]:
    """Here graphs are compiled with all of it."""
    with ExitStack() as stack:
        for one in (
            _none_for_no_load,
            _rules_made_once,
            _unlocked,
            _trusted,
            _no_empty_tails,
            _no_vain_fusions,
            _built_at_once,
        ):
            stack.enter_context(one())
        yield


def kernels_unlock() -> bool:
    """Whether compiled kernels let other threads of Python run beside them: with a version of torch that calls them as
    it is known here."""
    return getattr(CppPythonBindingsCodeCache, "call_entry_function", None) in (_CALL, _UNLOCKED_CALL)


def _unlocked() -> AbstractContextManager[object]:
    """Have kernels of the CPU let go of the interpreter's lock, which TorchInductor's hold while they run."""
    if not kernels_unlock():
        return nullcontext()
    return patch.object(CppPythonBindingsCodeCache, "call_entry_function", _UNLOCKED_CALL)


def _replaced(owner: type, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[object]:
    """Replace a method by what is made of it, if there is one."""
    original = getattr(owner, name, None)
    return nullcontext() if original is None else patch.object(owner, name, make(original))


def _none_for_no_load() -> AbstractContextManager[object]:
    """Mend a fault.

    Where kernels of one outer loop are fused, it asks how each user of an intermediate buffer reads it, to make the
    buffer a local one. A copy into the state is a user too, since it must come later, but reads nothing of it; asking
    raised a KeyError, and a step such as ``w.copy_(w - softmax(exp(softmax(w * x)) * x))`` was not compiled at all.
    The answer here, None, is no contiguous read, so that this one buffer stays as it is.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_read_expr(self: LoopBody, buffer_name: str) -> Any:
            try:
                return original(self, buffer_name)
            except KeyError:
                return None

        return get_read_expr

    return _replaced(LoopBody, "get_read_expr", make)


def _rules_made_once() -> AbstractContextManager[object]:
    """Have the table of dtypes made once for a graph.

    It is one object of the process, which is asked for with each operation that is written, and made anew each time.
    """
    made = False

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: DtypePropagationOpsHandler) -> None:
            nonlocal made
            if not made:
                original(self)
                made = True

        return __init__

    return _replaced(DtypePropagationOpsHandler, "__init__", make)


def _trusted() -> AbstractContextManager[object]:
    """Have the code not look at the shape of each of its inputs in every call.

    A tape is called with what it was compiled for. What operations return that are not compiled is looked at still.
    """
    return _replaced(PythonWrapperCodegen, "codegen_input_size_asserts", lambda _: lambda self: None)


@contextmanager
def _no_empty_tails() -> Iterator[None]:
    """Have no code written for what vectors leave over of a loop where they leave nothing.

    A kernel's code is written once for single numbers, once for vectors, and once for the rest in a vector that is
    not full; that one is thrown away where the loop's length is a multiple of the vector's, as it mostly is.
    """
    wanted = config.cpp.enable_loop_tail_vec

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def select_tiling(self: TilingSelect, functions: Any, sizes: Sequence[Any]) -> Any:
            # and, from torch 2.13 on, statistics
            found = original(self, functions, sizes)
            factors, loops = found[:2]
            outer, inner = max(sizes, key=lambda pair: len(pair[1]))
            lengths = (*outer, *inner)
            left = any(lengths[i] % n != 0 for i, n in zip(loops, factors, strict=True))
            # this kernel's code is what is written next
            config.cpp.enable_loop_tail_vec = wanted and left
            return found

        return select_tiling

    with config.patch({"cpp.enable_loop_tail_vec": wanted}), _replaced(TilingSelect, "select_tiling", make):
        yield


def _no_vain_fusions() -> AbstractContextManager[object]:
    """Have the outer loops of two kernels not be fused where that would be given up.

    It is given up when the code is written, which then is written once more: where one of the kernels has no loop
    within those that are fused, so that its vectors run along them; and where the next loop within is so long that it
    is better run in several threads.
    """

    def make(original: Callable[..., int]) -> Callable[..., int]:
        def depth(self: CppScheduling, one: Any, other: Any) -> int:
            found = original(self, one, other)
            for node in (one, other) if found else ():
                for part in node.get_outer_nodes() if isinstance(node, OuterLoopFusedSchedulerNode) else (node,):
                    lengths = [length for group in part.group[1] for length in group]
                    if len(lengths) <= found or lengths[found] > _LONGER * math.prod(lengths[:found]):
                        return 0
            return found

        return depth

    return _replaced(CppScheduling, "_get_outer_loop_fusion_depth", make)


def _built_at_once() -> AbstractContextManager[object]:
    """Have the C++ compiler begin with a kernel as soon as its code is written.

    TorchInductor begins with all of a graph's kernels when the last one is written. Those that were begun it then finds
    in its own cache, by their code.
    """

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def define_kernel(self: PythonWrapperCodegen, name: str, body: str, *args: Any, **keywords: Any) -> None:
            original(self, name, body, *args, **keywords)
            # as it stands in the module that calls the kernel; other kinds of kernels are begun when they ever were
            if body.startswith("async_compile.cpp_pybinding("):
                # here, since the import starts processes
                from torch._inductor.async_compile import AsyncCompile

                call = ast.parse(body.strip(), mode="eval").body
                assert isinstance(call, ast.Call)
                AsyncCompile().cpp_pybinding(*map(ast.literal_eval, call.args))

        return define_kernel

    return _replaced(PythonWrapperCodegen, "define_kernel", make)
