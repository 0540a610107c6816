"""A Slurm of one node on this machine, for tests: Debian's munged, slurmctld and slurmd, all files in one folder.

`python tests/cluster` brings one up by hand (__main__.py), the fixture `slurm` for a test (conftest.py).

It needs root and Debian's packages `slurm-wlm` and `munge`. It reads and writes nothing under /etc, takes two free
ports of 127.0.0.1, and several can stand side by side. What tests find there is named by the constants below.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster import accounting

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")

NODE = "node0"
GPUS = 4
# more than the machine has, so that jobs run side by side on a small one
CPUS = 16
MEMORY_MB = 65536
# the first is the default; `urgent` takes the devices of what runs in `main`, which is requeued
PARTITIONS = ("main", "urgent")
# the states of a job that may still use the node
ALIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD")

# AuthInfo: a requeued job waits until its old credential has run out, by default 120 s; 5 is the least.
# CommunicationParameters: nothing listens beyond this machine.
# SchedulerParameters: by default a batch job may wait for 3 s before it is looked at, and for 60 s after another's end.
# MinJobAge: the controller forgets a job so many seconds after its end, at its next look once a minute. Then nothing
# but accounting knows of it, and there is none.
CONFIGURATION = """
ClusterName=coalesce
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
{accounting}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait=5
MinJobAge=10
InactiveLimit=0
OverTimeLimit=0
ReturnToService=2
GresTypes=gpu
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes={node} Default=YES MaxTime=60 DefaultTime=5 DefMemPerCPU=1024 PriorityTier=1 GraceTime=5
PartitionName=urgent Nodes={node} MaxTime=60 DefaultTime=5 DefMemPerCPU=1024 PriorityTier=2
"""


class ClusterError(RuntimeError):
    """The cluster cannot be brought up or taken down, and why."""


def missing(accounted: bool = False) -> str | None:
    """Why no cluster (with accounting) can be brought up here, or None if one can."""
    if os.geteuid() != 0:
        return "slurmd and mknod need root"
    absent = [name for name in (*DAEMONS, *COMMANDS) if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install -y --no-install-recommends slurm-wlm munge"
    return accounting.missing() if accounted else None


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up: `folder` holds all its files."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What the environment of Slurm's commands must hold."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str | Path, check: bool = True, given: str = "") -> str:
        """Run one of Slurm's commands and return what it prints.

        Args:
            command: The program and its arguments.
            check: Raise if it fails.
            given: Its standard input.

        Returns:
            Its standard output, stripped.

        Raises:
            ClusterError: It failed; the message is what it wrote.
        """
        done = subprocess.run(
            [str(part) for part in command],
            env=os.environ | self.environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=30,
        )
        if check and done.returncode:
            raise ClusterError(f"{shlex.join(map(str, command))} exited with {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def sbatch(self, script: str, *options: str) -> str:
        """Submit a script of the shell, and return the id of its job."""
        return self.run("sbatch", "--parsable", *options, given=f"#!/bin/bash\n{script}\n")

    def end_in(self, job: str, seconds: int) -> None:
        """Move a running job's time limit: it ends in so many seconds instead of at a whole minute.

        Its signal (`sbatch --signal`) comes that much earlier. The controller looks every 30 s.
        """
        self.run("scontrol", "update", f"JobId={job}", f"EndTime=now+{seconds}")

    def states(self) -> dict[str, str]:
        """The state of every job that the controller knows, by its id (`12`, or `12_3` in an array)."""
        lines = self.run("squeue", "--noheader", "--array", "--states=all", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def state(self, job: str) -> str:
        """The state of one job, in Slurm's words: `FORGOTTEN` of one that the controller does not know any more."""
        return self.states().get(job, "FORGOTTEN")

    def processes(self, job: str) -> list[psutil.Process]:
        """The processes of one job on this machine, by its id as in `states`: the batch script, srun, the program."""
        return [
            process
            for process in processes(self.folder)
            if job
            in (_variable(process, "SLURM_JOB_ID"), _variable(process, "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"))
        ]

    def wait(self, done: Callable[[], object], what: str, seconds: float = 30) -> None:
        """Look ten times a second until `done()` is true.

        Raises:
            ClusterError: It is not after so many seconds; the message says `what` and what stands in the queue.
        """
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                queue = self.run("squeue", "--states=all", check=False)
                raise ClusterError(f"{what}: not after {seconds} s\n{queue}\n{self.logs()}")
            time.sleep(0.1)

    def clear(self) -> None:
        """Kill all jobs, and wait until the node is idle."""

        def cleared() -> bool:
            # again, since a job that is being requeued comes back
            left = sorted({job.split("_")[0] for job, state in self.states().items() if state in ALIVE})
            if left:
                self.run("scancel", "--signal=KILL", "--full", *left, check=False)
                self.run("scancel", *left, check=False)
            return not left and self.node() == "idle"

        self.wait(cleared, "the node is idle", 20)
        # what outlived its job: a child of a batch script that was killed alone
        _kill(lambda: [process for process in processes(self.folder) if _of_job(process, self.folder)])

    def node(self) -> str:
        """The state of the node: `idle`, `mixed`, `completing`, ..."""
        return self.run("sinfo", "--noheader", f"--partition={PARTITIONS[0]}", "--format=%T", check=False)

    def logs(self) -> str:
        """The ends of the daemons' logs, for an error message."""
        return "\n".join(
            f"{path}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-10:])
            for path in sorted((self.folder / "log").iterdir())
        )


