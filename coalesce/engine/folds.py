"""The folds of a cross-validation: which samples of the shared training split an experiment trains and validates on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coalesce.data import Data
from coalesce.errors import ConfigError, Problem

#: Where a problem with a task's folds stands.
KEY = "task.folds"
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Folds:
    """Index sets over the training split, which is stored once.

    Args:
        rows: "train" and "val" → for each fold its samples, (N_i,) int64 on the CPU, in the order given.
    """

    rows: dict[str, list[Tensor]]

    def __len__(self) -> int:
        return len(self.rows["train"])

    def counts(self, split: str) -> list[int]:
        """Samples of a split in each fold."""
        return [len(rows) for rows in self.rows[split]]

    def data(self, whole: Data, fold: int) -> Data:
        """One fold's own splits, copied; the test split is shared."""
        return whole.cut(*(self.rows[split][fold] for split in SPLITS))

    def table(self, split: str) -> list[Tensor]:
        """All folds of a split for a graph: the rows end to end, where each fold starts, and how long it is."""
        counts = torch.tensor(self.counts(split))
        return [torch.cat(self.rows[split]), counts.cumsum(0) - counts, counts]

    @property
    def bytes(self) -> int:
        """Memory of the tables."""
        return sum(t.nbytes for split in SPLITS for t in self.table(split))


def read_folds(returned: Any, data: Data) -> Folds:
    """What a task's ``folds(data)`` returned, checked.

    Args:
        returned: pairs of (training indices, validation indices): any iterable of them, as scikit-learn's ``split`` is.
        data: what they index.

    Raises:
        ConfigError: with everything that is wrong.
    """
    pair = "pairs of (training indices, validation indices), as scikit-learn's KFold().split gives them"
    problems: list[Problem] = []
    if "val" in data.sizes:
        rule = "data() gives a val split beside the folds, each of which has its own"
        problems.append(Problem(KEY, "val", rule, "splits train and test alone: all samples to fold stand in train"))
    if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        raise ConfigError([*problems, Problem(KEY, type(returned).__name__, "must return " + pair)])
    rows: dict[str, list[Tensor]] = {split: [] for split in SPLITS}
    for number, given in enumerate(returned):
        if not isinstance(given, Sequence) or len(given) != len(SPLITS):
            problems.append(Problem(f"{KEY}.{number}", type(given).__name__, "must be one of " + pair))
            continue
        read = [_indices(f"{KEY}.{number}.{s}", v, data.sizes["train"]) for s, v in zip(SPLITS, given, strict=True)]
        problems += [problem for _, found in read for problem in found]
        (train, wrong), (val, also) = read
        both = train[torch.isin(train, val)] if not wrong and not also else train[:0]
        if len(both):
            rule = f"{len(both.unique())} samples are in both its training and its validation indices"
            problems.append(Problem(f"{KEY}.{number}", int(both[0]), rule))
        rows["train"].append(train)
        rows["val"].append(val)
    if not problems and not rows["train"]:
        problems.append(Problem(KEY, 0, "returned no fold", pair))
    if problems:
        raise ConfigError(problems)
    return Folds(rows)


def _indices(key: str, given: Any, count: int) -> tuple[Tensor, list[Problem]]:
    """One index set as (N,) int64, and what is wrong with it. A sample may come twice, as in a bootstrap."""
    none = torch.zeros(0, dtype=torch.int64)
    try:
        index = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        return none, [Problem(key, type(given).__name__, "must be an array of indices")]
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if index.dim() != 1 or (index.numel() and index.dtype not in kinds):
        seen = f"{tuple(index.shape)} of {index.dtype}"
        way = " (mask.nonzero()[0] makes them of a mask)" if index.dtype == torch.bool else ""
        return none, [Problem(key, seen, f"must be integers in one dimension{way}")]
    index = index.to("cpu", torch.int64, copy=True)
    if not len(index):
        return none, [Problem(key, 0, "is empty", "at least one sample")]
    wrong = index[(index < 0) | (index >= count)]
    if len(wrong):
        rule = f"no sample of the training split: {len(wrong)} of {len(index)} indices are out of range"
        return none, [Problem(key, int(wrong[0]), rule, f"0 to {count - 1}")]
    return index, []
