"""The task `ResNet`: its images, its network, its errors.

Oracles: recorded hashes, scikit-learn's own digits, the network written out in functions of its weights, a linear
classifier, and the plain loop in float64.
"""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.tasks import Digits, ResNet
from engine_helpers import experiment, lanes_of, train_alone, worst


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data() -> coalesce.Data:
    return ResNet().data()


class Tiny(ResNet):
    """In float64, on a few images."""

    def data(self) -> coalesce.Data:
        x, y = super().data().leaves("val")
        return coalesce.Data(train=(x[:24].double(), y[:24]), val=(x[24:41].double(), y[24:41]), classes=10)

    def model(self) -> nn.Module:
        return super().model().double()


def test_the_images_are_the_recorded_ones(data: coalesce.Data) -> None:
    assert data.sizes == {"train": 5188, "val": 1000, "test": 1000}
    # rounded, since an interpolation may change in the last bits
    hashes = {}
    for split in data.sizes:
        x, y = data.leaves(split)
        assert x.shape[1:] == (3, 16, 16)
        assert (x.min().item(), x.max().item()) == (-1, 1)
        rounded = (x * 50).round().char()
        hashes[split] = hashlib.sha256(rounded.numpy().tobytes() + y.numpy().tobytes()).hexdigest()[:16]
    assert hashes == {
        "train": "c3cc97e32119e92a",
        "val": "9b6c057dc996d048",
        "test": "c3a0c228c4b9f57b",
    }


def test_all_images_of_one_digit_are_in_one_split(data: coalesce.Data) -> None:
    """Four at a time show the same digit: where the ink is follows from the pixels that `Digits` has."""
    digits = Digits().data()
    for split in data.sizes:
        (x, y), (pixels, labels) = data.leaves(split), digits.leaves(split)
        assert torch.equal(y.view(-1, 4), labels[:, None].expand(-1, 4))
        ink = F.interpolate(pixels.view(-1, 1, 8, 8), size=(14, 14), mode="bilinear")[:100, 0]
        # at the right one of nine places an image is two colours mixed, up to its noise: the ink explains it
        fits = torch.stack([_explained(x[:400, :, i : i + 14, j : j + 14], ink) for i in range(3) for j in range(3)])
        assert fits.amax(0).mean() > 0.65
        wrong = ink.roll(1, 0)
        others = torch.stack(
            [_explained(x[:400, :, i : i + 14, j : j + 14], wrong) for i in range(3) for j in range(3)]
        )
        assert (fits.amax(0) > others.amax(0)).double().mean() > 0.97


def _explained(images: Tensor, ink: Tensor) -> Tensor:
    """Share of each image's variance that a line through its ink explains, the mean of the channels."""
    a, b = images.flatten(2), ink.repeat_interleave(4, 0).flatten(1)[:, None]
    a, b = (z - z.mean(-1, keepdim=True) for z in (a, b))
    r: Tensor = ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).square().mean(1)
    return r


def test_colours_and_brightness_tell_nothing(data: coalesce.Data) -> None:
    """A linear classifier of the pixels is hardly better than a guess, although it knows half of what it was shown."""
    x, y = data.leaves("train")
    inputs, wanted = x.flatten(1), F.one_hot(y, 10).float()
    weights = torch.linalg.solve(inputs.T @ inputs + 100 * torch.eye(768), inputs.T @ wanted)
    unseen, labels = data.leaves("val")
    assert ((inputs @ weights).argmax(1) == y).float().mean() > 0.4
    assert ((unseen.flatten(1) @ weights).argmax(1) == labels).float().mean() < 0.2


