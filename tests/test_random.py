"""Counter-based streams.

Oracles: the known-answer vectors that Philox's authors publish with Random123 (`tests/kat_vectors`); their algorithm
as the paper states it, in Python's unbounded integers; chi-square statistics. These are of fixed seeds, so that they
cannot fail by chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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
from coalesce.random import Purpose, bits, key_of, philox, uniform

WORD = 2**32
SEEDS = st.integers(0, 2**63 - 1)

#: rounds, counter, key, result
KNOWN_ANSWERS = [
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def tensors(values: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


def plain_philox(key: Sequence[int], counter: Sequence[int], rounds: int = 10) -> list[int]:
    """Philox 4x32 as the paper has it."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, WORD)
        high1, low1 = divmod(0xCD9E8D57 * c2, WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return [c0, c1, c2, c3]


# Philox


@pytest.mark.parametrize(("rounds", "counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(rounds: int, counter: str, key: str, result: str) -> None:
    found = philox(tensors(words(key)), tensors(words(counter)), rounds)  # type: ignore[arg-type]
    assert [int(word) for word in found] == words(result)
    assert plain_philox(words(key), words(counter), rounds) == words(result)


def test_known_answers_side_by_side() -> None:
    rows = [row for row in KNOWN_ANSWERS if row[0] == 10]
    counters = torch.tensor([words(row[1]) for row in rows]).T
    keys = torch.tensor([words(row[2]) for row in rows]).T
    found = torch.stack(philox((keys[0], keys[1]), tuple(counters)))
    assert found.T.tolist() == [words(row[3]) for row in rows]


@given(st.lists(st.integers(0, WORD - 1), min_size=6, max_size=6))
def test_philox_is_the_published_algorithm(given: list[int]) -> None:
    found = philox(tensors(given[:2]), tensors(given[2:]))  # type: ignore[arg-type]
    assert [int(word) for word in found] == plain_philox(given[:2], given[2:])


# streams


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1])
def test_a_key_holds_the_whole_seed(seed: int) -> None:
    low, high = key_of(seed).tolist()
    assert (low, high) == (seed % WORD, seed // WORD)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"seed={seed}: must be in \[0, 2\*\*63\)"):
        key_of(seed)


@given(SEEDS, st.sampled_from(Purpose), st.integers(0, WORD - 1), st.integers(0, 1000), st.integers(0, 40))
def test_bits_are_the_blocks_of_their_counters(seed: int, purpose: Purpose, step: int, call: int, count: int) -> None:
    found = bits(key_of(seed), purpose, torch.tensor(step), call, count)
    # counter: number of the block, call, step, purpose; the first words of all blocks come first, then the second ones
    blocks = [
        plain_philox((seed % WORD, seed // WORD), (block, call, step, purpose)) for block in range(math.ceil(count / 4))
    ]
    assert found.tolist() == [block[word] for word in range(4) for block in blocks][:count]
    assert found.dtype == torch.int64


def test_streams_never_meet() -> None:
    # every word of key and counter takes part: none may be dropped, and no two may be mixed up
    seeds = [0, 1, 2, 3, WORD, 2 * WORD, WORD + 1, 2**63 - 1]
    streams = list(itertools.product(seeds, Purpose, [0, 1, 2, 3, WORD - 1], range(4)))
    blocks = set()
    for seed, purpose, step, call in streams:
        drawn = bits(key_of(seed), purpose, torch.tensor(step), call, 32)
        assert drawn.equal(bits(key_of(seed), purpose, torch.tensor(step), call, 32))
        blocks |= {tuple(block) for block in drawn.view(4, 8).T.tolist()}
    # 128 random bits to a block: two of the 2560 would be equal once in 10**32 tries
    assert len(blocks) == 8 * len(streams)


# uniform numbers


def draw(seed: int = 0, step: int = 0, call: int = 0, size: int = 4096, dtype: torch.dtype = torch.float64) -> Tensor:
    return uniform(key_of(seed), torch.tensor(step), call, (size,), dtype)


def test_uniform_numbers_are_what_they_were() -> None:
    # an experiment's id promises its numbers: if this fails, they need a new version of the id rule
    assert (draw(size=5) * 2**24).tolist() == [14495685, 12228810, 11400608, 6579784, 15136523]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_have_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = uniform(key_of(3), torch.tensor(7), 1, shape, dtype)
    assert found.shape == shape
    assert found.dtype == dtype


@given(SEEDS, st.integers(0, WORD - 1))
def test_uniform_numbers_are_alike_in_every_dtype(seed: int, step: int) -> None:
    wide = draw(seed, step, size=512)
    assert (wide >= 0).all()
    assert (wide < 1).all()
    # 24 bits: no dtype has to round, so a mask drawn in one is the mask drawn in another
    assert (wide * 2**24 == (wide * 2**24).round()).all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        narrow = draw(seed, step, size=512, dtype=dtype)
        assert narrow.dtype == torch.float32
        assert narrow.double().equal(wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_never_reach_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([0, 255, 256, WORD - 1])
    monkeypatch.setattr(coalesce.random, "bits", lambda *_: extremes)
    assert draw(size=4, dtype=dtype).tolist() == [0.0, 0.0, 2.0**-24, 1 - 2.0**-24]


def test_uniform_numbers_use_all_their_bits() -> None:
    drawn = (draw(size=2**16) * 2**24).long()
    for bit in range(24):
        ones = (drawn >> bit & 1).sum().item()
        assert abs(ones - 2**15) < 4 * math.sqrt(2**14), bit


def grid(*coordinates: Tensor) -> Tensor:
    """Counts in the cells of a square or cube with 16 cells to a side; of a line with 256."""
    side = 256 if len(coordinates) == 1 else 16
    cell = torch.zeros_like(coordinates[0], dtype=torch.int64)
    for x in coordinates:
        cell = cell * side + (x * side).long()
    return torch.bincount(cell, minlength=side ** len(coordinates))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_uniform_numbers_are_uniform(seed: int) -> None:
    key, count = key_of(seed), 2**14
    many = torch.arange(count)

    def by_step(step: Tensor) -> Tensor:
        return uniform(key, step, 0, (2,), torch.float64)

    def by_seed(low: Tensor) -> Tensor:
        return uniform(torch.stack([low, key[1]]), torch.tensor(0), 0, (2,), torch.float64)

    inside = draw(seed, size=count)
    steps, seeds = vmap(by_step)(many).T, vmap(by_seed)(many).T
    calls = torch.stack([draw(seed, call=call, size=4) for call in range(2048)]).T
    samples = {
        "one call": grid(inside),
        "first of each step": grid(steps[0]),
        "first of each seed": grid(seeds[0]),
        "first of each call": grid(calls[0]),
        "neighbours in a call": grid(inside[::2], inside[1::2]),
        "triples in a call": grid(*inside[: count // 3 * 3].view(-1, 3).T),
        "two of one step": grid(*steps),
        "neighbouring steps": grid(steps[0, ::2], steps[0, 1::2]),
        "neighbouring seeds": grid(seeds[0, ::2], seeds[0, 1::2]),
        "neighbouring calls": grid(calls[0, ::2], calls[0, 1::2]),
    }
    found = {name: deviation(n, n.double().mean().item(), n.numel() - 1) for name, n in samples.items()}
    # thirty statistics here: four deviations are a chance of 1 in 500 for a good generator, tried once, then fixed
    assert {name: z for name, z in found.items() if abs(z) > 4} == {}


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_lanes_draw_what_they_draw_alone(width: int) -> None:
    seeds = [5, 2**63 - 1, 5, 0, 2**40, 6, 7, 8][:width]
    steps = torch.tensor([9, 9, 10, 0, 3, 9, 9, WORD - 1][:width])
    keys = torch.stack([key_of(seed) for seed in seeds])
    drawn = vmap(lambda key, step: uniform(key, step, 2, (3, 7), torch.float32))(keys, steps)
    for lane, seed in enumerate(seeds):
        assert drawn[lane].equal(uniform(key_of(seed), steps[lane], 2, (3, 7), torch.float32))


@pytest.mark.slow
def test_compiled_code_draws_the_same() -> None:
    # products of words wrap the sign of an int64, which C++ leaves undefined: what the compiler makes of it is tested
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randint(0, WORD, (n, 999), generator=generator) for n in (4, 2)]
    inputs[0][:, 0] = inputs[1][:, 0] = WORD - 1

    def blocks(counter: Tensor, key: Tensor) -> list[Tensor]:
        return list(philox((key[0], key[1]), tuple(counter)))

    found = compile_graph(trace(blocks, inputs), inputs)(*inputs)
    assert torch.stack(list(found)).equal(torch.stack(blocks(*inputs)))
