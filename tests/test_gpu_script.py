"""`benchmarks/gpu.sh`: its arguments, its parts and how they end; all of it, in little, is a thorough test.

Oracles: commands that fail, hang and leave processes behind; the installed packages' own metadata; files read back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu.parts import LANES, SETTINGS, Order, Part
from benchmarks.gpu.running import Outcome, run
from benchmarks.gpu.summary import lines, summary
from benchmarks.throughput.__main__ import parse

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def script(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)


def test_the_script_is_bash_and_helps() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    done = script("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(option in done.stdout for option in ("--out", "--wheels", "--device", "--quick", "--python"))
    assert "hydra-core" in done.stdout
    assert "modelbatch " not in done.stdout.split("Needed beside")[1].split("This makes")[0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--fast"], "unknown argument --fast (known: --out,"),
        (["--device", "tpu"], "--device tpu: must be cuda or cpu"),
        (["--wheels", "nowhere"], "--wheels nowhere: is no folder"),
        (["--out", "benchmarks"], "--out benchmarks: must be an empty or a new folder"),
        (["--python", "no-python"], "--python no-python: is no command"),
        (["--out"], "--out needs a value"),
    ],
)
def test_what_does_not_fit_is_refused(given: list[str], named: str) -> None:
    done = script(*given)
    assert done.returncode == 2
    assert named in done.stderr


def closure(names: list[str]) -> set[str]:
    """Distributions and all that they need, as they say themselves, on Python 3.12."""
    found: set[str] = set()
    while names:
        name = names.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            needs = [Requirement(text) for text in requires(name) or []]
            # of torch those for a GPU, which come with it, are not installed here
            names += [
                n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": "", "python_version": "3.12"})
            ]
    return found


def test_the_list_of_wheels_is_what_the_machine_lacks() -> None:
    text = (ROOT / "benchmarks" / "wheels.txt").read_text().partition("# peers")[0]
    listed = {line.lower() for line in text.splitlines() if line and not line.startswith("#")}
    there = closure(["torch", "numpy", "pandas", "pyarrow", "safetensors", "rich"])
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert listed == closure([*(Requirement(text).name for text in own), "mnist1d"]) - there


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_task_is_measured_in_every_way(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    groups = Order(tmp_path, tmp_path, device, quick=False, peers=["jax"]).groups()
    names = [part.name for group in groups for part in group]
    assert len({*names}) == len(names)
    for task, lanes in LANES.items():
        settings = [*SETTINGS] if device == "cuda" else ["tf32", "bfloat16"]
        assert {task, f"{task}-jax", f"{task}-compile", *(f"{task}-{s}" for s in settings)} <= {*names}
        assert {f"{task}-lanes-{n}" for n in lanes} <= {*names}
    assert "memory" in names
    # the ruler understands them all
    for part in (part for group in groups for part in group if "benchmarks.throughput" in part.command):
        options = parse(part.command[3:])
        assert (options.device, options.json) == (device, tmp_path / f"{part.name}.json")


def python(name: str, code: str, limit_s: float = 30, prints: bool = False) -> Part:
    return Part(name, [sys.executable, "-c", code], limit_s, prints)


def test_a_part_that_fails_or_hangs_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    left_behind = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parts = [
        python("good", "print('{\"a\": 1}')", prints=True),
        python("bad", "import sys; print('about to'); sys.exit('it broke')"),
        python("hangs", left_behind, limit_s=3),
    ]
    told: list[Outcome] = []
    found = run(parts, tmp_path, time.monotonic() + 60, os.environ, told.append)
    assert [(o.name, o.rc) for o in found] == [("good", 0), ("bad", 1), ("hangs", 124)]
    assert sorted(o.name for o in told) == ["bad", "good", "hangs"]
    assert sorted(found[1].last_lines) == ["about to", "it broke"]
    pid, *said = found[2].last_lines
    assert said == ["ended: its 3 s were up"]
    assert 3 <= found[2].seconds < 20
    # and so is what it started: gone, or waiting for its parent to look
    state = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the part's own process runs on"
        time.sleep(0.1)
    whole = summary(tmp_path, found)
    assert whole["others"] == {"good": {"a": 1}}
    text = "\n".join(lines(whole))
    assert "FAILED bad (exit code 1" in text
    assert "1 parts done, 2 failed" in text


def test_when_no_time_is_left_nothing_is_started(tmp_path: Path) -> None:
    found = run([python("late", "open('started', 'w')")], tmp_path, time.monotonic(), os.environ, lambda _: None)
    assert [(o.rc, *o.last_lines) for o in found] == [(124, "not started: no time was left")]
    assert not (tmp_path / "logs").exists()


@pytest.mark.thorough
def test_all_of_it_in_little_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = script("--device", "cpu", "--quick", "--python", sys.executable, "--out", str(out), timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "summary.json").read_text())
    assert all(part["rc"] == 0 for part in found["parts"]), found["parts"]
    assert {"mlp", "gpt-bfloat16", "cnn-lanes-1"} <= found["rates"].keys()
    for row in found["rates"].values():
        assert all(one["min"] > 0 for one in row["experiment_steps_per_s"].values())
        assert row["others_were_done_preparing"] is True
    assert found["others"]["memory"]["plain"]["peak_of_parameters"] >= 1
    assert found["others"]["digits-compile"]["figures"]
