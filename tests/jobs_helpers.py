"""Runs in jobs, and what they are compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

import coalesce
from end_to_end_helpers import EAGER, Folder

#: Where and how long.
EXCEPTED = ["job", "device", "seconds"]

HOW = [EAGER, "trainer.width=2", "trainer.threads=1", "trainer.check=false"]
#: Unequal lengths, floats that ride though some shares have but one value of them; more experiments than lanes.
PARAMS = "sweep.params={optimizer.lr: [0.01, 0.1], steps: [15, 20], task.dropout: [0.0, 0.2]}"
SWEEP = [*HOW, PARAMS]
LOCAL = ["launcher=local", "launcher.poll_s=0.01", "trainer.device=cpu"]


def frame_of(folder: Path, *more: str) -> pd.DataFrame:
    return coalesce.load(folder).drop(columns=[*EXCEPTED, *more])


def same(one: Path, two: Path, *but: str) -> None:
    """Whether two run folders hold the same results, history and weights."""
    pd.testing.assert_frame_equal(frame_of(one, *but), frame_of(two, *but), check_exact=True)
    pd.testing.assert_frame_equal(coalesce.load_history(one), coalesce.load_history(two), check_exact=True)
    ids = coalesce.load(one).query("status == 'finished'")["experiment"]
    for name in [ids.iloc[0], ids.iloc[-1]]:
        first, second = (coalesce.load_model(folder, name).state_dict() for folder in (one, two))
        for key, value in first.items():
            np.testing.assert_array_equal(value.numpy(), second[key].numpy(), err_msg=f"{name} {key}")


def begun(folder: Folder, *arguments: str, code: int = 0, task: str = "Mine") -> tuple[Path, str]:
    """The run folder of a command, and what it printed."""
    before = set(folder.path.glob("runs/*/*"))
    found, out, err = folder(task, *arguments)
    assert found == code, (out, err)
    (made,) = set(folder.path.glob("runs/*/*")) - before
    return made, out + err
