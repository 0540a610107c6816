"""`torch.utils.checkpoint` inside a user's module: in a lane it is a plain call.

Functional gradients refuse both of its forms: they know neither its hooks on saved tensors nor its old-style Function.
Nothing is lost in numbers: draws are keyed, so a second pass would draw the same masks. What is lost is that memory is
saved; which values are kept until the backward pass is the engine's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

from coalesce.engine.rules.mode import AROUND

# the options of torch.utils.checkpoint.checkpoint; everything else is the function's own
_OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{k: v for k, v in kwargs.items() if k not in _OPTIONS})


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
