"""``python -m coalesce resume=FOLDER launcher=...``: a run goes on elsewhere than it began.

Oracle: what the same group and the same keys make of a new run; everything else of the order as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import coalesce.__main__ as command_line
from cli_for_tests import CommandLine
from coalesce.configuration.hydra import Order
from coalesce.configuration.resume import launcher_of, overrides_of, read_resumed
from coalesce.launch.settings import LauncherSettings
from coalesce.store.paths import RunPaths
from coalesce.store.resume import Reopened, reopen
from coalesce.store.writer import RunWriter
from run_fakes import plan

pytest.importorskip("submitit", reason="the launchers that start jobs need submitit")


class Resumed(CommandLine):
    """The command line with ``resume=``, up to the point where a plan would be made."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        super().__init__(folder, monkeypatch, capsys)
        self.begun = self.order("sweep.params={seed: [0, 1]}")
        self.paths = RunPaths(folder / "run")
        self.paths.folder.mkdir()
        self.found: list[Order] = []
        self._configure(self.begun.yaml)

        def resume(config: DictConfig) -> int:
            node = HydraConfig.get()
            self.found.append(read_resumed(self.back(), overrides_of(node)))
            return 0

        monkeypatch.setattr(command_line, "_resume", resume)

    def _configure(self, text: str) -> None:
        writer = RunWriter(self.paths, text)
        writer.started(plan(self.begun.experiments))
        writer.closed(None)

    def stored(self, launcher: object) -> None:
        """Let the folder's configuration have this launcher."""
        config = OmegaConf.create(self.begun.yaml)
        assert isinstance(config, DictConfig)
        config["launcher"] = launcher
        self._configure(OmegaConf.to_yaml(config))

    def back(self) -> Reopened:
        return reopen(self.paths)

    def resumed(self, *arguments: str) -> Order:
        assert self("resume=run", *arguments).code == 0
        order = self.found.pop()
        assert order.experiments == self.begun.experiments
        assert (order.trainer, order.keys) == (self.begun.trainer, self.begun.keys)
        return order


def launcher_node(order: Order) -> Any:
    """What a run folder keeps of where it was trained."""
    config = OmegaConf.create(order.yaml)
    assert isinstance(config, DictConfig)
    return config["launcher"]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Resumed:
    return Resumed(tmp_path, monkeypatch, capsys)


def test_a_run_goes_on_elsewhere(cli: Resumed) -> None:
    assert cli.resumed().launcher == launcher_of(cli.back()) == LauncherSettings()
    order = cli.resumed("launcher=slurm", "launcher.jobs=4", "launcher.nice=3", "launcher.time=1:00:00")
    assert order.launcher == LauncherSettings("slurm", jobs=4, time=60, sbatch={"nice": 3})
    # and from there in its turn
    cli.stored(launcher_node(order))
    assert cli.resumed().launcher == launcher_of(cli.back()) == order.launcher
    assert cli.resumed("launcher.jobs=2").launcher.jobs == 2
    assert cli.resumed("launcher=local").launcher == LauncherSettings("local")
    assert cli.resumed("launcher=process").launcher == LauncherSettings()


def test_a_users_own_option(cli: Resumed) -> None:
    cli.write("my/launcher/ours.yaml", "defaults:\n  - slurm\npartition: ${schedule.name}\njobs: ${batch_size}\n")
    order = cli.resumed("--config-dir", "my", "launcher=ours", "launcher.cpus=3")
    # interpolations are the run's own
    assert order.launcher == LauncherSettings("slurm", partition="cosine", jobs=64, cpus=3)
    cli.write("my/launcher/ours.yaml", "name: slurm\nretries: -1\njobs: 0\n")
    outcome = cli("--config-dir", "my", "resume=run", "launcher=ours", "launcher.partiton=x", "launcher.jobs=none")
    assert outcome.code == 2
    assert "launcher.retries=-1: out of range; valid: an integer, at least 0 (from my/" in outcome.err
    assert "did you mean 'partition'? (from command line)" in outcome.err
    assert "2 problems" in outcome.err


def test_what_was_called_local_is_this_process(cli: Resumed) -> None:
    cli.stored({"name": "local"})
    assert cli.resumed().launcher == launcher_of(cli.back()) == LauncherSettings()
    assert cli.resumed("launcher=local").launcher == LauncherSettings("local")
    # what was launched in jobs has records of them
    cli.paths.jobs_folder.mkdir()
    RunPaths(cli.paths.folder, 0).job_record.write_text("{}")
    assert cli.resumed().launcher == launcher_of(cli.back()) == LauncherSettings("local")


def test_a_local_launcher_has_all_of_its_keys(cli: Resumed) -> None:
    cli.stored(launcher_node(cli.order("launcher=local")))
    assert cli.resumed().launcher == launcher_of(cli.back()) == LauncherSettings("local")


def test_a_folder_without_a_launcher(cli: Resumed) -> None:
    cli.stored(None)
    assert cli.resumed().launcher == launcher_of(cli.back()) == LauncherSettings()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("launcher=slrum", "Did you mean launcher=slurm?"),
        ("~launcher", "launcher=None: a run that goes on keeps"),
        ("launcher.jobs=3", "launcher.jobs=3: unknown key for launcher=process"),
        ("trainer=default", "trainer='default': a run that goes on keeps the options that it chose"),
        ("optimizer=adamw", "optimizer='adamw': a run that goes on keeps the options that it chose"),
    ],
)
def test_overrides_that_are_refused(override: str, says: str, cli: Resumed) -> None:
    outcome = cli("resume=run", override)
    assert outcome.code == 2
    assert says in outcome.err
