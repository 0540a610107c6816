"""One process for each of this machine's devices, by submitit's executor for local processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from submitit import Job, LocalExecutor

from coalesce.errors import LaunchError
from coalesce.launch.base import Launcher, Look, Submitted, Work

VISIBLE = "CUDA_VISIBLE_DEVICES"

#: Minutes after which submitit would end a job. There is no limit here: this is a hundred years.
FOREVER = 60 * 24 * 365 * 100

#: Seconds that a process is waited for that has written all it had to.
CLOSING_S = 20.0


def devices() -> list[str]:
    """The CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them; none on a machine without."""
    count = torch.cuda.device_count()
    given = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return given[:count] if given else [str(number) for number in range(count)]


class Local(Launcher):
    """Starts a process for each job. The processes outlive this one, and the terminal.

    Args:
        cuda: whether each job gets one of the CUDA devices, if there are any.
    """

    name = "local"

    def __init__(self, cuda: bool = True):
        self._devices = devices() if cuda else []
        #: id → the device that it was given
        self._given: dict[str, str] = {}
        #: Those that this process started: they are its children, and wait for being asked how they ended.
        self._children: dict[str, Job[Any]] = {}

    def submit(self, works: Sequence[Work], folder: Path) -> Sequence[Submitted]:
        free = self._free()
        if self._devices and len(works) > len(free):
            raise LaunchError(
                f"{len(works)} jobs for {len(free)} free devices of {', '.join(self._devices)}: launcher=local starts "
                "one process for each; valid: a smaller launcher.jobs, or none"
            )
        executor = LocalExecutor(folder)
        executor.update_parameters(timeout_min=FOREVER, gpus_per_node=0)
        submitted = []
        with _left_alone():
            for number, work in enumerate(works):
                device = free[number] if self._devices else ""
                job = executor.submit(work.within({VISIBLE: device}))
                self._given[job.job_id] = device
                self._children[job.job_id] = job
                submitted.append(Submitted(job.job_id, str(job.paths.stderr)))
        return submitted

    def _free(self) -> list[str]:
        busy = {self._given[name] for name, look in self.look([*self._given]).items() if look.state == "running"}
        return [device for device in self._devices if device not in busy]

    def look(self, ids: Sequence[str]) -> Mapping[str, Look]:
        return {name: Look("running" if self._is_there(name) else "gone") for name in ids}

    def _is_there(self, name: str) -> bool:
        child = self._children.get(name)
        return _process(name) is not None if child is None else not child.done()

    def cancel(self, ids: Sequence[str]) -> None:
        for name in ids:
            process = _process(name)
            if process is not None:
                # submitit's own would be SIGINT, which these processes ignore; this is passed on to the job
                process.send_signal(signal.SIGTERM)

    def close(self, ids: Sequence[str]) -> None:
        until = time.monotonic() + CLOSING_S
        while any(self._is_there(name) for name in ids) and time.monotonic() < until:
            time.sleep(0.05)


def _process(name: str) -> psutil.Process | None:
    """The process of submitit's that looks after a job, if it is alive and is still that one."""
    try:
        process = psutil.Process(int(name))
        alive = process.status() != psutil.STATUS_ZOMBIE and any("submitit" in part for part in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None
    return process if alive else None


@contextmanager
def _left_alone() -> Iterator[None]:
    """Processes that are started here ignore the terminal's Ctrl-C and its end: whoever started them asks what is to
    become of them."""
    numbers = [signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
