"""Which samples the next batches of the lanes have: worked out by the host, ahead of the steps.

It is a function of an experiment's seed and its step alone, so that the graph of a step takes it as an input: an order
that is drawn there, index by index, costs more to compile than the whole model of a small sweep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from coalesce.engine.batches import Batches
from coalesce.random import epoch_order

#: An experiment that takes a step next: its seed, that step, and N, its samples. None: nobody does.
Place: TypeAlias = tuple[int, int, int] | None

#: Samples of all lanes whose order is worked out at once.
_AHEAD = 2**18


class Order:
    """The samples of batches.

    Args:
        batches: how N samples per epoch become batches.
    """

    def __init__(self, batches: Batches):
        self._batches = batches
        # those that the last call has used: lanes of one seed share them
        self._epochs: dict[tuple[int, int, int], Tensor] = {}
        self._before: dict[tuple[int, int, int], Tensor] = {}

    @property
    def bytes(self) -> int:
        """Memory of the orders that are kept from one call to the next: 8 bytes for each sample and seed."""
        return sum(order.nbytes for order in self._epochs.values())

    def forget(self) -> None:
        """Keep none; they can be made again."""
        self._epochs = {}

    def batch(self, seed: int, step: int, count: int) -> Tensor:
        """The samples of the batch of a step.

        Args:
            seed: of the experiment.
            count: N.

        Returns:
            (B,) int64, or fewer where the batch is short, each in 0 to N - 1.
        """
        self._begin()
        found = self._span(seed, self._batches.start(step, count), self._batches.size_at(step, count), count)
        self._before = {}
        return found

    def calls(self, lanes: Sequence[tuple[int, int, int, int]], count: int) -> Iterator[tuple[int, Tensor]]:
        """The samples of the next steps, in the order in which the graphs are to be called, see `Batches.calls`.

        Args:
            lanes: (seed, step, step to reach, N) of each of the K lanes.
            count: the most steps that a lane takes.

        Yields:
            The size of some batches, and their samples, (calls, K, size) int64.
        """
        size = self._batches.size
        if self._batches.sizes(n for _, _, _, n in lanes) == (size,):
            ahead = max(1, _AHEAD // (len(lanes) * size))
            for done in range(0, count, ahead):
                places = [(seed, step + done, n) if step + done < until else None for seed, step, until, n in lanes]
                yield size, self.ahead(places, min(ahead, count - done), size)
            return
        at = [step for _, step, _, _ in lanes]
        for size in self._batches.calls([lane[1:] for lane in lanes]):
            pairs = list(zip(at, lanes, strict=True))
            moves = [step < until and self._batches.size_at(step, n) == size for step, (_, _, until, n) in pairs]
            places = [(seed, step, n) if m else None for m, (step, (seed, _, _, n)) in zip(moves, pairs, strict=True)]
            yield size, self.ahead(places, 1, size)
            at = [step + m for step, m in zip(at, moves, strict=True)]

    def ahead(self, places: Sequence[Place], steps: int, size: int) -> Tensor:
        """The samples of the next batches of some lanes.

        Args:
            places: of each of the K lanes.
            steps: how many batches, n.
            size: of each of them.

        Returns:
            (n, K, size) int64. For a lane of which no batch is due, or of another size, some samples that there are.
        """
        self._begin()
        block = torch.zeros(steps, len(places), size, dtype=torch.int64)
        for lane, place in enumerate(places):
            if place is not None:
                seed, step, count = place
                for first, last, start in self._runs(step, steps, count):
                    span = self._span(seed, start, (last - first) * size, count)
                    block[first:last, lane] = span.view(last - first, size)
        self._before = {}
        return block

    def _runs(self, step: int, steps: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Batches whose positions follow one another: from which on, to which, and the first position."""
        if self._batches.remainder == "straddle":
            yield 0, steps, self._batches.start(step, count)
            return
        epoch, first = self._batches.epoch(count), 0
        while first < steps:
            last = min(steps, first + epoch - (step + first) % epoch)
            yield first, last, self._batches.start(step + first, count)
            first = last

    def _span(self, seed: int, start: int, length: int, count: int) -> Tensor:
        """Samples at positions of the endless sequence of epochs, from ``start`` on."""
        parts = []
        while length > 0:
            epoch, first = divmod(start, count)
            parts.append(self._epoch(seed, epoch, count)[first : first + length])
            start, length = start + len(parts[-1]), length - len(parts[-1])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _begin(self) -> None:
        self._before, self._epochs = self._epochs, {}

    def _epoch(self, seed: int, epoch: int, count: int) -> Tensor:
        key = seed, epoch, count
        if key not in self._epochs:
            found = self._before.get(key)
            self._epochs[key] = epoch_order(*key) if found is None else found
        return self._epochs[key]
