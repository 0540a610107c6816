"""``python -m coalesce.memory``: the files, the figures and the picture.

Oracle: what the files are to hold; the picture's own pixels; the bounds that a stack of layers sets.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coalesce.memory.__main__ import main
from coalesce.memory.modes import SIZES
from coalesce.memory.picture import COLOURS, draw
from coalesce.memory.timeline import CATEGORIES

PNG = b"\x89PNG\r\n\x1a\n"
TINY = SIZES["tiny"]


def assert_complete(folder: Path, *modes: str) -> dict[str, Any]:
    """The files that the command promises, and nothing else; the timelines."""
    names = {"memory_timelines.json", "counters.json", "memory_timelines.png", *(f"{m}.raw.json.gz" for m in modes)}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "memory_timelines.png").read_bytes().startswith(PNG)
    found = json.loads((folder / "memory_timelines.json").read_text())
    counters = json.loads((folder / "counters.json").read_text())
    assert tuple(found["categories"]) == CATEGORIES
    assert [*found["modes"]] == [*counters] == [*modes]
    for mode, timeline in found["modes"].items():
        assert [*timeline["gb"]] == [*CATEGORIES]
        assert {len(values) for values in timeline["gb"].values()} == {len(timeline["t"])}
        assert timeline["t"] == sorted(timeline["t"])
        total = [sum(now) for now in zip(*timeline["gb"].values(), strict=True)]
        assert total == pytest.approx([total[0] + seen for seen in timeline["seen_gb"]], abs=1e-12)
        assert timeline["step_ms"] > 0
        assert timeline["counters"]["allocations_per_step"] == timeline["counters"]["frees_per_step"] > 0
        assert timeline["counters"] == counters[mode]["counters"]
        assert json.loads(gzip.decompress((folder / f"{mode}.raw.json.gz").read_bytes()))
    return found["modes"]


def test_one_mode_from_its_processes_to_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    assert main([str(folder), "--size", "tiny", "--device", "cpu", "--modes", "hook"]) == 0
    timeline = assert_complete(folder, "hook")["hook"]
    gradient = max(timeline["gb"]["GRADIENT"]) * 1e9
    assert 4 * TINY.features**2 <= round(gradient) <= 4 * TINY.features * (TINY.features + 1)
    shown = capsys.readouterr().out
    for words in ("4 x Linear(256)", "peak above rest, MB", "updates from the plain loop's", "0.0e+00"):
        assert words in shown


@pytest.mark.thorough
def test_all_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a size at which the engine cuts the graph. No mode but the plain loop holds two layers' gradients."""
    assert main([str(tmp_path), "--size", "small", "--device", "cpu", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    modes = assert_complete(tmp_path, "plain", "hook", "compiled", "coalesced")
    layer = 4 * SIZES["small"].features * (SIZES["small"].features + 1)
    most = {name: max(m["gb"]["GRADIENT"]) * 1e9 / m["experiments"] for name, m in modes.items()}
    assert most["plain"] == pytest.approx(shown["plain"]["parameter_bytes"])
    assert all(0 < most[name] <= 1.01 * layer for name in ("hook", "compiled", "coalesced"))
    peaks = {name: figures["peak_of_parameters"] for name, figures in shown.items()}
    assert max(peaks["compiled"], peaks["coalesced"]) < peaks["hook"] < 1 < peaks["plain"]
    # the process's high-water mark and the allocator's events are two rulers of one thing
    for figures in shown.values():
        assert figures["recorded_peak_of_parameters"] == pytest.approx(figures["peak_of_parameters"], abs=0.03)
        assert figures["updates_apart"] < 100 * figures["rounding_apart"]


@pytest.mark.gpu
def test_all_modes_on_cuda(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--size", "small", "--device", "cuda"]) == 0
    modes = assert_complete(tmp_path, "plain", "hook", "compiled", "coalesced")
    assert all(m["counters"]["reserved_bytes"] > m["parameter_bytes"] for m in modes.values())


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("tpu", "--device tpu: "),
        ("meta", "--device meta: must be one of cpu, cuda"),
        pytest.param(
            "cuda", "cpu is always there", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
        ),
    ],
)
def test_a_device_that_is_not_there(device: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--device", device])
    assert refused.value.code == 2
    assert says in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file"), "--device", "cpu"]) == 1
    assert "file" in capsys.readouterr().err


def red(path: Path) -> int:
    """Pixels of the gradients' colour."""
    from matplotlib.image import imread

    wanted = [int(COLOURS["GRADIENT"][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((abs(imread(path)[..., :3] - wanted).max(-1) < 0.02).sum())


def test_the_picture_shows_gradients_where_there_are_any(tmp_path: Path) -> None:
    """A panel in which gradients fill half of the area, and one that has none; beside them the legend."""

    def mode(gradient: float) -> dict[str, Any]:
        gb = {category: [0.0, 0.0, 0.0] for category in CATEGORIES}
        gb["PARAMETER"], gb["GRADIENT"] = [1.0] * 3, [gradient] * 3
        return {"t": [0.0, 5.0, 10.0], "gb": gb, "experiments": 1}

    draw({"plain": mode(1.0), "hook": mode(0.0)}, tmp_path / "with.png", "some")
    draw({"plain": mode(0.0), "hook": mode(0.0)}, tmp_path / "without.png", "none")
    assert red(tmp_path / "with.png") > 50_000
    assert red(tmp_path / "without.png") < 2_000


def test_colours_can_be_told_apart() -> None:
    assert tuple(COLOURS) == CATEGORIES
    rgb = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLOURS.values()]
    pairs = [(a, b) for i, a in enumerate(rgb) for b in rgb[:i]]
    assert min(max(abs(x - y) for x, y in zip(a, b, strict=True)) for a, b in pairs) > 30
