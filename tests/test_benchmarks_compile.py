"""`python -m benchmarks.compile`.

Oracles: ratios worked out by hand, a clock that the test turns, and processes whose processor time the test knows.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch._inductor
from rich.console import Console

from benchmarks import compile as command
from benchmarks.throughput import spent
from benchmarks.throughput.spent import Inside, Spent


def figure(layers: int | None, lanes: int, cache: str, seconds: float) -> dict[str, Any]:
    """Half as much by the processor, of which a half is traced, a quarter each the rest; 3 s more to the first step."""
    own = {"compile_s": seconds, "processor_s": seconds / 2, "first_s": seconds + 3, "first_processor_s": seconds}
    split = {"tracing_s": seconds / 4, "compiler_s": seconds / 8, "started_s": seconds / 8}
    return {"layers": layers, "lanes": lanes, "cache": cache, **own, **split}


SOME = [
    figure(2, 1, "cold", 8.0), figure(4, 1, "cold", 10.0), figure(12, 1, "cold", 12.0),
    figure(4, 64, "cold", 11.0), figure(12, 64, "cold", 16.5), figure(12, 64, "warm", 4.0),
]  # fmt: skip


def test_ratios_are_those_of_the_most_over_four_layers_and_over_the_fewest_lanes() -> None:
    told = command.ratios(SOME)
    assert told.keys() == {"12 layers over 4", "64 lanes over 1"}
    cold = told["12 layers over 4"]["cold, clock"]
    assert cold == pytest.approx({"median": 1.35, "min": 1.2, "max": 1.5})
    # 4 layers: 11 over 10; 12 layers: 16.5 over 12; 2 layers have one number of lanes alone
    assert told["64 lanes over 1"]["cold, processor"] == pytest.approx({"median": 1.2375, "min": 1.1, "max": 1.375})
    # with a warm cache there is nothing to compare with
    assert all("warm, clock" not in row for row in told.values())


def test_without_four_layers_the_fewest_are_compared_with() -> None:
    told = command.ratios([figure(2, 8, "cold", 5.0), figure(6, 8, "cold", 6.0)])
    assert told == {"6 layers over 2": {key: pytest.approx({"median": 1.2, "min": 1.2, "max": 1.2}) for key in (
        "cold, clock", "cold, processor")}}  # fmt: skip
    assert command.ratios([figure(None, 8, "cold", 5.0)]) == {}


def test_the_report() -> None:
    out = io.StringIO()
    command.report("gpt", SOME, command.ratios(SOME), Console(file=out, width=160))
    text = out.getvalue()
    (row,) = [line for line in text.splitlines() if "16.5" in line]
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == ["12", "64", "cold", "19.5", "16.5", "8.2", "4.1", "2.1", "2.1"]
    assert "Compiling 12 layers over 4: cold, clock 1.35 (1.20 to 1.50)" in text


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.parse([]).layers == [2, 4, 8, 12]
    assert command.parse([]).lanes == [1, 8, 64]
    assert command.parse(["--task", "mlp"]).layers == [None]
    with pytest.raises(SystemExit):
        command.parse(["--task", "mlp", "--layers", "2"])
    assert "--layers is an option of gpt; mlp has no such number" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.parse(["--lanes", "0"])
    assert "0: must be at least 1" in capsys.readouterr().err


def test_layers_and_lanes_reach_the_experiments() -> None:
    ((layers, workload),) = command.workloads("gpt", [3], [2])
    experiments, _ = workload.experiments()
    assert layers == 3
    assert [e.config["task"]["layers"] for e in experiments] == [3, 3]


def test_time_within_the_compiler_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call within a call is no more time; and what comes between two calls is none."""
    moments = iter([Spent(1, 10, 0), Spent(4, 12, 5), Spent(6, 13, 5), Spent(7, 14, 6)])
    monkeypatch.setattr(spent.Spent, "now", classmethod(lambda cls: next(moments)))

    inductor: Any = torch._inductor

    def compile(depth: int) -> Any:
        return inductor.compile(depth - 1) if depth else 7

    monkeypatch.setattr(inductor, "compile", compile)
    inside = Inside()
    with inside.counting():
        assert [inductor.compile(1), inductor.compile(0)] == [7, 7]
    assert inside.spent == Spent(4, 3, 6)
    assert inductor.compile is compile
    assert spent.parts(Spent(10, 5, 8), inside.spent) == {
        "compile_s": 10, "processor_s": 13, "tracing_s": 2, "compiler_s": 3, "started_s": 8,
    }  # fmt: skip


def test_processes_that_ended_are_children() -> None:
    before = Spent.now()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    took = Spent.now() - before
    assert 0.3 <= took.children < 5
    assert took.own < took.children


def test_the_command_without_a_compiler(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command.main(["--task", "digits", "--lanes", "2", "--cores", "1", "--no-compile", "--json", str(out)])
    figures = json.loads(out.read_text())
    (found,) = figures["figures"]
    assert (found["layers"], found["lanes"], found["cache"]) == (None, 2, "cold")
    assert 0 < found["compile_s"] < found["first_s"]
    assert 0 < found["tracing_s"] <= found["processor_s"]
    # nothing was compiled, and no process was started
    assert (found["compiler_s"], found["started_s"]) == (0, 0)


@pytest.mark.thorough
def test_the_command(tmp_path: Path) -> None:
    """A graph that the cache has is not compiled once more."""
    out = tmp_path / "figures.json"
    command.main(["--task", "digits", "--lanes", "2", "--cores", "1", "--json", str(out)])
    figures = json.loads(out.read_text())
    cold, warm = figures["figures"]
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")
    assert warm["started_s"] < cold["started_s"]
    assert warm["compile_s"] < cold["compile_s"]
    assert figures["preparing an empty cache"]["started_s"] > 0
