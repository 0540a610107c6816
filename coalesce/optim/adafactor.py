"""Adafactor, as `torch.optim.Adafactor`.

Source: N. Shazeer, M. Stern, "Adafactor: adaptive learning rates with sublinear memory cost" (ICML 2018). As in torch,
the rate is scaled by the parameter's size, the weight decay is decoupled and is not scaled so, and the first eps bounds
the estimate instead of being added to the squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from coalesce.optim.base import Hyper, Optimizer, State
from coalesce.optim.common import OPTIONS, learning_rate, shrunk, weight_decay


class Adafactor(Optimizer):
    """Adam without a first moment, whose second one is kept as the means of its rows and columns.

    State: ``row_var`` (…, R, 1) and ``col_var`` (…, 1, C) of a parameter (…, R, C); ``variance``, like the parameter,
    where it has fewer than two dimensions. torch's pair ``eps`` is ``eps1`` and ``eps2`` here, since only the first may
    be null.
    """

    name: ClassVar[str] = "adafactor"
    hyper: ClassVar[dict[str, Hyper]] = {
        "lr": learning_rate(1e-2),
        "beta2_decay": Hyper(-0.8, high=0.0, text="at step t the means take up the share t ** beta2_decay"),
        "eps1": Hyper(None, low=0.0, optional=True, text="least root of the second moment; null: the dtype's epsilon"),
        "eps2": Hyper(1e-3, low=0.0, text="least size of a parameter that the rate is scaled by"),
        "d": Hyper(1.0, low=1.0, text="updates of a larger root mean square are scaled down to this"),
        "weight_decay": weight_decay(0.0, "share of the parameter, times the learning rate, taken off each step"),
        **OPTIONS,
    }

    @classmethod
    def init(cls, param: Tensor, hyper: Mapping[str, Any]) -> State:
        if param.dim() < 2:
            return {"variance": torch.zeros_like(param)}
        *rest, rows, columns = param.shape
        return {"row_var": param.new_zeros(*rest, rows, 1), "col_var": param.new_zeros(*rest, 1, columns)}

    @classmethod
    def update(
        cls, param: Tensor, grad: Tensor, state: State, hyper: SimpleNamespace, step: Tensor
    ) -> tuple[Tensor, State]:
        dtype = param.dtype
        # the share is 1 at step 1, so that the zeros of the start are forgotten
        share = (step.to(torch.float64) ** hyper.beta2_decay).to(dtype)
        size = torch.maximum(hyper.eps2, _root_mean_square(param))
        rate = size * torch.minimum(hyper.lr, 1 / torch.sqrt(step.to(torch.float64)))
        param = shrunk(param, hyper.lr, hyper.weight_decay)
        least = torch.finfo(dtype).eps if hyper.eps1 is None else hyper.eps1.to(dtype)
        squares = grad * grad
        if grad.dim() < 2:
            new = {"variance": torch.lerp(state["variance"], squares, share)}
            second = new["variance"]
        else:
            new = {
                "row_var": torch.lerp(state["row_var"], squares.mean(-1, keepdim=True), share),
                "col_var": torch.lerp(state["col_var"], squares.mean(-2, keepdim=True), share),
            }
            second = new["row_var"] * new["col_var"] / new["row_var"].mean(-2, keepdim=True).clamp(min=least)
        update = grad * torch.rsqrt(second.clamp(min=least * least))
        scale = torch.clamp(_root_mean_square(update) / hyper.d, min=1.0)
        return param - (rate / scale).to(dtype) * update, new


def _root_mean_square(x: Tensor) -> Tensor:
    """0-d float64."""
    return torch.linalg.vector_norm(x).to(torch.float64) / x.numel() ** 0.5 if x.numel() else x.sum().double()
