"""Everything that a run needs to go on from a host boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from coalesce.runner.listener import Result


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps of its lanes.

    Args:
        facts: what the host knows, see `runner.run.Run.take`; of what JSON holds (NaN and infinity included).
        tensors: ``<experiment id>/<name>`` → its lane's state on the CPU, of experiments that have begun and not ended.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(repr=False)


@dataclass(frozen=True)
class Begun:
    """What earlier processes left of a run.

    Args:
        results: of the experiments that ended.
        snapshot: the last one, if there is one.
        kind: of the search that the run began with, see `Search.kind`; "": not known.
        attempts: id → how often the experiment was to be begun once more. What a snapshot has of an earlier attempt is
            not gone on from.
    """

    results: Sequence[Result] = ()
    snapshot: Snapshot | None = None
    kind: str = ""
    attempts: Mapping[str, int] = field(default_factory=dict)
