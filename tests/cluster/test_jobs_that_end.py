"""Jobs that somebody cancels, that die whatever one does, that cannot start: what the command says, and what is left.

`pytest -m "cluster and thorough" -n 0` runs most of it (conftest.py says what it needs).
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import coalesce
from cluster.slurm import GPUS, Cluster
from cluster.test_jobs_on_slurm import LONG, SLURM, command, ended, folder, run_of, trains
from coalesce.store.jobs import read_records
from coalesce.store.paths import RunPaths
from end_to_end_helpers import TASK, Folder
from jobs_helpers import SWEEP, begun, same

__all__ = ["folder"]

pytestmark = pytest.mark.cluster

DIES = """

class Dies(Mine):
    def data(self):
        import os, signal
        if "SLURM_JOB_ID" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().data()
"""
#: One experiment, which does not train for long.
ONE = [*SWEEP[:-1], *SLURM]


@pytest.mark.thorough
def test_cancelled_by_the_user_and_gone_on_with(slurm: Cluster, folder: Folder) -> None:
    whole, _ = begun(folder, *LONG)
    with command(folder, "Mine", *LONG, *SLURM, "launcher.jobs=2") as process:
        run = run_of(folder, slurm, {whole}, 2)
        records = read_records(RunPaths(run))
        slurm.wait(lambda: all(trains(run, record.number) for record in records), "both jobs train", 120)
        slurm.run("scancel", *(record.id for record in records))
        said = ended(process, code=130)
    for record in records:
        assert f"job {record.number} ({record.id}) was cancelled" in said
    assert f"To go on: python -m coalesce resume={run}" in said
    done = subprocess.run(
        [sys.executable, "-m", "coalesce", f"resume={run}"],
        cwd=folder.path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    same(whole, run)


@pytest.mark.thorough
def test_a_job_that_always_dies(slurm: Cluster, folder: Folder) -> None:
    folder.write("mytask.py", TASK + DIES)
    code, out, err = folder("Dies", *ONE, "launcher.retries=1")
    assert code == 1, (out, err)
    (record,) = read_records(RunPaths(folder.run()))
    assert record.attempt == 1
    frame = coalesce.load(folder.run())
    assert list(frame["status"]) == ["failed"]
    (message,) = frame["message"]
    # Slurm's reason, and where to read on
    assert f"job 0 ({record.id}) died: FAILED" in message
    assert record.log in message
    assert "Killed" in Path(record.log).read_text()


def test_a_wrong_partition(slurm: Cluster, folder: Folder) -> None:
    code, out, err = folder("Mine", *ONE, "launcher.partition=nowhere")
    assert code == 1, (out, err)
    # behind sbatch's own lines
    assert err.splitlines()[-1] == "coalesce: Slurm takes no jobs: invalid partition specified: nowhere"
    assert not list(folder.path.glob("runs/*"))


@pytest.mark.thorough
def test_a_folder_that_goes_before_the_job_starts(slurm: Cluster, folder: Folder) -> None:
    """As if the node did not see it: there is no file even for what the job prints."""
    slurm.sbatch("sleep 600", f"--gres=gpu:{GPUS}", "--output=/dev/null")
    with command(folder, "Mine", *ONE, "launcher.retries=0") as process:
        run = run_of(folder, slurm, set(), 1)
        (record,) = read_records(RunPaths(run))
        assert slurm.state(record.id) == "PENDING"
        RunPaths(run).submissions.rename(folder.path / "elsewhere")
        slurm.run("scancel", str(int(record.id) - 1))
        said = ended(process, code=1)
    assert "it has written nothing into the run folder, which its node must see" in " ".join(said.split())


@pytest.mark.thorough
def test_a_node_that_does_not_see_the_folder(slurm: Cluster, folder: Folder) -> None:
    hidden = f'mount -t tmpfs none {shlex.quote(str(folder.path / "runs"))} && exec {shlex.quote(sys.executable)} "$@"'
    python = f"unshare -m sh -c {shlex.quote(hidden)} sh"
    folder.write("my/launcher/hidden.yaml", json.dumps({"defaults": ["slurm"], "python": python}))
    code, out, err = folder("Mine", *ONE, "--config-dir", "my", "launcher=hidden", "launcher.retries=0")
    assert code == 1, (out, err)
    (message,) = coalesce.load(folder.run())["message"]
    assert "it has written nothing into the run folder, which its node must see" in message
