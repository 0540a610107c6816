"""The side of JAX: `jit(vmap(scan))` over optax's AdamW. Needs numpy, jax and optax, and nothing else."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.throughput import worker
from benchmarks.throughput.jax_models import BUFFERS, MODELS, layout


def chunk(loss: Any, hyper: dict[str, Any], lr: Any, state: Any, index: Any, data: Any) -> Any:
    """Some steps of one experiment.

    Args:
        loss: of parameters, buffers and a batch.
        hyper: of AdamW, but for the rate; and ``steps``, which the rate falls over.
        lr: learning rate.
        state: parameters, buffers, and the optimiser's state.
        index: (steps, B), the samples of each batch.
        data: the training set.

    Returns:
        The state afterwards, and the losses (steps,).
    """
    rate = optax.cosine_decay_schedule(lr, hyper["steps"])
    b1, b2 = hyper["betas"]
    optimizer = optax.adamw(rate, b1, b2, hyper["eps"], weight_decay=hyper["weight_decay"])

    def step(state: Any, index: Any) -> Any:
        params, buffers, slots = state
        batch = tuple(leaf[index] for leaf in data)
        (value, buffers), grads = jax.value_and_grad(loss, has_aux=True)(params, buffers, batch)
        updates, slots = optimizer.update(grads, slots, params)
        return (optax.apply_updates(params, updates), buffers, slots), value

    return jax.lax.scan(step, state, index)


class Peer:
    """The process of this side.

    Args:
        name: of the workload.
        given: a file from `workloads.write_given`.
        hyper: see `chunk`.
        batch_size: B.
        length: steps in one call.
    """

    def __init__(self, name: str, given: str, hyper: dict[str, Any], batch_size: int, length: int):
        arrays = dict(np.load(given))
        self.length, self.size = length, batch_size
        self.lr, self.batches = arrays["lr"], arrays["batches"]
        self.lanes = len(self.lr)
        leaves = [arrays[f"train/{i}"] for i in range(sum(n.startswith("train/") for n in arrays))]
        if name == "cnn":
            leaves[0] = leaves[0].transpose(0, 2, 3, 1)
        self.data = tuple(jax.numpy.asarray(leaf) for leaf in leaves)
        self.count = len(leaves[0])
        state = {
            n.removeprefix("initial/"): layout(n.removeprefix("initial/"), a)
            for n, a in arrays.items()
            if "initial/" in n
        }
        self.initial = (
            {n: a for n, a in state.items() if not n.endswith(BUFFERS)},
            {n: a for n, a in state.items() if n.endswith(BUFFERS)},
        )
        whole = jax.vmap(partial(chunk, MODELS[name], hyper), in_axes=(0, 0, 0, None))
        self.run = jax.jit(whole, donate_argnums=1)
        self.rng = np.random.default_rng(0)
        self.order, self.at = self._shuffled(), 0

    def _shuffled(self) -> np.ndarray:
        """(K, N): on the host, where it costs less than by `jax.random.permutation`."""
        rows = np.broadcast_to(np.arange(self.count, dtype=np.int32), (self.lanes, self.count))
        return self.rng.permuted(rows, axis=1)

    def _begin(self) -> Any:
        params, buffers = (jax.tree.map(jax.numpy.array, part) for part in self.initial)
        # the rate is no part of its state
        slots = jax.vmap(optax.adamw(optax.cosine_decay_schedule(0.1, 10)).init)(params)
        return params, buffers, slots

    def prepare(self) -> dict[str, float]:
        """Compile; seconds until the first call is done."""
        self.state = self._begin()
        started = time.monotonic()
        self.step()
        seconds = time.monotonic() - started
        self.step()
        return {"compile_s": seconds}

    def step(self) -> None:
        """``length`` steps of all experiments, each on the next of its own shuffled samples."""
        size = self.length * self.size
        if self.at + size > self.count:
            self.order, self.at = self._shuffled(), 0
        index = self.order[:, self.at : self.at + size].reshape(self.lanes, self.length, self.size)
        self.at += size
        self.state, losses = self.run(self.lr, self.state, index, self.data)
        # waits for the steps, as whoever looks at the losses does
        self.last = np.asarray(losses)[:, -1]

    def losses(self, steps: int) -> list[list[float]]:
        """Losses of the first steps of all experiments, on coalesce's batches: (steps, K)."""
        index = self.batches[:steps].swapaxes(0, 1).astype(np.int32)
        _, losses = self.run(self.lr, self._begin(), index, self.data)
        return np.asarray(losses).T.tolist()

    def work(self, start: float, end: float) -> dict[str, float]:
        return worker.work(self.step, self.lanes * self.length, start, end)

    def memory(self) -> dict[str, int | None]:
        """Bytes of one lane's state, and what a step takes above it."""
        state = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state)) // self.lanes
        step = worker.rise(self.step, 2)
        return {"state": state, "step": None if step is None else step // self.lanes}


if __name__ == "__main__":
    channel = worker.Channel()
    channel.serve(Peer(**json.loads(sys.argv[1])))
