"""Counter-based random streams: the same (seed, purpose, step, call) gives the same numbers anywhere.

Nothing here has a state, so an experiment draws the same numbers in any lane, at any width, after any interruption.

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
for Philox 4x32-10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_WORD = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Purpose(IntEnum):
    """What a stream is for: one word of the counter, so that streams never overlap."""

    ORDER = 1
    DRAW = 2


Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(key: tuple[Tensor, Tensor], counter: Words, rounds: int = 10) -> Words:
    """Philox 4x32: four 32-bit words out of a 128-bit counter and a 64-bit key.

    Args:
        key: two int64 tensors that hold 32-bit words.
        counter: four of the same; shapes broadcast.
        rounds: 10 as published.

    Returns:
        Four int64 tensors of values in [0, 2**32).
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        # The product of two 32-bit words may wrap the sign of an int64; its bits are right all the same, and the
        # mask after the shift takes the copies of the sign away.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def key_of(seed: int) -> Tensor:
    """The stream key of a seed: (2,) int64, its low and its high 32 bits.

    Raises:
        ValueError: the seed is not in [0, 2**63).
    """
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: must be in [0, 2**63)")
    return torch.tensor([seed & _MASK, seed >> 32], dtype=torch.int64)


def seed_of(key: Tensor) -> int:
    """The seed that `key_of` made a key of."""
    low, high = key.tolist()
    return int(high << 32 | low)


def bits(key: Tensor, purpose: Purpose, step: Tensor, call: int | Tensor, count: int) -> Tensor:
    """Random words of 32 bits.

    Args:
        key: (2,) int64, from `key_of`.
        purpose: which stream of the seed.
        step: 0-d int64, in [0, 2**32).
        call: number of the draw within the step, also as a 0-d int64 tensor.
        count: how many words.

    Returns:
        (count,) int64 in [0, 2**32).
    """
    index = torch.arange((count + 3) // 4, device=key.device)
    zero = torch.zeros_like(index)
    words = philox((key[0], key[1]), (index, zero + call, zero + step, zero + int(purpose)))
    # Joining the four words end to end compiles to code four times as fast as interleaving them.
    return torch.cat(words)[:count]


def uniform(key: Tensor, step: Tensor, call: int | Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1) from the draw stream.

    They are multiples of 2**-24, in every dtype the same numbers as far as it can hold them, so that a mask drawn
    in float32 and in float64 is one mask.

    Args:
        key, step, call: see `bits`.
        shape: of the result.
        dtype: a floating dtype; bfloat16 and float16 are drawn in float32, since rounding could reach 1.

    Returns:
        Tensor of that shape; float32 for the 16-bit dtypes.
    """
    return uniform_of(bits(key, Purpose.DRAW, step, call, math.prod(shape)), shape, dtype)


def uniform_of(words: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The uniform numbers that words of 32 bits stand for; see `uniform`."""
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    return ((words >> 8).to(wide) * 2.0**-24).view(tuple(shape))


def epoch_order(seed: int, epoch: int, size: int) -> Tensor:
    """The order in which an epoch goes through the samples of a split.

    `torch.randperm`, as torch's own `DataLoader` has it, from a generator that is made for this epoch of this seed: so
    it does not matter what was drawn before. Like initial weights it is torch's, and holds as long as torch's stays.

    >>> epoch_order(seed=0, epoch=0, size=5)
    tensor([3, 1, 2, 0, 4])

    Args:
        seed: of the experiment.
        epoch: number of the epoch, from 0.
        size: N, samples of the split.

    Returns:
        (N,) int64, each of 0 to N - 1 once.
    """
    # the finaliser of splitmix64 (G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators",
    # OOPSLA 2014): torch's generator takes 32 of these bits, and seeds that are alike must not give orders that are
    word = (seed + (epoch + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    word ^= word >> 31
    return torch.randperm(size, generator=torch.Generator().manual_seed(word))
