"""Models that are no rows of the table of modules: attention, layouts, extras, dtypes; and where updates stand.

Oracle: the plain loop, in float64, with another seed, learning rate and float in every lane. Rates are large and the
optimiser is plain SGD, so that a gradient or a read that is off shows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.engine.step import _readers, build_step
from engine_helpers import experiment, lanes_of, train_alone, worst

STEPS = 3

# operations without a rule for lanes of their own are done lane by lane: slow, and right
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


class Small(coalesce.Task):
    dtype: torch.dtype = torch.float64

    def __init__(self, a: float = 0.2):
        self.a = a

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(33, 4, generator=generator, dtype=torch.float64).to(self.dtype)
        return coalesce.Data(train=(x, torch.randint(3, (33,), generator=generator)))

    def model(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: Any, batch: Any) -> dict[str, Tensor]:
        return {}


class Net(nn.Module):
    """Two layers, what stands between them, and whatever else is given by name."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], **parts: Any):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.between = between
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)))


def check(task: type[Small], steps: int = STEPS, tolerance: float = 1e-12, leave_out: tuple[str, ...] = ()) -> Any:
    experiments = [
        experiment(task, {"a": 0.1 * i}, {"name": "sgd", "lr": 0.3 * i, "weight_decay": 0.1 * i}, steps=steps, seed=i)
        for i in (2, 1, 3)
    ]
    lanes = lanes_of(experiments)
    lanes.advance(steps)
    reading = lanes.read()
    for lane, one in enumerate(experiments):
        plain = train_alone(one)
        assert worst(lanes, lane, plain.model, leave_out) <= tolerance
        assert reading.metrics["loss"][lane] == pytest.approx(plain.losses[-1], abs=max(tolerance, 1e-12))
        assert reading.steps[lane] == steps
    return lanes


class Convolutions(Small):
    def model(self) -> nn.Module:
        head = [nn.Flatten(), nn.GroupNorm(2, 24), nn.Linear(24, 3)]
        body = [nn.Conv1d(1, 6, 3, padding=1, bias=False), nn.BatchNorm1d(6), nn.ReLU(inplace=True)]
        return nn.Sequential(nn.Unflatten(1, (1, 4)), *body, nn.MaxPool1d(3, 1, 1), *head).double()


class Attention(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.embed, self.head = nn.Linear(1, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[..., None])
        h = h + self.attention(h, torch.tanh(h), h, need_weights=True)[0]
        return self.head(h.mean(1))


class AttentionWithWeights(Small):
    """A rate that rides; torch compares it with 0 on the way."""

    def model(self) -> nn.Module:
        return Attention(self.a).double()


class Encoder(Small):
    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, 7, dropout=self.a, batch_first=True)
        return nn.Sequential(nn.Unflatten(1, (1, 4)), layer, nn.Flatten(), nn.Linear(4, 3)).double()


class ReadsBelow(Small):
    """A parameter is read, detached, in a lower layer than the one where its gradient is born."""

    def model(self) -> nn.Module:
        def between(net: Any, h: Tensor) -> Tensor:
            low = torch.tanh(h @ net.middle.weight.detach().T)
            return torch.tanh(net.middle(low.detach()) + low)

        return Net(between, middle=nn.Linear(5, 5))


class Tied(Small):
    def model(self) -> nn.Module:
        def between(net: Any, h: Tensor) -> Tensor:
            return torch.tanh(net.two(torch.tanh(net.one(h)) @ net.one.weight))

        one, two = nn.Linear(5, 5), nn.Linear(5, 5)
        two.weight = one.weight
        return Net(between, one=one, two=two)


class Scalars(Small):
    """0-d parameters: one used, one that the loss multiplies by zero, one unused, one frozen."""

    def model(self) -> nn.Module:
        def between(net: Any, h: Tensor) -> Tensor:
            return torch.tanh(h * net.used + net.frozen) + 0.0 * net.zero

        ones = {name: nn.Parameter(torch.ones(())) for name in ("used", "zero", "unused", "frozen")}
        ones["frozen"].requires_grad_(False)
        return Net(between, **ones, empty=nn.Parameter(torch.ones(0, 3), requires_grad=False))


def test_what_is_not_used_does_not_decay() -> None:
    lanes = check(Scalars)
    for lane in range(3):
        state = lanes.state_dict(lane)
        assert state["unused"].item() == 1.0
        assert state["frozen"].item() == 1.0
        assert state["zero"].item() < 1.0
    assert set(lanes.template.fixed) == {"unused", "frozen", "empty"}


