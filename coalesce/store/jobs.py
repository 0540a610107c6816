"""What a run folder knows of its jobs: what each is to do, and where it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Any, TypeVar

from coalesce.store.files import read_json, write_json
from coalesce.store.paths import RunPaths

#: What a job may be doing. Of "ended" there is nothing left to do; "interrupted" by a signal, it is saved and goes on
#: when it is started again; "broke": an error has ended it.
STATES = ("planning", "compiling", "training", "ended", "interrupted", "broke")
#: Those of a process that is no more.
OVER = ("ended", "interrupted", "broke")

T = TypeVar("T")


@dataclass(frozen=True)
class JobRecord:
    """A job as it was submitted. Written by whoever submits it, and by nobody else.

    Args:
        number: of the job in its run, from 0.
        launcher: which launcher's.
        id: the launcher's own name for it: Slurm's job id, or a process.
        attempt: how often it was submitted before.
        experiments: ids of its share; those of a search that makes its experiments as it goes are not known yet.
        count: experiments in all, at the most.
        steps: experiment-steps in all, where they are known, or 0.
        submitted: seconds since 1970.
        log: the file that its process writes, if it is known.
    """

    number: int
    launcher: str
    id: str
    attempt: int
    experiments: tuple[str, ...]
    count: int
    steps: int
    submitted: float
    log: str = ""


@dataclass(frozen=True)
class Standing:
    """Where a job stands. Written by the job itself, every few seconds.

    Args:
        state: one of `STATES`.
        id: the launcher's own name of the job that wrote this; an earlier attempt's file is out of date.
        host: the machine that it runs on.
        device: "cpu" or "cuda", and its name.
        visible: ``CUDA_VISIBLE_DEVICES``, as the job finds it.
        message: why it was interrupted or broke.
        lanes, width: busy lanes and all lanes of its graph.
        steps, total_steps: experiment-steps done, and to do in all.
        experiments, total_experiments: ended, and in all.
        failed: of those that ended.
        monitor, best, best_id: the monitored metric, its best value so far, and whose it is.
        speed: experiment-steps per second of training, lately.
        since: seconds since 1970 at which this process began.
        written: seconds since 1970 at which this was written.
    """

    state: str
    id: str
    host: str
    device: str
    visible: str
    since: float
    written: float
    message: str = ""
    lanes: int = 0
    width: int = 0
    steps: int = 0
    total_steps: int = 0
    experiments: int = 0
    total_experiments: int = 0
    failed: int = 0
    monitor: str = ""
    best: float | None = None
    best_id: str = ""
    speed: float = 0.0


def write_record(paths: RunPaths, record: JobRecord) -> None:
    """Keep how a job was submitted."""
    write_json(RunPaths(paths.folder, record.number).job_record, dataclasses.asdict(record))


def write_standing(paths: RunPaths, standing: Standing) -> None:
    """Keep where the job stands whose paths these are. The next one comes in seconds: a disk is not waited for."""
    write_json(paths.standing, dataclasses.asdict(standing), durable=False)


def read_records(paths: RunPaths) -> list[JobRecord]:
    """The jobs of a run, by their numbers; none where the run was never launched in jobs."""
    found = [RunPaths(paths.folder, number).job_record for number in paths.jobs()]
    records = [
        _read(path, lambda data: JobRecord(**{**data, "experiments": tuple(data["experiments"])})) for path in found
    ]
    return [record for record in records if record is not None]


def read_standing(paths: RunPaths) -> Standing | None:
    """Where the job stands whose paths these are; None: it has not said so yet."""
    return _read(paths.standing, lambda data: Standing(**data))


def _read(path: Any, make: Callable[[Mapping[str, Any]], T]) -> T | None:
    try:
        return make(read_json(path))
    except (FileNotFoundError, JSONDecodeError):
        # not there yet; or a shared file system shows a file before it shows what is in it
        return None
