"""BatchNorm in lanes, whose formula is written out.

Oracle: `F.batch_norm` itself, lane by lane: values, statistics, and derivatives of both orders in float64; its own
distance from float64 where float32 is not enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

from coalesce.engine.rules import Rules
from coalesce.engine.trace import trace
from coalesce.random import key_of

KEYS = torch.stack([key_of(seed) for seed in (0, 1, 2)])
STEP = torch.tensor(0)

SHAPES = {"features": (7, 4), "sequences": (3, 4, 5), "images": (2, 4, 3, 5), "volumes": (2, 4, 2, 1, 3)}
KINDS = {"all": (True, True), "no statistics": (True, False), "not affine": (False, True), "nothing": (False, False)}


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Of three lanes: x, weight, bias, mean, variance."""
    torch.manual_seed(0)
    channels = shape[1]
    vectors = [torch.randn(3, channels, dtype=dtype) for _ in range(3)]
    return [torch.randn(3, *shape, dtype=dtype) * 3 + 2, *vectors, torch.rand(3, channels, dtype=dtype) + 0.5]


def layer(kind: str, training: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    affine, tracked = KINDS[kind]

    def apply(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = mean.clone(), variance.clone()
        m, v = (mean, variance) if tracked or not training else (None, None)
        w, b = (weight, bias) if affine else (None, None)
        return F.batch_norm(x, m, v, w, b, training, 0.3, 1e-3), mean, variance

    return apply


def in_lanes(function: Callable[..., Any]) -> Callable[..., Any]:
    def lane(key: Tensor, *given: Tensor) -> Any:
        with Rules(key, STEP, {}):
            return function(*given)

    return lambda *given: vmap(lane)(KEYS, *given)


# what torch's forward derivatives are made of
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=[*SHAPES])
def test_values_statistics_and_derivatives(shape: tuple[int, ...], kind: str, training: bool) -> None:
    apply, given = layer(kind, training), inputs(shape)

    def loss(*given: Tensor) -> Tensor:
        y = apply(*given)[0]
        return (y.sin() * torch.arange(1, y.numel() + 1).cos().view(y.shape)).sum()

    def first(*given: Tensor) -> tuple[Tensor, ...]:
        return grad(loss, (0, 1, 2))(*given)

    def second(*given: Tensor) -> tuple[Tensor, ...]:
        """Of the gradient's square; and along a direction."""
        squares = grad(lambda *g: sum(t.square().sum() for t in first(*g)), (0, 1))(*given)
        x, *rest = given
        return *squares, jvp(lambda x: loss(x, *rest), (x,), (x.cos(),))[1]

    for function in (apply, first, second):
        found = in_lanes(function)(*given)
        right = [function(*lane) for lane in zip(*given, strict=True)]
        for mine, theirs in zip(found, map(torch.stack, zip(*right, strict=True)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10 * float(theirs.abs().max()))


def test_a_mean_far_from_nothing_costs_no_digits() -> None:
    x, *rest = inputs((64, 4, 6, 6), torch.float32)
    given = [x * 0.1 + 1000, *rest]
    apply = layer("all", training=True)

    def both(*given: Tensor) -> tuple[Tensor, ...]:
        return *apply(*given), *grad(lambda *g: apply(*g)[0].sin().sum(), (0, 1, 2))(*given)

    exact = [both(*(t.double() for t in lane)) for lane in zip(*given, strict=True)]
    plain = [both(*lane) for lane in zip(*given, strict=True)]
    for mine, theirs, right in zip(
        in_lanes(both)(*given), *(map(torch.stack, zip(*r, strict=True)) for r in (plain, exact)), strict=True
    ):
        assert float((mine - right).abs().max()) <= 2 * float((theirs - right).abs().max()) + 1e-6


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_half_precision_is_computed_in_float32(parameters: torch.dtype) -> None:
    """And so the statistics, which move by less than half precision can tell, in the end stand where torch's do."""
    given = [t.to(parameters) for t in inputs((64, 4, 6, 6), torch.float32)]
    given[0] = (given[0] + 5).bfloat16()
    mine, right = given, [[*lane] for lane in zip(*given, strict=True)]
    training = layer("all", training=True)
    for _ in range(100):
        y, *statistics = in_lanes(training)(*mine)
        mine = [*mine[:3], *statistics]
        plain = [training(*lane) for lane in right]
        right = [[*lane[:3], *after] for lane, (_, *after) in zip(right, plain, strict=True)]
    evaluation = layer("all", training=False)
    found = y, *statistics, in_lanes(evaluation)(*mine)[0]
    expected = *map(torch.stack, zip(*plain, strict=True)), torch.stack([evaluation(*lane)[0] for lane in right])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2**-5, atol=2**-5 if one.dtype == torch.bfloat16 else 1e-4)


def test_statistics_have_no_gradient() -> None:
    evaluation, given = layer("all", training=False), inputs((7, 4))
    found = in_lanes(grad(lambda *g: evaluation(*g)[0].sum(), (3, 4)))(*given)
    assert [t.count_nonzero().item() for t in found] == [0, 0]


@pytest.mark.parametrize(
    ("training", "change", "says"),
    [
        (False, lambda x, w, b, m, v: (x, w, b, None, None), "running_mean must be defined in evaluation mode"),
        (False, lambda x, w, b, m, v: (x, w, b, m[:1], v[:1]), "running_mean should contain 4 elements not 1"),
        (True, lambda x, w, b, m, v: (x, w[:1], b[:1], m, v), "weight.* 4"),
        (False, lambda x, w, b, m, v: (x.long(), w, b, m, v), "not implemented for 'Long'"),
    ],
)
def test_what_torch_refuses_is_refused(training: bool, change: Callable[..., Any], says: str) -> None:
    def apply(*given: Tensor) -> Tensor:
        x, w, b, m, v = change(*given)
        return F.batch_norm(x, m, v, w, b, training)

    given = inputs((7, 4))
    with pytest.raises((RuntimeError, NotImplementedError), match=says):
        apply(*(t[0] for t in given))
    with pytest.raises((RuntimeError, NotImplementedError), match=says):
        in_lanes(apply)(*given)


def test_an_epsilon_of_nothing_is_refused() -> None:
    given = inputs((7, 4))
    with pytest.raises(ValueError, match="eps must be positive"):
        in_lanes(lambda x, *_: F.batch_norm(x, None, None, training=True, eps=0.0))(*given)


def test_gradients_are_added_up_twice_and_lanes_are_not_moved() -> None:
    """Over the samples, once for what scales and once for what shifts: the most costly part of a step of images."""
    apply, given = layer("all", training=True), inputs((8, 4, 6, 6))

    def step(x: Tensor, weight: Tensor, bias: Tensor, *statistics: Tensor) -> tuple[Tensor, ...]:
        return grad(lambda *g: apply(*g, *statistics)[0].square().sum(), (0, 1, 2))(x, weight, bias)

    nodes = [*trace(lambda *t: [*in_lanes(step)(*t)], given).graph.nodes]

    def large(node: Any) -> bool:
        return getattr(node.meta.get("val"), "numel", int)() >= given[0].numel()

    sums = [n for n in nodes if str(n.target).startswith(("aten.sum", "aten.mean")) and large(n.args[0])]
    # and in the forward pass for the mean, what it is off by, and the variance
    assert len(sums) == 5
    assert not [
        n for n in nodes if str(n.target).startswith(("aten.permute", "aten.clone", "aten._unsafe")) and large(n)
    ]


def test_one_value_is_too_few() -> None:
    given = inputs((1, 4))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        in_lanes(layer("all", training=True))(*given)
