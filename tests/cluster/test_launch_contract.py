"""Slurm, held to the contract of launchers, on a real one. `pytest -m cluster -n 0` runs it (conftest.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.slurm import Cluster
from coalesce.errors import LaunchError
from coalesce.launch.base import Launcher
from coalesce.launch.settings import LauncherSettings
from coalesce.launch.slurm import Slurm
from launcher_contract import Contract, Note, gone, noted, wait_for

pytestmark = pytest.mark.cluster


class TestSlurm(Contract):
    @pytest.fixture
    def launcher(self, slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Launcher:
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        return Slurm(LauncherSettings("slurm", time=10))

    def test_a_folder_with_a_percent_sign(self, launcher: Launcher, tmp_path: Path) -> None:
        """sbatch and srun would read it as a pattern."""
        folder = tmp_path / "100% it's %x %"
        folder.mkdir()
        works = [Note(number, str(folder)) for number in (0, 1, 2)]
        # one that is submitted alone, and an array
        submitted = [*launcher.submit(works[:1], folder / "a"), *launcher.submit(works[1:], folder / "b")]
        wait_for(lambda: gone(launcher, submitted))
        assert [noted(folder, number)["state"] for number in (0, 1, 2)] == ["done"] * 3
        for one in submitted:
            assert Path(one.log).is_file(), [*folder.rglob("*")]
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]

    def test_a_folder_that_submitit_would_read_otherwise(self, launcher: Launcher, tmp_path: Path) -> None:
        with pytest.raises(LaunchError, match="'%j'"):
            launcher.submit([Note(0, str(tmp_path))], tmp_path / "50%jobs")
