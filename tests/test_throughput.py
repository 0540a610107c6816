"""The ruler: `python -m benchmarks.throughput`.

Oracles: a clock that the test turns, ratios and counts of products worked out by hand, and losses of plain PyTorch.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.throughput import __main__ as command
from benchmarks.throughput import floor, report, sides, worker
from benchmarks.throughput.processes import Caches, Contestant, Process, SideFailed
from benchmarks.throughput.sides import Setup, Side
from benchmarks.throughput.workloads import WORKLOADS


def test_the_command_on_two_experiments(tmp_path: Path) -> None:
    """All that needs neither a compiler nor a peer: the sides agree, and every figure follows from the rounds."""
    out = tmp_path / "figures.json"
    small = ["--lanes", "2", "--rounds", "2", "--seconds", "0.02", "--cores", "1", "--processes", "1", "--no-compile"]
    command.main(["--task", "digits", "--sides", "plain", "coalesced", "floor", *small, "--json", str(out)])
    figures = json.loads(out.read_text())
    assert figures["machine"]["cores"] >= 1
    (found,) = figures["tasks"]["digits"]
    assert found["lanes"] == 2
    assert found["apart"].keys() == {"coalesced"}
    middle, most = found["apart"]["coalesced"]
    assert 0 <= middle <= most < report.TOLERANCE
    work = {name: rates for side in found["sides"].values() for name, rates in side["work"].items()}
    assert all(len(one["rates"]) == 2 and one["min"] > 0 for one in work.values()), work
    assert found["ratios"].keys() == {"plain eager", "floor"}
    chosen = found["ratios"]["floor"]["wall"]
    pairs = zip(work[chosen["against"]]["rates"], work["coalesced"]["rates"], strict=True)
    assert chosen["max"] == pytest.approx(max(theirs / ours for theirs, ours in pairs))


@pytest.mark.slow
def test_the_whole_command_beside_plain_loops(tmp_path: Path) -> None:
    """`sweep=lr_grid` with few steps: every part of it runs, on both sides."""
    out = tmp_path / "figures.json"
    small = ["--rounds", "1", "--processes", "2", "--no-compile", "--override", "steps=20", "trainer.compile=false"]
    command.main(["--task", "lr_grid", *small, "--json", str(out)])
    found = json.loads(out.read_text())["lr_grid"]
    assert found["seconds"].keys() == {"the command, cold", "the command, warm", "plain eager, 2 processes"}
    assert found["ratios"].keys() == {"cold", "warm"}
    ((cold,), (plain,)) = (found["seconds"][name] for name in ("the command, cold", found["against"]))
    assert found["ratios"]["cold"]["median"] == pytest.approx(plain / cold)


def test_what_is_done_within_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that reach over an end of the window count by their share, in steps and in processor time."""
    now = iter([8.0, 11.0, 13.0, 15.0])
    busy = iter([0.0, 3.0, 4.0, 6.0])
    monkeypatch.setattr(worker.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(worker.time, "process_time", lambda: next(busy))
    pace = worker.Pace(10.0, 14.0)
    assert [pace.mark(6), pace.mark(6), pace.mark(6)] == [False, False, True]
    # a third of the first call, all of the second, half of the third
    assert pace.result() == pytest.approx({"steps": 2 + 6 + 3, "processor_s": 1 + 1 + 1})


def test_a_process_that_comes_late_has_done_less(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([11.0, 13.0])
    monkeypatch.setattr(worker.time, "monotonic", lambda: next(now))
    pace = worker.Pace(10.0, 12.0)
    assert pace.mark(8)
    assert pace.result()["steps"] == pytest.approx(4)


def some_sides() -> list[Side]:
    """Rates of two rounds: the second one of a machine half as fast."""
    rates = {
        "plain": {"plain eager, 1 process": [10.0, 4.0], "plain eager, 2 processes": [8.0, 8.0]},
        "coalesced": {"coalesced": [40.0, 20.0]},
        "floor": {"floor, threads wait passive": [60.0, 40.0]},
    }
    found = []
    for name, ways in rates.items():
        contestants = [Contestant(way, (), {}, row, [2 * rate for rate in row]) for way, row in ways.items()]
        found.append(Side(name, contestants))
    return found


def test_ratios_are_those_of_one_round_with_the_best_way_of_a_peer() -> None:
    found = report.ratios(some_sides())
    assert found["plain eager"]["wall"] == {
        "median": 3.75, "min": 2.5, "max": 5.0, "against": "plain eager, 2 processes",
    }  # fmt: skip
    # time over the floor's: its rate over ours
    assert (found["floor"]["wall"]["min"], found["floor"]["processor"]["max"]) == (1.5, 2.0)


@pytest.mark.parametrize(("theirs", "named"), [(1.01, "trains something else"), (float("nan"), "not finite")])
def test_a_side_that_trains_something_else_is_not_timed(
    theirs: float, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {"plain": {"eager": [[2.0, 1.0]]}, "coalesced": {"coalesced": [[2.0, theirs]]}}
    made = {name: (lambda *_, name=name: Side(name, [], losses[name])) for name in losses}
    monkeypatch.setattr(command, "SIDES", made)
    setup = Setup(tmp_path, Caches(tmp_path), cores=1)
    with pytest.raises((SideFailed, ValueError), match=named):
        command.bring_up(WORKLOADS["mlp"], ["plain", "coalesced"], setup, Console(quiet=True))


@pytest.mark.parametrize(
    ("factors", "agree"), [([1, 1, 1, 1, 1.003], True), ([1.003] * 5, False), ([1] * 4 + [1.1], False)]
)
def test_rounding_may_have_been_magnified_in_one_experiment(factors: list[float], agree: bool, tmp_path: Path) -> None:
    """AdamW's first steps have the size of the rate, whatever the gradient's is."""
    first = [2.0, 2.1, 2.2, 2.3, 2.4]
    theirs = [first, [a * b for a, b in zip(first, factors, strict=True)]]
    middle, most = report.apart([Side("plain", [], {"eager": [first, first]}), Side("jax", [], {"jax": theirs})])["jax"]
    assert (middle <= report.TOLERANCE and most <= report.COARSE) == agree
    # one of a process of its own: the first loss alone is held against it
    alone = [[None, None, None, None, row[-1]] for row in theirs]
    middle, _ = report.apart([Side("plain", [], {"eager": [first, first], "compiled": alone})])["compiled"]
    assert middle == 0


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sides.NEEDS, "jax", ("no-such-peer",))
    assert "jax is left out" in (said := sides.missing("jax", sides.sys.executable))
    assert "pip install 'coalesce[bench]'" in said
    assert sides.missing("plain", sides.sys.executable) == ""


def test_a_process_that_fails_says_why() -> None:
    process = Process("no_such_side", {})
    try:
        with pytest.raises(SideFailed, match=r"No module named benchmarks\.throughput\.no_such_side"):
            process.call("losses", steps=1)
    finally:
        process.close()


def by_hand(name: str) -> int:
    """Multiplications and additions of the products of one step of one experiment."""
    if name == "digits":
        return 2 * 64 * (2 * 64 * 64 + 3 * 64 * 64 + 3 * 64 * 10)
    if name == "mlp":
        # three products for each layer, but the first one's input has no gradient
        return 2 * 100 * (2 * 40 * 100 + 3 * 100 * 100 + 3 * 100 * 10)
    if name == "cnn":
        taps = [(256, 16 * 16 * 9)] * 2 + [
            (64, 32 * 16 * 9 + 32 * 32 * 9 + 32 * 16),
            (16, 64 * 32 * 9 + 64 * 64 * 9 + 64 * 32),
        ]
        return 2 * 64 * (2 * 256 * 16 * 3 * 9 + 3 * sum(pixels * count for pixels, count in taps) + 3 * 640)
    from coalesce.tasks.charlm import encoded, reference

    _, kinds = encoded(reference())
    per_token = 4 * 12 * 64 * 64 + 64 * len(kinds)
    return 3 * 2 * 16 * (64 * per_token + 4 * 2 * 64 * 64 * 64)


@pytest.mark.parametrize("name", [*WORKLOADS])
def test_the_floor_has_all_products_of_a_step(name: str) -> None:
    found = floor.shapes(WORKLOADS[name])
    assert sum(floor.flops(shape) * times for shape, times in found.items()) == by_hand(name)


def test_each_way_of_a_product_computes_it() -> None:
    seen = set()
    for name, call in floor.ways(("product", 2, 3, 5, 7), lanes=2):
        call()
        a, b = call.args[:2]  # type: ignore[attr-defined]
        seen.add(name)
        if name != "mkldnn":
            out = call.keywords.get("out", call.args[-1])  # type: ignore[attr-defined]
            assert out.shape == (4, 3, 7)
            torch.testing.assert_close(out, a @ b)
    assert {f"{kind} {order}" for kind in ("bmm", "mm") for order in ("NN", "NT", "TN", "TT")} <= seen


def test_each_lowering_of_a_convolution_runs() -> None:
    shape = ("convolution", (2, 3, 6, 6), (4, 3, 3, 3), (2, 2), (1, 1), (True, True))
    ways = dict(floor.ways(shape, lanes=2))
    assert {"single", "single channels last", "grouped", "grouped channels last", "columns"} == ways.keys()
    for call in ways.values():
        call()


def test_the_fastest_way_is_the_one_whose_best_time_is_least(monkeypatch: pytest.MonkeyPatch) -> None:
    # the first call of each is not timed
    durations = iter([0, 5, 5, 5, 5, 2.5, 0, 4, 4, 3, 4, 4])
    now = 0.0

    def clock() -> float:
        return now

    def call() -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(floor.time, "perf_counter", clock)
    assert floor.fastest(iter([("once", call), ("steady", call)]))[::2] == ("once", 2.5)
