"""Every file name of a run folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import unicodedata
from datetime import datetime
from pathlib import Path

from coalesce.errors import Problem

#: A folder name may have 255 bytes on the usual file systems; this leaves room for whatever a user appends.
NAME_BYTES = 100

#: The weights of an experiment that a run keeps.
WHICH = ("best", "last")


def safe_name(name: str) -> str:
    """A sweep's name as the name of one folder: letters, digits, ``.``, ``_`` and ``-``, never empty or hidden.

    >>> safe_name("lr_grid")
    'lr_grid'
    >>> safe_name("../my sweep")
    'my_sweep'
    >>> safe_name("..")
    'sweep'
    """
    name = re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFC", name))
    name = name.encode()[:NAME_BYTES].decode(errors="ignore")
    # a leading dot hides the folder, a leading dash makes it an option of every shell command
    return name.strip("._-") or "sweep"


class RunPaths:
    """The file names of one run folder.

    Args:
        folder: the run folder, ``runs/<sweep>/<time>``. It need not exist.
        job: the number of the job that writes, where several jobs share the folder: its parts and its log get
            names of their own. None: one process writes everything.
    """

    def __init__(self, folder: str | os.PathLike[str], job: int | None = None):
        self.folder = Path(folder)
        self.job = job

    def __repr__(self) -> str:
        return f"RunPaths({str(self.folder)!r})"

    @classmethod
    def create(cls, root: str | os.PathLike[str], name: str, now: datetime | None = None) -> RunPaths:
        """Make a new run folder ``<root>/<name>/<time>``; two runs of the same second get two folders.

        Args:
            root: where runs are kept; made if it is missing.
            name: the sweep's name, any text.
            now: the time to name it after; the present local time if None.

        Raises:
            OSError: the folder cannot be made. ``check_root`` tells beforehand.
        """
        parent = Path(root) / safe_name(name)
        parent.mkdir(parents=True, exist_ok=True)
        stamp = (now or datetime.now()).strftime("%Y-%m-%d_%H-%M-%S")
        for number in itertools.count(1):
            folder = parent / (stamp if number == 1 else f"{stamp}_{number}")
            try:
                # mkdir either makes the folder or fails: asking first whether it exists would leave a gap
                folder.mkdir()
            except FileExistsError:
                continue
            return cls(folder)
        raise AssertionError("unreachable")

    def remove(self) -> None:
        """Take the run folder away, and its sweep's where that is empty then: nothing was run in it."""
        shutil.rmtree(self.folder)
        with contextlib.suppress(OSError):
            # other runs lie there
            self.folder.parent.rmdir()

    @property
    def configuration(self) -> Path:
        """The resolved configuration, YAML."""
        return self.folder / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, device, commit; of each job, where there are several."""
        return self._own("environment", "json")

    @property
    def plan(self) -> Path:
        """Every experiment with its id, values, configuration and cohort; a job's own has those of its share."""
        return self._own("plan", "json")

    @property
    def results(self) -> Path:
        """One row per experiment. It is there if and only if the last process that wrote here came to its end."""
        return self.folder / "results.parquet"

    @property
    def results_csv(self) -> Path:
        """The same for spreadsheets."""
        return self.folder / "results.csv"

    @property
    def history(self) -> Path:
        """Every recorded metric, long."""
        return self.folder / "history.parquet"

    @property
    def log(self) -> Path:
        """Lines with time stamps."""
        return self._own("log", "txt")

    @property
    def weights_folder(self) -> Path:
        """Where final weights are kept."""
        return self.folder / "weights"

    def weights(self, experiment: str, which: str = "last") -> Path:
        """The weights of one experiment: its "last" ones, or its "best".

        Raises:
            ValueError: the id could name a file elsewhere.
        """
        if not re.fullmatch(r"[0-9A-Za-z_]+", experiment):
            raise ValueError(f"{experiment!r} is no experiment id: an id consists of letters and digits")
        suffix = {"last": "", "best": "-best"}[which]
        return self.weights_folder / f"{experiment}{suffix}.safetensors"

    @property
    def study(self) -> Path:
        """Optuna's study, SQLite."""
        return self.folder / "study.db"

    @property
    def retried(self) -> Path:
        """Which experiments were begun once more, and which parts therefore no longer count for them."""
        return self._own("retried", "json")

    def retries(self) -> list[Path]:
        """Such files that exist, of all jobs."""
        found = [RunPaths(self.folder).retried, *self.jobs_folder.glob("retried-*.json")]
        return sorted(path for path in found if path.is_file())

    @property
    def jobs_folder(self) -> Path:
        """What jobs write that is none of the results, and what is known of them."""
        return self.folder / "jobs"

    @property
    def job_record(self) -> Path:
        """How the job was submitted."""
        return self._own("job", "json")

    @property
    def standing(self) -> Path:
        """Where the job stands."""
        return self._own("standing", "json")

    @property
    def submissions(self) -> Path:
        """The folder of submitit, which starts jobs: what it hands to them, and what they print."""
        return self.jobs_folder / "submitit"

    def decisions(self, shape: str) -> Path:
        """What was decided by measuring for a cohort, by the first of its jobs."""
        return self.jobs_folder / f"cohort-{shape}.json"

    def jobs(self) -> list[int]:
        """The numbers of the jobs that were submitted, from the least on."""
        found = (re.fullmatch(r"job-(\d+)\.json", path.name) for path in self.jobs_folder.glob("job-*.json"))
        return sorted(int(match[1]) for match in found if match is not None)

    def _own(self, name: str, suffix: str) -> Path:
        """A file of which each job has one of its own."""
        if self.job is None:
            return self.folder / f"{name}.{suffix}"
        return self.jobs_folder / f"{name}-{self.job}.{suffix}"

    @property
    def journal(self) -> Path:
        """Optuna's study, where several jobs share it."""
        return self.folder / "study.journal"

    @property
    def lock(self) -> Path:
        """Held by the process that writes here."""
        return self.folder / ".lock"

    @property
    def lock_owner(self) -> Path:
        """Which process holds the lock."""
        return self.lock.with_name(f"{self.lock.name}.json")

    @property
    def snapshot_folder(self) -> Path:
        """Where snapshots of the lanes are kept."""
        return self.folder / "snapshots"

    def snapshot(self, number: int, digest: str) -> Path:
        """A snapshot of the lanes.

        Args:
            number: they are counted from 0.
            digest: the checksum of its bytes, in hexadecimal digits.
        """
        return self.snapshot_folder / f"{self._prefix}snapshot-{number:05d}.{digest}.safetensors"

    def snapshots(self) -> list[Path]:
        """The snapshots of this job that exist, oldest first."""
        pattern = rf"{self._prefix}snapshot-\d+\.[^.]*\.safetensors"
        found = [path for path in self.snapshot_folder.glob("*.safetensors") if re.fullmatch(pattern, path.name)]
        return sorted(found, key=lambda path: (self.snapshot_number(path), path.name))

    @staticmethod
    def snapshot_number(path: Path) -> int:
        """The number in a snapshot's name."""
        return int(path.name.partition(".")[0].rpartition("-")[2])

    @staticmethod
    def snapshot_digest(path: Path) -> str:
        """The checksum in a snapshot's name."""
        return path.name.split(".")[1]

    def leftovers(self) -> list[Path]:
        """Temporary files of this job, which a process left that was killed while it wrote them."""
        folders = (
            self.folder,
            self.snapshot_folder,
            self.weights_folder,
            self.folder / "metrics",
            self.folder / "results",
        )
        if self.job is None:
            # the latter are safetensors' own
            return [path for folder in folders for name in (".*.tmp", ".tmp*") for path in folder.glob(name)]
        # another job's may be in use; what is named after no job is left lying, and so is what others write of this one
        own = [path for folder in folders for path in folder.glob(f".{self._prefix}*.tmp")]
        files = (self.plan, self.environment, self.standing)
        return own + [path for file in files for path in self.jobs_folder.glob(f".{file.name}.*.tmp")]

    def metric_part(self, number: int) -> Path:
        """A part of the history."""
        return self._part("metrics", number)

    def result_part(self, number: int) -> Path:
        """A part of the results."""
        return self._part("results", number)

    def metric_parts(self) -> list[Path]:
        """The history's parts that exist, of all jobs, oldest first within a job."""
        return self._parts("metrics")

    def result_parts(self) -> list[Path]:
        """The results' parts that exist, of all jobs, oldest first within a job."""
        return self._parts("results")

    @staticmethod
    def part_number(part: Path) -> int:
        """The number in a part's name."""
        return int(part.stem.rpartition("-")[2])

    @staticmethod
    def next_part(parts: list[Path]) -> int:
        """The number of the part that comes behind these."""
        return 1 + max(map(RunPaths.part_number, parts), default=-1)

    def _part(self, kind: str, number: int) -> Path:
        return self.folder / kind / f"{self._prefix}part-{number:05d}.parquet"

    @property
    def _prefix(self) -> str:
        return "" if self.job is None else f"job-{self.job}-"

    def _parts(self, kind: str) -> list[Path]:
        # temporary files begin with a dot and match neither pattern
        folder = self.folder / kind
        found = [*folder.glob("part-*.parquet"), *folder.glob("job-*-part-*.parquet")]
        return sorted(found, key=lambda part: (self._job_number(part), self.part_number(part)))

    @staticmethod
    def _job_number(part: Path) -> int:
        """The number of the job that wrote a part; -1: there was but one process."""
        return int(part.stem.split("-")[1]) if part.stem.startswith("job-") else -1


def check_root(root: str | os.PathLike[str], key: str) -> list[Problem]:
    """What keeps run folders from being made under ``root``; writes nothing.

    Args:
        root: where runs are to be kept; it need not exist.
        key: the configuration key that names it, for the message.
    """
    rule = ""
    folder = Path(root).absolute()
    if not str(root):
        rule = "must name a folder"
    else:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            rule = f"{str(folder)!r} is a file, so no folder can be made there"
        elif not os.access(folder, os.W_OK | os.X_OK):
            rule = f"the folder {str(folder)!r} cannot be written"
    return [Problem(key, str(root), rule, "a folder that can be written or made")] if rule else []
