"""What is submitted to Slurm, compared whole, and how Slurm's answers are read. No Slurm is needed: its commands are
scripts that record what they are given.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from coalesce.errors import LaunchError
from coalesce.launch.settings import LauncherSettings
from coalesce.launch.slurm import Slurm
from launcher_contract import Note

DEFAULTS = """\
#!/bin/bash

# Parameters
#SBATCH --error=FOLDER/%j_0_log.err
#SBATCH --gres=gpu:1
#SBATCH --job-name=coalesce
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=240
#SBATCH --wckey=submitit

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/%j_%t_log.out --error FOLDER/%j_%t_log.err PYTHON -u -m submitit.core._submit FOLDER
"""

ALL = """\
#!/bin/bash

# Parameters
#SBATCH --account=lab
#SBATCH --array=0-2%2
#SBATCH --constraint='a100|h100'
#SBATCH --cpus-per-task=6
#SBATCH --error=FOLDER/%A_%a_0_log.err
#SBATCH --exclusive
#SBATCH --gres=gpu:a100:1
#SBATCH --job-name=coalesce-mine
#SBATCH --mem=1536M
#SBATCH --nice=100
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/%A_%a_0_log.out
#SBATCH --partition=a,b
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --signal=USR2@30
#SBATCH --time=10
#SBATCH --wckey=submitit

# setup
module load cuda
source 'my venv/bin/activate'

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/%A_%a_%t_log.out --error FOLDER/%A_%a_%t_log.err '--container-image=my image.sqsh' \
apptainer exec --nv image.sif python -u -m submitit.core._submit FOLDER
"""

EVERYTHING = LauncherSettings(
    "slurm",
    jobs=2,
    cpus=6,
    partition="a,b",
    account="lab",
    qos="high",
    constraint="a100|h100",
    time=10,
    memory_gb=1.5,
    gres="gpu:a100:1",
    signal_s=30,
    setup=("module load cuda", "source 'my venv/bin/activate'"),
    python="apptainer exec --nv image.sif python",
    srun=("--container-image=my image.sqsh",),
    sbatch={"nice": 100, "exclusive": True},
)


class Fakes:
    """Slurm's commands, which append what they are given to a file, and say what they are told to say."""

    def __init__(self, path: Path):
        self.path = path
        for name in ("sbatch", "srun", "squeue", "scancel", "sacct", "scontrol"):
            self.says(name, "Submitted batch job 12" if name == "sbatch" else "")

    def says(self, name: str, out: str, error: str = "", code: int = 0) -> None:
        program = self.path / name
        program.write_text(
            "#!/bin/sh\n"
            f'echo "$@" >> {shlex.quote(str(self.path / name))}.calls\n'
            f"printf %s {shlex.quote(out)}; printf %s {shlex.quote(error)} >&2; exit {code}\n"
        )
        program.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        calls = self.path / f"{name}.calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Fakes(folder)


def script(folder: Path) -> str:
    (found,) = folder.glob("*_submission.sh")
    text = found.read_text().rstrip("\n") + "\n"
    return text.replace(str(folder), "FOLDER").replace(shlex.quote(sys.executable), "PYTHON")


@pytest.mark.parametrize(
    ("settings", "name", "count", "recorded"),
    [(LauncherSettings("slurm"), "coalesce", 1, DEFAULTS), (EVERYTHING, "coalesce-mine", 3, ALL)],
    ids=["defaults", "every key"],
)
def test_the_script_that_is_submitted(
    fakes: Fakes, tmp_path: Path, settings: LauncherSettings, name: str, count: int, recorded: str
) -> None:
    folder = tmp_path / "submitted"
    works = [Note(number, str(tmp_path)) for number in range(count)]
    submitted = Slurm(settings, name).submit(works, folder)
    assert script(folder) == recorded
    ids = ["12"] if count == 1 else [f"12_{number}" for number in range(count)]
    assert [one.id for one in submitted] == ids
    assert [one.log for one in submitted] == [str(folder / f"{name}_0_log.err") for name in ids]
    assert len(fakes.calls("sbatch")) == 1


