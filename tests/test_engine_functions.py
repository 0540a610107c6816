"""torch's functions inside a lane: a float that rides must count, or be refused by name; nothing may be drawn.

Oracle: the same function called with the Python float of each lane in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from coalesce.engine.rules import Rules
from coalesce.errors import TaskError
from coalesce.random import key_of

LANES = torch.tensor([0.1, 0.2, 0.35], dtype=torch.float64)
KEYS = torch.stack([key_of(seed) for seed in (0, 1, 2)])
STEP = torch.tensor(5)
# of functions that have no rule for lanes of their own: they are slow, and right
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

LABELS = torch.tensor([0, 2, 1, 1, 0, -100])
CLASSES = torch.tensor([0, 2, 1, 1, 0, 2])
SOFT = torch.tensor([[0.2, 0.8, 0.0], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4]], dtype=torch.float64).repeat(2, 1)
WEIGHTS = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)

Function = Callable[[Tensor, Any], Tensor]


def hidden() -> Tensor:
    return torch.linspace(-2, 2, 18, dtype=torch.float64).sin().view(6, 3)


def in_lanes(function: Function) -> Tensor:
    def lane(key: Tensor, a: Tensor) -> Tensor:
        with Rules(key, STEP, {"task.a": a, "task.b": LANES}, origins={"task.a": "task.a"}):
            return function(hidden() + 0 * a, a)

    return vmap(lane)(KEYS, LANES)


def one_by_one(function: Function) -> Tensor:
    results = []
    for key, a in zip(KEYS, LANES.tolist(), strict=True):
        with Rules(key, STEP, {}):
            results.append(function(hidden(), a))
    return torch.stack(results)


def entropy(**options: Any) -> Function:
    return lambda h, a: F.cross_entropy(h, LABELS, label_smoothing=a, **options)


def filled(h: Tensor, a: Any) -> Tensor:
    result = h.clone()
    result[:, 1] = a
    return result.add_(torch.zeros_like(h).fill_(a))


RIDES: dict[str, Function] = {
    "arithmetic": lambda h, a: (a - h) * a / (h.abs() + a) + h % a + a**h + h.abs() ** a,
    "comparison": lambda h, a: h * (h > a) + torch.where(h > 0, h, a),
    "clamp": lambda h, a: h.clamp(-a, a) + torch.clamp(h, min=a) + h.clip(max=a),
    "in place": filled,
    "masked_fill": lambda h, a: h.masked_fill(h > 0, a),
    "lerp": lambda h, a: torch.lerp(h, h * 2, a),
    "normalize": lambda h, a: F.normalize(h, eps=a * 20),
    "dropout": lambda h, a: F.dropout(h, a),
    "dropout by name": lambda h, a: F.dropout(input=h, p=a, training=True),
    "dropout in place": lambda h, a: F.dropout(h.clone(), a, True, True),
    "torch.dropout": lambda h, a: torch.dropout(h, a, True),
    "dropout1d": lambda h, a: F.dropout1d(h[:, :, None], a),
    "dropout2d": lambda h, a: F.dropout2d(h[:, :, None, None], a),
    "dropout3d": lambda h, a: F.dropout3d(h[:, :, None, None, None], a),
    "Dropout": lambda h, a: torch.nn.Dropout(0.25)(h) * a,
    "attention": lambda h, a: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=a),
    "causal attention": lambda h, a: F.scaled_dot_product_attention(h[None], h[None], h[None], None, a, True),
    "label smoothing": entropy(),
    "label smoothing, sum": entropy(reduction="sum"),
    "label smoothing, none": entropy(reduction="none"),
    "label smoothing, weights": entropy(weight=WEIGHTS),
    "label smoothing, weights, sum": entropy(weight=WEIGHTS, reduction="sum"),
    "label smoothing, another index ignored": lambda h, a: F.cross_entropy(
        h, LABELS.abs() % 3, ignore_index=1, label_smoothing=a
    ),
    "label smoothing, images": lambda h, a: F.cross_entropy(h.T[None], LABELS[None], label_smoothing=a),
    "label smoothing, one sample": lambda h, a: F.cross_entropy(h[0], LABELS[0], label_smoothing=a),
    "label smoothing, shares": lambda h, a: F.cross_entropy(h, SOFT, label_smoothing=a),
    "label smoothing, shares, weights": lambda h, a: F.cross_entropy(h, SOFT, WEIGHTS, label_smoothing=a),
}

REFUSED: dict[str, Function] = {
    "leaky_relu": lambda h, a: F.leaky_relu(h, a),
    "elu": lambda h, a: F.elu(h, a),
    "celu": lambda h, a: F.celu(h, a),
    "softplus": lambda h, a: F.softplus(h, a),
    "hardtanh": lambda h, a: F.hardtanh(h, -1.0, a),
    "softshrink": lambda h, a: F.softshrink(h, a),
    "layer_norm": lambda h, a: F.layer_norm(h, (3,), eps=a),
    "group_norm": lambda h, a: F.group_norm(h, 1, eps=a),
    "batch_norm": lambda h, a: F.batch_norm(h, None, None, training=True, eps=a),
    "huber_loss": lambda h, a: F.huber_loss(h, h * 0.2, delta=a),
    "smooth_l1_loss": lambda h, a: F.smooth_l1_loss(h, h * 0.2, beta=a),
    "add": lambda h, a: torch.add(h, h, alpha=a),
    "addcmul": lambda h, a: torch.addcmul(h, h, h, value=a),
    "nan_to_num": lambda h, a: torch.nan_to_num(h, nan=a),
    "full_like": lambda h, a: torch.full_like(h, a),
    "pad": lambda h, a: F.pad(h, (0, 1), value=a),
    "scaled_dot_product_attention": lambda h, a: F.scaled_dot_product_attention(h[None], h[None], h[None], scale=a),
    "__float__": lambda h, a: h * float(a),
    "__bool__": lambda h, a: h if a else -h,
    "__format__": lambda h, a: h * len(f"{a:.2f}"),
    "item": lambda h, a: h * a.item(),
}

#: They ask for a value that follows from a float: the operation is named, and every float that rides.
ASKS: dict[str, Function] = {
    "__bool__": lambda h, a: h if a > 0.5 else -h,
    "item": lambda h, a: h * (a * 2).item(),
    "tensor": lambda h, a: h * torch.tensor([a, 1.0, 1.0]),
    "norm": lambda h, a: h.norm(p=1 + a),
    "tolist": lambda h, a: h * (h * a).tolist()[0][0],
}

DRAWS: dict[str, Function] = {
    "rand": lambda h, a: h * torch.rand(3),
    "randn_like": lambda h, a: h + torch.randn_like(h),
    "normal_": lambda h, a: h + torch.empty_like(h).normal_(),
    "bernoulli": lambda h, a: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "randperm": lambda h, a: h[torch.randperm(6)],
    "multinomial": lambda h, a: h * torch.multinomial(torch.ones(4), 1),
    "alpha_dropout": lambda h, a: F.alpha_dropout(h, 0.3, training=True),
    "feature_alpha_dropout": lambda h, a: F.feature_alpha_dropout(h, 0.3, training=True),
    "gumbel_softmax": lambda h, a: F.gumbel_softmax(h),
    "native_dropout": lambda h, a: torch.native_dropout(h, 0.3, True)[0],
    "normal": lambda h, a: h + torch.distributions.Normal(0.0, 1.0).sample(torch.Size((3,))),
}


@pytest.mark.parametrize("name", RIDES)
def test_a_float_rides(name: str) -> None:
    found, expected = in_lanes(RIDES[name]), one_by_one(RIDES[name])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(found[0], found[2])


@pytest.mark.parametrize("name", REFUSED)
def test_a_float_is_refused_by_name(name: str) -> None:
    with pytest.raises(TaskError) as caught:
        in_lanes(REFUSED[name])
    text = str(caught.value)
    assert f"{name}() takes only a Python number where task.a stands" in text
    assert 'static = ("a",)' in text
    assert f'File "{__file__}"' in text


@pytest.mark.parametrize("name", ASKS)
def test_a_value_is_not_there(name: str) -> None:
    with pytest.raises(TaskError) as caught:
        in_lanes(ASKS[name])
    text = str(caught.value)
    assert f"{name}() asks for the value of a tensor" in text
    assert "Floats that ride here: task.a, task.b" in text
    assert f'File "{__file__}"' in text


@pytest.mark.parametrize("name", DRAWS)
def test_nothing_is_drawn_from_the_global_generator(name: str) -> None:
    with pytest.raises(TaskError, match=rf"{name}\(\) draws from torch's global generator"):
        in_lanes(DRAWS[name])
    # in a plain call it would work, and so is watched where it is tried before tracing
    with (
        pytest.raises(TaskError, match=rf"{name}\(\) draws from torch's global generator"),
        Rules(KEYS[0], STEP, {}, watch=True),
    ):
        DRAWS[name](hidden(), 0.1)


def test_a_rate_of_zero_changes_nothing_and_of_one_drops_everything() -> None:
    def lane(key: Tensor, p: Tensor) -> Tensor:
        with Rules(key, STEP, {}):
            return F.dropout(hidden(), p)  # type: ignore[arg-type]

    none, all_dropped = vmap(lane)(KEYS[:2], torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert torch.equal(none, hidden())
    assert torch.equal(all_dropped, torch.zeros(6, 3, dtype=torch.float64))


def test_every_call_and_every_step_and_every_key_draws_anew() -> None:
    x = torch.ones(64)
    masks = []
    for key in KEYS[:2]:
        for step in (0, 1):
            with Rules(key, torch.tensor(step), {}):
                masks += [F.dropout(x, 0.5), F.dropout(x, 0.5)]
    for i, mask in enumerate(masks):
        assert 16 < int((mask == 2).sum()) < 48
        assert set(mask.tolist()) == {0.0, 2.0}
        assert not any(torch.equal(mask, other) for other in masks[i + 1 :])
