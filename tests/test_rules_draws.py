"""torch's random functions inside a lane: of torch's distributions, from the lane's own stream.

Oracles: the distribution functions as textbooks have them (sup distance by Kolmogorov and Smirnov, counts by chi
square, both at one in ten thousand); the same lane alone; torch's global generator, which must stay as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from chi_square import limit
from coalesce.engine.rules import Rules
from coalesce.errors import TaskError
from coalesce.random import key_of
from rules_helpers import KEYS, STEP, Function, hidden, in_lanes, one_by_one

DRAWS: dict[str, Function] = {
    "rand": lambda h, a: h * torch.rand(6, 3) + torch.rand((6, 1), dtype=torch.float64) + torch.rand(size=(3,)),
    "rand_like": lambda h, a: h * torch.rand_like(h) + torch.rand_like(h, dtype=torch.float32),
    "randn": lambda h, a: h + torch.randn(6, 3, dtype=torch.float64) + torch.randn([3]),
    "randn_like": lambda h, a: h + torch.randn_like(h),
    "randint": lambda h, a: (
        h * torch.randint(9, (6, 3)) + torch.randint(-3, 9, (3,)) + torch.randint(high=9, size=(3,))
    ),
    "randint_like": lambda h, a: h * torch.randint_like(h, 9) + torch.randint_like(h, -2, 10**9),
    "randperm": lambda h, a: h[torch.randperm(6)] * torch.randperm(3),
    "bernoulli": lambda h, a: h * torch.bernoulli(h.abs()) + h.abs().bernoulli() + h.bernoulli(0.3),
    "multinomial": lambda h, a: h * torch.multinomial(h.abs(), 3) + h.abs().multinomial(3, True),
    "normal": lambda h, a: h + torch.normal(h, h.abs()) + torch.normal(0.0, h.abs()) + torch.normal(h, 2.0),
    "normal of a size": lambda h, a: h + torch.normal(1.0, 2.0, (6, 3)),
    "Normal": lambda h, a: h + torch.distributions.Normal(0.0, 1.0).sample(torch.Size((3,))),
    "uniform_": lambda h, a: h + torch.empty(6, 3).uniform_(-1, 2) + torch.empty_like(h).uniform_(),
    "normal_": lambda h, a: h + torch.empty(6, 3).normal_(1, 2) + torch.zeros(3).normal_(),
    "bernoulli_": lambda h, a: h * torch.ones(3).bernoulli_(0.4) + torch.empty_like(h).bernoulli_(h.abs()),
    "exponential_": lambda h, a: h + h.new_empty(6, 3).exponential_(2.0),
    "log_normal_": lambda h, a: h + torch.empty(3).log_normal_(0.0, 0.5),
    "cauchy_": lambda h, a: h + torch.empty(3).cauchy_(),
    "geometric_": lambda h, a: h + torch.empty(3).geometric_(0.3),
    "random_": lambda h, a: h + torch.empty(3, dtype=torch.int64).random_(5) + torch.empty(3).random_(2, 9),
    "init": lambda h, a: h + torch.nn.init.uniform_(torch.empty(3)) + torch.nn.init.normal_(torch.empty(3)),
    "dropout": lambda h, a: F.dropout(h) + F.dropout(h.clone(), inplace=True) + torch.native_dropout(h, 0.3, True)[0],
    "dropout of channels": lambda h, a: F.dropout1d(h[None])[0] + F.dropout2d(h[None, None])[0, 0] + F.dropout1d(h),
    "alpha_dropout": lambda h, a: F.alpha_dropout(h, 0.3, True) + F.alpha_dropout(h.clone(), 0.3, True, True),
    "feature_alpha_dropout": lambda h, a: F.feature_alpha_dropout(h, 0.5, True),
    "rrelu": lambda h, a: F.rrelu(h, training=True) + F.rrelu(h.clone(), training=True, inplace=True),
    "gumbel_softmax": lambda h, a: F.gumbel_softmax(h) + F.gumbel_softmax(h, a, hard=True),
    "fractional_max_pool2d": lambda h, a: F.fractional_max_pool2d(h.repeat(2, 4)[None], 2, output_size=(5, 6)),
    "fractional_max_pool3d": lambda h, a: F.fractional_max_pool3d(
        h.repeat(1, 4).sin()[None, None, ..., None] * h[0].repeat(3), 2, output_size=(2, 4, 2)
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", DRAWS)
def test_a_lane_draws_its_own_numbers(name: str) -> None:
    before = torch.random.get_rng_state()
    (values, gradients), (expected, slopes) = in_lanes(DRAWS[name]), one_by_one(DRAWS[name])
    torch.manual_seed(77)
    again = in_lanes(DRAWS[name])[0]
    assert torch.equal(values, again)
    torch.random.set_rng_state(before)
    # logarithms and sines differ in their last bit with the place in memory
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, slopes, rtol=1e-12, atol=1e-12)
    assert not torch.equal(values[0], values[1])


@pytest.mark.parametrize("name", DRAWS)
def test_the_global_generator_is_left_alone(name: str) -> None:
    """And each step and each call draws anew."""

    def draw(step: int, calls: int) -> list[Tensor]:
        with Rules(KEYS[0], torch.tensor(step), {}, watch=True):
            return [DRAWS[name](hidden(), 0.1) for _ in range(calls)]

    before = torch.random.get_rng_state()
    first, second = draw(0, 2)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first, draw(0, 1)[0])
    if "fractional" not in name:
        # a window has few places to go to
        assert not torch.equal(first, second)
        assert not torch.equal(first, draw(1, 1)[0])


COUNT = 20_000


def sample(draw: Callable[[], Tensor], seed: int = 5) -> Tensor:
    with Rules(key_of(seed), torch.tensor(3), {}):
        return draw()


def uniform(x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return (x - low) / (high - low)


def bell(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return 0.5 * (1 + torch.erf((x - mean) / (std * math.sqrt(2))))


CONTINUOUS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "rand": (lambda: torch.rand(COUNT), uniform),
    "rand, float64": (lambda: torch.rand(COUNT, dtype=torch.float64), uniform),
    "uniform_": (lambda: torch.empty(COUNT).uniform_(-1, 3), lambda x: uniform(x, -1, 3)),
    "randn": (lambda: torch.randn(COUNT), bell),
    "randn, half of an odd number": (lambda: torch.randn(COUNT + 1)[COUNT // 2 :], bell),
    "randn, float64": (lambda: torch.randn(COUNT, dtype=torch.float64), bell),
    "normal": (lambda: torch.normal(torch.full((COUNT,), 2.0), 3.0), lambda x: bell(x, 2.0, 3.0)),
    "exponential_": (lambda: torch.empty(COUNT).exponential_(2.0), lambda x: 1 - (-2 * x).exp()),
    "log_normal_": (lambda: torch.empty(COUNT).log_normal_(1.0, 0.5), lambda x: bell(x.log(), 1.0, 0.5)),
    "cauchy_": (lambda: torch.empty(COUNT).cauchy_(1.0, 2.0), lambda x: 0.5 + ((x - 1) / 2).atan() / math.pi),
    "rrelu": (lambda: F.rrelu(-torch.ones(COUNT), 0.2, 0.6, training=True), lambda x: uniform(x, -0.6, -0.2)),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_of_torchs_distribution(name: str) -> None:
    draw, distribution = CONTINUOUS[name]
    expected = distribution(sample(draw).double()).sort().values
    place = torch.arange(1, len(expected) + 1, dtype=torch.float64) / len(expected)
    apart = torch.maximum((place - expected).abs(), (place - 1 / len(expected) - expected).abs()).max().item()
    assert apart < 2.23 / math.sqrt(len(expected))


P = torch.tensor([0.1, 0.0, 0.3, 0.6])
DISCRETE: dict[str, tuple[Callable[[], Tensor], list[float]]] = {
    "randint": (lambda: torch.randint(3, 10, (COUNT,)) - 3, [1 / 7] * 7),
    "randint, two words": (lambda: torch.randint(0, 2**40, (COUNT,)) >> 37, [1 / 8] * 8),
    "random_": (lambda: torch.empty(COUNT, dtype=torch.uint8).random_() // 32, [1 / 8] * 8),
    "randperm, first place": (lambda: first_places(5), [1 / 5] * 5),
    "bernoulli": (lambda: torch.bernoulli(torch.full((COUNT,), 0.3)), [0.7, 0.3]),
    "bernoulli_": (lambda: torch.empty(COUNT).bernoulli_(0.9), [0.1, 0.9]),
    "geometric_": (
        lambda: torch.empty(COUNT).geometric_(0.3).clamp(max=6) - 1,
        [0.3 * 0.7**k for k in range(5)] + [0.7**5],
    ),
    "multinomial": (lambda: torch.multinomial(P * 7, COUNT, True), P.tolist()),
    "multinomial, the first": (lambda: torch.multinomial(P.expand(COUNT, 4), 2)[:, 0], P.tolist()),
    # the second of two: p_j p_i / (1 - p_i) summed over the first, i
    "multinomial, the second": (
        lambda: torch.multinomial(P.expand(COUNT, 4), 2)[:, 1],
        [sum(P[j] * P[i] / (1 - P[i]) for i in range(4) if i != j).item() for j in range(4)],  # type: ignore[union-attr]
    ),
    "gumbel_softmax": (lambda: F.gumbel_softmax(P.log().expand(COUNT, 4), hard=True).argmax(-1), P.tolist()),
}


def first_places(size: int) -> Tensor:
    return torch.stack([torch.randperm(size)[0] for _ in range(800)])


@pytest.mark.parametrize("name", DISCRETE)
def test_of_torchs_probabilities(name: str) -> None:
    draw, probabilities = DISCRETE[name]
    values = sample(draw)
    counts = torch.bincount(values.long(), minlength=len(probabilities)).double()
    expected = torch.tensor(probabilities, dtype=torch.float64) * len(values)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert counts[possible].sum() == len(values)
    off = ((counts - expected).square() / expected)[possible].sum().item()
    assert off < limit(int(possible.sum()) - 1)


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.randn(COUNT), lambda: torch.rand(COUNT) - 0.5, lambda: torch.empty(COUNT).exponential_() - 1],
    ids=["randn", "rand", "exponential_"],
)
def test_streams_of_two_seeds_and_two_calls_are_independent(draw: Callable[[], Tensor]) -> None:
    """Correlations of 20,000 draws: four standard deviations of one of independent ones."""
    with Rules(key_of(5), torch.tensor(3), {}):
        series = [draw(), draw(), draw()[torch.arange(COUNT) - 1]]
    series += [sample(draw, seed=6), sample(draw, seed=5 + 2**32)]
    found = torch.corrcoef(torch.stack(series).double()).fill_diagonal_(0.0).abs().max().item()
    assert found < 4 / math.sqrt(COUNT)
    halves = series[0].double().view(2, -1)
    assert abs(torch.corrcoef(halves)[0, 1].item()) < 4 / math.sqrt(COUNT // 2)


def test_ends() -> None:
    """No exponential of 0, whose logarithm Gumbel noise takes; nothing that is not finite; no 1 among uniforms."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        with Rules(key_of(1), torch.tensor(0), {}):
            found = torch.rand(COUNT, dtype=dtype)
            assert found.dtype == dtype
            assert found.min() >= 0
            assert found.max() < 1
            assert torch.empty(COUNT, dtype=dtype).exponential_().min() > 0
            assert torch.randn(COUNT, dtype=dtype).isfinite().all()
            assert torch.rand(0, 3, dtype=dtype).shape == (0, 3)
            assert torch.randn((), dtype=dtype).shape == ()
    # a permutation is one, at any size
    with Rules(key_of(1), torch.tensor(0), {}):
        for size in (0, 1, 2, 33, 1000):
            assert torch.equal(torch.randperm(size).sort().values, torch.arange(size))
        chosen = torch.multinomial(torch.rand(50, 7), 7)
    assert torch.equal(chosen.sort().values, torch.arange(7).expand(50, 7))


