"""Rows of the table of modules: the losses of `torch.nn`, and losses that draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from module_table import Row, rows


class Head(nn.Module):
    """Scores of four classes, or four numbers."""

    def __init__(self, *losses: nn.Module):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        self.losses = nn.ModuleList(losses)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def labels(y: Tensor) -> Tensor:
    """(B,) of four classes."""
    return (y.abs() * 10).long() % 4


def targets(x: Tensor) -> Tensor:
    """(B, 4), of the size of what the model gives."""
    return x[:, :4].sin()


def regression(model: Any, x: Tensor, y: Tensor, a: Any) -> Tensor:
    h, t = model(x), targets(x)
    found = [loss(h, t) for loss in model.losses[:6]]
    poisson, gaussian, kl, entropy, logits, soft = model.losses[6:]
    found += [poisson(h, t.abs()), gaussian(h, t, h.square() + 0.1), kl(h.log_softmax(-1), t.softmax(-1))]
    found += [entropy(h.sigmoid(), t.square()), logits(h, t.square()), soft(h, t.sign())]
    return torch.stack(found).sum()


def classification(model: Any, x: Tensor, y: Tensor, a: Any) -> Tensor:
    h, label = model(x), labels(y)
    plain, smooth, weighted, likelihood, margin, many, several, hinge = model.losses
    among = torch.stack([label, (label + 1) % 4, torch.full_like(label, -1), label], 1)
    found = [plain(h, label), smooth(h, label), weighted(h, h.detach().softmax(-1)), margin(h, label)]
    found += [likelihood(h.log_softmax(-1), label), many(h, among), several(h, F.one_hot(label, 4).to(h.dtype))]
    found += [hinge(h, targets(x).sign())]
    return torch.stack(found).sum()


def pairs(model: Any, x: Tensor, y: Tensor, a: Any) -> Tensor:
    one, two, three = model(x), model(x.flip(0)), targets(x)
    ranking, cosine, triplet, distance, similarity, apart = model.losses
    found = [ranking(one[:, 0], two[:, 0], y.sign()), cosine(one, two, y.sign()), triplet(one, two, three)]
    found += [distance(one, two, three), similarity(one, three).mean(), apart(one, three).mean()]
    return torch.stack(found).sum()


def sequence(model: Any, x: Tensor, y: Tensor, a: Any) -> Tensor:
    scores = model(x).unflatten(1, (2, 2)).repeat(1, 2, 2).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(x),), 4)
    return model.losses[0](scores, labels(y)[:, None] % 3 + 1, lengths, torch.ones_like(lengths))


def noisy(model: Any, x: Tensor, y: Tensor, a: Any) -> Tensor:
    """The kinds of draws that a loss may want."""
    h = model(x + 0.1 * torch.randn_like(x))
    h = h * torch.bernoulli(torch.full_like(h, 1 - a))
    mixed = a * h + (1 - a) * h[torch.randperm(len(h))]
    noise = torch.empty(4, dtype=h.dtype).exponential_(2.0)
    action = torch.distributions.Categorical(logits=h).sample()
    hard = F.gumbel_softmax(h, tau=a, hard=True)
    return (mixed + noise - y[:, None]).square().mean() + F.cross_entropy(h, action) + (hard * h).sum(-1).mean()


rows(
    Row(
        "losses of numbers",
        lambda a: Head(
            *(nn.L1Loss(), nn.MSELoss(), nn.HuberLoss(delta=a), nn.HuberLoss(), nn.SmoothL1Loss(beta=a)),
            *(nn.SmoothL1Loss(reduction="sum"), nn.PoissonNLLLoss(), nn.GaussianNLLLoss(full=True)),
            *(nn.KLDivLoss(reduction="batchmean"), nn.BCELoss(), nn.BCEWithLogitsLoss(pos_weight=torch.ones(4) * 2)),
            nn.SoftMarginLoss(),
        ),
        loss=regression,
    ),
    Row(
        "losses of classes",
        lambda a: Head(
            *(nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=a), nn.CrossEntropyLoss(torch.arange(1.0, 5))),
            *(nn.NLLLoss(ignore_index=1), nn.MultiMarginLoss(margin=a), nn.MultiLabelMarginLoss()),
            *(nn.MultiLabelSoftMarginLoss(), nn.HingeEmbeddingLoss(margin=a)),
        ),
        loss=classification,
    ),
    Row(
        "losses of pairs",
        lambda a: Head(
            *(nn.MarginRankingLoss(a), nn.CosineEmbeddingLoss(a), nn.TripletMarginLoss(a, swap=True)),
            *(nn.TripletMarginWithDistanceLoss(margin=2.0), nn.CosineSimilarity(), nn.PairwiseDistance(2.0, a)),
        ),
        loss=pairs,
    ),
    Row("CTCLoss", lambda a: Head(nn.CTCLoss()), loss=sequence),
    Row("losses that draw", lambda a: Head(), loss=noisy, draws=True, compiled=True, thorough=True),
)
