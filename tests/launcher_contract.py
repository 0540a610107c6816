"""What every launcher keeps to. `test_launch_contract.py` holds this process and local processes to it, and
`cluster/test_launch_contract.py` Slurm.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from coalesce.launch.base import Launcher, Submitted


@dataclass(frozen=True)
class Note:
    """Work that writes down that it was done, where, and with which environment.

    Args:
        number: the job's.
        folder: gets ``<number>.json``.
        wait_s: seconds that it takes; SIGTERM ends it before, and is written down.
        fails: raise when it is done.
    """

    number: int
    folder: str
    wait_s: float = 0.0
    fails: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def within(self, environment: Mapping[str, str]) -> Note:
        return replace(self, environment={**self.environment, **environment})

    def __call__(self) -> None:
        os.environ.update(self.environment)
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        self.write("begun", told)
        until = time.monotonic() + self.wait_s
        while time.monotonic() < until and not told:
            time.sleep(0.05)
        self.write("done", told)
        if self.fails:
            raise ValueError("it was to fail")

    def write(self, state: str, told: Sequence[int]) -> None:
        seen = {
            "state": state,
            "pid": os.getpid(),
            "told": list(told),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "given": os.environ.get("GIVEN_TO_WORK"),
        }
        file = Path(self.folder) / f"{self.number}.json"
        file.with_suffix(".tmp").write_text(json.dumps(seen))
        file.with_suffix(".tmp").replace(file)


def noted(folder: Path, number: int) -> dict[str, object]:
    """What a `Note` has written; empty if nothing yet."""
    file = folder / f"{number}.json"
    found: dict[str, object] = json.loads(file.read_text()) if file.exists() else {}
    return found


def wait_for(what: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until something is so."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.1)


def gone(launcher: Launcher, submitted: Sequence[Submitted]) -> bool:
    """Whether none of the jobs is there any more."""
    looks = launcher.look([one.id for one in submitted])
    return all(looks[one.id].state == "gone" for one in submitted)


class Contract:
    """The tests. A subclass has the fixture `launcher`, and says whether jobs have processes of their own."""

    own_process = True

    def test_each_work_is_done_once(self, launcher: Launcher, tmp_path: Path) -> None:
        works = [Note(number, str(tmp_path)) for number in (0, 3)]
        submitted = launcher.submit(works, tmp_path / "submitted")
        assert len({one.id for one in submitted}) == 2
        wait_for(lambda: gone(launcher, submitted))
        found = [noted(tmp_path, number) for number in (0, 3)]
        assert [one["state"] for one in found] == ["done", "done"]
        pids = {one["pid"] for one in found}
        assert (pids == {os.getpid()}) is not self.own_process
        assert len(pids) == (2 if self.own_process else 1)

    def test_a_folder_with_a_space_and_quotes(self, launcher: Launcher, tmp_path: Path) -> None:
        folder = tmp_path / """a folder's "name" """.strip()
        folder.mkdir()
        submitted = launcher.submit([Note(0, str(folder))], folder / "submitted")
        wait_for(lambda: gone(launcher, submitted))
        assert noted(folder, 0)["state"] == "done"

    def test_variables_are_set_first(self, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GIVEN_TO_WORK", "5")
        (only,) = launcher.submit([Note(0, str(tmp_path)).within({"GIVEN_TO_WORK": "7"})], tmp_path / "submitted")
        wait_for(lambda: gone(launcher, [only]))
        assert noted(tmp_path, 0)["given"] == "7"

    def test_running_then_gone(self, launcher: Launcher, tmp_path: Path) -> None:
        if not self.own_process:
            return
        (only,) = launcher.submit([Note(0, str(tmp_path), wait_s=600)], tmp_path / "submitted")
        wait_for(lambda: bool(noted(tmp_path, 0)))
        assert launcher.look([only.id])[only.id].state == "running"
        launcher.cancel([only.id])
        wait_for(lambda: gone(launcher, [only]))
        # it was told, and came to its own end
        assert noted(tmp_path, 0)["told"] == [signal.SIGTERM]
        launcher.cancel([only.id])

    def test_what_a_job_prints_is_kept(self, launcher: Launcher, tmp_path: Path) -> None:
        if not self.own_process:
            return
        (only,) = launcher.submit([Note(0, str(tmp_path), fails=True)], tmp_path / "submitted")
        wait_for(lambda: gone(launcher, [only]))
        assert "ValueError: it was to fail" in Path(only.log).read_text()

    def test_of_nothing_there_is_nothing_to_say(self, launcher: Launcher) -> None:
        assert launcher.look([]) == {}
        launcher.cancel([])
