"""Writing files so that a name always stands for a whole file: temporary name, flush, rename.

Nothing here, or anywhere in the store, pickles or unpickles: tables are Parquet, weights are safetensors, the rest
is JSON and text.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


@contextmanager
def atomic(path: Path, name: Callable[[Path], Path] | None = None, durable: bool = True) -> Iterator[Path]:
    """Give a temporary path beside ``path``; what the block writes there becomes ``path``, on disk, at its end.

    If the block raises, the temporary file goes and ``path`` is as it was. A process that dies in the block leaves
    the temporary file, whose name begins with a dot; nothing reads it.

    Args:
        path: the file.
        name: the written temporary file → the path that it is to have instead, in the same folder.
        durable: wait until it is on disk. Without that a power cut may leave an empty file.

    Raises:
        OSError: the folder is missing, or the disk is full.
    """
    # not tempfile.mkstemp: its files are readable by their owner alone, and results are there to be shared
    temporary = path.parent / f".{path.name[:100]}.{uuid.uuid4().hex}.tmp"
    try:
        yield temporary
        if durable:
            _sync(temporary)
        os.replace(temporary, path if name is None else name(temporary))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # the rename itself is safe only once the folder's own entry is on disk
    if durable:
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes, durable: bool = True) -> None:
    """Write ``data``; see `atomic`."""
    with atomic(path, durable=durable) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Write ``text`` as UTF-8; see `atomic`."""
    write_bytes(path, text.encode(), durable)


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    """Write a value of dictionaries, lists, text, numbers, booleans and None; see `atomic`."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", durable)


def write_json_first(path: Path, value: Any) -> bool:
    """Write as ``write_json`` does, unless the file is there: of several processes that write it at once, on whatever
    machines, one does.

    Returns:
        Whether it was this one.
    """
    temporary = path.parent / f".{path.name[:100]}.{uuid.uuid4().hex}.tmp"
    try:
        write_json(temporary, value)
        # unlike a rename, a second name is refused where there is one; on shared file systems as well
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)
    return True


def read_json(path: Path) -> Any:
    """Read what ``write_json`` wrote."""
    return json.loads(path.read_bytes())


def write_parquet(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame; its index is dropped."""
    with atomic(path) as temporary:
        pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), temporary)


def read_parquet(path: Path) -> pd.DataFrame:
    """Read what ``write_parquet`` wrote; list values come back as tuples."""
    # not read_table: it takes "a=b" anywhere in the path for a column
    with pq.ParquetFile(path) as file:
        table = file.read()
    frame: pd.DataFrame = table.to_pandas()
    for field in table.schema:
        if pa.types.is_list(field.type):
            values = [tuples(value) for value in table[field.name].to_pylist()]
            frame[field.name] = pd.Series(values, index=frame.index, dtype=object)
    return frame


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame; floats with every digit, list values as JSON text, missing values empty."""
    texts = {name: column.map(_json_of_tuple) for name, column in frame.items() if column.dtype == object}
    with atomic(path) as temporary:
        frame.assign(**{str(name): column for name, column in texts.items()}).to_csv(temporary, index=False)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors. Tied ones (two names, one memory) are written twice, since the format has no sharing."""
    with atomic(path) as temporary:
        save_safetensors({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, temporary)


def save_safetensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """What `safetensors.torch.save_file` does, with the system's errors as such and a file that others may read.

    Args:
        tensors: each in memory of its own.
        path: a temporary file.
        metadata: text beside the tensors.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error
    # safetensors writes into a temporary file of its own, which is its owner's alone
    path.chmod(mode)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read what ``write_safetensors`` wrote, onto the CPU."""
    return load_file(path)


def tuples(value: Any) -> Any:
    """Lists, nested or not, as tuples: a column of tuples can be grouped by, one of lists cannot."""
    return tuple(tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _json_of_tuple(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, tuple) else value
