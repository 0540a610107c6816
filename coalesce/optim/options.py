"""What every optimiser takes beside its own hyperparameters, carried out around its rule.

Sources: `torch.nn.utils.clip_grad_value_`, `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`, and the
parameter groups of `torch.optim`.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from coalesce.optim.base import Optimizer, State
from coalesce.optim.groups import Names, hyper_of

#: The name of the weights' moving average among an optimiser's state.
AVERAGE = "average"


def apply(
    rule: type[Optimizer], param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, names: Names, step: Tensor
) -> tuple[Tensor, State]:
    """One step of a rule for one parameter of one lane, with its options but for what needs all gradients at once.

    Args:
        hyper: the lane's, with patterns as they stand in the configuration.
        names: the parameter's.
        param, grad, state, step: as in `Optimizer.update`; the state holds ``average`` where ``ema`` is on.
    """
    hyper = hyper_of(rule, hyper, names)
    if hyper.clip_value is not None and hyper.clip_norm is None:
        grad = clip_value(grad, hyper.clip_value)
    own = {name: value for name, value in state.items() if name != AVERAGE}
    new, moved = rule.update(param, grad, own, hyper, step)
    if AVERAGE in state:
        # the start has no part in the average: after the first step it is the weight
        mean = torch.lerp(state[AVERAGE], new, (1 - hyper.ema).to(new.dtype))
        moved = {**moved, AVERAGE: torch.where(step == 1, new, mean)}
    return new, moved


def clip_value(gradient: Tensor, bound: Tensor) -> Tensor:
    """Bound every entry by the bound's size; NaN stays NaN."""
    bound = bound.to(gradient.dtype)
    return torch.clamp(gradient, -bound, bound)
