"""Floats that torch takes only as Python numbers, and that ride all the same. `docs/riding.md` lists them.

Oracle: the same function called with the Python float of each lane in turn, which calls torch's own code; values and
gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from coalesce.engine.rules import Rules
from rules_helpers import KEYS, STEP, Function, hidden, in_lanes, one_by_one

# of functions that have no rule for lanes of their own: they are slow, and right
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

LABELS = torch.tensor([0, 2, 1, 1, 0, -100])
CLASSES = torch.tensor([0, 2, 1, 1, 0, 2])
SOFT = torch.tensor([[0.2, 0.8, 0.0], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4]], dtype=torch.float64).repeat(2, 1)
WEIGHTS = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
SIGNS = torch.tensor([1, -1, 1, 1, -1, -1])
OTHER = torch.linspace(-3, 3, 18, dtype=torch.float64).cos().view(6, 3)
IMAGE = (2, 3, 3, 1)


def entropy(**options: Any) -> Function:
    return lambda h, a: F.cross_entropy(h, LABELS, label_smoothing=a, **options)


def filled(h: Tensor, a: Any) -> Tensor:
    result = h.clone()
    result[:, 1] = a
    return result.add_(torch.zeros_like(h).fill_(a))


def batch_norm(h: Tensor, training: bool, **options: Any) -> Tensor:
    """The result and the statistics afterwards."""
    mean, variance = torch.zeros_like(h[0]) + 0.1, torch.ones_like(h[0]) * 0.8
    result = F.batch_norm(h, mean, variance, WEIGHTS, WEIGHTS / 2, training=training, **options)
    return torch.cat([result, mean[None], variance[None]])


def instance_norm(h: Tensor, stats: bool, **options: Any) -> Tensor:
    mean, variance = torch.zeros_like(h[0]) + 0.1, torch.ones_like(h[0]) * 0.8
    x = h.view(2, 3, 3)
    result = F.instance_norm(x, mean, variance, WEIGHTS, WEIGHTS / 2, use_input_stats=stats, **options)
    return torch.cat([result.reshape(6, 3), mean[None], variance[None]])


def infinite(h: Tensor) -> Tensor:
    return torch.where(h > 0.5, torch.inf, torch.where(h < -0.5, -torch.inf, h))


def written(method: str, *values: Any, **options: Any) -> Function:
    """A method in place on a copy."""
    return lambda h, a: getattr(h.clone(), method)(*values, **{k: v * a for k, v in options.items()})


TENSORS: dict[str, Function] = {
    "arithmetic": lambda h, a: (a - h) * a / (h.abs() + a) + h % a + a**h + h.abs() ** a,
    "comparison": lambda h, a: h * (h > a) + torch.where(h > 0, h, a),
    "clamp": lambda h, a: h.clamp(-a, a) + torch.clamp(h, min=a) + h.clip(max=a),
    "in place": filled,
    "masked_fill": lambda h, a: h.masked_fill(h > 0, a),
    "lerp": lambda h, a: torch.lerp(h, h * 2, a),
    "normalize": lambda h, a: F.normalize(h, eps=a * 20),
    "temperature": lambda h, a: F.softmax(h / a, -1) + F.log_softmax(h / a, -1) + F.softmin(h * a, -1),
    "local_response_norm": lambda h, a: F.local_response_norm(h[None], 2, alpha=a, beta=a, k=1 + a),
    "lp_pool1d": lambda h, a: F.lp_pool1d(h.abs()[None], 1 + a, 2),
    "tensor": lambda h, a: h * torch.tensor([a, 1.0, 2.0]) + torch.tensor([[a], [1]])[0] + torch.tensor(a),
    "full": lambda h, a: h * torch.full((3,), a) + torch.full_like(h, a) * h.new_full((3,), a) ** 2,
    "linspace": lambda h, a: (
        h * torch.linspace(0, a, 3, dtype=h.dtype) + torch.linspace(a, 1, 6, dtype=h.dtype)[:, None]
    ),
    "scatter": lambda h, a: h.scatter(1, CLASSES[:, None], a) + h.clone().scatter_(1, CLASSES[:, None], a),
}

DROPOUT: dict[str, Function] = {
    "dropout": lambda h, a: F.dropout(h, a),
    "dropout by name": lambda h, a: F.dropout(input=h, p=a, training=True),
    "dropout in place": lambda h, a: F.dropout(h.clone(), a, True, True),
    "torch.dropout": lambda h, a: torch.dropout(h, a, True),
    "dropout1d": lambda h, a: F.dropout1d(h[:, :, None], a),
    "dropout1d, one sample": lambda h, a: F.dropout1d(h, a),
    "dropout2d": lambda h, a: F.dropout2d(h[:, :, None, None], a),
    "dropout3d": lambda h, a: F.dropout3d(h[:, :, None, None, None], a),
    "alpha_dropout": lambda h, a: F.alpha_dropout(h, a, training=True),
    "feature_alpha_dropout": lambda h, a: F.feature_alpha_dropout(h.view(2, 3, 3), a, training=True),
    "Dropout": lambda h, a: nn.Dropout(0.25)(h) * a,
    "attention": lambda h, a: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=a),
    "attention, scale": lambda h, a: F.scaled_dot_product_attention(h[None], h[None], h[None], scale=a),
    "causal attention": lambda h, a: F.scaled_dot_product_attention(h[None], h[None], h[None], None, a, True),
}

ACTIVATIONS: dict[str, Function] = {
    "leaky_relu": lambda h, a: F.leaky_relu(h, a) + F.leaky_relu(h, negative_slope=a * 2),
    "leaky_relu in place": lambda h, a: F.leaky_relu(h.clone(), a, True) + F.leaky_relu_(h.clone(), a),
    "rrelu": lambda h, a: F.rrelu(h, a, 2 * a) + nn.RReLU(a, 0.5)(h),
    "rrelu in place": lambda h, a: F.rrelu(h.clone(), a, 0.5, True, True),
    "elu": lambda h, a: F.elu(h, a) + F.elu(h.clone(), alpha=a, inplace=True) + F.elu_(h.clone(), a),
    "celu": lambda h, a: F.celu(h, a) + F.celu(h.clone(), alpha=a, inplace=True) + F.celu_(h.clone(), a),
    "softplus": lambda h, a: F.softplus(h, a) + F.softplus(h, 3, a) + F.softplus(1000 * h, beta=a),
    "hardshrink": lambda h, a: F.hardshrink(h, a) + h.hardshrink(a),
    "softshrink": lambda h, a: F.softshrink(h, a),
    "threshold": lambda h, a: F.threshold(h, a, -a) + F.threshold(h.clone(), a, 20.0, True) + F.threshold(h, 0.3, a),
    "hardtanh": lambda h, a: F.hardtanh(h, -a, a) + F.hardtanh(h.clone(), -1.0, a, True) + F.hardtanh(h, max_val=a),
    "modules": lambda h, a: nn.Sequential(nn.LeakyReLU(a), nn.ELU(a), nn.Softplus(a), nn.Threshold(a, 0.0))(h),
}

NORMALISATIONS: dict[str, Function] = {
    "layer_norm": lambda h, a: F.layer_norm(h, (3,), WEIGHTS, WEIGHTS / 2, a) + F.layer_norm(h, (6, 3), eps=a),
    "rms_norm": lambda h, a: F.rms_norm(h, (3,), WEIGHTS, a) + F.rms_norm(h, (6, 3), eps=a),
    "group_norm": lambda h, a: (
        F.group_norm(h.view(2, 3, 3), 3, WEIGHTS, WEIGHTS, a).view(6, 3) + F.group_norm(h, 1, eps=a)
    ),
    "batch_norm": lambda h, a: batch_norm(h, True, eps=a),
    "batch_norm, momentum": lambda h, a: batch_norm(h, True, momentum=a),
    "batch_norm, both": lambda h, a: batch_norm(h, True, momentum=a, eps=a),
    "batch_norm, evaluation": lambda h, a: batch_norm(h, False, momentum=a) + batch_norm(h, False, eps=a),
    "batch_norm, images": lambda h, a: F.batch_norm(h.view(IMAGE), None, None, training=True, eps=a),
    "instance_norm": lambda h, a: instance_norm(h, True, eps=a),
    "instance_norm, momentum": lambda h, a: instance_norm(h, True, momentum=a),
    "instance_norm, evaluation": lambda h, a: instance_norm(h, False, eps=a) + instance_norm(h, False, momentum=a),
}

LOSSES: dict[str, Function] = {
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
    "huber_loss": lambda h, a: F.huber_loss(h, OTHER, delta=a) + F.huber_loss(h, h * 0.2, "none", a),
    "huber_loss, weights": lambda h, a: F.huber_loss(h, OTHER, delta=a, weight=OTHER.square()),  # type: ignore[call-arg]
    "smooth_l1_loss": lambda h, a: (
        F.smooth_l1_loss(h, OTHER, beta=a) + F.smooth_l1_loss(h, h / 5, reduction="sum", beta=a)
    ),
    "smooth_l1_loss, all": lambda h, a: F.smooth_l1_loss(h, OTHER, reduction="none", beta=a),
    "margin_ranking_loss": lambda h, a: F.margin_ranking_loss(h[:, 0], h[:, 1], SIGNS, a),
    "hinge_embedding_loss": lambda h, a: F.hinge_embedding_loss(h, SIGNS[:, None].expand(6, 3), a),
    "cosine_embedding_loss": lambda h, a: F.cosine_embedding_loss(h, OTHER, SIGNS, a, reduction="none"),
    "cosine_similarity": lambda h, a: F.cosine_similarity(h, OTHER, eps=9 * a) + nn.CosineSimilarity(1, a)(h, OTHER),
    "pairwise_distance": lambda h, a: F.pairwise_distance(h, OTHER, eps=a) + F.pairwise_distance(h, OTHER, 2 + a),
    "norm": lambda h, a: (
        h.norm(1 + a) + torch.norm(h, p=1 + a, dim=1) + torch.linalg.vector_norm(h, 2 + a, dim=0).sum()
    ),
    "triplet_margin_loss": lambda h, a: F.triplet_margin_loss(h, OTHER, OTHER.flip(0), a, swap=True, reduction="none"),
    "triplet_margin_with_distance_loss": lambda h, a: F.triplet_margin_with_distance_loss(
        h, OTHER, OTHER.flip(0), margin=a, reduction="none"
    ),
    "multi_margin_loss": lambda h, a: F.multi_margin_loss(h, CLASSES, 2, a, WEIGHTS, reduction="none"),
    "multi_margin_loss, one sample": lambda h, a: F.multi_margin_loss(h[0], CLASSES[0], margin=a),
    "poisson_nll_loss": lambda h, a: F.poisson_nll_loss(h.abs(), 3 * OTHER.square(), False, True, eps=a),
    "gaussian_nll_loss": lambda h, a: F.gaussian_nll_loss(h, OTHER, h.square(), eps=a, full=True),
    "gaussian_nll_loss, a variance": lambda h, a: F.gaussian_nll_loss(h, OTHER, a, reduction="sum"),
    "gaussian_nll_loss, one for each sample": lambda h, a: (
        F.gaussian_nll_loss(h, OTHER, h[:, 0].square(), reduction="none") * a
    ),
}

ARITHMETIC: dict[str, Function] = {
    "add": lambda h, a: torch.add(h, OTHER, alpha=a) + h.add(OTHER, alpha=a) + written("add_", OTHER, alpha=1)(h, a),
    "sub": lambda h, a: torch.sub(h, OTHER, alpha=a) + h.sub(OTHER, alpha=a) + written("sub_", OTHER, alpha=1)(h, a),
    "addcmul": lambda h, a: torch.addcmul(h, h, OTHER, value=a) + written("addcmul_", OTHER, OTHER, value=1)(h, a),
    "addcdiv": lambda h, a: torch.addcdiv(OTHER, OTHER, h, value=a) + written("addcdiv_", h, OTHER, value=2)(h, a),
    "addmm": lambda h, a: torch.addmm(h, h, OTHER[:3], alpha=a) + h.addmm(h, OTHER[:3], beta=a, alpha=2.0),
    "addmv": lambda h, a: torch.addmv(h[:, 0], OTHER, h[0], beta=a, alpha=a),
    "addr": lambda h, a: torch.addr(h, h[:, 0], h[0], beta=a, alpha=a),
    "baddbmm": lambda h, a: torch.baddbmm(h[None], h[None], OTHER[None, :3], beta=a, alpha=a),
    "addbmm": lambda h, a: torch.addbmm(h, h[None].expand(2, 6, 3), OTHER.view(2, 3, 3), beta=a, alpha=a),
    "nan_to_num": lambda h, a: torch.nan_to_num(h.log(), nan=a) + infinite(h).nan_to_num(posinf=a, neginf=-a),
    "logit": lambda h, a: torch.logit(h.abs(), a),
    "pad": lambda h, a: F.pad(h, (0, 1), value=a) + nn.ConstantPad1d((1, 0), a)(h),
}

RIDES = TENSORS | DROPOUT | ACTIVATIONS | NORMALISATIONS | LOSSES | ARITHMETIC


@pytest.mark.parametrize("name", RIDES)
def test_a_float_rides(name: str) -> None:
    (values, gradients), (expected, slopes) = in_lanes(RIDES[name]), one_by_one(RIDES[name])
    assert values.dtype == expected.dtype
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-13)
    # torch 2.13.0 rounds 1 / alpha to float32 in the gradient of CELU
    tolerance = 1e-7 if name == "celu" else 1e-12
    torch.testing.assert_close(gradients, slopes, rtol=tolerance, atol=tolerance)
    assert not torch.allclose(values[0].nan_to_num(), values[2].nan_to_num())


@pytest.mark.parametrize("function", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout])
def test_a_rate_of_zero_changes_nothing_and_of_one_drops_everything(function: Any) -> None:
    def lane(key: Tensor, p: Tensor) -> Tensor:
        with Rules(key, STEP, {}):
            return function(hidden(), p, True)

    none, everything = vmap(lane)(KEYS[:2], torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert torch.equal(none, hidden())
    assert torch.equal(everything, torch.zeros(6, 3, dtype=torch.float64))
