"""Optuna's journal: a study as one file that several jobs append to, on a file system that they share."""

from __future__ import annotations

from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

#: How a file's name ends that holds a journal.
SUFFIX = ".journal"


def journal(file: Path) -> JournalStorage:
    """The storage in a file, which is made if it is missing."""
    # jobs may have other working folders
    path = file.absolute()
    return JournalStorage(JournalFileBackend(str(path), _Lock(path)))


class _Lock(JournalFileOpenLock):
    """Optuna's lock by ``O_EXCL``, which also takes away what a process has left that ended while it wrote.

    Optuna's default is a symbolic link, for NFS version 2. When a process has died that held it, others look at the
    link's target, not at the link, to see whether a third one has taken over; and a reply that is lost makes a link
    seem to be somebody else's. Since version 3, NFS answers the same process the same again for ``O_EXCL``.

    A line without its end is what a full disk, or the end of a process, has left. Readers pass over it, but the next
    line would be appended to it, and from then on no one could read the journal.
    """

    def __init__(self, file: Path):
        super().__init__(str(file))
        self._file = file

    def acquire(self) -> bool:
        acquired = super().acquire()
        try:
            _mend(self._file)
        except BaseException:
            self.release()
            raise
        return acquired


def _mend(file: Path) -> None:
    with file.open("rb+") as stream:
        end = stream.seek(0, 2)
        stream.seek(max(0, end - 1))
        if end == 0 or stream.read() == b"\n":
            return
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
