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


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    """One cluster for all tests."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with temporary() as cluster:
        yield cluster


@pytest.fixture
def slurm(_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, its node idle, and Slurm's commands in this process and its children talking to it.

    Jobs get this process's environment, and so can import what stands in tests/: submitit pickles a function by name.
    What a test leaves running is killed when it ends.
    """
    for name, value in _cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    yield _cluster
    _cluster.clear()
