"""A name always stands for a whole file.

Oracle: the file system after an exception and after a process that died between writing and renaming; the order of
the system calls that POSIX asks for; for weights, safetensors read by its own library.
"""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import coalesce.store
from coalesce.store import files

ROOT = Path(coalesce.store.__file__).parents[2]
WRITERS = {
    "bytes": lambda path: files.write_bytes(path, b"new"),
    "text": lambda path: files.write_text(path, "nëw"),
    "json": lambda path: files.write_json(path, {"new": [1, None]}),
    "parquet": lambda path: files.write_parquet(path, pd.DataFrame({"new": [1]})),
    "csv": lambda path: files.write_csv(path, pd.DataFrame({"new": [1]})),
    "safetensors": lambda path: files.write_safetensors(path, {"new": torch.ones(2)}),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_failed_rename_leaves_the_old_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(source: Path, target: Path) -> None:
        assert Path(source).parent == tmp_path  # a rename across file systems would be a copy
        assert Path(source).stat().st_size > 0
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        WRITERS[kind](path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", WRITERS)
def test_flush_then_rename_then_flush_the_folder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    WRITERS[kind](tmp_path / "file")
    assert calls == ["file", "rename", "folder"]


@pytest.mark.parametrize("existing", [True, False])
def test_a_process_that_dies_before_the_rename(existing: bool, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    if existing:
        path.write_text("old")
    code = """
import os, sys
from pathlib import Path
from coalesce.store.files import write_json
os.replace = lambda source, target: os.kill(os.getpid(), 9)
write_json(Path(sys.argv[1]), {"new": 1})
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, timeout=120)
    assert done.returncode == -9
    assert (path.read_text() == "old") if existing else not path.exists()
    # what is left cannot be taken for a part of anything
    assert all(left.name.startswith(".") and left.suffix == ".tmp" for left in tmp_path.iterdir() if left != path)


@pytest.mark.parametrize("kind", WRITERS)
def test_others_may_read(kind: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path / "file")
    plain = tmp_path / "plain"
    plain.write_text("text")
    assert (tmp_path / "file").stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("kind", WRITERS)
def test_a_folder_that_is_gone_is_the_systems_error(kind: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No such file|non-existent"):
        WRITERS[kind](tmp_path / "gone" / "file")


def test_a_disk_that_is_full_is_the_systems_error(tmp_path: Path) -> None:
    """The disk is the limit that the system sets on a file's size."""
    code = """
import resource, signal, sys
import pandas as pd, torch
from pathlib import Path
from coalesce.store import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
values = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
frame = pd.DataFrame({"a": values.numpy()})
path = Path(sys.argv[1])
for write in (
    lambda: files.write_parquet(path, frame),
    lambda: files.write_csv(path, frame),
    lambda: files.write_safetensors(path, {"a": values}),
    lambda: files.write_bytes(path, b"x" * 10_000),
):
    try:
        write()
    except OSError as error:
        print(error.strerror)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert done.stdout.count("File too large") == 4, done
    assert list(tmp_path.iterdir()) == []


def test_json_round_trip(tmp_path: Path) -> None:
    value = {"lr": 0.1 + 0.2, "seed": 2**63 - 1, "name": "größe", "none": None, "list": [1, 1.0, True], "inf": 1e400}
    files.write_json(tmp_path / "x.json", value)
    back = files.read_json(tmp_path / "x.json")
    assert back == value
    assert [type(item) for item in back["list"]] == [int, float, bool]


def test_weights_round_trip(tmp_path: Path) -> None:
    tied = torch.randn(3, 4)
    state = {
        "weight": tied,
        "tied": tied,
        "view": torch.randn(5, 6).T,
        "half": torch.randn(3).bfloat16(),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 2),
        "frozen": torch.nn.Parameter(torch.ones(2)),
    }
    files.write_safetensors(tmp_path / "x.safetensors", state)
    for back in (files.read_safetensors(tmp_path / "x.safetensors"), load_file(tmp_path / "x.safetensors")):
        assert back.keys() == state.keys()
        for name, tensor in state.items():
            assert back[name].dtype == tensor.dtype
            assert torch.equal(back[name], tensor)


def test_an_equals_sign_in_the_path_is_no_column(tmp_path: Path) -> None:
    folder = tmp_path / "lr=1"
    folder.mkdir()
    files.write_parquet(folder / "x.parquet", pd.DataFrame({"a": [1]}))
    assert list(files.read_parquet(folder / "x.parquet")) == ["a"]


def test_the_store_knows_no_pickle() -> None:
    """By the syntax trees: no module that unpickles or executes, and none of the loaders that would."""
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy", "yaml"}
    calls = {"eval", "exec", "compile", "__import__", "import_module", "read_pickle", "to_pickle"}
    sources = sorted(Path(coalesce.store.__file__).parent.glob("*.py"))
    assert len(sources) >= 6
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
            elif isinstance(node, ast.Name):
                names = {node.id}
            elif isinstance(node, ast.Attribute):
                names = {node.attr}
                if isinstance(node.value, ast.Name) and node.value.id in ("torch", "np", "numpy"):
                    assert node.attr not in ("load", "save"), source
            assert not names & (modules | calls), (source, names)
