"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.throughput.place import Place

#: What of a processor's abilities decides how fast it multiplies.
FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe(python: str, place: Place, precision: str = "float32") -> dict[str, Any]:
    """Processor, device, versions, and the commit.

    Args:
        python: the interpreter that has the peers.
        place: where all sides compute.
        precision: of the experiments.
    """
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = facts.get("flags", "").split()
    return {
        "cores": cores(),
        "cpu": facts.get("model name", platform.processor()),
        "flags": [flag for flag in FLAGS if flag in flags],
        "load": os.getloadavg()[0],
        "device": torch.cuda.get_device_name() if place.on_cuda else "cpu",
        "dtype": precision,
        "matmul_precision": place.matmul or torch.get_float32_matmul_precision(),
        "python": platform.python_version(),
        "versions": {n: _version(n) for n in ("torch", "triton", "numpy")} | _peers(python),
        "commit": _commit(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _peers(python: str) -> dict[str, str]:
    code = "import importlib.metadata as m, sys\nfor n in sys.argv[1:]:\n    print(n, m.version(n))"
    done = subprocess.run([python, "-c", code, "jax", "optax", "modelbatch"], capture_output=True, text=True)
    return dict(line.split() for line in done.stdout.splitlines())


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None
