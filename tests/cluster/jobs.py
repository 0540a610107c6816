"""What the tests on a real Slurm let submitit run: functions that a job imports by name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import submitit


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class Counter(submitit.helpers.Checkpointable):
    """Counts to `end` in steps of 0.1 s, and on from where it stood when it is requeued."""

    def __init__(self, beats: Path):
        self.beats = beats
        self.count = 0

    def __call__(self, end: int) -> tuple[int, str | None]:
        with self.beats.open("a") as file:
            file.write(f"from {self.count}\n")
        while self.count < end:
            time.sleep(0.1)
            self.count += 1
        return self.count, os.environ.get("SLURM_RESTART_COUNT")


def device(seconds: float) -> str:
    time.sleep(seconds)
    return os.environ["CUDA_VISIBLE_DEVICES"]


def executor(folder: Path, **parameters: Any) -> submitit.SlurmExecutor:
    """submitit's executor for jobs of one device."""
    made = submitit.SlurmExecutor(folder=folder)
    made.update_parameters(time=30, gpus_per_node=1, mem="1GB", stderr_to_stdout=True, **parameters)
    return made
