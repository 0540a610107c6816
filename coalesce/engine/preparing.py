"""What TorchInductor must know before its first C++ kernel, found out while the step is traced.

For the CPU it tries, for each kind of vector instructions that the processor has, whether the C++ compiler can build
for it and the system can load what was built: one try in each process and, with an empty cache, up to ten small
programs, one after the other. Then it precompiles the header of all kernels, once for each compiler and torch, and in
each process asks whether that is still the one. All of it is done by other processes, while this one waits. So it is
begun in a thread as soon as it is known that something will be compiled, the tries side by side, which are waited for
before the first graph is compiled. The header is wanted later, by the first kernel; who comes too early for it waits by
the compiler's own lock.

TorchInductor keeps the answers itself, in the process and on disk: here are no results, and where anything fails it
will ask again, and say what is wrong.
"""

from __future__ import annotations

import contextvars
import logging
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

# not in the thread: two threads that import modules which need each other may see unfinished ones
import torch.utils.cpp_extension
from torch._inductor import codecache, cpp_builder, cpu_vec_isa

logger = logging.getLogger(__name__)

#: A kernel that is built of nothing; it is never built.
_NOTHING = 'extern "C" void kernel(float* x) {}'

_lock = threading.Lock()
_thread: threading.Thread | None = None
_tried = threading.Event()


def begin(device: str) -> None:
    """Begin, unless this process has; where nothing will be compiled for the CPU there is nothing to do.

    Args:
        device: of what will be compiled; "auto" as the trainer has it.
    """
    global _thread
    if not (device == "cpu" or (device == "auto" and not torch.cuda.is_available())):
        return
    with _lock:
        if _thread is None:
            # the compiler's settings are those of a context
            context = contextvars.copy_context()
            # a daemon: nobody waits for it if nothing comes to be compiled
            _thread = threading.Thread(target=context.run, args=(_prepare,), name="compiler", daemon=True)
            _thread.start()


def finish() -> None:
    """Wait until the instructions are tried, if that was begun; signals are heard meanwhile."""
    # in a process that was forked off meanwhile the thread is not alive
    while _thread is not None and _thread.is_alive() and not _tried.wait(timeout=0.1):
        pass


def _prepare() -> None:
    try:
        _try_instructions()
        _tried.set()
        _precompile_header()
    except Exception:
        # no C++ compiler, or another version of torch: whoever compiles will ask, and will be told
        logger.debug("the compiler could not be prepared", exc_info=True)
    finally:
        _tried.set()


def _try_instructions() -> None:
    """Try the kinds of vector instructions that the processor has side by side, before the compiler asks one by one."""
    if platform.machine() in ("x86_64", "AMD64"):
        known = cpu_vec_isa.x86_isa_checker()
        kinds = [one for one in cpu_vec_isa.supported_vec_isa_list if known and set(str(one).split()) <= {*known}]
        if len(kinds) > 1:
            # asked by all of them
            cpp_builder.get_compiler_version_info(cpp_builder.get_cpp_compiler())
            contexts = [contextvars.copy_context() for _ in kinds]
            with ThreadPoolExecutor(min(len(kinds), os.cpu_count() or 1)) as pool:
                # a kind keeps its answer
                list(pool.map(lambda context, kind: context.run(bool, kind), contexts, kinds))
    cpu_vec_isa.pick_vec_isa()


def _precompile_header() -> None:
    # as the code that the compiler writes asks for a kernel: this far, and no further, the header is made
    codecache.CppPythonBindingsCodeCache.load_pybinding_async(["float*"], _NOTHING)
