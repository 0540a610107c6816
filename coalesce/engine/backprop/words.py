"""Warnings that point to the user's own line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_INSIDE = (Path(__file__).parents[2], Path(torch.__file__).parent)


def warn(message: str) -> None:
    """Warn at the innermost line that is neither ours nor torch's, however deep in either the cause is found."""
    level, frame = 1, _outer(sys._getframe())
    while frame is not None and any(Path(frame.f_code.co_filename).is_relative_to(home) for home in _INSIDE):
        level, frame = level + 1, _outer(frame)
    # on a thread of the backward pass no line is the user's; then it is ours
    warnings.warn(message, UserWarning, stacklevel=level + 1 if frame is not None else 2)


def _outer(frame: FrameType) -> FrameType | None:
    return frame.f_back
