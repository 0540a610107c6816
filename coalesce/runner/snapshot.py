"""Everything that a run needs to go on from a host boundary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """A run at a host boundary.

    Args:
        facts: what the host knows: queue, slots, search; of what JSON holds (NaN and infinity included).
        tensors: ``<experiment id>/<name>`` → that tensor of the experiment's lane, on the CPU.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(repr=False)
