"""What the ready tasks that tell classes apart have in common."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

import coalesce


class Classification(coalesce.Task):
    """Cross-entropy on (samples, labels), with the accuracy beside it.

    Args:
        label_smoothing: share of the label that is spread over all classes while training, 0 to 1.
    """

    def __init__(self, label_smoothing: float = 0.0):
        self.label_smoothing = label_smoothing

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=self.label_smoothing)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(-1) == y).float().mean()}
