"""Which positions a batch of a step has, and in which order the graphs of full and of short batches are called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

#: An int of the host, or an int64 tensor.
Count: TypeAlias = Any


@dataclass(frozen=True)
class Batches:
    """How N shuffled samples per epoch become batches.

    Args:
        size: B, samples of a full batch.
        remainder: what becomes of the N mod B samples that fill no batch. "straddle": the batch takes the first ones of
            the next epoch as well. "drop": they are left out; an epoch is floor(N / B) batches. "short": they make a
            batch by themselves; an epoch is ceil(N / B) batches.
    """

    size: int
    remainder: str

    def epoch(self, count: Count) -> Count:
        """Steps of an epoch of ``count`` samples, B of them at least; not for "straddle", which knows no epochs."""
        return count // self.size if self.remainder == "drop" else (count + self.size - 1) // self.size

    def start(self, step: int, count: int) -> int:
        """The position of a batch's first sample in the endless sequence of shuffled epochs (see `epoch_order`)."""
        if self.remainder == "straddle":
            return step * self.size
        epoch: int = self.epoch(count)
        return step // epoch * count + step % epoch * self.size

    def rest(self, count: Count) -> Count:
        """Samples of an epoch's last batch."""
        return count - (self.epoch(count) - 1) * self.size

    def sizes(self, counts: Iterable[int]) -> tuple[int, ...]:
        """The sizes of batches that occur among epochs of these numbers of samples: B, and then the short ones."""
        if self.remainder != "short":
            return (self.size,)
        return tuple(dict.fromkeys([self.size, *(self.rest(count) for count in counts)]))

    def of_size(self, size: int, step: Tensor, count: Count) -> Tensor:
        """Whether the batch of a step has this many samples: (…) bool, for "short"."""
        epoch, rest = self.epoch(count), self.rest(count)
        last = step % epoch == epoch - 1
        return (last & (rest == size)) | (~last & (size == self.size))

    def size_at(self, step: int, count: int) -> int:
        """Samples of the batch of a step."""
        if self.remainder != "short":
            return self.size
        epoch = self.epoch(count)
        return self.rest(count) if step % epoch == epoch - 1 else self.size

    def calls(self, lanes: Iterable[tuple[int, int, int]]) -> list[int]:
        """The sizes of the batches of which the graphs are to be called, one after the other.

        Each graph moves only the lanes whose next batch has its size. Lanes that stand at equal places of their epochs
        need as many calls as steps. For others two ways are counted, and the shorter one is taken: a lane at a short
        batch gets it at once, while the rest wait one call; or it waits until no lane can go on otherwise, from where
        on all lanes are aligned. Which one it is changes no result.

        Args:
            lanes: (step, step to reach, N) of each.
        """
        places = {(step, until, count) for step, until, count in lanes if step < until}
        ways = [self._calls(places, eager) for eager in (True, False)]
        return min(ways, key=len)

    def _calls(self, places: set[tuple[int, int, int]], eager: bool) -> list[int]:
        made = []
        while places:
            wanted = {self.size_at(step, count) for step, _, count in places}
            # a full batch is the largest; which of several short ones comes first is of no account
            size = min(wanted) if eager else max(wanted)
            moved = {(s + 1, u, n) if self.size_at(s, n) == size else (s, u, n) for s, u, n in places}
            places = {(step, until, count) for step, until, count in moved if step < until}
            made.append(size)
        return made
