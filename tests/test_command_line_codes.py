"""Exit codes of ``python -m coalesce``, and what becomes of faults, interrupts and the environment.

Oracle: what DESIGN.md and the guide promise of exit codes; one command runs as a real process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import coalesce
import coalesce.__main__ as command_line
from cli_for_tests import CommandLine
from coalesce.configuration.hydra import Order
from coalesce.errors import ConfigError, Problem, RunFolderError, TaskError
from coalesce.store.signals import Interrupted

ROOT = Path(coalesce.__file__).parent.parent


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, monkeypatch, capsys)


def codes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: BaseException | int) -> int:
    def run_order(order: Order) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "run_order", run_order)
    monkeypatch.setattr(sys, "argv", ["coalesce"])
    return command_line.main()


@pytest.mark.parametrize(
    ("outcome", "code", "says"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (ConfigError([Problem("batch_size", 9, "is larger than the data")]), 2, "batch_size=9: is larger"),
        (TaskError("my_task.py, line 3: oops"), 1, "my_task.py, line 3: oops"),
    ],
)
def test_exit_codes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: Exception | int,
    code: int,
    says: str,
) -> None:
    assert codes(monkeypatch, tmp_path, outcome) == code
    printed = capsys.readouterr()
    assert says in printed.err
    assert "Traceback" not in printed.err


def test_what_only_the_data_show_has_its_source_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [
        Problem("batch_size", 64, "too large"),
        Problem("task.x", 1, "odd"),
        Problem("seed", 0, "odd", source="x"),
    ]
    assert codes(monkeypatch, tmp_path, ConfigError(problems)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].endswith("config.yaml)")
    assert lines[2].endswith("odd")
    assert lines[3].endswith("(from x)")


def test_a_fault_of_our_own_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a bug"):
        codes(monkeypatch, tmp_path, ValueError("a bug"))


def test_an_interrupt_ends_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(order: Order) -> int:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "run_order", interrupted)
    monkeypatch.setattr(sys, "argv", ["coalesce"])
    assert command_line.main() == 130


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 75)])
def test_a_signal_is_an_exit_code(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert codes(monkeypatch, tmp_path, Interrupted(name)) == code
    assert capsys.readouterr().err == f"{name} has ended the run\n"


def test_a_run_folder_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert codes(monkeypatch, tmp_path, RunFolderError("the run folder is full")) == 1
    assert capsys.readouterr().err == "coalesce: the run folder is full\n"


def test_the_environment_is_left_as_it_was(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    cli.refused("optimizer=adamz")
    cli.order()
    assert "HYDRA_FULL_ERROR" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [(["optimizer.lr=fast"], 2, "must be a number"), (["-m", "seed=1,2"], 2, "python -m coalesce 'sweep.params=")],
)
def test_as_a_process(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "coalesce", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert says in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
