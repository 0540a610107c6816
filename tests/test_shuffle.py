"""The shuffle.

Oracles: laws (every sample once per epoch, whatever the batches); its own construction in Python's unbounded integers;
chi-square statistics of what a fair shuffle does. These are of fixed seeds, so that they cannot fail by chance, and one
shows that they see a shuffle of too few rounds.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

import coalesce.random
from chi_square import deviation
from coalesce.engine.compiling import compile_graph
from coalesce.engine.trace import trace
from coalesce.random import key_of, shuffled

WORD = 2**32
SEEDS = st.integers(0, 2**63 - 1)


# laws


def epochs(size: int, count: int = 1, first: int = 0, seed: int = 0) -> Tensor:
    """(epochs, N): the samples of some epochs."""
    return shuffled(key_of(seed), torch.arange(first * size, (first + count) * size), size).view(count, size)


def is_permutation(rows: Tensor) -> bool:
    return bool((rows.sort(dim=-1).values == torch.arange(rows.shape[-1])).all())


def test_shuffles_are_what_they_were() -> None:
    # an experiment's id promises its batches: if this fails, they need a new version of the id rule
    assert epochs(11, 2).tolist() == [[2, 9, 1, 3, 7, 0, 4, 6, 8, 10, 5], [2, 10, 1, 4, 8, 9, 7, 0, 3, 6, 5]]


def test_every_small_size_is_permuted() -> None:
    assert [size for size in range(1, 201) if not is_permutation(epochs(size, 5, seed=size))] == []


# primes, squares and their neighbours, products of neighbours (the rectangle's shapes), real data sets
@pytest.mark.parametrize("size", [251, 1257, 1437, 4000, 4096, 10007, 46341, 50000, 65535, 65536, 65537, 98910, 199999])
def test_large_sizes_are_permuted(size: int) -> None:
    assert is_permutation(epochs(size, 2, seed=size))


@given(SEEDS, st.integers(1, 3000), st.integers(0, 2**31))
def test_every_sample_once_in_any_epoch(seed: int, size: int, epoch: int) -> None:
    assert is_permutation(epochs(size, 1, epoch, seed))


@given(SEEDS, st.integers(1, 60), st.data())
def test_batches_that_straddle_epochs_miss_nothing(seed: int, size: int, data: st.DataObject) -> None:
    # as the engine draws them: step * batch_size + [0, batch_size)
    batch_size = data.draw(st.integers(1, size), label="batch_size")
    key = key_of(seed)
    steps = [
        shuffled(key, torch.tensor(step * batch_size) + torch.arange(batch_size), size)
        for step in range(math.ceil(3 * size / batch_size))
    ]
    sequence = torch.cat(steps)[: 3 * size]
    assert is_permutation(sequence.view(3, size))
    # and a batch is a piece of the sequence, whatever its shape
    assert sequence.equal(epochs(size, 3, seed=seed).flatten())
    position = torch.arange(3 * size).view(size, 3)
    assert shuffled(key, position, size).equal(sequence.view(size, 3))


@pytest.mark.parametrize("width", [1, 2, 5])
def test_lanes_shuffle_as_they_do_alone(width: int) -> None:
    seeds = [0, 2**63 - 1, 3, 0, WORD][:width]
    position = torch.tensor([0, 1000, 77, 99, 5])[:width, None] + torch.arange(50)
    found = vmap(lambda key, p: shuffled(key, p, 37))(torch.stack([key_of(s) for s in seeds]), position)
    for lane, seed in enumerate(seeds):
        assert found[lane].equal(shuffled(key_of(seed), position[lane], 37))


@pytest.mark.parametrize("size", [0, -1, 2**31])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"size={size}: must be in \[1, 2\*\*31\)"):
        shuffled(key_of(0), torch.tensor(0), size)


def plain_shuffle(seed: int, position: int, size: int) -> int:
    """The shuffle in unbounded integers; fails where an int64 would not have held a value."""

    def held(x: int) -> int:
        assert 0 <= x < 2**63
        return x

    def mix(x: int) -> int:
        x = held(((x ^ x >> 15) % WORD) * 0x7FEB352D) % WORD
        x = held((x ^ x >> 13) * 0x27D4EB2F) % WORD
        return x ^ x >> 16

    key = (seed % WORD, seed // WORD)
    columns = math.isqrt(size - 1) + 1
    epoch, sample = divmod(position, size)
    salts = [mix(held(mix(held(key[i] + held(epoch * 0x3C6EF372))) + key[1 - i])) for i in (0, 1)]
    row, column = divmod(sample, columns)
    for i in range(16):
        if i % 2 == 0:
            height = len(range(column, size, columns))
            row = (row + (held(mix(held(column * 0x165667B1 + salts[0] + i * 0x1E3779B9)) * height) >> 32)) % height
        else:
            width = min(columns, size - row * columns)
            column = (column + (held(mix(held(row * 0x165667B1 + salts[1] + i * 0x1E3779B9)) * width) >> 32)) % width
    return row * columns + column


@pytest.mark.parametrize("size", [1, 2, 3, 1437, 46340**2, 46340**2 + 1, 46341 * 46340, 2**31 - 1])
@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**63 - 1])
def test_nothing_leaves_an_int64(size: int, seed: int) -> None:
    # Up to epoch 2**32: a batch is no larger than the data, so no earlier than after 2**32 steps, which is where the
    # draws' counter ends too.
    samples = [0, 1, size // 2, size - 2, size - 1]
    positions = [e * size + s for e in (0, 1, 2**31, 2**32 - 1) for s in samples if 0 <= s < size]
    positions = [p for p in positions if p < 2**63]
    found = shuffled(key_of(seed), torch.tensor(positions), size)
    assert found.tolist() == [plain_shuffle(seed, p, size) for p in positions]


def test_the_largest_size_has_no_collisions() -> None:
    size = 2**31 - 1
    position = torch.cat([torch.arange(300_000), torch.arange(size - 300_000, size), torch.arange(300_000) * 7001])
    position = position.unique()
    found = shuffled(key_of(1), position, size)
    assert found.min() >= 0
    assert found.max() < size
    assert found.unique().numel() == position.numel()


# quality

# Small sizes are the hard ones: few rows and columns to turn. 9 and 25 are squares of odd numbers.
SMALL = [*range(2, 14), 16, 17, 20, 25, 30, 31]


def many_epochs(size: int, count: int, vary: str) -> Tensor:
    """(count, N): epochs of one seed, or one epoch of many seeds."""
    if vary == "epoch":
        return epochs(size, count)
    keys = torch.stack([torch.arange(count), torch.zeros(count, dtype=torch.int64)], 1)
    return vmap(lambda key: shuffled(key, torch.arange(size) + 3 * size, size))(keys)


def pairs(left: Tensor, right: Tensor, size: int) -> Tensor:
    """(N, N): how often two values come together."""
    return torch.bincount((left * size + right).flatten(), minlength=size * size).view(size, size)


@pytest.mark.parametrize("vary", ["epoch", "seed"])
@pytest.mark.parametrize("size", [*SMALL, 64, 100])
def test_every_sample_comes_everywhere(size: int, vary: str) -> None:
    rows = many_epochs(size, 20_000 if size < 64 else 4000, vary)
    count = rows.shape[0]
    observed = pairs(torch.arange(size).expand_as(rows), rows, size)
    if size < 7:
        # too few degrees of freedom for the normal approximation of the sum: each count by itself
        spread = math.sqrt(count / size * (1 - 1 / size))
        assert ((observed - count / size).abs() < 4 * spread).all()
    else:
        # rows and columns of the table have fixed sums: (N - 1)**2 are free, and the statistic is larger by N / (N - 1)
        assert abs(deviation(observed, count / size, (size - 1) ** 2, (size - 1) / size)) < 4


@pytest.mark.parametrize("vary", ["epoch", "seed"])
@pytest.mark.parametrize("size", [4, 5, 6])
def test_small_permutations_are_equally_likely(size: int, vary: str) -> None:
    # By exact computation with ideal round functions, 16 rounds leave 0.6 % total variation at N=6, less at any other
    # size: 10 rounds 5 %. What this many epochs can see is more than that.
    rows = many_epochs(size, 40_000, vary)
    code = (rows * torch.tensor([size**i for i in range(size)])).sum(1)
    observed = code.unique(return_counts=True)[1]
    assert observed.numel() == math.factorial(size)
    # 23 degrees of freedom at N=4 have a longer tail than a normal variable
    assert abs(deviation(observed, rows.shape[0] / observed.numel(), observed.numel() - 1)) < 4


def neighbours(size: int, vary: str = "epoch") -> float:
    """The deviation of which two samples follow each other, over all positions."""
    rows = many_epochs(size, 20_000, vary)
    observed = pairs(rows[:, ::2][:, : size // 2], rows[:, 1::2], size)
    assert (observed.diagonal() == 0).all()
    cells = size * (size - 1)
    off_diagonal = observed[~torch.eye(size, dtype=torch.bool)]
    # pairs within an epoch exclude each other, which makes the statistic smaller by at most 1 / (N - 1)
    return deviation(off_diagonal, observed.sum().item() / cells, cells - 1)


@pytest.mark.parametrize("vary", ["epoch", "seed"])
@pytest.mark.parametrize("size", [6, 7, 8, 9, 10, 11, 12, 16, 20, 25, 31])
def test_any_two_samples_follow_each_other(size: int, vary: str) -> None:
    assert abs(neighbours(size, vary)) < 4


def test_too_few_rounds_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesce.random, "SHUFFLE_ROUNDS", 8)
    assert neighbours(6) > 10


@pytest.mark.parametrize("size", [100, 1257, 1437, 4096])
def test_successive_differences_are_even(size: int) -> None:
    rows = epochs(size, 400_000 // size)
    difference = (rows[:, 1:] - rows[:, :-1]) % size
    observed = torch.bincount(difference.flatten(), minlength=size)
    assert observed[0] == 0
    assert abs(deviation(observed[1:], difference.numel() / (size - 1), size - 2)) < 4


@pytest.mark.parametrize("size", [7, 12, 31, 64])
@pytest.mark.parametrize("other", ["next epoch", "next seed", "seed + 2**32"])
def test_shuffles_know_nothing_of_each_other(size: int, other: str) -> None:
    count = 10_000 if size < 64 else 4000
    if other == "next epoch":
        rows = epochs(size, 2 * count)
        left, right = rows[::2], rows[1::2]
    else:
        step = torch.tensor([1, 0] if other == "next seed" else [0, 1])
        keys = torch.stack([2 * torch.arange(count), torch.zeros(count, dtype=torch.int64)], 1)
        draw_all = vmap(lambda key: shuffled(key, torch.arange(size), size))
        left, right = draw_all(keys), draw_all(keys + step)
    # what stands at one position in both: N independent pairs of permutations, as in a table with fixed margins
    observed = pairs(left, right, size)
    expected = observed.sum().item() / size**2
    assert abs(deviation(observed, expected, (size - 1) ** 2, (size - 1) / size)) < 4
    # a permutation keeps one sample in its place, on average and with variance 1
    kept = (left == right).sum().item()
    assert abs(kept - count) < 4 * math.sqrt(count)


def test_no_two_epochs_and_no_two_seeds_are_alike() -> None:
    found = {tuple(row) for row in torch.cat([epochs(20, 300, seed=s) for s in [*range(20), WORD, 2**63 - 1]]).tolist()}
    assert len(found) == 300 * 22


@pytest.mark.slow
def test_compiled_code_shuffles_the_same() -> None:
    keys = torch.stack([key_of(seed) for seed in (0, 5, 2**63 - 1)])
    positions = torch.randint(0, 2**62, (3, 999), generator=torch.Generator().manual_seed(0))

    def order(keys: Tensor, positions: Tensor) -> list[Tensor]:
        return [vmap(lambda k, p: shuffled(k, p, 2**31 - 1))(keys, positions)]

    (compiled,) = compile_graph(trace(order, [keys, positions]), [keys, positions])(keys, positions)
    assert compiled.equal(order(keys, positions)[0])
