"""What launching on Slurm relies on, shown on a real one: devices, requeueing, signals, arrays, submitit.

`pytest -m cluster -n 0` runs it (conftest.py says what it needs). Oracle: what the jobs themselves write.
"""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import pytest

from cluster import slurm as control
from cluster.jobs import Counter, device, executor, lines
from cluster.slurm import GPUS, PARTITIONS, Cluster, ClusterError

pytestmark = pytest.mark.cluster


def test_every_job_sees_a_device_of_its_own_and_the_next_one_waits(slurm: Cluster, tmp_path: Path) -> None:
    script = f"""
    echo "$CUDA_VISIBLE_DEVICES" > '{tmp_path}'/$SLURM_JOB_ID
    until [ -e '{tmp_path}/go' ]; do sleep 0.1; done
    """
    jobs = [slurm.sbatch(script, "--gres=gpu:1", f"--output={tmp_path}/%j.out") for _ in range(GPUS + 1)]
    slurm.wait(lambda: all(lines(tmp_path / job) for job in jobs[:-1]), "the jobs have started")
    assert sorted(lines(tmp_path / job)[0] for job in jobs[:-1]) == [str(index) for index in range(GPUS)]
    assert slurm.state(jobs[-1]) == "PENDING"
    # why it waits: Slurm looks every second
    why = ("squeue", "--noheader", "--format=%r", f"--jobs={jobs[-1]}")
    slurm.wait(lambda: slurm.run(*why) == "Resources", "the last one waits for a device")
    (tmp_path / "go").touch()
    slurm.wait(lambda: slurm.state(jobs[-1]) == "COMPLETED", "the last one has had its turn")
    assert len(lines(tmp_path / jobs[-1])) == 1


