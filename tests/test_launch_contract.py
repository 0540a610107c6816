"""This process and local processes, held to the contract of launchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coalesce.errors import LaunchError
from coalesce.launch.base import Launcher, ThisProcess
from coalesce.launch.local import Local, devices
from launcher_contract import Contract, Note, gone, noted, wait_for


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit pickles a class by its name, and a job's process must find it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


class TestThisProcess(Contract):
    own_process = False

    @pytest.fixture
    def launcher(self) -> Iterator[Launcher]:
        before = signal.getsignal(signal.SIGTERM)
        yield ThisProcess()
        signal.signal(signal.SIGTERM, before)


class TestLocal(Contract):
    @pytest.fixture
    def launcher(self) -> Launcher:
        return Local(cuda=False)


def test_what_a_work_raises_here_ends_all(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ValueError, match="it was to fail"):
            ThisProcess().submit([Note(0, str(tmp_path), fails=True), Note(1, str(tmp_path))], tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted(tmp_path, 1) == {}


def test_each_local_job_sees_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6,7")
    assert devices() == ["4", "6", "7"]
    launcher = Local()
    one, two = launcher.submit([Note(number, str(tmp_path), wait_s=600) for number in (0, 1)], tmp_path / "submitted")
    wait_for(lambda: bool(noted(tmp_path, 0)) and bool(noted(tmp_path, 1)))
    assert [noted(tmp_path, number)["visible"] for number in (0, 1)] == ["4", "6"]
    with pytest.raises(LaunchError, match="2 jobs for 1 free devices of 4, 6, 7"):
        launcher.submit([Note(2, str(tmp_path)), Note(3, str(tmp_path))], tmp_path / "submitted")
    launcher.cancel([one.id])
    wait_for(lambda: gone(launcher, [one]))
    # a job that is started again gets what is free by then
    (again,) = launcher.submit([Note(4, str(tmp_path))], tmp_path / "submitted")
    wait_for(lambda: gone(launcher, [again]))
    assert noted(tmp_path, 4)["visible"] == "4"
    launcher.cancel([two.id])
    wait_for(lambda: gone(launcher, [two]))


def test_devices_of_a_machine_with_none_and_of_one_that_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert devices() == []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert devices() == ["0", "1"]


def test_local_jobs_outlive_who_started_them(tmp_path: Path) -> None:
    """And the terminal's Ctrl-C, which goes to all processes of its group, is not theirs."""
    code = f"""
import os, signal, sys, time
from pathlib import Path
from launcher_contract import Note
from coalesce.launch.local import Local
(only,) = Local(cuda=False).submit([Note(0, {str(tmp_path)!r}, wait_s=600)], Path({str(tmp_path / "submitted")!r}))
print(only.id, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as first:
        assert first.stdout is not None
        try:
            name = first.stdout.readline().strip()
            wait_for(lambda: bool(noted(tmp_path, 0)))
            os.killpg(first.pid, signal.SIGINT)
            first.wait(60)
        finally:
            first.kill()
    launcher = Local(cuda=False)
    assert launcher.look([name])[name].state == "running"
    launcher.cancel([name])
    wait_for(lambda: launcher.look([name])[name].state == "gone")
    assert noted(tmp_path, 0)["told"] == [signal.SIGTERM]


def test_a_process_of_somebody_else_is_no_job() -> None:
    name = str(psutil.Process().pid)
    assert Local(cuda=False).look([name])[name].state == "gone"
