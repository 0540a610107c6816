"""Train many PyTorch experiments as lanes of one compiled graph; every one gets the numbers that it would get alone."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coalesce import kernels as kernels  # first: it speaks to what torch loads
from coalesce.errors import ConfigError, TaskError
from coalesce.experiment import Experiment
from coalesce.task import Data, Task

if TYPE_CHECKING:
    from coalesce.engine.backprop import BackProp
    from coalesce.engine.checkpointing import checkpoint_pieces
    from coalesce.engine.single import compile_step
    from coalesce.library import sweep
    from coalesce.loading import load_model
    from coalesce.search.space import Interval
    from coalesce.store.read import load, load_history

__version__ = "0.1.0"
__all__ = [
    "BackProp",
    "ConfigError",
    "Data",
    "Experiment",
    "Interval",
    "Task",
    "TaskError",
    "checkpoint_pieces",
    "compile_step",
    "load",
    "load_history",
    "load_model",
    "sweep",
]

# What needs Hydra, pandas or pyarrow is found when it is asked for: `import coalesce` must do where only torch is
# installed (PEP 562).
_LAZY = {
    "BackProp": "coalesce.engine.backprop",
    "Interval": "coalesce.search.space",
    "checkpoint_pieces": "coalesce.engine.checkpointing",
    "compile_step": "coalesce.engine.single",
    "load": "coalesce.store.read",
    "load_history": "coalesce.store.read",
    "load_model": "coalesce.loading",
    "sweep": "coalesce.library",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
