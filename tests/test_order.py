"""The order of the samples.

Oracle: laws (every sample once per epoch, whatever the batches); one batch at a time against many ahead; chi-square
statistics of what a fair shuffle does, of fixed seeds, so that they cannot fail by chance.
"""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from chi_square import deviation
from coalesce.engine import order
from coalesce.engine.batches import Batches
from coalesce.engine.order import Order
from coalesce.random import epoch_order

WORD = 2**32
SEEDS = st.integers(0, 2**63 - 1)
REMAINDERS = st.sampled_from(["drop", "short", "straddle"])


# an epoch


def epochs(size: int, count: int, seed: int = 0) -> Tensor:
    """(count, N): the first epochs of a seed."""
    return torch.stack([epoch_order(seed, epoch, size) for epoch in range(count)])


def test_orders_are_what_they_were() -> None:
    # An experiment's id promises its batches. If this fails, torch.randperm has changed: say so, as it must be said of
    # torch's initial weights, and let no run that was begun before be resumed.
    assert epochs(11, 2).tolist() == [[0, 3, 2, 1, 8, 4, 5, 7, 9, 6, 10], [8, 7, 5, 3, 2, 4, 10, 0, 1, 6, 9]]


@given(SEEDS, st.integers(1, 3000), st.integers(0, 2**31))
def test_every_sample_once_in_any_epoch(seed: int, size: int, epoch: int) -> None:
    assert epoch_order(seed, epoch, size).sort().values.equal(torch.arange(size))


def test_nothing_else_is_drawn_from_or_seeded() -> None:
    before = torch.get_rng_state()
    epoch_order(3, 0, 10)
    assert torch.get_rng_state().equal(before)


def test_no_two_epochs_and_no_two_seeds_are_alike() -> None:
    found = {tuple(row) for s in [*range(20), WORD, 2**63 - 1] for row in epochs(20, 300, s).tolist()}
    assert len(found) == 300 * 22


@pytest.mark.parametrize("vary", ["epoch", "seed", "seed * 2**32"])
def test_epochs_know_nothing_of_each_other(vary: str) -> None:
    """What stands at one position in two that follow one another: independent pairs of permutations."""
    size, count = 12, 5000
    if vary == "epoch":
        rows = epochs(size, 2 * count)
    else:
        rows = torch.stack([epoch_order(n * (1 if vary == "seed" else WORD // 4), 5, size) for n in range(2 * count)])
    left, right = rows[::2], rows[1::2]
    for one, two in ((left, right), (torch.arange(size).expand_as(rows), rows)):
        observed = torch.bincount((one * size + two).flatten(), minlength=size * size)
        # rows and columns of the table have fixed sums: (N - 1)**2 are free, and the statistic is larger by N / (N - 1)
        freedom, scale = (size - 1) ** 2, (size - 1) / size
        assert abs(deviation(observed, observed.sum().item() / size**2, freedom, scale)) < 4
    # a permutation keeps one sample in its place, on average and with variance 1
    assert abs((left == right).sum().item() - count) < 4 * math.sqrt(count)


# batches


@given(SEEDS, st.integers(1, 60), st.integers(1, 90), st.integers(0, 40))
def test_batches_that_straddle_epochs_miss_nothing(seed: int, size: int, batch: int, first: int) -> None:
    found = Order(Batches(batch, "straddle"))
    whole = torch.cat([found.batch(seed, step, size) for step in range(first + size)])
    # as many as fill whole epochs
    assert (
        whole[: len(whole) // size * size]
        .view(-1, size)
        .sort()
        .values.equal(torch.arange(size).expand(len(whole) // size, size))
    )
    assert whole[:size].equal(epoch_order(seed, 0, size)[: len(whole)])


@given(
    st.integers(1, 9),
    REMAINDERS,
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 20))), min_size=1),
    st.integers(1, 12),
)
def test_many_ahead_are_what_one_at_a_time_gives(
    size: int, remainder: str, drawn: list[tuple[int, int, int] | None], steps: int
) -> None:
    batches = Batches(size, remainder)
    places = [None if one is None else (one[0], one[1], size + one[2]) for one in drawn]
    found = Order(batches).ahead(places, steps, size)
    assert found.shape == (steps, len(places), size)
    for lane, place in enumerate(places):
        if place is None:
            assert not found[:, lane].any()
            continue
        seed, first, count = place
        for step in range(steps):
            alone = Order(batches).batch(seed, first + step, count)
            # a graph of full batches is not called for a short one
            assert len(alone) == batches.size_at(first + step, count)
            assert found[step, lane, : len(alone)].equal(alone)


@given(
    st.integers(1, 9),
    REMAINDERS,
    st.lists(st.tuples(*[st.integers(0, 30)] * 2, st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=4),
    st.integers(1, 40),
)
def test_each_lane_gets_its_own_batches_in_turn(
    size: int, remainder: str, drawn: list[tuple[int, int, int, int]], ahead: int
) -> None:
    """However few steps are worked out at once."""
    batches = Batches(size, remainder)
    lanes = [(seed, step, step + more, size + rest) for seed, step, more, rest in drawn]
    count = max(until - step for _, step, until, _ in lanes)
    at = [step for _, step, _, _ in lanes]
    with patch.object(order, "_AHEAD", ahead):
        for called, block in Order(batches).calls(lanes, count):
            for samples in block:
                for lane, (seed, _, until, n) in enumerate(lanes):
                    if at[lane] < until and batches.size_at(at[lane], n) == called:
                        assert samples[lane].equal(Order(batches).batch(seed, at[lane], n))
                        at[lane] += 1
    assert at == [until for _, _, until, _ in lanes]


def test_what_is_passed_is_forgotten() -> None:
    """Of each seed the epochs that the last call has used; what is forgotten is made again."""
    batches = Batches(4, "straddle")
    kept = Order(batches)
    for step in (0, 1, 7, 2):
        block = kept.ahead([(0, step, 10), (0, step, 10), (1, step, 10)], 3, 4)
        # three batches of four begin at position 4 step
        epochs = range(4 * step // 10, (4 * step + 11) // 10 + 1)
        assert kept.bytes == 2 * len(epochs) * 10 * 8
        for lane, seed in enumerate((0, 0, 1)):
            assert block[:, lane].equal(torch.stack([Order(batches).batch(seed, step + n, 10) for n in range(3)]))
    kept.forget()
    assert kept.bytes == 0
