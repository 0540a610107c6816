"""The side of modelbatch, as its documentation uses it: models stacked by `ModelBatch`, one optimiser with a group of
parameters per model by `OptimizerFactory`."""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import torch
from torch import Tensor

from benchmarks.throughput import worker
from benchmarks.throughput.place import Place
from benchmarks.throughput.plain import TRIES, stock
from benchmarks.throughput.workloads import STEPS, Workload, batches, build, hyperparameters, loss, parts
from coalesce.engine.precision import autocast
from coalesce.memory.measure import peak

KINDS: tuple[dict[str, Any], ...] = ({}, {"fused": True})


class Stack:
    """All experiments as one `ModelBatch`.

    Args:
        workload: what is trained.
        optimizer: more arguments of AdamW.
        device: where.
    """

    def __init__(self, workload: Workload, optimizer: dict[str, Any], device: str):
        from modelbatch import ModelBatch
        from modelbatch.optimizer import OptimizerFactory

        self.workload = workload
        self.experiments, _ = workload.experiments()
        task, _ = build(self.experiments[0])
        self.data = task.data().to(device)
        self.leaves = self.data.leaves("train")
        self.model = ModelBatch([build(e)[1] for e in self.experiments], shared_input=False).to(device)
        configs = [hyperparameters(e) for e in self.experiments]
        self.optimizer = OptimizerFactory(torch.optim.AdamW, optimizer).create_optimizer(self.model, configs)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.count, self.size = self.data.sizes["train"], workload.batch_size
        self.device = device
        self.order, self.at, self.done = self._shuffled(), 0, 0
        self.last: list[float] = []

    def _shuffled(self) -> Tensor:
        return torch.stack([torch.randperm(self.count, device=self.device) for _ in self.experiments])

    def step(self) -> None:
        """One step of all experiments, each on the next of its own shuffled samples."""
        if self.at + self.size > self.count:
            self.order, self.at = self._shuffled(), 0
        losses = self.step_on(self.order[:, self.at : self.at + self.size])
        self.at += self.size
        self.done += 1
        if self.done % self.workload.every == 0:
            self.last = losses.tolist()

    def step_on(self, index: Tensor) -> Tensor:
        """One step of all experiments on these samples (K, B); their losses (K,)."""
        flat = index.reshape(-1)
        gathered = [leaf.index_select(0, flat).reshape(*index.shape, *leaf.shape[1:]) for leaf in self.leaves]
        x, y = parts(self.workload.name, gathered)
        self.optimizer.zero_grad()
        with autocast(self.experiments[0], self.device):
            whole = self.model.compute_loss(self.model(x), y, loss)
        whole.backward()
        self.optimizer.step()
        self.scheduler.step()
        losses: Tensor = self.model.latest_losses
        return losses


class Peer:
    """The process of this side.

    Args:
        workload: what is trained.
        place: where.
        threads: of torch.
    """

    def __init__(self, workload: dict[str, Any], place: dict[str, Any], threads: int):
        self.place = Place(**place)
        self.place.settle()
        torch.set_num_threads(threads)
        # of operations that vmap runs lane by lane: a fact about this peer, not a fault here
        warnings.filterwarnings("ignore", "There is a performance drop")
        self.workload = Workload(**workload)

    def prepare(self) -> dict[str, float]:
        """Build, and take the faster implementation of AdamW; seconds to the end of the first step."""
        started = time.monotonic()
        stacks = [Stack(self.workload, kind, self.place.device) for kind in KINDS[:1]]
        stacks[0].step()
        self.place.synchronize()
        seconds = time.monotonic() - started
        stacks += [Stack(self.workload, kind, self.place.device) for kind in KINDS[1:]]
        best = []
        for stack in stacks:
            times = []
            for _ in range(TRIES):
                started = self.place.clock()
                stack.step()
                times.append(self.place.clock() - started)
            best.append(min(times))
        self.stack = stacks[best.index(min(best))]
        return {"first_s": seconds, "fused": float(best.index(min(best)))}

    def losses(self, steps: int) -> list[list[float]]:
        """Losses of the first steps of all experiments, on coalesce's batches: (steps, K)."""
        stack = Stack(self.workload, {}, self.place.device)
        given = batches(stack.experiments, stack.data, steps).to(self.place.device)
        return [stack.step_on(index).tolist() for index in given]

    def work(self, start: float, end: float) -> dict[str, float]:
        step, steps = self.place.turn(self.stack.step, self.workload.every)
        return worker.work(step, steps * self.workload.lanes, start, end)

    def memory(self) -> dict[str, int | None]:
        """Bytes of one lane's state, and what a step takes above it."""
        stack, lanes = self.stack, self.workload.lanes
        state = [t for s in stack.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        whole = sum(t.nbytes for t in [*stack.model.stacked_params.values(), *stack.model.stacked_buffers.values()])
        # the models that it was made of stay alive in it
        whole += sum(t.nbytes for m in stack.model.models for t in [*m.parameters(), *m.buffers()])
        step = peak(stack.step, device=self.place.device)
        total = whole + sum(t.nbytes for t in state)
        return {"state": total // lanes, "step": None if step is None else step // lanes}


if __name__ == "__main__":
    channel = worker.Channel()
    stock()
    channel.serve(Peer(**worker.json.loads(sys.argv[1])))
