"""bfloat16 autocast inside lanes.

Oracle: stock `torch.autocast("cpu", dtype=torch.bfloat16)` around the same function, and around a plain loop: the dtype
of every result is the same, and the values are, to bfloat16's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

import coalesce
from coalesce.configuration import make_experiments
from coalesce.engine.plain import Plain
from coalesce.engine.rules import Rules
from coalesce.errors import ConfigError
from coalesce.experiment import Experiment
from engine_helpers import experiment, lanes_of, template_of, train_alone, worst
from rules_helpers import KEYS, STEP

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    # stock rms_norm says that it is slow
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
]

Case = Callable[[Tensor, Tensor], Tensor]


def number(*shape: int) -> Tensor:
    return torch.linspace(-3, 3, torch.Size(shape).numel()).sin().view(shape)


W, B, LABELS = number(5, 6), number(5), torch.tensor([0, 1, 2, 3])
with torch.random.fork_rng():
    torch.manual_seed(0)
    LINEAR, ATTENTION = nn.Linear(6, 3).requires_grad_(False), nn.MultiheadAttention(6, 2).requires_grad_(False)
    GRU, LSTM, RNN, *CELLS = (
        kind(6, 3).requires_grad_(False) for kind in (nn.GRU, nn.LSTM, nn.RNN, nn.GRUCell, nn.LSTMCell, nn.RNNCell)
    )
    GRU_CELL, LSTM_CELL, RNN_CELL = CELLS
ONES, KERNEL = torch.ones(6), number(6, 2, 3)

#: Of x, float32, and h, bfloat16, both (4, 6).
CASES: dict[str, Case] = {
    "linear": lambda x, h: F.linear(x, W, B),
    "linear without bias": lambda x, h: F.linear(h, W),
    "Linear": lambda x, h: LINEAR(h),
    "matmul": lambda x, h: x @ W.T,
    "mm, bmm": lambda x, h: torch.mm(x, W.T) + torch.bmm(x[None], W.T[None])[0],
    "addmm": lambda x, h: torch.addmm(B, x, W.T) + torch.baddbmm(B, x[None], W.T[None])[0],
    "einsum": lambda x, h: torch.einsum("ij,kj->ik", x, W),
    "tensordot": lambda x, h: torch.tensordot(x, W, ([1], [1])) + torch.inner(x, W),
    "mv": lambda x, h: torch.mv(W, x[0]),
    "outer": lambda x, h: torch.outer(x[0], W[0]),
    "convolution": lambda x, h: F.conv1d(x.view(4, 2, 3), KERNEL, number(6)),
    "transposed convolution": lambda x, h: F.conv_transpose1d(x.view(4, 2, 3), number(2, 4, 3), number(4)),
    "attention": lambda x, h: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "MultiheadAttention": lambda x, h: ATTENTION(x[:, None], x[:, None], x[:, None])[0],
    "GRU": lambda x, h: GRU(x[:, None])[0],
    "GRU of bfloat16": lambda x, h: GRU(h[:, None])[0],
    "LSTM": lambda x, h: LSTM(x[:, None])[0],
    "RNN": lambda x, h: RNN(x[:, None])[0],
    "GRUCell": lambda x, h: GRU_CELL(x),
    "LSTMCell": lambda x, h: LSTM_CELL(h)[0],
    "RNNCell": lambda x, h: RNN_CELL(x),
    "prelu": lambda x, h: F.prelu(h, torch.ones(1) / 3),
    "layer_norm": lambda x, h: F.layer_norm(h, (6,), ONES / 2, ONES),
    "layer_norm of float32": lambda x, h: F.layer_norm(x, (6,), ONES / 2, ONES),
    "rms_norm": lambda x, h: F.rms_norm(h, (6,), ONES / 2),
    "group_norm": lambda x, h: F.group_norm(h, 2, ONES / 2, ONES),
    "batch_norm": lambda x, h: F.batch_norm(h, None, None, ONES / 2, ONES, True),
    "batch_norm, statistics": lambda x, h: statistics(h),
    "batch_norm, evaluation": lambda x, h: F.batch_norm(h, number(6), ONES * 2, ONES / 2, ONES),
    "batch_norm, plain": lambda x, h: F.batch_norm(h, None, None, None, None, True),
    "instance_norm": lambda x, h: F.instance_norm(h.view(4, 2, 3), None, None, ONES[:2], ONES[:2]),
    "local_response_norm": lambda x, h: F.local_response_norm(h.view(4, 2, 3), 2),
    "softmax": lambda x, h: h.softmax(-1) + F.log_softmax(h, -1),
    "activations": lambda x, h: F.gelu(h) + F.silu(h) + F.elu(h) + F.softplus(h) + h.exp() + h**2 + h.tanh(),
    "dropout": lambda x, h: F.dropout(h, 0.0),
    "cross_entropy": lambda x, h: F.cross_entropy(h, LABELS, label_smoothing=0.1),
    "cross_entropy without": lambda x, h: F.cross_entropy(h, LABELS),
    "nll_loss": lambda x, h: F.nll_loss(h.log_softmax(-1), LABELS),
    "mse_loss": lambda x, h: F.mse_loss(h, x) + F.l1_loss(h, x),
    "mse_loss of two": lambda x, h: F.mse_loss(h, h.sin()),
    "huber_loss": lambda x, h: F.huber_loss(h, h.sin(), delta=0.1) + F.smooth_l1_loss(h, h.sin()),
    "binary_cross_entropy": lambda x, h: F.binary_cross_entropy(h.sigmoid(), h.cos().abs()),
    "with logits": lambda x, h: F.binary_cross_entropy_with_logits(h, h.cos().abs()),
    "kl_div": lambda x, h: F.kl_div(h.log_softmax(-1), h.softmax(-1), reduction="batchmean"),
    "margins": lambda x, h: F.margin_ranking_loss(h[:, 0], h[:, 1], torch.ones(4)),
    "triplet_margin_loss": lambda x, h: F.triplet_margin_loss(h, h.sin(), h.cos()),
    "multi_margin_loss": lambda x, h: F.multi_margin_loss(h, LABELS),
    "soft_margin_loss": lambda x, h: F.soft_margin_loss(h, h.sign()),
    "gaussian_nll_loss": lambda x, h: F.gaussian_nll_loss(h, x, h.abs() + 0.1),
    "poisson_nll_loss": lambda x, h: F.poisson_nll_loss(h, h.abs()),
    "cosine_embedding_loss": lambda x, h: F.cosine_embedding_loss(h, h.cos(), torch.ones(4)),
    "cosine_similarity": lambda x, h: F.cosine_similarity(h, h.cos()),
    "cdist": lambda x, h: torch.cdist(h, h.sin()),
    "cat": lambda x, h: torch.cat([h, x]) * torch.stack([h, x]).sum(),
    "prod": lambda x, h: h.prod(-1),
    "sums": lambda x, h: h.cumsum(0) + h.sum() + h.mean() + h.norm() + h.std() + h.logsumexp(0),
    "pooling": lambda x, h: F.avg_pool1d(h.view(4, 2, 3), 2) + F.max_pool1d(h.view(4, 2, 3), 2),
    "pooling, 3d": lambda x, h: F.avg_pool3d(h.view(1, 2, 2, 2, 3), (1, 2, 3)),
    "arithmetic": lambda x, h: h * 2 + h.clamp(-1, 1) + torch.where(h > 0, h, 0.5),
    "mixed arithmetic": lambda x, h: h * x,
    "embedding": lambda x, h: F.embedding(LABELS, W),
    "glu": lambda x, h: F.glu(h),
    "float64": lambda x, h: F.linear(x.double(), W.double()),
    "trace": lambda x, h: (h @ h.T).trace(),
    "off within": lambda x, h: off(x),
}


def statistics(h: Tensor) -> Tensor:
    mean, variance = number(6).clone(), torch.ones(6)
    F.batch_norm(h, mean, variance, training=True)
    return torch.stack([mean, variance])


def off(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(x, W, B)


@pytest.mark.parametrize("name", CASES)
def test_dtypes_and_values_are_stock(name: str) -> None:
    x = number(3, 4, 6)

    def lane(key: Tensor, x: Tensor) -> Tensor:
        with Rules(key, STEP, {}), torch.autocast("cpu", dtype=torch.bfloat16):
            return CASES[name](x, x.bfloat16())

    found = vmap(lane)(KEYS, x)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stock = [CASES[name](one, one.bfloat16()) for one in x]
    except RuntimeError as error:
        # oneDNN, which torch takes for LSTMs alone, has none in bfloat16 for processors without AVX-512
        if "could not create a primitive descriptor" not in str(error):
            raise
        pytest.skip("torch has no bfloat16 LSTM for this processor, so there is nothing to compare with")
    expected = torch.stack(stock)
    assert found.dtype == expected.dtype
    # sums of up to 24 terms, each rounded to 8 bits somewhere on the way
    tolerance = 0.03 if "float64" not in name and name != "off within" else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class Mixed(coalesce.Task):
    """Normalisations, dropout and attention between products, on float32 weights."""

    def __init__(self, dropout: float = 0.1, smoothing: float = 0.0):
        self.dropout, self.smoothing = dropout, smoothing

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(3)
        x, y = torch.randn(61, 10, generator=generator), torch.randint(3, (61,), generator=generator)
        return coalesce.Data(train=(x[:45], y[:45]), val=(x[45:], y[45:]))

    def model(self) -> nn.Module:
        first = [nn.Linear(10, 16, bias=False), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(self.dropout)]
        return nn.Sequential(*first, nn.Linear(16, 16), nn.LayerNorm(16), nn.PReLU(), nn.Linear(16, 3))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        scores = model(x)
        assert scores.dtype == torch.bfloat16
        return F.cross_entropy(scores, y, label_smoothing=self.smoothing)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": F.cross_entropy(model(x), y)}


def check(compile: bool) -> None:
    """Two ways of rounding one computation to bfloat16 both stand off from the exact one, which float32 shows. Lanes
    may be about as far from the plain autocast loops as those are from float32: on the average of the lanes, since a
    single loop may be near by luck."""

    def make(i: int, precision: str) -> Experiment:
        task = {"dropout": 0.1 * i, "smoothing": 0.05 * i}
        return experiment(Mixed, task, {"name": "sgd", "lr": 0.1 * i}, steps=20, seed=i, precision=precision)

    lanes = lanes_of([make(i, "bfloat16") for i in (1, 2, 3)], compile=compile)
    lanes.advance(20)
    evaluation = lanes.evaluate("val")["loss"]
    apart, offs = [], []
    for lane, i in enumerate((1, 2, 3)):
        mixed = train_alone(make(i, "bfloat16"))
        exact = train_alone_in_float32(make(i, "float32"))
        off = max((a - b).abs().max().item() for a, b in zip(mixed.model.parameters(), exact.parameters(), strict=True))
        assert 1e-4 < off < 0.1
        offs.append(off)
        apart.append(worst(lanes, lane, mixed.model))
        assert all(t.dtype in (torch.float32, torch.int64) for t in lanes.state_dict(lane).values())
        mixed.model.eval()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            found = mixed.task.metrics(mixed.model, mixed.task.data().splits["val"])["loss"].item()
        assert evaluation[lane] == pytest.approx(found, rel=0.05)
    assert sum(apart) < 2 * sum(offs)


def train_alone_in_float32(one: Experiment) -> nn.Module:
    with patch.object(
        Mixed,
        "loss",
        lambda self, model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=self.smoothing),
    ):
        return train_alone(one).model


def test_lanes_train_as_a_plain_autocast_loop_does() -> None:
    check(compile=False)


@pytest.mark.thorough
def test_compiled_lanes_do_too() -> None:
    check(compile=True)


def test_the_plain_engine_trains_so_as_well() -> None:
    one = experiment(Mixed, {"dropout": 0.0}, {"name": "sgd", "lr": 0.1}, steps=5, seed=1, precision="bfloat16")
    plain = Plain(template_of([one]))
    plain.fill(0, one)
    plain.advance(5)
    expected = train_alone(one).model.state_dict()
    for name, value in plain.state_dict(0).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


def test_a_precision_is_part_of_an_experiment() -> None:
    def resolved(**more: str) -> Experiment:
        base = {"task": Mixed, "optimizer": "sgd", "schedule": "constant", "steps": 5, "batch_size": 4, "seed": 0}
        return make_experiments(base | more, None, ())[0][0]

    plain, named, mixed = resolved(), resolved(precision="float32"), resolved(precision="bfloat16")
    assert plain.id == named.id
    assert mixed.id != plain.id
    assert mixed.precision == "bfloat16"
    # an id from before there was a precision
    config = {k: v for k, v in plain.config.items() if k != "precision"}
    assert Experiment(config, introduced=plain.introduced).id == plain.id
    with pytest.raises(ConfigError, match="unknown precision"):
        resolved(precision="bf16")