def up(folder: Path, accounted: bool = False) -> Cluster:
    """Bring a cluster up.

    Args:
        folder: Where all its files go: not there yet, or empty. Its path is at most 80 bytes long, since it names a
            socket, and holds nothing that Slurm's configuration reads otherwise (spaces, commas, brackets, ...).
        accounted: Whether `sacct` works, through slurmdbd and a database.

    Returns:
        The cluster, its node idle.

    Raises:
        ClusterError: It cannot be brought up. Nothing is left of it.
    """
    reason = missing(accounted)
    if reason is not None:
        raise ClusterError(reason)
    folder = folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ClusterError(f"{folder} is not empty: take down what is there, or name another folder")
    if len(str(folder)) > 80 or not all(sign.isascii() and (sign.isalnum() or sign in "/._-") for sign in str(folder)):
        raise ClusterError(f"{folder}: the path may have at most 80 letters, digits, '/', '.', '_' and '-'")
    cluster = Cluster(folder)
    try:
        ports = _ports()
        _write(folder, ports, accounted)
        _start(cluster, ports, accounted)
    except BaseException:
        _remove(folder)
        raise
    return cluster


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _ports() -> list[int]:
    """Four free ports of 127.0.0.1: the controller's, the node's, slurmdbd's, the database's."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(4)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _write(folder: Path, ports: list[int], accounted: bool) -> None:
    """Write the configuration, the key and the devices."""
    # munged wants its socket where everybody may come to it
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in ("dev", "log", "munge", "spool", "state"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge/key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    for index in range(GPUS):
        os.mknod(folder / f"dev/gpu{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder,
            host=_host(),
            controller_port=ports[0],
            node_port=ports[1],
            accounting=accounting.CONFIGURATION.format(folder=folder, port=ports[2]) if accounted else accounting.NONE,
            node=NODE,
            cpus=CPUS,
            memory=MEMORY_MB,
            gpus=GPUS,
        ).lstrip()
    )
    (folder / "gres.conf").write_text(f"NodeName={NODE} Name=gpu File={folder}/dev/gpu[0-{GPUS - 1}]\n")


def _start(cluster: Cluster, ports: list[int], accounted: bool) -> None:
    """Start the daemons, and wait until the node is idle."""
    folder = cluster.folder
    munge = [f"--{name}={folder}/munge/{name}" for name in ("socket", "pid-file", "seed-file")]
    cluster.run("munged", "--force", f"--key-file={folder}/munge/key", f"--log-file={folder}/log/munged", *munge)
    if accounted:
        accounting.start(folder, _host(), ports[2], ports[3])
    cluster.run("slurmctld")
    cluster.run("slurmd", "-N", NODE)
    cluster.wait(lambda: cluster.node() == "idle", "the node is idle", 20)


def processes(folder: Path) -> list[psutil.Process]:
    """The processes of the cluster in `folder`: its daemons, and all that its jobs have started."""
    found = set()
    for process in psutil.process_iter():
        # one that has ended, or that not even root may look into, is none of them
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if _is_daemon(process, folder.absolute()) or _of_job(process, folder.absolute()):
                found |= {process, *process.children(recursive=True)}
    return sorted(found, key=lambda process: process.pid)


def _is_daemon(process: psutil.Process, folder: Path) -> bool:
    if process.name() == "munged":
        return f"--socket={folder}/munge/socket" in process.cmdline()
    if process.name() == "mariadbd":
        return process.cwd() == str(folder / "db")
    # slurmstepd, which every step of a job has, writes its title over its environment
    return process.name().startswith("slurm") and process.cwd() == str(folder / "log")


def _of_job(process: psutil.Process, folder: Path) -> bool:
    conf = str(folder / "slurm.conf")
    return _variable(process, "SLURM_CONF") == conf and _variable(process, "SLURM_JOB_ID") is not None


def _variable(process: psutil.Process, *names: str) -> str | None:
    """What these variables were when the process began, joined by `_`; None if one is not there."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        variables = process.environ()
        return "_".join(variables[name] for name in names) if all(name in variables for name in names) else None
    return None


def _kill(find: Callable[[], list[psutil.Process]]) -> None:
    """Kill what `find` finds until it finds nothing: what is about to die may have started another."""
    deadline = time.monotonic() + 10
    while left := find():
        if time.monotonic() > deadline:
            raise ClusterError(f"still running after SIGKILL: {left}")
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


def down(folder: Path) -> None:
    """End all jobs and daemons of the cluster in `folder`, and remove the folder.

    Raises:
        ClusterError: The folder holds something else, or a process does not end.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "munge/key").exists():
        raise ClusterError(f"{folder} holds no cluster: nothing is removed")
    _remove(folder)


def _remove(folder: Path) -> None:
    """End what `up` has started so far, and remove what it has written."""
    _kill(lambda: processes(folder))
    if folder.exists():
        shutil.rmtree(folder)


@contextlib.contextmanager
def temporary(accounted: bool = False) -> Iterator[Cluster]:
    """A cluster in a temporary folder, taken down afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="coalesce-slurm-"))
    try:
        yield up(folder, accounted)
    finally:
        down(folder)
