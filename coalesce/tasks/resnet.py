"""A small residual network with BatchNorm (He et al. 2016, arXiv:1512.03385) on coloured digits of 16 x 16 pixels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.tasks.checks import check_shares, check_sizes
from coalesce.tasks.classification import Classification
from coalesce.tasks.digits import split_digits

#: Images that are made of one digit, and the deviation of the noise that lies on them.
COPIES, NOISE = 4, 0.1


class ResNet(Classification):
    """The digits of `Digits` as colour images (3, 16, 16): 5,188 to train on, 1,000 for validation, 1,000 for the test.

    Each handwritten digit is drawn four times, in a colour of its own on another one, at another place, with noise.
    Neither colour nor brightness tells which is the digit. All images of one digit are in one split.

    Args:
        width: channels of the first stage; the second and the third have 2 and 4 times as many.
        blocks: residual blocks in each stage.
        dropout: probability with which a feature is dropped before the last layer, 0 to 1.
        label_smoothing: share of the label that is spread over all classes while training, 0 to 1.

    Raises:
        ConfigError: an argument is out of range.

    >>> ResNet().data().sizes
    {'train': 5188, 'val': 1000, 'test': 1000}
    """

    def __init__(self, width: int = 16, blocks: int = 1, dropout: float = 0.0, label_smoothing: float = 0.0):
        problems = check_sizes(width=width, blocks=blocks)
        problems += check_shares(dropout=dropout, label_smoothing=label_smoothing)
        if problems:
            raise coalesce.ConfigError(problems)
        super().__init__(label_smoothing)
        self.width = width
        self.blocks = blocks
        self.dropout = dropout

    def data(self) -> coalesce.Data:
        generator = np.random.Generator(np.random.PCG64(0))
        return coalesce.Data(**{s: _draw(x, y, generator) for s, (x, y) in split_digits().items()}, classes=10)

    def model(self) -> nn.Module:
        return ResidualNetwork(self.width, self.blocks, self.dropout)


class ResidualNetwork(nn.Module):
    """Images (B, 3, 16, 16) to scores (B, C=10): a convolution, three stages, the mean over the pixels, a linear layer.

    Args:
        width: channels of the first stage.
        blocks: blocks in each stage.
        dropout: see `ResNet`.
    """

    def __init__(self, width: int, blocks: int, dropout: float):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages = []
        channels = width
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(BasicBlock(channels, width * 2**stage, stride))
                channels = width * 2**stage
        self.stages = nn.Sequential(*stages)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        scores: Tensor = self.linear(self.dropout(x.mean((2, 3))))
        return scores


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution of 1 x 1 where the shape changes.

    Args:
        before, after: channels of what comes in and of what goes out.
        stride: of the first convolution and of the shortcut.
    """

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            convolution = nn.Conv2d(before, after, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return F.relu(h + self.shortcut(x))


def _draw(pixels: np.ndarray, labels: np.ndarray, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Digits (N, 64) as colour images (4 N, 3, 16, 16) from -1 to 1, and their labels."""
    count = COPIES * len(labels)
    digits = torch.from_numpy(pixels).reshape(-1, 1, 8, 8).repeat_interleave(COPIES, 0)
    digits = F.interpolate(digits, size=(14, 14), mode="bilinear")
    ink = torch.zeros(count, 1, 16, 16)
    for image, digit, (top, left) in zip(ink, digits, generator.integers(0, 3, (count, 2)).tolist(), strict=True):
        image[:, top : top + 14, left : left + 14] = digit
    paper = generator.random((count, 3))
    # each channel of the ink is at least 0.35 away from the paper's, above or below it
    colour = (paper + generator.uniform(0.35, 0.65, (count, 3))) % 1
    below, above = (torch.from_numpy(c).float()[:, :, None, None] for c in (paper, colour))
    noise = torch.from_numpy(generator.normal(0, NOISE, (count, 3, 16, 16))).float()
    images = (below + (above - below) * ink + noise).clamp(0, 1)
    return 2 * images - 1, torch.from_numpy(labels).repeat_interleave(COPIES)
