"""Snapshots of a run: one safetensors file each, whose name holds the checksum of every byte in it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coalesce.errors import RunFolderError
from coalesce.runner.snapshot import Snapshot
from coalesce.store.environment import version
from coalesce.store.files import atomic, save_safetensors
from coalesce.store.paths import RunPaths

logger = logging.getLogger("coalesce")

#: What the files of this version look like. Another format is an error and no reason to start anew.
FORMAT = "coalesce-snapshot-1"

#: So many snapshots are kept: should the last one be damaged, the run goes on from the one before.
KEPT = 2


class DamagedSnapshot(Exception):
    """A file is not what was written."""


class Snapshots:
    """The snapshots of one run folder.

    Args:
        paths: the run folder.

    Attributes:
        damaged: the snapshots that `newest` could not use, and why.
    """

    def __init__(self, paths: RunPaths):
        self.paths = paths
        self.damaged: dict[Path, str] = {}
        self._last: Path | None = None

    def newest(self) -> Snapshot | None:
        """The last snapshot that is whole. Each one that is damaged is told as a warning of the log.

        Returns:
            None: there is none, the run goes on from its start.

        Raises:
            RunFolderError: a snapshot is whole, and of a version that this one cannot read.
            OSError: a file cannot be read at all.
        """
        found = self.paths.snapshots()
        for path in reversed(found):
            try:
                snapshot = read_snapshot(path)
            except DamagedSnapshot as error:
                self.damaged[path] = str(error)
                rest = len(found) - len(self.damaged)
                logger.warning(
                    "the snapshot %s is damaged (%s); %s",
                    path,
                    error,
                    "the one before is tried" if rest else "there is none before: unfinished experiments start anew",
                )
            else:
                self._last = path
                return snapshot
        return None

    def write(self, snapshot: Snapshot) -> Path:
        """Write one more snapshot, and remove all but it and the last one that is known to be whole.

        Raises:
            OSError: the disk is full, or the folder is gone. The snapshots that were there are there still.
            TypeError: the facts hold what JSON does not.
        """
        earlier = self.paths.snapshots()
        number = 1 + max(map(RunPaths.snapshot_number, earlier), default=-1)
        self.paths.snapshot_folder.mkdir(exist_ok=True)
        path = write_snapshot(self.paths, number, snapshot)
        # of those that another process wrote, and nobody has looked at, the last ones are kept
        known = [self._last] if self._last in earlier else earlier[1 - KEPT :]
        for old in earlier:
            if old not in known:
                old.unlink(missing_ok=True)
        self._last = path
        return path

    def clear(self, kept: Path | None = None) -> None:
        """Remove the snapshots of a run that is over, and their folder if nothing else is in it.

        Args:
            kept: one that stays.
        """
        for path in self.paths.snapshots():
            if path != kept:
                path.unlink(missing_ok=True)
        with suppress(OSError):
            # another job's may be there, or there were none
            self.paths.snapshot_folder.rmdir()


def write_snapshot(paths: RunPaths, number: int, snapshot: Snapshot) -> Path:
    """Write a snapshot.

    Args:
        paths: the run folder.
        number: of the snapshot.
        snapshot: what to write.

    Returns:
        Its file.
    """
    _check_json(snapshot.facts, "facts")
    tensors = _storable(snapshot.tensors)
    metadata = {
        "format": FORMAT,
        "coalesce": str(version("coalesce")),
        "facts": json.dumps(snapshot.facts, ensure_ascii=False),
        # the format knows no 128-bit complex numbers
        "complex": json.dumps([name for name, tensor in snapshot.tensors.items() if tensor.is_complex()]),
    }
    named: list[Path] = []

    def name(temporary: Path) -> Path:
        # safetensors writes a header that is too long, and refuses to read it
        with safe_open(temporary, framework="pt"):
            named.append(paths.snapshot(number, _digest(temporary)))
        return named[0]

    with atomic(paths.snapshot_folder / f"snapshot-{number:05d}", name) as temporary:
        save_safetensors(tensors, temporary, metadata)
    return named[0]


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot, after a look whether it is what was written.

    Raises:
        DamagedSnapshot: it is not.
        RunFolderError: it is, in another version's format.
    """
    if _digest(path) != RunPaths.snapshot_digest(path):
        raise DamagedSnapshot(f"its {path.stat().st_size:,} bytes are not those that its name has the checksum of")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise RunFolderError(_of_another_version(path, metadata))
            # cloned: what is read lies in the file itself, which will be removed one day
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedSnapshot(str(error)) from error
    for name in json.loads(metadata["complex"]):
        tensors[name] = torch.view_as_complex(tensors[name])
    return Snapshot(json.loads(metadata["facts"]), tensors)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_another_version(path: Path, metadata: Mapping[str, str]) -> str:
    seen = metadata.get("format", "no format of coalesce's")
    by = f"written by coalesce {metadata['coalesce']}" if "coalesce" in metadata else "not written by coalesce"
    return (
        f"the snapshot {str(path)!r} is of the format {seen!r}, {by}; this is coalesce {version('coalesce')}, which "
        f"reads {FORMAT!r}. Resume with the version that wrote it; or delete {str(path.parent)!r}, and experiments "
        f"that have not ended start anew"
    )


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each in memory of its own, as safetensors wants them."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, given in tensors.items():
        tensor = given.detach().cpu().resolve_conj().resolve_neg()
        tensor = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(tensor.untyped_storage().data_ptr())
        stored[name] = tensor
    return stored


def _check_json(value: Any, place: str) -> None:
    """Refuse what would come back from JSON as something else, or not at all. Tuples come back as lists.

    Raises:
        TypeError: with the place.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place}: the key {key!r} is no text, and JSON would make it one")
            _check_json(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{place}.{index}")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise TypeError(f"{place}: JSON holds numbers, text, booleans, None, lists and mappings, no {type(value)}")
