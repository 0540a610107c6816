"""Lanes shared out among the processor's cores.

Lanes know nothing of each other, so that no core has to wait for another one within a step: each has its own lanes, and
goes through the whole graph of these few with one thread. Otherwise the threads would meet at the end of each of a
step's many loops, and each loop would be too short for two.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from coalesce import kernels
from coalesce.engine import inductor
from coalesce.engine.template import Template

T = TypeVar("T")

#: Fewest lanes of a share. The compiler's kernels for one lane differ from those for more in the last bit.
LEAST = 2

#: Fewest bytes of state that a share's lanes hold. Between two kernels each thread needs the interpreter's lock, and
#: where a step is short, to be woken for it costs more than the loops' meetings (`python -m benchmarks.step --threads 2
#: --worth 0 1000000000`). Nothing but shapes decides: how lanes are shared out may show in the last bit, and must not
#: depend on which experiment comes first.
WORTH = 2**21


def _can_share(device: torch.device, compile: bool) -> bool:
    """Whether lanes are shared out at all: where a CPU's compiled kernels let other threads run beside them. Operation
    by operation the interpreter's lock is wanted all the time."""
    return compile and device.type == "cpu" and inductor.kernels_unlock()


class Shares:
    """Into how many shares K lanes are cut, and how these run beside each other.

    All have as many lanes, or each would want a graph of its own: so the last one may have some that nobody fills.

    Args:
        width: K.
        threads: how many there are for all shares together.
        bytes_per_lane: of a lane's state; None: it is not to be shared out. Then the one share runs in the thread that
            asks.
    """

    def __init__(self, width: int, threads: int, bytes_per_lane: int | None):
        least = width if bytes_per_lane is None else max(LEAST, -(-WORTH // max(1, bytes_per_lane)))
        most = max(1, min(threads, width // least))
        # By what a step takes, if threads of one share gain their number's root: of two a factor of 1.35 was seen. Of
        # equal ones the fewest: of 17 lanes for 16 threads 6 shares of 3, and not 8, of which two would be empty.
        self.count = min(range(1, most + 1), key=lambda n: -(-width // n) / (threads // n) ** 0.5)
        self.lanes = -(-width // self.count)
        #: of each share
        self.threads = max(1, threads // self.count)

    @classmethod
    def of(
        cls, template: Template, width: int, device: torch.device | str, compile: bool, threads: int | None = None
    ) -> Shares:
        """Those of a cohort's lanes, by itself on the threads that torch has now."""
        held = template.state_bytes if _can_share(torch.device(device), compile) else None
        return cls(width, threads or torch.get_num_threads(), held)

    def __len__(self) -> int:
        return self.count

    @property
    def width(self) -> int:
        """Lanes of all shares, K at least."""
        return self.count * self.lanes

    def cut(self, tensor: Tensor, dim: int = 0) -> Sequence[Tensor]:
        """The shares' parts of what has all their lanes in a dimension."""
        return (tensor,) if self.count == 1 else tensor.split(self.lanes, dim)

    def prepare(self) -> AbstractContextManager[None]:
        """Here graphs are compiled for a share."""
        return kernels.threads(self.threads)

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call a function with the number of each share, all at once, each in a thread of its own.

        Returns:
            What they gave, in the shares' order.

        Raises:
            Exception: what one of them raised, when all have ended.
        """
        if self.count == 1:
            return [function(0)]
        pool = _pool(self.count, self.threads)
        ends: list[Future[T]] = []
        try:
            ends += [pool.submit(function, share) for share in range(self.count)]
            wait(ends)
        except BaseException:
            # Ctrl-C: whoever hears of it finds lanes that nobody moves
            wait(ends)
            raise
        return [end.result() for end in ends]


@functools.cache
def _pool(count: int, threads: int) -> ThreadPoolExecutor:
    """Threads which each have so many of OpenMP's."""
    pool, all_there = ThreadPoolExecutor(count, thread_name_prefix="lanes"), threading.Barrier(count)
    mine = torch.get_num_threads()

    def begin(_: int) -> None:
        # asked for the first time in a thread, torch sets it to what was set last in any
        torch.get_num_threads()
        torch.set_num_threads(threads)
        # else one of them could begin twice, and another one never
        all_there.wait()

    try:
        list(pool.map(begin, range(count)))
    except BaseException:
        # one of them could not be started: the others are not to wait for it
        all_there.abort()
        raise
    # what was set last is also what threads begin with that the user starts later
    torch.set_num_threads(mine)
    return pool


if hasattr(os, "register_at_fork"):
    # threads are not forked along
    os.register_at_fork(after_in_child=_pool.cache_clear)