def test_a_requeued_job_starts_again_under_its_id(slurm: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "starts"
    job = slurm.sbatch(
        f"echo $SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} >> '{out}'; exec sleep 60", "--output=/dev/null"
    )
    slurm.wait(lambda: lines(out), "the job has started")
    slurm.run("scontrol", "requeue", job)
    slurm.wait(lambda: len(lines(out)) == 2, "the job has started again")
    assert lines(out) == [f"{job} 0", f"{job} 1"]


@pytest.mark.parametrize(
    ("how", "reached"),
    [((), {"step"}), (("--batch",), {"batch"}), (("--full",), {"batch", "step"})],
    ids=["steps", "batch", "full"],
)
def test_a_signal_comes_to_the_steps_or_to_the_batch_script(
    slurm: Cluster, tmp_path: Path, how: tuple[str, ...], reached: set[str]
) -> None:
    def loop(name: str) -> str:
        return f"trap 'echo {name} >> got' USR2; touch {name}; until [ -e end ]; do sleep 0.1; done"

    script = f"""srun bash -c "{loop("step")}" &\n{loop("batch")}\nwait"""
    job = slurm.sbatch(script, f"--chdir={tmp_path}", "--output=log")
    slurm.wait(lambda: (tmp_path / "step").exists() and (tmp_path / "batch").exists(), "script and step listen")
    slurm.run("scancel", "--signal=USR2", *how, job)
    slurm.wait(lambda: lines(tmp_path / "got"), "the signal has come")
    (tmp_path / "end").touch()
    slurm.wait(lambda: slurm.state(job) == "COMPLETED", "the job has ended")
    assert set(lines(tmp_path / "got")) == reached


def test_a_wrong_partition_is_refused_at_once(slurm: Cluster) -> None:
    with pytest.raises(ClusterError, match="invalid partition specified: nowhere"):
        slurm.sbatch("true", "--partition=nowhere")


def test_an_array_through_submitit_gives_its_results_back(
    slurm: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("submitit"), "propagate", True)
    # the folder's name has what a shell would take apart
    jobs = executor(tmp_path / "it's a folder").map_array(device, [1.0] * GPUS)
    assert len({job.job_id.split("_")[0] for job in jobs}) == 1
    assert sorted(job.result() for job in jobs) == [str(index) for index in range(GPUS)]
    # without accounting: a warning at every look, no state, and only the result's file says that it is over
    assert "Bypassing sacct error" in caplog.text
    assert {job.state for job in jobs} == {"UNKNOWN"}
    slurm.wait(lambda: {slurm.state(job.job_id) for job in jobs} == {"COMPLETED"}, "Slurm knows that they are over")


def test_submitit_never_sees_a_job_die_without_accounting_but_the_queue_tells(slurm: Cluster, tmp_path: Path) -> None:
    job = executor(tmp_path / "folder").submit(device, 60.0)
    slurm.wait(lambda: "Loading pickle" in (job.stdout() or ""), "the function runs")
    (python,) = [each for each in slurm.processes(job.job_id) if each.name().startswith("python")]
    python.kill()
    slurm.wait(lambda: slurm.state(job.job_id) not in control.ALIVE, "the job has died")
    assert slurm.state(job.job_id) == "FAILED"
    assert not job.done(force_check=True)
    assert job.state == "UNKNOWN"


def test_usr2_makes_submitit_checkpoint_and_requeue(slurm: Cluster, tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    job = executor(tmp_path / "folder").submit(Counter(beats), 20)
    slurm.wait(lambda: lines(beats), "the function runs")
    slurm.run("scancel", "--signal=USR2", job.job_id)
    assert job.result() == (20, "1")
    first, second = lines(beats)
    assert first == "from 0"
    assert 0 <= int(second.removeprefix("from ")) < 20


def test_preemption_comes_as_usr2_too(slurm: Cluster, tmp_path: Path) -> None:
    beats = [tmp_path / f"beats{index}" for index in range(GPUS)]
    low = [executor(tmp_path / "low").submit(Counter(path), 40) for path in beats]
    slurm.wait(lambda: all(lines(path) for path in beats), "all devices are taken")
    urgent = executor(tmp_path / "urgent", partition=PARTITIONS[1]).submit(device, 0.0)
    assert urgent.result() in {str(index) for index in range(GPUS)}
    results = [job.result() for job in low]
    assert sorted(results, key=str) == [(40, "1")] + [(40, None)] * (GPUS - 1)


@pytest.mark.thorough
def test_the_time_limit_comes_as_usr2(slurm: Cluster, tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    job = executor(tmp_path / "folder", signal_delay_s=10).submit(Counter(beats), 350)
    slurm.wait(lambda: lines(beats), "the function runs")
    # the controller looks every 30 s: whenever it does next, the signal is due, and the end is not
    slurm.end_in(job.job_id, 41)
    assert job.result() == (350, "1")
    assert "is preempted" in (job.stdout() or "")


def test_nothing_is_left_of_a_cluster(slurm: Cluster, tmp_path: Path) -> None:
    stubborn = "trap '' TERM USR2; touch '{}'; while true; do sleep 1; done"
    with control.temporary() as other:
        other.sbatch(f"""srun bash -c "{stubborn.format(tmp_path / "step")}\"""", "--output=/dev/null")
        other.sbatch(f"""setsid bash -c "{stubborn.format(tmp_path / "free")}" & wait""", "--output=/dev/null")
        other.wait(lambda: (tmp_path / "step").exists() and (tmp_path / "free").exists(), "both jobs run")
        running = control.processes(other.folder)
        assert {"munged", "slurmctld", "slurmd", "slurmstepd", "srun", "bash"} <= {each.name() for each in running}
        assert not set(running) & set(control.processes(slurm.folder))
    assert not other.folder.exists()
    assert not [each for each in running if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    # the one beside it is as it was
    assert slurm.node() == "idle"


@pytest.mark.parametrize("name", ["a b", "x" * 90, "50%", "a,b", "a[0]"])
def test_a_folder_that_slurm_cannot_name_is_refused(slurm: Cluster, name: str) -> None:
    folder = slurm.folder / name
    with pytest.raises(ClusterError, match="the path may have at most 80 letters"):
        control.up(folder)
    assert not folder.exists()


def test_a_folder_with_something_in_it_is_left_alone(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ClusterError, match="is not empty"):
        control.up(tmp_path)
    with pytest.raises(ClusterError, match="holds no cluster"):
        control.down(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
