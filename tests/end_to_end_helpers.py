"""A task in a folder of the user's own, and the command line in that folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import coalesce
import coalesce.__main__ as command_line

ROOT = Path(coalesce.__file__).parent.parent

TASK = """
import coalesce
import torch
from torch import nn
from torch.nn import functional as F


class Mine(coalesce.Task):
    def __init__(self, hidden: int = 8, scale: float = 1.0, dropout: float = 0.0):
        self.hidden, self.scale, self.dropout = hidden, scale, dropout

    def data(self):
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        y = x.sum(1).gt(0).long()
        return coalesce.Data(train=(x[:40], y[:40]), val=(x[40:], y[40:]))

    def model(self):
        return nn.Sequential(
            nn.Linear(4, self.hidden), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(self.hidden, 2)
        )

    def loss(self, model, batch):
        x, y = batch
        return self.scale * F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"loss": F.cross_entropy(model(x), y), "accuracy": (model(x).argmax(1) == y).float().mean()}


class Picky(Mine):
    def model(self):
        if self.scale > 2:
            raise ValueError("no such model")
        return super().model()


class Raises(Mine):
    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y[:3])


class Stateless(Mine):
    def data(self):
        raise FileNotFoundError("nothing.csv")


class Measures(Mine):
    def metrics(self, model, batch):
        return {"accuracy": model(batch[0]).shape[7]}


class Constructs(Mine):
    def __init__(self, hidden: int = 8):
        raise OSError("[red]no[/red] constructor")


class Labels(Mine):
    def data(self):
        x = torch.zeros(40, 4)
        y = torch.zeros(40, dtype=torch.long)
        y[33] = 2
        return coalesce.Data(train=(x, y), val=(x, y))


class NotFinite(Mine):
    def data(self):
        x = torch.zeros(40, 4)
        x[7, 1] = torch.nan
        return coalesce.Data(train=(x, torch.zeros(40, dtype=torch.long)))


class Exits(Mine):
    def data(self):
        raise SystemExit("no data in this folder")


class Pair(coalesce.Task):
    def data(self):
        return coalesce.Data(train=(torch.ones(4, 2), torch.zeros(4, 1)), val=(torch.ones(2, 2), torch.zeros(2, 1)))

    def model(self):
        return nn.Linear(2, 1)

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        return {"loss": self.loss(model, batch)}
"""

#: A quick run of the user's task.
QUICK = ["task=custom", "steps=20", "batch_size=8", "trainer.every=5", "trainer.evaluate_every=10"]
EAGER = "trainer.compile=false"
ALONE = "trainer.stack=false"


class Folder:
    """A user's folder with ``mytask.py`` in it, and the command run there."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        self.path = path
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, name: str, *arguments: str, quick: bool = True) -> tuple[int, str, str]:
        """Train the class of this name; exit code, stdout, stderr."""
        return self.command(*self.arguments(name, *arguments, quick=quick))

    def command(self, *arguments: str) -> tuple[int, str, str]:
        """Give the command with these arguments alone; exit code, stdout, stderr."""
        self._monkeypatch.setattr(sys, "argv", ["coalesce", *arguments])
        code = command_line.main()
        return (code, *self._capsys.readouterr())

    @staticmethod
    def arguments(name: str, *arguments: str, quick: bool = True) -> list[str]:
        return [*(QUICK if quick else ()), f"task._target_=mytask.{name}", *arguments]

    def process(self, name: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """The same as a process of its own, its output in pipes."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **options}
        command = [sys.executable, "-m", "coalesce", *self.arguments(name, *arguments)]
        return subprocess.Popen(
            command, cwd=self.path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def files(self) -> set[str]:
        """Everything below the folder that was not there at the start."""
        found = {str(p.relative_to(self.path)) for p in self.path.rglob("*") if "__pycache__" not in p.parts}
        return found - {"mytask.py"}

    def run(self) -> Path:
        """The only run folder."""
        (found,) = self.path.glob("runs/*/*")
        return found


@contextmanager
def user_folder(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Folder]:
    """A folder with ``mytask.py``, in which this process works meanwhile."""
    (path / "mytask.py").write_text(TASK)
    monkeypatch.chdir(path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield Folder(path, capsys, monkeypatch)
    sys.modules.pop("mytask", None)
