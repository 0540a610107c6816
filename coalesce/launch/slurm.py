"""One Slurm job for each GPU, by submitit."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from coalesce.errors import LaunchError
from coalesce.launch.base import Launcher, Look, Submitted, Work
from coalesce.launch.settings import LauncherSettings

#: Slurm's states of a job that is not over, and whether it waits.
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")

#: Seconds that a command of Slurm's may take.
PATIENCE_S = 30.0

#: A job that is out of time is queued again as often as it gets on; whether it does is for the job to see. submitit
#: counts what is cut off by the time limit, and takes every limit of ten minutes or less for that.
TIMEOUTS = 10**6

#: What submitit puts into the names of its files, and takes for such wherever it stands in their folder's; and signs
#: that sbatch has no way to write.
MEANT_OTHERWISE = ("%j", "%t", "%A", "%a", "\\", "\n")


class Slurm(Launcher):
    """Submits one job for each work, all that are submitted together as one array.

    Args:
        settings: what to ask Slurm for.
        name: the jobs' name in Slurm's lists.
    """

    name = "slurm"

    def __init__(self, settings: LauncherSettings, name: str = "coalesce"):
        missing = [command for command in ("sbatch", "srun", "squeue", "scancel") if shutil.which(command) is None]
        if missing:
            raise LaunchError(
                f"launcher=slurm needs Slurm's commands, and {', '.join(missing)} is not on this machine's PATH: run "
                "this on a login node of the cluster, or take launcher=local or launcher=process"
            )
        self._settings, self._name = settings, name
        #: Whether Slurm keeps accounts; None: not known yet.
        self._accounting: bool | None = None

    def submit(self, works: Sequence[Work], folder: Path) -> Sequence[Submitted]:
        bad = [sign for sign in MEANT_OTHERWISE if sign in str(folder.absolute())]
        if bad:
            raise LaunchError(f"a job's output can't go to {str(folder)!r}: Slurm reads {bad[0]!r} in a path otherwise")
        executor = SlurmExecutor(folder, max_num_timeout=TIMEOUTS, python=self._settings.python)
        parameters = _parameters(self._settings, self._name)
        if "%" in str(folder.absolute()):
            _escape(parameters, folder.absolute(), array=len(works) > 1)
        executor.update_parameters(**parameters)
        try:
            with executor.batch():
                jobs = [executor.submit(work) for work in works]
        except (FailedJobError, FailedSubmissionError) as error:
            raise LaunchError(f"Slurm takes no jobs: {_said(error)}") from error
        return [Submitted(job.job_id, str(job.paths.stderr)) for job in jobs]

    def look(self, ids: Sequence[str]) -> Mapping[str, Look]:
        if not ids:
            return {}
        queued = self._queue(ids)
        if queued is None:
            return {name: Look("unknown", "squeue does not answer") for name in ids}
        return {name: queued[name] if name in queued else self._gone(name) for name in ids}

    def cancel(self, ids: Sequence[str]) -> None:
        if ids:
            # to all of a job: the batch script alone would be told, and the job's own process would not
            _run(["scancel", "--quiet", *ids])

    def _queue(self, ids: Sequence[str]) -> dict[str, Look] | None:
        """What waits or runs, by id; None: Slurm cannot be asked just now."""
        whole = ",".join(sorted({name.split("_")[0] for name in ids}))
        done = _run(["squeue", "--noheader", "--array", "--states=all", f"--jobs={whole}", "--format=%i|%T|%r"])
        if done is None or (done.returncode and "Invalid job id" not in done.stderr):
            return None
        found = {}
        for line in done.stdout.splitlines():
            name, state, reason = line.strip().split("|", 2)
            if state in WAITING:
                found[name] = Look("waiting", reason if reason != "None" else state)
            elif state in RUNNING:
                found[name] = Look("running")
            else:
                found[name] = _over(state, reason if reason != "None" else "")
        return found

    def _gone(self, name: str) -> Look:
        """What became of a job that Slurm's queue has forgotten."""
        if self._accounting is not False:
            done = _run(
                ["sacct", "--noheader", "--parsable2", "-X", f"--jobs={name}", "--format=State,ExitCode,Reason"]
            )
            # without a database it says that accounting is disabled
            self._accounting = done is not None and done.returncode == 0
            if done is not None and self._accounting and done.stdout.strip():
                state, code, reason = done.stdout.splitlines()[-1].split("|", 2)
                why = f"exit code {code}" + (f", {reason}" if reason not in ("", "None") else "")
                return _over(state.split()[0], why)
        done = _run(["scontrol", "--oneliner", "show", "job", name])
        if done is not None and done.returncode == 0:
            facts = dict(re.findall(r"(JobState|ExitCode|Reason)=(\S+)", done.stdout))
            why = f"exit code {facts.get('ExitCode', '?')}"
            return _over(facts.get("JobState", ""), why)
        return Look("gone")


def _over(state: str, reason: str) -> Look:
    why = ", ".join(part for part in (state, reason) if part)
    return Look("gone", why, cancelled=state.startswith("CANCELLED"), well=state == "COMPLETED")


def _parameters(settings: LauncherSettings, name: str) -> dict[str, Any]:
    """A launcher's settings as submitit has them."""
    asked = {
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "cpus_per_task": settings.cpus,
        "gres": settings.gres,
        "mem": None if settings.memory_gb is None else f"{round(1024 * settings.memory_gb)}M",
    }
    parameters: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    parameters |= {
        "job_name": name,
        "time": settings.time,
        "signal_delay_s": settings.signal_s,
        "setup": list(settings.setup) or None,
        "srun_args": list(settings.srun) or None,
        # requeue: by us when the time is up, by Slurm where a node fails or somebody else's job goes first
        "additional_parameters": {"requeue": True, **settings.sbatch},
    }
    if settings.jobs:
        parameters["array_parallelism"] = settings.jobs
    return parameters


def _escape(parameters: dict[str, Any], folder: Path, *, array: bool) -> None:
    """Name the files of a job's output once more: submitit leaves a percent sign in their folder's name as it is, and
    sbatch and srun take it for the beginning of a pattern. What they are given last holds."""
    job = "%A_%a" if array else "%j"
    output, error = (f"{folder}/".replace("%", "%%") + f"{job}_%t_log.{name}" for name in ("out", "err"))
    flags = {"output": output.replace("%t", "0"), "error": error.replace("%t", "0")}
    parameters["additional_parameters"] = {**flags, **parameters["additional_parameters"]}
    parameters["srun_args"] = ["--output", output, "--error", error, *(parameters["srun_args"] or ())]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """A command of Slurm's; None: it is not there, or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None


def _said(error: Exception) -> str:
    """What sbatch said, in the many words that submitit puts around it."""
    found = re.search(r"sbatch: error: (?:Batch job submission failed: )?(.+)", str(error))
    return found[1] if found else str(error).strip().splitlines()[-1]
