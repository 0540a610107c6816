"""Everything that a run needs to go on from a host boundary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps of its lanes.

    Args:
        facts: what the host knows, see `runner.run.Run.take`; of what JSON holds (NaN and infinity included).
        tensors: ``<experiment id>/<name>`` → its lane's state on the CPU, of experiments that have begun and not ended.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(repr=False)
