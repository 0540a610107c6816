"""`import coalesce` is light and hands out the public names.

Oracle: `sys.modules` of a fresh interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import coalesce

HEAVY = ["hydra", "omegaconf", "pandas", "sklearn", "pyarrow", "rich", "scipy", "matplotlib"]
ROOT = Path(coalesce.__file__).parent.parent


def run(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_nothing_heavy() -> None:
    # what torch itself imports is not ours to judge
    code = f"""
import sys, torch
before = set(sys.modules)
import coalesce, coalesce.tasks
coalesce.Task, coalesce.Data, coalesce.Experiment, coalesce.ConfigError, coalesce.TaskError
print([name for name in {HEAVY} if name in set(sys.modules) - before])
"""
    assert run(code) == "[]"


def test_the_engine_needs_only_torch() -> None:
    missing = [*HEAVY, "numpy", "safetensors"]
    code = f"""
import sys, warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
sys.modules.update(dict.fromkeys({missing}))
import torch, coalesce
print(coalesce.Data(train=torch.zeros(3, 2)).batch("train", torch.tensor([0, 2])).shape)
"""
    assert run(code) == "torch.Size([2, 2])"


@pytest.mark.parametrize("name", coalesce.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(coalesce, name) is not None
    assert name in dir(coalesce)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'coalesce' has no attribute 'lode'"):
        coalesce.lode  # noqa: B018
