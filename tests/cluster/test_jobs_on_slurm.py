"""A run in Slurm jobs gives what it gives in one process, bit for bit, whatever happens to its jobs.

`pytest -m cluster -n 0` runs it (conftest.py says what it needs). Oracle: the same sweep in this process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from cluster.slurm import GPUS, Cluster
from coalesce.store.jobs import JobRecord, Standing, read_records, read_standing
from coalesce.store.paths import RunPaths
from end_to_end_helpers import ROOT, Folder, user_folder
from jobs_helpers import SWEEP, begun, same

pytestmark = pytest.mark.cluster

SLURM = ["launcher=slurm", "launcher.poll_s=0.2", "launcher.time=10", "launcher.signal_s=10", "trainer.device=cpu"]
#: So long that a job is hit while it trains.
LONG = [
    *SWEEP[:-1],
    "sweep.params={optimizer.lr: [0.01, 0.1], task.hidden: [4, 8], steps: [100, 140], task.dropout: [0.0, 0.2]}",
]
#: What is killed without a word goes on from where it was saved last.
OFTEN = ["trainer.snapshot_minutes=0"]


@pytest.fixture
def folder(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Folder]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    with user_folder(tmp_path, monkeypatch, capsys) as made:
        yield made


@contextlib.contextmanager
def command(folder: Folder, name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command in the background, which does not outlive the test."""
    process = folder.process(name, *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """What a command has said, when it is over."""
    out, err = process.communicate(timeout=900)
    assert process.returncode == code, (process.returncode, out, err)
    return out + err


def run_of(folder: Folder, cluster: Cluster, before: set[Path], jobs: int) -> Path:
    """The folder of the run whose jobs are just submitted."""

    def made() -> bool:
        found = set(folder.path.glob("runs/*/*")) - before
        return bool(found) and len(read_records(RunPaths(found.pop()))) == jobs

    cluster.wait(made, f"{jobs} jobs are submitted", 60)
    (run,) = set(folder.path.glob("runs/*/*")) - before
    return run


def standing(run: Path, number: int) -> Standing | None:
    return read_standing(RunPaths(run, number))


def trains(run: Path, number: int) -> bool:
    """Whether a job is in the midst of its training."""
    found = standing(run, number)
    return found is not None and found.state == "training" and found.steps > 0


@pytest.mark.thorough
def test_one_two_and_three_jobs_launched_at_once(slurm: Cluster, folder: Folder) -> None:
    whole, _ = begun(folder, *SWEEP)
    with contextlib.ExitStack() as stack:
        commands = [
            stack.enter_context(command(folder, "Mine", *SWEEP, *SLURM, f"launcher.jobs={jobs}")) for jobs in (1, 2, 3)
        ]
        for process in commands:
            ended(process)
    runs = set(folder.path.glob("runs/*/*")) - {whole}
    assert sorted(len(read_records(RunPaths(run))) for run in runs) == [1, 2, 3]
    for run in runs:
        same(whole, run)
    one_device_each(runs)


@pytest.mark.thorough
def test_the_main_sweep_compiled_in_one_two_and_three_jobs(slurm: Cluster, folder: Folder) -> None:
    """64 experiments in 16 lanes; one run after the other, as they compile. It takes some minutes."""
    how = ["sweep=lr_grid", "trainer.width=16", "trainer.threads=1", "trainer.device=cpu"]
    assert folder.command(*how)[0] == 0
    (whole,) = folder.path.glob("runs/*/*")
    for jobs in (1, 2, 3):
        before = set(folder.path.glob("runs/*/*"))
        assert folder.command(*how, *SLURM, "launcher.time=60", f"launcher.jobs={jobs}")[0] == 0
        (run,) = set(folder.path.glob("runs/*/*")) - before
        assert len(read_records(RunPaths(run))) == jobs
        same(whole, run)
        one_device_each([run])


def one_device_each(runs: Iterable[Path]) -> None:
    """Each job has seen one device, and those that ran at the same time different ones."""
    found = [seen for run in runs for record in read_records(RunPaths(run)) if (seen := standing(run, record.number))]
    assert {seen.state for seen in found} == {"ended"}
    assert {seen.visible for seen in found} <= {str(number) for number in range(GPUS)}
    for one, two in itertools.combinations(found, 2):
        if one.since < two.written and two.since < one.written:
            assert one.visible != two.visible


def requeue(slurm: Cluster, record: JobRecord) -> None:
    slurm.run("scontrol", "requeue", record.id)


def usr2(slurm: Cluster, record: JobRecord) -> None:
    slurm.run("scancel", "--signal=USR2", record.id)


def kill(slurm: Cluster, record: JobRecord) -> None:
    (python,) = [each for each in slurm.processes(record.id) if each.name().startswith("python")]
    python.kill()


def time_limit(slurm: Cluster, record: JobRecord) -> None:
    # the controller looks every 30 s: whenever it does next, the signal is due, and the end is not
    slurm.end_in(record.id, 41)


def preempt(slurm: Cluster, record: JobRecord) -> None:
    # all devices at once, so that whoever runs must go
    slurm.sbatch("sleep 2", "--partition=urgent", f"--gres=gpu:{GPUS}", "--output=/dev/null")


BLOWS: list[Sequence[Callable[[Cluster, JobRecord], None]]] = [(requeue, usr2, kill)]
THOROUGH = [(preempt,), (time_limit,)]


@pytest.mark.parametrize(
    "blows",
    [*BLOWS, *(pytest.param(blows, marks=pytest.mark.thorough) for blows in THOROUGH)],
    ids=lambda blows: " ".join(blow.__name__ for blow in blows),
)
def test_whatever_hits_a_job_nothing_is_lost(
    slurm: Cluster, folder: Folder, blows: Sequence[Callable[[Cluster, JobRecord], None]]
) -> None:
    """Each of the blows hits a job of its own while it trains."""
    # the signal of a time limit may be half a minute in coming
    sweep = [part.replace("[100, 140]", "[400, 600]") for part in LONG] if time_limit in blows else LONG
    whole, _ = begun(folder, *sweep)
    with command(folder, "Mine", *sweep, *SLURM, *OFTEN, f"launcher.jobs={len(blows)}") as process:
        run = run_of(folder, slurm, {whole}, len(blows))
        first = read_records(RunPaths(run))
        before = []
        for blow, record in zip(blows, first, strict=True):
            slurm.wait(functools.partial(trains, run, record.number), "the job trains", 120)
            blow(slurm, record)
            before.append(standing(run, record.number))
        said = ended(process)
    same(whole, run)
    one_device_each([run])
    for blow, record, seen in zip(blows, read_records(RunPaths(run)), before, strict=True):
        last = standing(run, record.number)
        # another process has ended it, which was submitted anew only where the first one died without a word
        assert last is not None
        assert seen is not None
        assert last.since > seen.since, said
        assert record.attempt == (1 if blow is kill else 0), said
