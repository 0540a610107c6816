"""Whether an error says that memory does not suffice."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's allocator has an error of its own; the CPU's raises a RuntimeError that only its text tells apart.

    Its text, seen with torch 2.13: "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate
    memory: you tried to allocate 4 bytes. Error code 12 (Cannot allocate memory)".
    """
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
