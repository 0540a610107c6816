"""Rows of the table of modules: parametrisations, lookups, and parameters that belong to two modules."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from module_table import Row, rows


def old(name: str, module: nn.Module) -> nn.Module:
    """`torch.nn.utils.weight_norm` and its like, which put a hook in front of forward; deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return getattr(nn.utils, name)(module)


def parametrised(a: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2))
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    parametrizations.orthogonal(model[4])
    parametrizations.spectral_norm(model[5], n_power_iterations=2)
    return model


def hooked(a: Any) -> nn.Module:
    first, second = old("weight_norm", nn.Linear(6, 5)), old("spectral_norm", nn.Linear(5, 5))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), old("spectral_norm", nn.Linear(5, 2)))


class Tied(nn.Module):
    """One weight for the way in and the way out, parametrised."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 2)
        parametrizations.weight_norm(self.left)
        self.right.bias = nn.Parameter(self.right.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(self.out(self.embed(x).mean(1))).tanh())


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.padded, self.scaled = nn.Embedding(7, 4, padding_idx=0), nn.Embedding(7, 4, scale_grad_by_freq=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.padded(x) + self.scaled(x)).tanh().mean(1))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        modes: Any = [("sum", None), ("mean", 0), ("max", None), ("max", 0)]
        self.bags = nn.ModuleList([nn.EmbeddingBag(7, 3, mode=m, padding_idx=p) for m, p in modes])
        self.flat = nn.EmbeddingBag(7, 3, mode="mean", include_last_offset=True)
        self.weights, self.head = nn.Parameter(torch.rand(5)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        total = self.bags[0](x, per_sample_weights=self.weights.expand(x.shape).contiguous())
        total = total + sum(bag(x) for bag in self.bags)
        offsets = torch.tensor([0, 2, 2, 7])
        flat = self.flat(x.flatten()[:7], offsets)
        return self.head((total + flat.sum(0)).tanh())


def lazy(a: Any) -> nn.Module:
    """Layers that find out their sizes at their first call, which is in model()."""
    layers: list[nn.Module] = [nn.LazyConv1d(3, 2), nn.LazyBatchNorm1d(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)]
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), *layers)
    model(torch.zeros(2, 6))
    return model


rows(
    Row("Lazy", lazy, zero=("1.bias",)),
    Row("Parametrisations", parametrised),
    Row("Parametrisations by hooks", hooked),
    Row("Tied", lambda a: Tied(), (3,), 7),
    Row("Embedding", lambda a: Embeds(), (5,), 7),
    Row("EmbeddingBag", lambda a: Bags(), (5,), 7),
)
