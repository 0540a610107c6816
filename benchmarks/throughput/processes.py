"""The processes of all sides, as whoever measures sees them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coalesce import kernels

#: Seconds between the moment in which the processes of a side are called and the beginning of their window.
LEAD_S = 0.1


def stock_environment() -> dict[str, str]:
    """What a process begins with in which coalesce has not asked anything of the libraries yet."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    whole = os.environ | {"PYTHONPATH": path}
    asked = {kernels.VARIABLE: kernels.STRICT, kernels.WAIT: kernels.PASSIVE}
    return {name: value for name, value in whole.items() if asked.get(name) != value}


class SideFailed(RuntimeError):
    """A side's process failed; with what it said."""


class Process:
    """One process of a side; see `worker`.

    Args:
        module: below `benchmarks.throughput`.
        arguments: of its class.
        environment: what is added to this process's.
        python: the interpreter.
    """

    def __init__(
        self,
        module: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ):
        self.name = module
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        command = [python, "-W", "ignore", "-m", f"benchmarks.throughput.{module}", json.dumps(arguments)]
        whole = stock_environment() | dict(environment or {})
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, env=whole, text=True)

    def send(self, do: str, **arguments: Any) -> None:
        """Say what is to be done."""
        assert self._process.stdin is not None
        # where it is gone, the answer is missed, and why is told there
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()

    def receive(self) -> Any:
        """The answer to what was sent.

        Raises:
            SideFailed: there is none.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._said()}
        if "error" in answer:
            raise SideFailed(f"{self.name} failed:\n{answer['error']}")
        return answer["answer"]

    def call(self, do: str, **arguments: Any) -> Any:
        """`send` and `receive`."""
        self.send(do, **arguments)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        # it may be gone already
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            # it is in the middle of something, such as a call of the compiler
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _said(self) -> str:
        self._process.wait()
        self._log.seek(0)
        return self._log.read()[-4000:]


@dataclass
class Contestant:
    """One way to do the work: processes that work at the same time.

    Args:
        name: of the row.
        processes: one or several.
        arguments: of their "work".
        rates: experiment-steps per second, a number for each round.
        processor_rates: the same per processor second.
    """

    name: str
    processes: Sequence[Process]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    processor_rates: list[float] = field(default_factory=list)

    def turn(self, seconds: float) -> None:
        """Work for a window of so many seconds."""
        start = time.monotonic() + LEAD_S
        for process in self.processes:
            process.send("work", start=start, end=start + seconds, **self.arguments)
        found = [process.receive() for process in self.processes]
        steps = sum(one["steps"] for one in found)
        self.rates.append(steps / seconds)
        self.processor_rates.append(steps / max(1e-9, sum(one["processor_s"] for one in found)))


def interleave(contestants: Sequence[Contestant], rounds: int, seconds: float) -> None:
    """Let all of them have their turn, round by round."""
    for _ in range(rounds):
        for contestant in contestants:
            contestant.turn(seconds)


class Caches:
    """Folders for the compilers' caches: each begins as one that was used on this machine, for another graph.

    Args:
        folder: where they are made.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        #: Seconds to prepare an empty cache by compiling the primer.
        self.primed_s = float("nan")
        self.primed = False

    def environment(self, name: str) -> dict[str, str]:
        """What makes a process use the cache of that name."""
        place = self.folder / name
        if not place.exists():
            primer = self.folder / "primer"
            if self.primed:
                shutil.copytree(primer, place)
            else:
                place.mkdir(parents=True)
        jax = {"JAX_COMPILATION_CACHE_DIR": str(place), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        return {"TORCHINDUCTOR_CACHE_DIR": str(place), **jax}

    def prime(self, arguments: Mapping[str, Any]) -> None:
        """Compile the primer into an empty cache.

        Args:
            arguments: of coalesce's side.
        """
        environment = self.environment("primer")
        started = time.monotonic()
        process = Process("coalesced", arguments, environment)
        try:
            process.call("losses", steps=1)
        finally:
            process.close()
        self.primed_s = time.monotonic() - started
        self.primed = True
