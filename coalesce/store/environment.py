"""What a run ran in: versions, device, threads, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

import numpy as np
import torch

from coalesce import kernels

_PACKAGES = ("hydra-core", "omegaconf", "pandas", "pyarrow", "safetensors")


def environment(device: str) -> dict[str, Any]:
    """What may matter when the run is to be done again.

    Args:
        device: the resolved device: "cpu", "cuda", "cuda:1".
    """
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "coalesce": version("coalesce"),
        "packages": {name: version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "device": device,
        "device_name": device_name(device),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "matmul_precision": kernels.precision(),
        "command": sys.argv,
        "git": commit(),
    }


def device_name(device: str) -> str:
    """What a device is called: "NVIDIA H200", "x86_64"."""
    on_gpu = device.startswith("cuda") and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> dict[str, Any] | None:
    """The git commit of the working directory and whether files differ from it; None outside a repository."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "dirty": None if changed is None else bool(changed)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
            # reading must not take the index's lock away from a commit that runs at the same time
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):  # no git, no repository, no commit yet, or a very slow disk
        return None
    return done.stdout.strip()
