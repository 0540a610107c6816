"""MNIST-1D (Greydanus & Kobak 2020, arXiv:2011.14439): signals of length 40 in 10 classes, three models for them."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

import coalesce
from coalesce.tasks.classification import Classification


class Mnist1d(Classification):
    """What the models share: the data of the paper (4,000 to train on, 1,000 for the test).

    The 1,000 samples for validation come from the same generator with another seed. They are standardised by their
    own mean and deviation, as the generator does with every set that it makes.

    Args:
        label_smoothing: share of the label that is spread over all classes while training, 0 to 1.
    """

    introduced: ClassVar[dict[str, Any]] = {"label_smoothing": 0.0}

    def data(self) -> coalesce.Data:
        paper = _generate(seed=42, num_samples=5000, train_split=0.8)
        other = _generate(seed=43, num_samples=1000, train_split=1.0)
        return coalesce.Data(
            train=(paper["x"], paper["y"]),
            val=(other["x"], other["y"]),
            test=(paper["x_test"], paper["y_test"]),
            classes=10,
        )


class Mnist1dMLP(Mnist1d):
    """A plain MLP. (The paper's also adds the first hidden layer to the second.)

    Args:
        hidden: units of each hidden layer.
        layers: number of hidden layers.
        dropout: probability with which a hidden unit is dropped, 0 to 1.
        label_smoothing: see `Mnist1d`.
    """

    introduced: ClassVar[dict[str, Any]] = {"dropout": 0.0, "label_smoothing": 0.0}

    def __init__(self, hidden: int = 100, layers: int = 2, dropout: float = 0.0, label_smoothing: float = 0.0):
        super().__init__(label_smoothing)
        self.hidden = hidden
        self.layers = layers
        self.dropout = dropout

    def model(self) -> nn.Module:
        sizes = [40] + [self.hidden] * self.layers
        blocks = [nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Dropout(self.dropout)) for a, b in pairwise(sizes)]
        return nn.Sequential(*blocks, nn.Linear(sizes[-1], 10))


class Mnist1dCNN(Mnist1d):
    """The paper's CNN: three convolutions of stride 2 and a linear layer.

    Args:
        channels: channels of each convolution.
        label_smoothing: see `Mnist1d`.
    """

    def __init__(self, channels: int = 25, label_smoothing: float = 0.0):
        super().__init__(label_smoothing)
        self.channels = channels

    def model(self) -> nn.Module:
        width = self.channels
        return nn.Sequential(
            nn.Unflatten(1, (1, 40)),
            nn.Sequential(nn.Conv1d(1, width, 5, stride=2, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv1d(width, width, 3, stride=2, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv1d(width, width, 3, stride=2, padding=1), nn.ReLU()),
            nn.Flatten(),
            nn.Linear(5 * width, 10),
        )


class Mnist1dGRU(Mnist1d):
    """The paper's GRU: it reads the signal value by value in both directions; a linear layer sees all of its outputs.

    Args:
        hidden: units of each direction.
        label_smoothing: see `Mnist1d`.
    """

    def __init__(self, hidden: int = 6, label_smoothing: float = 0.0):
        super().__init__(label_smoothing)
        self.hidden = hidden

    def model(self) -> nn.Module:
        return BidirectionalGRU(self.hidden)


class BidirectionalGRU(nn.Module):
    """Signals (B, T=40) to scores (B, C=10).

    Args:
        hidden: D, units of each direction.
    """

    def __init__(self, hidden: int):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(40 * 2 * hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.rnn(x[:, :, None])  # (B, T, 2 D)
        scores: Tensor = self.linear(outputs.flatten(1))
        return scores


def _generate(**arguments: float) -> dict[str, np.ndarray]:
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; MNIST-1D needs: pip install 'coalesce[mnist1d]'", name=error.name
        ) from None
    settings = get_dataset_args()
    vars(settings).update(arguments)
    # the generator seeds the global streams, which are the user's
    before = random.getstate(), np.random.get_state()
    try:
        return make_dataset(settings)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