def test_a_generator_with_a_state_is_refused() -> None:
    generator = torch.Generator()
    calls: list[Callable[[], Any]] = [
        lambda: torch.rand(3, generator=generator),
        lambda: torch.randperm(3, generator=generator),
        lambda: torch.empty(3).normal_(generator=generator),
        lambda: torch.multinomial(P, 1, generator=generator),
    ]
    for call in calls:
        with pytest.raises(TaskError, match=r"\(generator=...\) draws from a generator with a state"):
            sample(call)


def test_options_of_factories() -> None:
    with Rules(key_of(1), torch.tensor(0), {}):
        assert torch.rand(3, requires_grad=True).requires_grad
        assert torch.randint(3, (2,), dtype=torch.int32).dtype == torch.int32
        assert torch.randn_like(torch.zeros(2), dtype=torch.float64).dtype == torch.float64
        with pytest.raises(TypeError, match="does not know out"):
            torch.rand(3, out=torch.zeros(3))


def test_a_seed_that_differs_by_lane() -> None:
    """Equal lanes draw equal numbers."""

    def lane(key: Tensor) -> Tensor:
        with Rules(key, STEP, {}):
            return torch.randn(5)

    first, second, other = vmap(lane)(KEYS[[0, 0, 1]])
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "drop",
    [
        F.dropout,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.dropout1d,
        lambda x, p, training: F.dropout(x.clone(), p, training, inplace=True),
        lambda x, p, training: torch.native_dropout(x, p, training)[0],
    ],
)
def test_a_rate_that_is_zero_draws_nothing(drop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn behind it is what it is where the rate is another one."""
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    drawn: list[int] = []
    bits = Rules.bits

    def counted(self: Rules, count: int) -> Tensor:
        drawn.append(count)
        return bits(self, count)

    monkeypatch.setattr(Rules, "bits", counted)
    found = []
    for rate in (0.0, 0, 0.3):
        drawn.clear()
        with Rules(KEYS[0], STEP, {}):
            first = drop(x, rate, True)
            found.append(F.dropout(x, 0.5))
        assert len(drawn) == (1 if rate == 0 else 2)
        assert torch.equal(first, x) == (rate == 0)
    assert found[0].equal(found[2])
    assert found[1].equal(found[2])
