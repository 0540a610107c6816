"""Rows of the table of modules: recurrent layers and cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from module_table import Row, rows

STEPS, WIDTH = 5, 3


class Layers(nn.Module):
    """A recurrent layer over time, and a linear layer of its outputs and of its last states."""

    def __init__(self, kind: Any, **options: Any):
        super().__init__()
        self.recurrent = kind(WIDTH, 4, **options)
        directions = 2 if self.recurrent.bidirectional else 1
        self.head = nn.Linear(directions * (self.recurrent.proj_size or 4), 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.recurrent.batch_first else x.transpose(0, 1)
        out, states = self.recurrent(x)
        out = self.head(out if self.recurrent.batch_first else out.transpose(0, 1))
        states = [states] if isinstance(states, Tensor) else states
        return out.mean(1) + sum(s.square().mean((0, 2))[:, None] for s in states)


class Chain(nn.Module):
    """Two layers, the second on what the first gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.RNN(WIDTH, 4, nonlinearity="relu", bidirectional=True, batch_first=True)
        self.second = nn.RNN(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[0])[1][0]


class Cells(nn.Module):
    """Cells called step by step, each on what the one before gives."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.RNNCell(WIDTH, 4, nonlinearity="relu")
        self.gru, self.lstm = nn.GRUCell(4, 4, bias=False), nn.LSTMCell(4, 4)
        self.tanh = nn.RNNCell(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        relu: Any = None
        gru, lstm, tanh = relu, relu, relu
        for now in x.unbind(1):
            relu = self.relu(now, relu)
            gru = self.gru(relu, gru)
            lstm = self.lstm(gru, lstm)
            tanh = self.tanh(lstm[0] + lstm[1], tanh)
        return tanh


class Unbatched(nn.Module):
    """A layer that sees one sequence without a batch, from a state that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(WIDTH, 4, bias=False), nn.Linear(4, 2)
        self.start = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.head(self.layer(sequence, self.start)[1][0]) for sequence in x[:2]]).mean(0)[None]


def row(name: str, model: Any, **options: Any) -> Row:
    return Row(name, model, (STEPS, WIDTH), **options)


rows(
    row("RNN", lambda a: Chain()),
    row("GRU", lambda a: Layers(nn.GRU, num_layers=2, bidirectional=True, dropout=a), compiled=True),
    row("GRU unbatched", lambda a: Unbatched()),
    row("LSTM", lambda a: Layers(nn.LSTM, num_layers=2, dropout=a, batch_first=True), compiled=True, thorough=True),
    row("LSTM projected", lambda a: Layers(nn.LSTM, proj_size=2, bidirectional=True, bias=False)),
    row("Recurrent cells", lambda a: Cells()),
)