def test_a_percent_sign_in_the_folder_is_doubled(fakes: Fakes, tmp_path: Path) -> None:
    folder = tmp_path / "50% of it"
    (only,) = Slurm(LauncherSettings("slurm")).submit([Note(0, str(tmp_path))], folder)
    (found,) = folder.glob("*_submission.sh")
    text = found.read_text()
    written = str(folder).replace("%", "%%")
    srun = shlex.split(text.split("# command\n")[1].splitlines()[1])
    for kind, short in (("output", "out"), ("error", "err")):
        assert f"#SBATCH --{kind}='{written}/%j_0_log.{short}'" in text
        # what stands last holds
        last = len(srun) - srun[::-1].index(f"--{kind}")
        assert srun[last] == f"{written}/%j_%t_log.{short}"
    assert only.log == str(folder / "12_0_log.err")


@pytest.mark.parametrize("name", ["a%j", "%Ab", "a\\b", "a\nb"])
def test_a_folder_that_is_read_otherwise_is_refused(fakes: Fakes, tmp_path: Path, name: str) -> None:
    with pytest.raises(LaunchError, match="can't go to"):
        Slurm(LauncherSettings("slurm")).submit([Note(0, str(tmp_path))], tmp_path / name)
    assert not fakes.calls("sbatch")


def test_what_sbatch_refuses_is_said_in_its_words(fakes: Fakes, tmp_path: Path) -> None:
    fakes.says("sbatch", "", "sbatch: error: invalid partition specified: nowhere\nsbatch: error: Batch job failed", 1)
    with pytest.raises(LaunchError, match=r"^Slurm takes no jobs: invalid partition specified: nowhere$"):
        Slurm(LauncherSettings("slurm", partition="nowhere")).submit([Note(0, str(tmp_path))], tmp_path / "submitted")


def test_without_slurm_it_is_said_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch, srun, squeue, scancel is not on this machine's PATH"):
        Slurm(LauncherSettings("slurm"))


#: What squeue says of a job, what accounting says, and what becomes of it.
LOOKS = [
    ("12_0|PENDING|Resources", "", ("waiting", "Resources", False)),
    ("12_0|REQUEUED|None", "", ("waiting", "REQUEUED", False)),
    ("12_0|RUNNING|None", "", ("running", "", False)),
    ("12_0|OUT_OF_MEMORY|OutOfMemory", "", ("gone", "OUT_OF_MEMORY, OutOfMemory", False)),
    ("12_0|CANCELLED|None", "", ("gone", "CANCELLED", True)),
    ("", "CANCELLED by 0|0:0|None", ("gone", "CANCELLED, exit code 0:0", True)),
    ("", "NODE_FAIL|1:0|None", ("gone", "NODE_FAIL, exit code 1:0", False)),
    ("", "", ("gone", "", False)),
]


@pytest.mark.parametrize(("queue", "accounts", "expected"), LOOKS)
def test_how_slurms_answers_are_read(fakes: Fakes, queue: str, accounts: str, expected: tuple[str, str, bool]) -> None:
    fakes.says("squeue", queue)
    fakes.says("sacct", accounts)
    fakes.says("scontrol", "", "slurm_load_jobs error: Invalid job id specified", 1)
    look = Slurm(LauncherSettings("slurm")).look(["12_0"])["12_0"]
    assert (look.state, look.reason, look.cancelled) == expected


def test_a_queue_that_does_not_answer_is_no_death(fakes: Fakes) -> None:
    fakes.says("squeue", "", "slurm_load_jobs error: Unable to contact slurm controller", 1)
    assert Slurm(LauncherSettings("slurm")).look(["12"])["12"].state == "unknown"
    fakes.says("squeue", "", "slurm_load_jobs error: Invalid job id specified", 1)
    fakes.says("sacct", "", "Slurm accounting storage is disabled", 1)
    fakes.says("scontrol", "JobId=12 JobState=FAILED Reason=NonZeroExitCode ExitCode=9:0")
    look = Slurm(LauncherSettings("slurm")).look(["12"])["12"]
    assert (look.state, look.reason) == ("gone", "FAILED, exit code 9:0")
