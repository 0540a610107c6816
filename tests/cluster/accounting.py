"""Accounting for the Slurm of slurm.py: MariaDB and slurmdbd in the same folder, so that `sacct` knows every job.

It needs Debian's packages `slurmdbd` and `mariadb-server`, and takes some seconds more to come up.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path

PROGRAMS = ("mariadbd", "mariadb-install-db", "mariadb", "slurmdbd", "sacct", "sacctmgr")

# what goes into slurm.conf
NONE = "AccountingStorageType=accounting_storage/none"
CONFIGURATION = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge/socket"""

SLURMDBD = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={storage_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
PidFile={folder}/slurmdbd.pid
LogFile={folder}/log/slurmdbd
"""

# one statement a line, as --init-file wants it; nobody gets in without the password
USERS = """
CREATE DATABASE slurm;
CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{password}';
GRANT ALL ON slurm.* TO slurm@'127.0.0.1';
DROP USER IF EXISTS root@'127.0.0.1', root@'::1';
ALTER USER root@localhost IDENTIFIED BY '{password}';
"""


class AccountingError(RuntimeError):
    """The database does not come up, and why."""


def missing() -> str | None:
    """Why there can be no accounting here, or None if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install -y --no-install-recommends slurmdbd mariadb-server"
    return None


def start(folder: Path, host: str, port: int, storage_port: int) -> None:
    """Start the database and slurmdbd, and make the cluster known to it. munged is up already.

    Args:
        folder: The cluster's folder, with its slurm.conf.
        host: This machine's name.
        port: Where slurmdbd listens, as in slurm.conf.
        storage_port: Where the database listens.

    Raises:
        AccountingError: One of them does not come up.
    """
    password = secrets.token_hex(16)
    dbd = folder / "slurmdbd.conf"
    dbd.touch(mode=0o600)
    dbd.write_text(
        SLURMDBD.format(folder=folder, host=host, port=port, storage_port=storage_port, password=password).lstrip()
    )
    _database(folder, storage_port, password)
    _run(folder, "slurmdbd")
    _until(folder, "sacctmgr", "--immediate", "add", "cluster", "coalesce")


def _database(folder: Path, port: int, password: str) -> None:
    data = folder / "db"
    data.mkdir(mode=0o700)
    users = data / "users.sql"
    users.touch(mode=0o600)
    users.write_text(USERS.format(password=password).lstrip())
    common = ("--no-defaults", f"--datadir={data}", "--user=root")
    _run(folder, "mariadb-install-db", *common, "--auth-root-authentication-method=normal", "--skip-test-db")
    # it has no way of its own into the background, and a child of this process would have to be waited for
    _run(
        folder,
        *("sh", "-c", 'setsid "$@" </dev/null >/dev/null 2>&1 &', "sh"),
        *("mariadbd", *common, f"--socket={data}/socket", f"--pid-file={data}/pid"),
        *("--bind-address=127.0.0.1", f"--port={port}", "--skip-name-resolve", f"--init-file={users}"),
        *(f"--log-error={folder}/log/mariadbd.err", "--innodb-log-file-size=8M"),
        # it is thrown away anyhow
        *("--innodb-flush-log-at-trx-commit=0", "--skip-log-bin"),
    )
    client = data / "client.cnf"
    client.touch(mode=0o600)
    client.write_text(f"[client]\nhost=127.0.0.1\nport={port}\nuser=slurm\npassword={password}\n")
    _until(folder, "mariadb", f"--defaults-file={client}", "--execute=SELECT 1", "slurm")


def _run(folder: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        env=os.environ | {"SLURM_CONF": str(folder / "slurm.conf")},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    if check and done.returncode:
        raise AccountingError(f"{command[0]} exited with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done


def _until(folder: Path, *command: str) -> None:
    """Run a command until it succeeds."""
    deadline = time.monotonic() + 30
    while (done := _run(folder, *command, check=False)).returncode:
        if time.monotonic() > deadline:
            raise AccountingError(f"{command[0]} fails for 30 s: {(done.stderr or done.stdout).strip()}")
        time.sleep(0.1)