class Layouts(Small):
    """A transposed parameter, two that share a storage, one in float32, one in channels-last order."""

    def model(self) -> nn.Module:
        def between(net: Any, h: Tensor) -> Tensor:
            h = net.convolution(h.view(-1, 1, 1, 5)).flatten(1)[:, :5]
            h = torch.tanh(h @ net.transposed + net.head)
            return torch.tanh((h * net.tail).float() @ net.single).double()

        whole = torch.randn(10, dtype=torch.float64)
        net = Net(
            between,
            convolution=nn.Conv2d(1, 3, (1, 3)).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            transposed=nn.Parameter(torch.randn(5, 5, dtype=torch.float64).T),
            head=nn.Parameter(whole[:5]),
            tail=nn.Parameter(whole[5:]),
        )
        net.single = nn.Parameter(torch.randn(5, 5))
        return net


def test_layouts() -> None:
    # one parameter is float32
    check(Layouts, tolerance=1e-6)


class WeightNorm(Small):
    def model(self) -> nn.Module:
        net = Net(lambda net, h: torch.tanh(h))
        nn.utils.parametrizations.weight_norm(net.first)
        nn.utils.parametrizations.orthogonal(net.last)
        return net


class Extras(Small):
    """A dict as batch, and scalars beside the loss."""

    def data(self) -> coalesce.Data:
        x, y = super().data().splits["train"]
        return coalesce.Data(train={"y": y, "x": {"left": x[:, :2], "right": x[:, 2:]}})

    def model(self) -> nn.Module:
        return Net(lambda net, h: torch.tanh(h))

    def loss(self, model: Any, batch: Any) -> Any:
        scores = model(torch.cat([batch["x"]["left"], batch["x"]["right"]], 1))
        loss = F.cross_entropy(scores, batch["y"])
        hits = scores.argmax(-1) == batch["y"]
        return loss + self.a, {"plain": loss, "a": torch.as_tensor(self.a), "hits": hits.sum(), "any": hits.any()}


def test_extras() -> None:
    metrics = check(Extras).read().metrics
    assert set(metrics) == {"loss", "plain", "a", "hits", "any"}
    assert metrics["a"] == pytest.approx([0.2, 0.1, 0.3])
    assert metrics["plain"] == pytest.approx([v - a for v, a in zip(metrics["loss"], metrics["a"], strict=True)])
    assert all(value == int(value) for value in metrics["hits"])


class Straight(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 10 * gradient


class Functions(Small):
    """A custom gradient, a gradient of a gradient, a gradient within, and a pass without."""

    def model(self) -> nn.Module:
        return Net(lambda net, h: torch.tanh(h) + 0.1 * Straight.apply(h))

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        with torch.no_grad():
            target = model(x).softmax(-1)
        model.eval()
        twin = model(x + self.a).softmax(-1)
        model.train()
        return loss + self.a * sum(g.square().sum() for g in gradients) + F.mse_loss(twin, target)


@pytest.mark.parametrize(
    "task",
    [
        ReadsBelow,
        AttentionWithWeights,
        Functions,
        # `test_modules.py` has rows of their kind
        *(pytest.param(task, marks=pytest.mark.thorough) for task in (Convolutions, Encoder, WeightNorm)),
    ],
)
def test_equals_the_plain_loop(task: type[Small]) -> None:
    check(task)


class Half(Small):
    dtype = torch.bfloat16

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(self.a), nn.Linear(5, 3)).bfloat16()


def test_bfloat16_parameters() -> None:
    # Both round each operation to 8 bits, in another order: a few units of the last place of weights up to 1.
    lanes = check(Half, tolerance=4 * torch.finfo(torch.bfloat16).eps)
    assert lanes.state_dict(0)["0.weight"].dtype == torch.bfloat16
    # 0.1 is 0.10009765625 in bfloat16, and a rate is not to be rounded to that
    assert lanes.template.dtype == torch.float32


def test_updates_stand_where_their_gradients_are_born() -> None:
    """In the graph, the last layer is updated before the gradient of the first one is computed (law 4)."""
    one = experiment(Tied, {"a": 0.1})
    lanes = lanes_of([one])
    samples = torch.zeros(lanes.width, one.batch_size, dtype=torch.int64)
    module, _ = build_step(lanes.template, lanes.state, [samples, *lanes.data.leaves("train")])
    nodes = list(module.graph.nodes)
    holders = dict(zip(lanes.state, nodes, strict=False))
    writes = [(i, n.args[0]) for i, n in enumerate(nodes) if n.target is torch.ops.aten.copy_.default]
    place = {name: i for i, target in writes for name, holder in holders.items() if holder is target}
    products = [i for i, n in enumerate(nodes) if n.target is torch.ops.aten.bmm.default]
    order = [place[f"trained/{name}.weight"] for name in ("last", "one", "first")]
    assert order == sorted(order)
    for early, late in pairwise(order):
        assert any(early < product < late for product in products)
    # and nothing reads a parameter, or a view of it, after it was written
    for name, holder in holders.items():
        for reader in _readers(holder) if name in place else []:
            assert nodes.index(reader) <= place[name], name
