"""One process at a time writes a run folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from types import TracebackType

from filelock import FileLock, Timeout

from coalesce.errors import RunFolderError
from coalesce.store.files import read_json, write_json
from coalesce.store.paths import RunPaths


class RunLock:
    """The lock of a run folder. It may be taken several times over, and is free when it was released as often, or when
    its process ends, however it ends. Reading a run folder needs no lock.

    Args:
        paths: the run folder. Its jobs need none: each writes files of its own, and who launches them holds it.
    """

    def __init__(self, paths: RunPaths):
        self.paths = paths
        # the system's own lock, which goes with the process; not bound to a thread
        self._lock = FileLock(paths.lock, timeout=0, thread_local=False)

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            RunFolderError: another process has it; or the folder cannot be written.
        """
        if not self.paths.folder.is_dir():
            # filelock would make it
            raise cannot_write(self.paths, FileNotFoundError(2, "No such file or directory"))
        try:
            self._lock.acquire()
            if self._lock.lock_counter == 1:
                # not into the lock's own file: whoever asks for the lock may empty that
                write_json(self.paths.lock_owner, {"pid": os.getpid(), "host": socket.gethostname()})
        except Timeout:
            raise RunFolderError(
                f"the run folder {str(self.paths.folder)!r} is being written by {self._owner()}: wait for its end, or "
                "end it. coalesce.load reads what it has done so far"
            ) from None
        except OSError as error:
            self._lock.release(force=True)
            raise cannot_write(self.paths, error) from error

    def release(self) -> None:
        """Give the lock back."""
        if self._lock.lock_counter == 1:
            try:
                self.paths.lock_owner.unlink(missing_ok=True)
            except OSError:
                # the folder is gone, or is read-only by now: the lock itself matters, and is given back
                self._lock.release(force=True)
                return
        self._lock.release()

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _owner(self) -> str:
        try:
            owner = read_json(self.paths.lock_owner)
        except (OSError, JSONDecodeError):  # it has just taken the lock, or just gives it back
            return "another process"
        return f"process {owner['pid']} on host {owner['host']}"


@contextmanager
def writing(paths: RunPaths) -> Iterator[None]:
    """Say of an error of the system's what it means for the run.

    Raises:
        RunFolderError: in place of any other OSError.
    """
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise cannot_write(paths, error) from error


def cannot_write(paths: RunPaths, error: OSError) -> RunFolderError:
    """What to say where a run folder cannot be written.

    Args:
        paths: the run folder.
        error: what the system said.
    """
    name = str(error.filename or "")
    what = f" ({name})" if name and name != str(paths.folder) else ""
    text = f"the run folder {str(paths.folder)!r} cannot be written: {error.strerror or error}{what}. "
    if not paths.folder.is_dir():
        text += "It is gone"
    else:
        text += (
            "What was written before is whole, and coalesce.load reads it. Once the folder can be written again, "
            "resume it"
        )
    return RunFolderError(text)
