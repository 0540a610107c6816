"""Muon for matrices, AdamW for the rest.

Sources: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (kellerjordan.github.io/posts/muon,
2024); J. Liu et al., "Muon is scalable for LLM training" (arXiv:2502.16982) for weight decay and the other scale of the
rate. Departure from both and from `torch.optim.Muon`: the Newton-Schulz iteration runs in the parameter's own dtype,
not in bfloat16, which rounds to 3 digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Count, Hyper, Optimizer, Patterns, State
from coalesce.optim.common import OPTIONS, adam_step, betas, epsilon, learning_rate, mean, shrunk, weight_decay, zeros

_DECAY = "share of the parameter, times the learning rate, taken off each step"


class Muon(Optimizer):
    """Momentum whose matrices are orthogonalised. A parameter of more than two dimensions, a convolution's kernel, is
    the matrix of its first dimension and the rest.

    AdamW updates what has fewer than two dimensions, and the parameters that ``adamw`` names: embeddings and the last
    layer, as the authors advise. ``lr_factors`` and the schedule multiply both rates, ``no_decay`` holds for both.

    State: ``momentum``, like the parameter; or AdamW's ``exp_avg`` and ``exp_avg_sq``.
    """

    name: ClassVar[str] = "muon"
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(0.02),
        "momentum": Hyper(0.95, low=0.0, high=1.0, open_high=True, text="share of the momentum that is kept"),
        "weight_decay": weight_decay(0.01, _DECAY),
        "nesterov": Hyper(True, text="look ahead along the momentum"),
        "match_rms_adamw": Hyper(False, text="scale updates to the size of AdamW's, so that its rates fit"),
        "ns_coefficients": Hyper((3.4445, -4.775, 2.0315), text="coefficients of the Newton-Schulz iteration"),
        "ns_steps": Count(5, low=1, high=99, text="how often the Newton-Schulz iteration runs"),
        "eps": Hyper(1e-7, low=0.0, open_low=True, text="added to the norm that a matrix is divided by"),
        "adamw": Patterns((), text="names of matrices that AdamW updates too"),
        "adamw_lr": Hyper(3e-4, low=0.0, text="AdamW's learning rate, before the schedule's factor"),
        "adamw_betas": betas(0.9, 0.95),
        "adamw_eps": epsilon(1e-10),
        "adamw_weight_decay": weight_decay(0.01, _DECAY),
        **OPTIONS,
    }
    rates: ClassVar[tuple[str, ...]] = ("lr", "adamw_lr")
    decays: ClassVar[tuple[str, ...]] = ("weight_decay", "adamw_weight_decay")

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        if param.dim() < 2 or hyper["adamw"]:
            return zeros(param, "exp_avg", "exp_avg_sq")
        return zeros(param, "momentum")

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        if param.dim() < 2 or hyper.adamw:
            param = shrunk(param, hyper.adamw_lr, hyper.adamw_weight_decay)
            return adam_step(param, grad, state, hyper.adamw_lr, hyper.adamw_betas, hyper.adamw_eps, step)
        buffer = mean(state["momentum"], grad, hyper.momentum)
        direction = torch.lerp(grad, buffer, hyper.momentum.to(grad.dtype)) if hyper.nesterov else buffer
        matrix = direction.flatten(1)
        rows, columns = matrix.shape
        scale = 0.2 * max(rows, columns) ** 0.5 if hyper.match_rms_adamw else max(1.0, rows / columns) ** 0.5
        whole = orthogonal(matrix, hyper.ns_coefficients, hyper.ns_steps, hyper.eps).reshape(param.shape)
        param = shrunk(param, hyper.lr, hyper.weight_decay)
        return param - (hyper.lr * scale).to(param.dtype) * whole, {"momentum": buffer}


def orthogonal(matrix: Tensor, coefficients: tuple[Tensor, ...], steps: int, eps: Tensor) -> Tensor:
    """Newton-Schulz: a matrix of the same singular vectors whose singular values lie near 1.

    Args:
        matrix: (R, C).
        coefficients: three, a, b and c: a value s becomes a s + b s³ + c s⁵.
        steps: how often.
        eps: added to the norm that the matrix is divided by at first.
    """
    a, b, c = (number.to(matrix.dtype) for number in coefficients)
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / (torch.linalg.vector_norm(x) + eps.to(x.dtype))
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x
