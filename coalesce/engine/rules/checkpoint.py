"""`torch.utils.checkpoint` inside a user's module: in a lane it is a region that the backward pass computes again.

Functional gradients refuse both of its forms: they know neither its hooks on saved tensors nor its old-style Function.
So in a lane it is a plain call, and the trace notes what was called: see `recompute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

from coalesce.engine.pieces import Region
from coalesce.engine.rules.mode import AROUND

# the options of torch.utils.checkpoint.checkpoint; everything else is the function's own
_OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    own = {k: v for k, v in kwargs.items() if k not in _OPTIONS}
    if not torch.is_grad_enabled():
        # an evaluation has no backward pass
        return function(*args, **own)
    region = Region()
    region.begin([args, own])
    returned = function(*args, **own)
    region.end(returned)
    return returned


# torch's wrapper looks here for the form of the function that its compiler leaves alone: this one needs no other
_plain.__dynamo_disable = _plain  # type: ignore[attr-defined]


@contextmanager
def _called_plainly() -> Iterator[None]:
    """`checkpoint` is a wrapper of the function that does the work, in a closure: changing it there reaches names that
    were imported earlier as well. Tried on torch 2.13.0; `tests/test_rules_functions.py` sees whether it still works.
    """
    wrapper = torch.utils.checkpoint.checkpoint
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    work = cells["fn"].cell_contents
    cells["fn"].cell_contents = _plain
    try:
        yield
    finally:
        cells["fn"].cell_contents = work


AROUND.append(_called_plainly)
