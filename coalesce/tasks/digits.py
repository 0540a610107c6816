"""An MLP on the handwritten digits that ship with scikit-learn."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from torch import nn

import coalesce
from coalesce.tasks.classification import Classification


class Digits(Classification):
    """1,797 images of 8 x 8 pixels, 10 classes: 1,297 to train on, 250 for validation, 250 for the test.

    The images are shuffled before they are split, always in the same way: those of one writer stand together.

    Args:
        hidden: units of each hidden layer.
        layers: number of hidden layers.
        dropout: probability with which a hidden unit is dropped, 0 to 1.
        label_smoothing: share of the label that is spread over all classes, 0 to 1.

    >>> Digits(hidden=100).data().sizes
    {'train': 1297, 'val': 250, 'test': 250}
    """

    def __init__(self, hidden: int = 64, layers: int = 2, dropout: float = 0.1, label_smoothing: float = 0.0):
        super().__init__(label_smoothing)
        self.hidden = hidden
        self.layers = layers
        self.dropout = dropout

    def data(self) -> coalesce.Data:
        return coalesce.Data(**split_digits(), classes=10)

    def model(self) -> nn.Module:
        sizes = [64] + [self.hidden] * self.layers
        blocks = [nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Dropout(self.dropout)) for a, b in pairwise(sizes)]
        return nn.Sequential(*blocks, nn.Linear(sizes[-1], 10))


def split_digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Split → its pixels (N, 64), float32 from 0 to 1, and its labels (N,)."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(labels))
    x = pixels.astype(np.float32) / 16
    parts = zip(("train", "val", "test"), np.split(order, [1297, 1547]), strict=True)
    return {split: (x[part], labels[part]) for split, part in parts}
