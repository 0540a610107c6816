"""A snapshot comes back bit for bit, or not at all.

Oracle: the bytes of the tensors that went in; Python's own comparison for facts; files that are damaged on purpose.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import coalesce
from coalesce.errors import RunFolderError
from coalesce.runner.snapshot import Snapshot
from coalesce.store import snapshots as module
from coalesce.store.paths import RunPaths
from coalesce.store.snapshots import FORMAT, DamagedSnapshot, Snapshots, read_snapshot, write_snapshot

ROOT = Path(coalesce.__file__).parent.parent


def floats(*bits: int) -> Tensor:
    """float32 with these bits."""
    return torch.tensor(list(bits), dtype=torch.int64).to(torch.int32).view(torch.float32)


STACK = torch.arange(12.0).reshape(3, 4)
TENSORS: dict[str, Tensor] = {
    "0-d": torch.tensor(0.1, dtype=torch.float64),
    "bool": torch.tensor([True, False]),
    "64 bits": torch.tensor([-(2**63), 2**63 - 1, 2**53 + 1]),
    "unsigned": torch.tensor([2**64 - 1], dtype=torch.uint64),
    "bfloat16": torch.tensor([1.0, 3.14, -0.0], dtype=torch.bfloat16),
    "half": torch.tensor([[65504.0]], dtype=torch.float16),
    "empty": torch.empty(0, 3),
    "empty too": torch.empty(2, 0, dtype=torch.int64),
    "NaN payloads": floats(0x7FC00001, 0x7F800001, -0x400000, 0x7F800000, -0x80000000, 1),
    "complex": torch.tensor([1 + 2j, complex(math.nan, -math.inf)]),
    "complex128": torch.tensor([0.1 + 0.2j], dtype=torch.complex128),
    "conjugate": torch.tensor([[1 + 2j, 3 - 1j]]).conj(),
    "a lane of a stack": STACK[1],
    "another lane": STACK[2],
    "a column": STACK[:, 1],
    "transposed": STACK.T,
    "expanded": torch.tensor(3.0).expand(2, 2),
    "the same memory": STACK,
    "parameter": torch.nn.Parameter(torch.ones(2)),
}
FACTS: dict[str, Any] = {
    "floats": [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, math.inf, -math.inf],
    "integers": [2**63 - 1, -(2**80)],
    "none": None,
    "true": True,
    "größe": {"": [], "nested": [{"a": {}}]},
}


def same(left: Tensor, right: Tensor) -> bool:
    """Whether shape, dtype and every bit agree."""

    def raw(tensor: Tensor) -> bytes:
        tensor = tensor.detach().resolve_conj().contiguous()
        return bytes(tensor.flatten().view(torch.uint8).numpy()) if tensor.numel() else b""

    return left.shape == right.shape and left.dtype == right.dtype and raw(left) == raw(right)


def snapshot(number: int = 0) -> Snapshot:
    return Snapshot({"number": number}, {"id/w": torch.full((50,), float(number)), "id/step": torch.tensor(number)})


def numbers(store: Snapshots) -> list[int]:
    return [RunPaths.snapshot_number(path) for path in store.paths.snapshots()]


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    store = Snapshots(RunPaths(tmp_path))
    store.write(Snapshot({}, {f"0a1b/{name}": TENSORS[name]}))
    back = store.newest()
    assert back is not None
    assert list(back.tensors) == [f"0a1b/{name}"]
    assert same(back.tensors[f"0a1b/{name}"], TENSORS[name])


def test_all_of_them_together(tmp_path: Path) -> None:
    write_snapshot(paths := RunPaths(make(tmp_path)), 0, Snapshot(FACTS, TENSORS))
    back = read_snapshot(paths.snapshots()[0])
    assert back.tensors.keys() == TENSORS.keys()
    assert all(same(back.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert back.facts == FACTS
    assert math.copysign(1, back.facts["floats"][3]) == -1
    # views of one memory, of which each is written alone
    assert torch.equal(STACK, torch.arange(12.0).reshape(3, 4))


def make(folder: Path) -> Path:
    RunPaths(folder).snapshot_folder.mkdir()
    return folder


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_facts_come_back(tmp_path_factory: pytest.TempPathFactory, facts: dict[str, Any]) -> None:
    store = Snapshots(RunPaths(tmp_path_factory.mktemp("run")))
    store.write(Snapshot(facts, {}))
    back = store.newest()
    assert back is not None
    assert repr(back.facts) == repr(facts)


def test_nan_in_facts(tmp_path: Path) -> None:
    store = Snapshots(RunPaths(tmp_path))
    store.write(Snapshot({"best": math.nan}, {}))
    back = store.newest()
    assert back is not None
    assert math.isnan(back.facts["best"])


@pytest.mark.parametrize(
    ("facts", "place"),
    [
        ({"lanes": {3: "a"}}, "facts.lanes: the key 3"),
        ({"a": [torch.ones(1)]}, "facts.a.0: .*Tensor"),
        ({"a": {"b": {1}}}, "facts.a.b: .*set"),
        ({"a": b"x"}, "facts.a: .*bytes"),
    ],
)
def test_facts_that_would_change_are_refused(facts: Any, place: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=place):
        Snapshots(RunPaths(tmp_path)).write(Snapshot(facts, {}))
    assert Snapshots(RunPaths(tmp_path)).newest() is None


def test_two_are_kept(tmp_path: Path) -> None:
    store = Snapshots(RunPaths(tmp_path))
    assert store.newest() is None
    for number in range(5):
        store.write(snapshot(number))
        assert numbers(store) == [number - 1, number][-number - 1 :]
    # another process goes on counting, and its first leaves the last of the one before
    other = Snapshots(RunPaths(tmp_path))
    other.write(snapshot(5))
    assert numbers(other) == [4, 5]
    assert not [path for path in store.paths.snapshot_folder.iterdir() if path not in store.paths.snapshots()]


DAMAGE = {
    "cut in half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one byte long": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "another file": lambda data: b"nothing of the kind",
    "a bit of the data": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "a bit of the header": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "a bit of a fact": lambda data: data.replace(b"number", b"numbes"),
    "a huge header": lambda data: struct.pack("<Q", 2**60) + data[8:],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_told_and_the_one_before_is_used(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Snapshots(RunPaths(tmp_path))
    for number in range(2):
        store.write(snapshot(number))
    last = store.paths.snapshots()[-1]
    data = last.read_bytes()
    assert DAMAGE[kind](data) != data
    last.write_bytes(DAMAGE[kind](data))
    with caplog.at_level(logging.WARNING, "coalesce"):
        back = Snapshots(RunPaths(tmp_path)).newest()
    assert back is not None
    assert back.facts == {"number": 0}
    (record,) = caplog.records
    assert str(last) in record.getMessage()
    assert "is damaged" in record.getMessage()
    assert "the one before is tried" in record.getMessage()
    with pytest.raises(DamagedSnapshot):
        read_snapshot(last)


@pytest.mark.parametrize("kind", DAMAGE)
def test_none_left_is_the_start(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Snapshots(RunPaths(tmp_path))
    for number in range(2):
        store.write(snapshot(number))
    for path in store.paths.snapshots():
        path.write_bytes(DAMAGE[kind](path.read_bytes()))
    assert store.newest() is None
    assert len(caplog.records) == 2
    assert "there is none before: unfinished experiments start anew" in caplog.records[-1].getMessage()
    assert len(store.damaged) == 2


def test_the_sound_one_outlives_the_damaged_one(tmp_path: Path) -> None:
    store = Snapshots(RunPaths(tmp_path))
    for number in range(2):
        store.write(snapshot(number))
    store.paths.snapshots()[-1].write_bytes(b"")
    resumed = Snapshots(RunPaths(tmp_path))
    assert resumed.newest() is not None
    resumed.write(snapshot(2))
    # not 1, which is newer than 0 but of no use
    assert numbers(resumed) == [0, 2]
    resumed.write(snapshot(3))
    assert numbers(resumed) == [2, 3]


def write_by_hand(paths: RunPaths, number: int, metadata: dict[str, str] | None, data: bytes | None = None) -> Path:
    """A file whose name has the right checksum."""
    paths.snapshot_folder.mkdir(exist_ok=True)
    temporary = paths.snapshot_folder / "by hand"
    if data is None:
        save_file({"x": torch.ones(2)}, temporary, metadata)
    else:
        temporary.write_bytes(data)
    return temporary.rename(paths.snapshot(number, hashlib.sha256(temporary.read_bytes()).hexdigest()))


@pytest.mark.parametrize(
    ("metadata", "by"),
    [
        ({"format": "coalesce-snapshot-2", "coalesce": "9.1", "facts": "{}"}, "written by coalesce 9.1"),
        (None, "not written by coalesce"),
    ],
)
def test_another_version_is_an_error_and_no_start_from_the_beginning(
    metadata: dict[str, str] | None, by: str, tmp_path: Path
) -> None:
    store = Snapshots(RunPaths(tmp_path))
    store.write(snapshot(0))
    write_by_hand(store.paths, 1, metadata)
    with pytest.raises(RunFolderError, match=f"{by}.*{FORMAT}.*Resume with the version that wrote it"):
        store.newest()


def test_bytes_that_are_no_safetensors_are_damaged_though_their_checksum_is_right(tmp_path: Path) -> None:
    store = Snapshots(RunPaths(tmp_path))
    store.write(snapshot(0))
    write_by_hand(store.paths, 1, None, pickle.dumps({"x": 1}))
    back = store.newest()
    assert back is not None
    assert back.facts == {"number": 0}


def test_a_disk_that_is_full_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Snapshots(RunPaths(tmp_path))
    store.write(snapshot(0))

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    for name, holder in (("fsync", os), ("replace", os), ("save_safetensors", module)):
        with monkeypatch.context() as patched:
            patched.setattr(holder, name, full)
            with pytest.raises(OSError, match="No space left"):
                store.write(snapshot(1))
        assert numbers(store) == [0]
        assert [path.name[0] for path in store.paths.snapshot_folder.iterdir()] == ["s"]
    back = store.newest()
    assert back is not None
    assert back.facts == {"number": 0}


def test_a_process_that_dies_while_it_writes(tmp_path: Path) -> None:
    store = Snapshots(RunPaths(tmp_path))
    store.write(snapshot(0))
    code = f"""
