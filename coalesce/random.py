"""Counter-based random streams: the same (seed, purpose, step, call) gives the same numbers anywhere.

Nothing here has a state, so an experiment draws the same numbers in any lane, at any width, after any interruption.

Sources: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
for Philox 4x32-10; M. Dworkin, "Recommendation for block cipher modes of operation: methods for format-preserving
encryption" (NIST SP 800-38G), for the construction of the shuffle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

#: Rounds of the shuffle. FF1, which is built alike, has 10; below ten samples those leave a bias that a test sees.
SHUFFLE_ROUNDS = 16


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


def shuffled(key: Tensor, position: Tensor, size: int | Tensor) -> Tensor:
    """The sample that stands at a position of an endless sequence of shuffled epochs.

    Epoch e of a seed is a permutation of ``range(size)``, keyed by (seed, e). The samples lie in a rectangle of
    about sqrt(N) columns whose last row may be short. One round turns every column by a keyed amount, the next
    every row; each is a bijection of the samples whatever N is, so no index needs a second try and no lane needs a
    table. This is a Feistel network over two coordinates with addition, as FF1 is. Its round function is a 32-bit
    multiply-and-shift hash of key, round and coordinate: shuffling data asks no more, and Philox here would double
    the operations of a small model's step. (An argsort of random words once per epoch takes more time per sample,
    and a table in every lane that a refill or a snapshot would have to carry: `python -m benchmarks.shuffle`.)

    How even it is, `tests/test_shuffle.py` counts; the worst size is 6. When N is the square of an odd number, every
    round is an even permutation, so that the odd ones never come up: all N-2 first places are even nevertheless.

    Args:
        key: (2,) int64.
        position: int64 of any shape: counts samples from the start of training, epoch after epoch.
        size: N, below 2**31; a 0-d int64 tensor gives the same bits, and is not checked.

    Returns:
        int64 in [0, N), of the shape of ``position``.

    Raises:
        ValueError: ``size`` is out of range.
    """
    columns: int | Tensor
    if isinstance(size, Tensor):
        # exact: a float64 holds N, and no root of an integer below 2**31 lies as near to another integer as it errs
        columns = size.to(torch.float64).sqrt().ceil().to(torch.int64)
    elif 1 <= size < 2**31:
        columns = math.isqrt(size - 1) + 1
    else:
        raise ValueError(f"size={size}: must be in [1, 2**31)")
    full_rows, rest = size // columns, size % columns
    # Whether the last row is short. Where that is not known, the general formula gives the same: no column is below 0.
    ragged = isinstance(rest, Tensor) or rest > 0
    epoch, sample = position // size, position % size
    salts = [_mix(_mix(key[i] + epoch * 0x3C6EF372) + key[1 - i]) for i in (0, 1)]
    row, column = sample // columns, sample % columns
    for i in range(SHUFFLE_ROUNDS):
        salt = salts[i % 2] + i * 0x1E3779B9
        if i % 2 == 0:
            height = torch.where(column < rest, full_rows + 1, full_rows) if ragged else full_rows
            row = _turn(row, _mix(column * 0x165667B1 + salt), height)
        else:
            width = torch.where(row < full_rows, columns, rest) if ragged else columns
            column = _turn(column, _mix(row * 0x165667B1 + salt), width)
    return row * columns + column


def _mix(x: Tensor) -> Tensor:
    """A hash of the low 47 bits of x to 32 bits."""
    # The constants are odd and below 2**31, so that no product of 32-bit words leaves an int64.
    x = ((x ^ (x >> 15)) & _MASK) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 13)) * 0x27D4EB2F & _MASK
    return x ^ (x >> 16)


def _turn(x: Tensor, word: Tensor, size: Tensor | int) -> Tensor:
    """x plus a 32-bit word scaled to [0, size), modulo size."""
    x = x + (word * size >> 32)
    return torch.where(x >= size, x - size, x)
