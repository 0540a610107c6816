"""What a launcher can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The launchers, by name.
LAUNCHERS = ("process", "local", "slurm")


@dataclass(frozen=True)
class LauncherSettings:
    """A launcher as it was asked for, checked. Settings that it does not have stand at their defaults.

    Args:
        name: "process": everything in this process, one job after the other; "local": one process for each of this
            machine's devices; "slurm": one Slurm job for each GPU.
        jobs: how many there may be at once; None: as many as this machine has devices ("local"), or 1 ("slurm").
            There are never more of them than experiments.
        experiments_per_job: the most that one job takes; where that makes more jobs than ``jobs``, there are more.
        cpus: CPU cores of a job, which are its threads where ``trainer.threads`` is null; None: this machine's cores
            shared out ("local"), or what the partition gives ("slurm").
        retries: how often a job is started again that died (a node that failed, memory that did not suffice).
        detach: come back as soon as the jobs are submitted.
        poll_s: seconds between two looks at the jobs.
        partition, account, qos, constraint: Slurm's.
        time: minutes that Slurm gives a job. One that needs more is saved and queued again.
        memory_gb: of a job's node, GB; None: what the partition gives.
        gres: what else a job asks for; one GPU by default. None: nothing.
        signal_s: seconds before its time is up at which a job is told to save.
        setup: shell commands to run first: ``module load cuda``.
        python: the command that starts Python on the node, which may be a container's; None: this one's.
        srun: arguments for ``srun``, such as those that name a container.
        sbatch: everything else, for ``sbatch``: {"nice": 100} is ``--nice=100``.
    """

    name: str = "process"
    jobs: int | None = None
    experiments_per_job: int | None = None
    cpus: int | None = None
    retries: int = 2
    detach: bool = False
    poll_s: float = 2.0
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: int = 240
    memory_gb: float | None = None
    gres: str | None = "gpu:1"
    signal_s: int = 90
    setup: tuple[str, ...] = ()
    python: str | None = None
    srun: tuple[str, ...] = ()
    sbatch: Mapping[str, Any] = field(default_factory=dict)
