"""Calls as CUDA graphs: what launching their kernels one by one costs falls away.

What is recorded must read and write memory that stays where it is, and must not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Call = Callable[[], object]


def warm(call: Call) -> None:
    """Call once on a stream of its own, as what is to be recorded: libraries prepare themselves at a first call, which
    they must not do while one is recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)


def record(call: Call, times: int = 1) -> Callable[[], None]:
    """Record a call that `warm` has prepared, without carrying it out.

    Args:
        call: launches kernels.
        times: how often it is called in the graph.

    Returns:
        What carries the graph out. It does not wait for the device.
    """
    graph = torch.cuda.CUDAGraph()
    # other threads of the process, such as the compiler's, may use the device meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            call()
    return graph.replay