import os, sys
sys.path[:0] = {[str(ROOT), str(Path(__file__).parent)]}
from pathlib import Path
from test_store_snapshots import snapshot
from coalesce.store.paths import RunPaths
from coalesce.store.snapshots import Snapshots
os.replace = lambda source, target: os.kill(os.getpid(), 9)
Snapshots(RunPaths(Path(sys.argv[1]))).write(snapshot(1))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120)
    assert done.returncode == -9
    (left,) = store.paths.leftovers()
    assert left.name.startswith(".snapshot")
    back = store.newest()
    assert back is not None
    assert back.facts == {"number": 0}


def test_a_header_that_nobody_can_read_is_not_written(tmp_path: Path) -> None:
    store = Snapshots(RunPaths(tmp_path))
    store.write(snapshot(0))
    with pytest.raises(Exception, match=r"(?i)header"):
        store.write(Snapshot({"text": "x" * 110_000_000}, {}))
    assert numbers(store) == [0]


def test_each_job_has_its_own(tmp_path: Path) -> None:
    for job in (None, 1, 11):
        Snapshots(RunPaths(tmp_path, job)).write(snapshot(job or 0))
    for job in (None, 1, 11):
        back = Snapshots(RunPaths(tmp_path, job)).newest()
        assert back is not None
        assert back.facts == {"number": job or 0}


def test_what_is_read_is_not_the_file_itself(tmp_path: Path) -> None:
    store = Snapshots(RunPaths(tmp_path))
    path = store.write(snapshot(7))
    back = store.newest()
    assert back is not None
    os.truncate(path, 0)
    assert back.tensors["id/w"].tolist() == [7.0] * 50
    back.tensors["id/w"].zero_()


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Snapshots(RunPaths(tmp_path))
    path = store.write(Snapshot({"a": 1}, TENSORS))

    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert store.newest() is not None
    # and anybody can look into it
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["facts"]) == {"a": 1}
