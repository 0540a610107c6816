"""The side of plain PyTorch: one experiment after the other, in as many processes as do best."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.throughput import worker
from benchmarks.throughput.place import Place
from benchmarks.throughput.workloads import STEPS, Workload, batches, build, hyperparameters
from coalesce import kernels
from coalesce.data import Data
from coalesce.engine.precision import autocast
from coalesce.experiment import Experiment
from coalesce.memory.measure import peak

#: The kinds of loops that are compiled, and the mode of `torch.compile`. The last one is CUDA's alone: the launches of
#: all kernels are recorded as a graph.
MODES = {"compiled": "default", "reduce-overhead": "reduce-overhead"}

#: Steps by which the two implementations of AdamW are told apart, and how often.
TRIED, TRIES = 20, 5


def stock() -> None:
    """Leave the libraries as torch finds them by itself, not as coalesce asks for them. Before the first product."""
    if os.environ.get(kernels.VARIABLE) == kernels.STRICT:
        del os.environ[kernels.VARIABLE]


class Loop:
    """An ordinary training loop.

    Args:
        experiment: which.
        data: of its task, where it computes.
        every: steps after which the loss is read.
        kind: "eager", or one of `MODES`: model and loss go through `torch.compile`.
        optimizer: more arguments of AdamW.
        place: where it computes.
    """

    def __init__(
        self, experiment: Experiment, data: Data, every: int, kind: str, optimizer: dict[str, Any], place: Place
    ):
        self.experiment, self.device = experiment, place.device
        self.task, model = build(experiment)
        self.model = model.to(place.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **hyperparameters(experiment), **optimizer)
        self.scheduler: torch.optim.lr_scheduler.LRScheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, STEPS
        )
        plain: Any = self.task.loss
        self.loss: Callable[[nn.Module, Any], Tensor] = (
            torch.compile(plain, mode=MODES[kind]) if kind in MODES else plain
        )
        self.data, self.leaves, self.size = data, data.leaves("train"), experiment.batch_size
        self.every, self.done, self.last = every, 0, 0.0
        self.order, self.at = self._shuffled(), 0

    def _shuffled(self) -> Tensor:
        return torch.randperm(self.data.sizes["train"], device=self.device)

    def step(self) -> None:
        """One step on the next shuffled samples."""
        if self.at + self.size > len(self.order):
            self.order, self.at = self._shuffled(), 0
        index = self.order[self.at : self.at + self.size]
        self.at += self.size
        loss = self.step_on(index)
        self.done += 1
        if self.done % self.every == 0:
            self.last = loss.item()

    def step_on(self, index: Tensor) -> Tensor:
        """One step on these samples; its loss."""
        batch = self.data.unflatten([leaf.index_select(0, index) for leaf in self.leaves])
        self.optimizer.zero_grad()
        with autocast(self.experiment, self.device):
            loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    @property
    def bytes(self) -> int:
        """Of the weights, buffers, and the optimiser's state."""
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return sum(t.nbytes for t in [*self.model.parameters(), *self.model.buffers(), *state])


class Plain:
    """One process of this side.

    Args:
        workload: what is trained.
        place: where.
        number: of the process; it trains the experiment of that number.
    """

    def __init__(self, workload: dict[str, Any], place: dict[str, Any], number: int = 0):
        self.place = Place(**place)
        self.place.settle()
        # as who trains convolutions on a GPU does it
        torch.backends.cudnn.benchmark = self.place.on_cuda
        self.workload = Workload(**workload)
        self.experiments, _ = self.workload.experiments()
        self.number = number % len(self.experiments)
        task, _ = build(self.experiments[0])
        self.data = task.data().to(self.place.device)
        self.loops: dict[str, Loop] = {}
        self.optimizer: dict[str, Any] = {}

    def choose(self) -> dict[str, Any]:
        """Which implementation of AdamW is faster here, by the best of some tries in turns."""
        torch.set_num_threads(1)
        kinds: tuple[dict[str, Any], ...] = ({}, {"fused": True})
        loops = [self._loop(self.experiments[0], "eager", kind) for kind in kinds]
        times: list[list[float]] = [[], []]
        for _ in range(TRIES):
            for loop, found in zip(loops, times, strict=True):
                started = self.place.clock()
                for _ in range(TRIED):
                    loop.step()
                found.append(self.place.clock() - started)
        return kinds[0] if min(times[0]) <= min(times[1]) else kinds[1]

    def prepare(self, kinds: list[str], threads: list[int], optimizer: dict[str, Any]) -> dict[str, float]:
        """Get ready: "eager", "compiled", ..., for these numbers of threads; seconds to the end of the first step."""
        seconds: dict[str, float] = {}
        for kind in kinds:
            self.loops[kind] = loop = self._loop(self.experiments[self.number], kind, optimizer)
            for count in threads:
                torch.set_num_threads(count)
                started = time.monotonic()
                loop.step()
                self.place.synchronize()
                seconds.setdefault(kind, time.monotonic() - started)
                for _ in range(3):
                    loop.step()
        return seconds

    def _loop(self, experiment: Experiment, kind: str, optimizer: dict[str, Any]) -> Loop:
        return Loop(experiment, self.data, self.workload.every, kind, optimizer, self.place)

    def losses(self, steps: int, kind: str = "eager") -> list[list[float | None]]:
        """Losses of the first steps, on coalesce's batches: (steps, K). "eager" of all experiments, compiled of the
        first and of the last one, since each is compiled anew."""
        given = batches(self.experiments, self.data, steps).to(self.place.device)
        columns: list[list[float | None]] = []
        for lane, experiment in enumerate(self.experiments):
            if kind in MODES and lane not in (0, len(self.experiments) - 1):
                columns.append([None] * steps)
                continue
            loop = self._loop(experiment, kind, {})
            columns.append([loop.step_on(given[step, lane]).item() for step in range(steps)])
        return [list(row) for row in zip(*columns, strict=True)]

    def work(self, kind: str, threads: int, start: float, end: float) -> dict[str, float]:
        torch.set_num_threads(threads)
        step, steps = self.place.turn(self.loops[kind].step, self.workload.every)
        return worker.work(step, steps, start, end)

    def memory(self) -> dict[str, int | None]:
        """Bytes of one experiment's state, and what a step takes above it."""
        loop = self.loops["eager"]
        return {"state": loop.bytes, "step": peak(loop.step, device=self.place.device)}


if __name__ == "__main__":
    channel = worker.Channel()
    stock()
    channel.serve(Plain(**worker.json.loads(sys.argv[1])))