def test_the_network_is_the_papers() -> None:
    """Written out: stages of W, 2 W and 4 W channels, halved at the second and the third, shortcuts of 1 x 1."""
    torch.manual_seed(0)
    model = Tiny(width=2, blocks=2).model().eval()
    for name, buffer in model.named_buffers():
        if name.endswith(("mean", "var")):
            buffer.uniform_(0.5, 1.5)
    weights = dict(model.state_dict())
    used = []

    def convolve(x: Tensor, name: str, stride: int = 1) -> Tensor:
        used.append(f"{name}.weight")
        kernel = weights[used[-1]]
        return F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)

    def normalise(x: Tensor, name: str) -> Tensor:
        used.extend(f"{name}.{end}" for end in ("running_mean", "running_var", "weight", "bias"))
        mean, var, scale, shift = (weights[key][:, None, None] for key in used[-4:])
        return (x - mean) / (var + 1e-5).sqrt() * scale + shift

    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    x = normalise(convolve(images, "stem.0"), "stem.1").relu()
    for i, (channels, stride) in enumerate([(2, 1), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1)]):
        h = normalise(convolve(x, f"stages.{i}.conv1", stride), f"stages.{i}.norm1").relu()
        h = normalise(convolve(h, f"stages.{i}.conv2"), f"stages.{i}.norm2")
        if stride == 2:
            x = normalise(convolve(x, f"stages.{i}.shortcut.0", 2), f"stages.{i}.shortcut.1")
        x = (h + x).relu()
        assert x.shape == (3, channels, *2 * (16 // (channels // 2),))
    expected = x.mean((2, 3)) @ weights["linear.weight"].T + weights["linear.bias"]
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-10)
    rest = {name for name in weights if not name.endswith("num_batches_tracked")}
    assert rest - set(used) == {"linear.weight", "linear.bias"}


def test_arguments_reach_the_loss_and_the_last_layer() -> None:
    task = Tiny(width=2, dropout=0.3, label_smoothing=0.2)
    model = task.model()
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.3]
    model.eval()
    batch = task.data().splits["val"]
    logits = model(batch[0]).log_softmax(-1)
    nll = -logits.gather(1, batch[1][:, None]).mean()
    # 80 % of the label, 20 % spread over all 10 classes
    torch.testing.assert_close(task.loss(model, batch), 0.8 * nll - 0.2 * logits.mean())
    metrics = task.metrics(model, batch)
    torch.testing.assert_close(metrics["loss"], nll)
    assert metrics["accuracy"] == pytest.approx((logits.argmax(1) == batch[1]).double().mean().item())
    # the features go through the dropout: with all of them dropped, the scores are the bias
    model.dropout = nn.Dropout(1.0)
    model.train()
    assert torch.equal(model(batch[0]), model.linear.bias.expand(17, 10))  # type: ignore[union-attr, operator]


def test_lanes_are_plain_loops() -> None:
    """Weights and running statistics, with everything riding that can."""
    sgd = {"name": "sgd", "momentum": 0.9, "nesterov": True}
    experiments = [
        experiment(
            Tiny,
            {"width": 2, "blocks": 1, "dropout": 0.2 * i, "label_smoothing": 0.1 * i},
            {**sgd, "lr": 0.05 * (i + 1), "weight_decay": 1e-2 * i},
            steps=2,
            batch_size=5,
            seed=i,
        )
        for i in (1, 2)
    ]
    lanes = lanes_of(experiments)
    lanes.advance(2)
    measured = lanes.evaluate("val")
    for lane, one in enumerate(experiments):
        alone = train_alone(one)
        # a bias has no part in front of BatchNorm here, so that all is rounding of float64
        assert worst(lanes, lane, alone.model) < 1e-12
        with torch.no_grad():
            expected = alone.task.metrics(alone.model.eval(), alone.task.data().splits["val"])
        found = {name: values[lane] for name, values in measured.items()}
        assert found == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-9)


def test_it_learns() -> None:
    torch.manual_seed(0)
    task = ResNet(width=8)
    data, model = task.data(), task.model()
    steps = 200
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model, data.batch("train", torch.randint(data.sizes["train"], (64,))))
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        metrics = task.metrics(model.eval(), data.splits["val"])
    # seen: 0.53; a guess has 0.1, a linear classifier 0.13
    assert metrics["accuracy"] > 0.35


def test_what_is_out_of_range_is_told_together() -> None:
    with pytest.raises(coalesce.ConfigError) as caught:
        ResNet(width=0, blocks=-1, dropout=1.5, label_smoothing=math.nan)
    said = str(caught.value)
    assert "4 problems" in said
    assert "task.width=0: must be at least 1" in said
    assert "task.blocks=-1: must be at least 1" in said
    assert "task.dropout=1.5: must lie in 0 to 1" in said
    assert "task.label_smoothing=nan: must lie in 0 to 1" in said
