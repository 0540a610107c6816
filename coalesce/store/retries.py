"""Experiments that are trained once more: what was written of them before no longer counts.

Parts are never rewritten. A file beside them says of which experiments the rows do not count, and up to which part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from coalesce.store.files import read_json, write_json
from coalesce.store.paths import WHICH, RunPaths


@dataclass(frozen=True)
class Retries:
    """What of a run folder's parts no longer counts.

    Args:
        attempts: experiment → how often it was begun once more.
        before: kind of part ("metrics", "results") → experiment → the names' beginning of a job's parts → the number
            of its first part that counts.
    """

    attempts: Mapping[str, int] = field(default_factory=dict)
    before: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)

    def counted(self, part: Path, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows of a part that count.

        Args:
            frame: all that is in it.
        """
        beginning, _, number = part.stem.rpartition("-")
        cuts = self.before.get(part.parent.name, {})
        gone = [name for name, cut in cuts.items() if int(number) < cut.get(beginning, 0)]
        return frame[~frame["experiment"].isin(gone)] if gone else frame


def read_retries(paths: RunPaths) -> Retries:
    """What no longer counts, of all jobs."""
    entries: list[dict[str, Any]] = [entry for file in paths.retries() for entry in read_json(file)]
    before: dict[str, dict[str, dict[str, int]]] = {"metrics": {}, "results": {}}
    for entry in entries:
        for kind, cuts in before.items():
            for name in entry["experiments"]:
                cut = cuts.setdefault(name, {})
                for beginning, number in entry[kind].items():
                    cut[beginning] = max(number, cut.get(beginning, 0))
    return Retries(Counter(name for entry in entries for name in entry["experiments"]), before)


def write_retries(paths: RunPaths, experiments: Collection[str]) -> None:
    """Let nothing count any more that was written of these experiments, and remove their weights. Whoever calls it
    holds the folder's lock."""
    entry = {
        "experiments": sorted(experiments),
        "metrics": _ends(paths.metric_parts()),
        "results": _ends(paths.result_parts()),
    }
    file = paths.retried
    file.parent.mkdir(exist_ok=True)
    write_json(file, [*(read_json(file) if file.exists() else []), entry])
    for name, which in product(experiments, WHICH):
        # a second attempt may end with none
        paths.weights(name, which).unlink(missing_ok=True)


def _ends(parts: list[Path]) -> dict[str, int]:
    ends: dict[str, int] = {}
    for part in parts:
        beginning, _, number = part.stem.rpartition("-")
        ends[beginning] = max(int(number) + 1, ends.get(beginning, 0))
    return ends
