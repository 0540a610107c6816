"""Convolutions whose channels come last: kernels of the library that a plain eager loop on the CPU seldom uses.

Some of them write beyond their memory (see `lowerings`). Oracle: the same convolution with channels in front, and the
C library's own look at the heap whenever memory is given back; and for a network of them, with BatchNorm between them,
a plain loop in float32, and its own bits in other lanes.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.engine import shares
from coalesce.engine.lanes import Lanes
from coalesce.engine.measure import choose_lowerings
from engine_helpers import experiment, template_of, train_alone

CHILD = Path(__file__).with_name("channels_last_child.py")


@pytest.mark.parametrize("instructions", ["", "AVX2"])
@pytest.mark.parametrize(("seed", "count"), [(0, 60), *(pytest.param(n, 600, marks=pytest.mark.slow) for n in (1, 2))])
def test_no_kernel_writes_beyond_its_memory(instructions: str, seed: int, count: int) -> None:
    if instructions and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{instructions} are instructions of another processor")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if instructions:
        environment |= {"ONEDNN_MAX_CPU_ISA": instructions}
    if platform.system() == "Linux":
        environment |= {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
    command = [sys.executable, str(CHILD), str(seed), str(count)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    # of the C library's look at the heap
    assert "cannot be preloaded" not in child.stderr, child.stderr
    told = child.stdout.splitlines()
    assert (child.returncode, told[-1]) == (0, "all"), f"{told[-1]}\n{child.stderr[-2000:]}"


class Residual(coalesce.Task):
    """A stem, and one block with a strided shortcut, with BatchNorm, on noise."""

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(24, 3, 9, 7, generator=generator), torch.randint(4, (24,), generator=generator)
        return coalesce.Data(train=(x, y), val=(x, y), classes=4)

    def model(self) -> nn.Module:
        return Block()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv, self.norm1 = nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.short, self.norm2 = nn.Conv2d(16, 32, 1, 2, bias=False), nn.BatchNorm2d(32)
        self.linear = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.norm1(self.conv(x)) + self.norm2(self.short(x)))
        scores: Tensor = self.linear(x.mean((2, 3)))
        return scores


def test_compiled_lanes_are_plain_loops_and_know_nothing_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws 1 and 2, where lanes are shared out among two threads and one of them is nobody's."""
    monkeypatch.setattr(shares, "WORTH", 0)
    torch.set_num_threads(2)
    experiments = [
        experiment(Residual, optimizer={"name": "sgd", "lr": 0.02 * (i + 1)}, seed=i, steps=6, batch_size=8)
        for i in range(5)
    ]
    template = template_of(experiments)
    lowerings = choose_lowerings(template.rehearsal.convolutions, 5)
    assert [*lowerings.values()] == ["channels_last"] * 3
    lanes = Lanes(template, 5, lowerings=lowerings)
    assert len(lanes.shares) == 2
    found = []
    # forward, backward, and beside lanes that stand still
    for places in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2]):
        for lane in range(5):
            lanes.clear(lane)
        for one, lane in zip(experiments, places, strict=False):
            lanes.fill(lane, one)
        lanes.advance(6)
        measured = lanes.evaluate("val")["loss"]
        found.append([(lanes.state_dict(lane), measured[lane]) for lane in places])
    for others in found[1:]:
        for (mine, loss), (theirs, other) in zip(found[0], others, strict=False):
            assert loss == other
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())

    data = Residual().data()
    for one, (weights, loss) in zip(experiments, found[0], strict=True):
        alone = train_alone(one)
        alone.model.eval()
        with torch.no_grad():
            right = alone.task.metrics(alone.model, data.unflatten(data.leaves("val")))["loss"]
        assert loss == pytest.approx(float(right), rel=1e-5)
        for name, tensor in alone.model.state_dict().items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)
