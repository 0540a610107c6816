"""What the time before a first step goes to: tracing, the compiler's own Python, and the compilers that it starts."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch._inductor


@dataclass(frozen=True)
class Spent:
    """Seconds.

    Args:
        clock: by the clock.
        own: of processors, in this process, all threads together.
        children: of processors, in processes that this one started and that have ended.
    """

    clock: float = 0.0
    own: float = 0.0
    children: float = 0.0

    @classmethod
    def now(cls) -> Spent:
        """Since some moment in the past."""
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return cls(time.monotonic(), own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime)

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.clock + other.clock, self.own + other.own, self.children + other.children)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.clock - other.clock, self.own - other.own, self.children - other.children)

    @property
    def processor(self) -> float:
        return self.own + self.children


class Inside:
    """What is spent within calls of `torch._inductor.compile`, whatever thread calls it.

    Where calls overlap, the time counts once, and with it all that the process does meanwhile.
    """

    def __init__(self) -> None:
        self.spent = Spent()
        self._lock = threading.Lock()
        self._calls = 0
        self._since = Spent()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls that are made meanwhile."""
        original = torch._inductor.compile
        torch._inductor.compile = self._counted(original)
        try:
            yield
        finally:
            torch._inductor.compile = original

    def _counted(self, compile: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._calls += 1
                if self._calls == 1:
                    self._since = Spent.now()
            try:
                return compile(*args, **kwargs)
            finally:
                with self._lock:
                    self._calls -= 1
                    if self._calls == 0:
                        self.spent += Spent.now() - self._since

        return call


def parts(whole: Spent, inside: Spent) -> dict[str, float]:
    """The seconds of tracing and compiling, and which share each part has of those of the processors.

    Args:
        whole: of all.
        inside: of it, within the compiler.
    """
    return {
        "compile_s": whole.clock,
        "processor_s": whole.processor,
        "tracing_s": whole.own - inside.own,
        "compiler_s": inside.own,
        "started_s": whole.children,
    }
