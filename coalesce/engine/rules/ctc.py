"""Connectionist temporal classification for lanes: torch's own asks for the values of the lengths.

A. Graves et al., "Connectionist temporal classification" (ICML 2006): the forward recursion in logarithms. The gradient
is autograd's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.mode import Rules, rule

#: Stands for log 0: a logarithm of a sum of nothing but infinities would have a gradient of NaN.
_NEVER = -1e30


@rule(F.ctc_loss)
def ctc_loss(
    rules: Rules,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    if not rules.stacked:
        return rules.open(
            F.ctc_loss, log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    single = log_probs.dim() == 2
    scores = log_probs[:, None] if single else log_probs  # (T, B, C)
    inputs, lengths = (torch.as_tensor(n, device=scores.device).reshape(-1) for n in (input_lengths, target_lengths))
    labels = _padded(targets, lengths)  # (B, S)
    # between every two labels, and at the ends, there may be a blank: (B, 2S + 1)
    states = torch.stack([torch.full_like(labels, blank), labels], -1).flatten(1)
    states = F.pad(states, (0, 1), value=blank)
    # a label may follow the label before it, unless the two are equal
    skips = (states != blank) & (states != F.pad(states, (2, 0), value=blank)[:, :-2])
    place = torch.arange(states.shape[1], device=scores.device)
    reached = torch.where(place < 2, scores[0].gather(1, states), _NEVER)
    ends = 2 * lengths[:, None]
    for time, row in enumerate(scores[1:].unbind(0), 1):
        one, two = (F.pad(reached, (n, 0), value=_NEVER)[:, : len(place)] for n in (1, 2))
        ways = torch.stack([reached, one, torch.where(skips, two, _NEVER)], -1).logsumexp(-1)
        moved = (ways + row.gather(1, states)).clamp(min=_NEVER)
        reached = torch.where(time < inputs[:, None], moved, reached)
    # the path ends at the last label or at the blank behind it; without labels there is the blank alone
    last = torch.where(lengths > 0, reached.gather(1, (ends - 1).clamp(min=0))[:, 0], _NEVER)
    loss = -torch.stack([reached.gather(1, ends)[:, 0], last], -1).logsumexp(-1)
    impossible = loss > -_NEVER / 2
    loss = torch.where(impossible, torch.zeros_like(loss) if zero_infinity else torch.inf, loss)
    if reduction == "mean":
        return (loss / lengths.clamp(min=1)).mean()
    return loss.sum() if reduction == "sum" else loss[0] if single else loss


def _padded(targets: Tensor, lengths: Tensor) -> Tensor:
    """(B, S) labels, of (B, S), of (S,) for one sample, or of all samples one after the other."""
    if targets.dim() == 2:
        return targets
    place = torch.arange(targets.shape[0], device=targets.device)
    starts = lengths.cumsum(0) - lengths
    return targets[(starts[:, None] + place).clamp(max=max(len(targets) - 1, 0))]
