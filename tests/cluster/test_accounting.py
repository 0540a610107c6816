"""What changes where `sacct` works: submitit knows how its jobs stand.

Thorough, since the database takes its time: `pytest -m "cluster and thorough" -n 0`. Oracle: `squeue`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.jobs import Counter, device, executor, lines
from cluster.slurm import ALIVE, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]


def test_submitit_sees_a_job_die(accounted_slurm: Cluster, tmp_path: Path) -> None:
    job = executor(tmp_path / "folder").submit(device, 60.0)
    accounted_slurm.wait(lambda: "Loading pickle" in (job.stdout() or ""), "the function runs")
    (python,) = [each for each in accounted_slurm.processes(job.job_id) if each.name().startswith("python")]
    python.kill()
    accounted_slurm.wait(lambda: job.done(force_check=True), "submitit knows that the job has died")
    assert job.state == "FAILED"
    assert accounted_slurm.state(job.job_id) == "FAILED"


def test_what_the_controller_has_forgotten_is_still_accounted_for(accounted_slurm: Cluster) -> None:
    job = accounted_slurm.sbatch("exit 3", "--output=/dev/null")
    accounted_slurm.wait(lambda: accounted_slurm.state(job) == "FORGOTTEN", "the controller forgets", 90)
    told = accounted_slurm.run(
        "sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "-o", "State,ExitCode"
    )
    assert told == "FAILED|3:0"


def test_a_requeued_job_is_not_done_in_between(accounted_slurm: Cluster, tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    job = executor(tmp_path / "folder").submit(Counter(beats), 20)
    accounted_slurm.wait(lambda: lines(beats), "the function runs")
    accounted_slurm.run("scancel", "--signal=USR2", job.job_id)
    seen = set()

    def over() -> bool:
        done = job.done(force_check=True)
        seen.add((job.state, done, job.paths.result_pickle.exists()))
        return done

    accounted_slurm.wait(over, "the job is done")
    assert job.result() == (20, "1")
    # never done before there is a result
    assert all(there for _, done, there in seen if done)
    assert {state for state, done, _ in seen if not done} <= {*ALIVE, "UNKNOWN"}
