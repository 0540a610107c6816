"""Law 4, measured: gradients never coexist.

Oracle: the high-water mark of a process, by the command that anybody can run. The plain eager loop beside it must read
at least 1 and the hook less: else the measurement would see nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's high-water mark")
def test_peak_memory_of_a_deep_stack(tmp_path: Path) -> None:
    """At one lane, where the compiler likes best to put all updates at the end. The command itself fails above its
    bounds."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.memory", "--widths", "1", "--size", "1024", "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {kind: by_width["1"] for kind, by_width in json.loads(figures.read_text()).items()}
    assert found["tape, compiled"] < found["BackProp"] < found["tape, op by op"] < 1 < found["eager loop"]
