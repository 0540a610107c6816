"""The precision that an experiment's code runs in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from coalesce.experiment import Experiment


def autocast(experiment: Experiment, device: torch.device | str = "cpu") -> AbstractContextManager[object]:
    """The context for an experiment's `loss` and `metrics`: torch's own, which inside a lane the rules obey (see
    `rules/autocast.py`)."""
    if experiment.precision == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
