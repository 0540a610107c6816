"""The command line run in this process, up to the point where a plan would be made."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import coalesce.__main__ as command_line
from coalesce.configuration.hydra import Order


@dataclass(frozen=True)
class Outcome:
    """What a command did.

    Args:
        code: its exit code.
        order: what it would have run; None if it was refused or only showed something.
        out, err: what it printed.
    """

    code: int
    order: Order | None
    out: str
    err: str


class CommandLine:
    """Calls ``coalesce.__main__.main`` in an empty folder; the folder must stay as it was."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.chdir(folder)
        # hydra appends nothing here, `main` appends the folder: both are forgotten after the test
        monkeypatch.setattr(sys, "path", list(sys.path))

    def __call__(self, *arguments: str, program: str = "coalesce/__main__.py") -> Outcome:
        orders: list[Order] = []

        def keep(order: Order) -> int:
            orders.append(order)
            return 0

        self._monkeypatch.setattr(command_line, "run_order", keep)
        self._monkeypatch.setattr(sys, "argv", [program, *arguments])
        before = self._files()
        try:
            code = command_line.main()
        except SystemExit as stop:
            # argparse's own: --version, an unknown flag
            code = stop.code if isinstance(stop.code, int) else 0
        assert self._files() == before, "nothing may be written before a run"
        printed = self._capsys.readouterr()
        return Outcome(code, orders[0] if orders else None, printed.out, printed.err)

    def order(self, *arguments: str) -> Order:
        """What a command that must succeed would run."""
        outcome = self(*arguments)
        assert outcome.code == 0, outcome.err
        assert outcome.order is not None
        return outcome.order

    def refused(self, *arguments: str) -> str:
        """What a command that must be refused says."""
        outcome = self(*arguments)
        assert outcome.code == 2, outcome
        assert outcome.order is None
        assert "Traceback" not in outcome.err
        return outcome.err

    def write(self, name: str, text: str) -> Path:
        """Write a file of the user's; leading blank lines go."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"))
        return path

    def _files(self) -> set[str]:
        return {str(p) for p in self.folder.rglob("*") if "__pycache__" not in p.parts}
