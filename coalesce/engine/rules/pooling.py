"""Fractional max pooling with windows from the lane's own stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.draws import random
from coalesce.engine.rules.mode import Rules, rule


def _register(function: Callable[..., Any], dims: int) -> None:
    @rule(function)
    def fractional_max_pool(rules: Rules, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("_random_samples") is None:
            samples = input.shape[0] if input.dim() == dims + 2 else 1
            shape = (samples, input.shape[-dims - 1], dims)
            kwargs["_random_samples"] = random(rules, shape, input.dtype)
        return function(input, *args, **kwargs)


for _function, _dims in (
    (F.fractional_max_pool2d, 2),
    (F.fractional_max_pool2d_with_indices, 2),
    (F.fractional_max_pool3d, 3),
    (F.fractional_max_pool3d_with_indices, 3),
):
    _register(_function, _dims)
