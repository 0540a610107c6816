"""A real Slurm for the tests that ask for the fixture `slurm`.

Such a test is marked `cluster` and runs with `pytest -m cluster -n 0`: with xdist every process would bring up a
cluster of its own, which works, but they share the cores. Where Slurm is missing, or one is not root, it is skipped
with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.slurm import Cluster, missing, temporary


def _session(accounted: bool) -> Iterator[Cluster]:
    reason = missing(accounted)
    if reason is not None:
        pytest.skip(reason)
    with temporary(accounted) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    """One cluster for all tests."""
    yield from _session(accounted=False)


@pytest.fixture(scope="session")
def _accounted() -> Iterator[Cluster]:
    """One more, beside it, in which `sacct` works."""
    yield from _session(accounted=True)


def _lent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    yield cluster
    cluster.clear()


@pytest.fixture
def slurm(_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, its node idle, and Slurm's commands in this process and its children talking to it.

    Jobs get this process's environment, and so can import what stands in tests/: submitit pickles a function by name.
    What a test leaves running is killed when it ends.
    """
    yield from _lent(_cluster, monkeypatch)


@pytest.fixture
def accounted_slurm(_accounted: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The same with accounting: skipped where slurmdbd or MariaDB is missing."""
    yield from _lent(_accounted, monkeypatch)
