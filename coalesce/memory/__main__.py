"""``python -m coalesce.memory [FOLDER]``: four ways of training one stack of Linear layers, and what each takes.

Measures a plain eager loop, a hook that updates each parameter as soon as its gradient is there, the compiled step,
and a coalesced step of four experiments: milliseconds per step, the peak of memory above its rest, the allocator's
counters, and how far the updates are from the plain loop's. Given a folder, it writes the timeline of each into it, by
category: memory_timelines.json, counters.json, memory_timelines.png, and torch's own raw export of each,
MODE.raw.json.gz.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from coalesce.memory.measure import READABLE, alone, measured
from coalesce.memory.modes import MODES, SIZES
from coalesce.memory.picture import draw
from coalesce.memory.timeline import CATEGORIES

#: Parts of the measurement by process: environment → parts. On the CPU time is taken without the allocator's setting
#: that makes memory readable, since it makes every allocation slow. On CUDA the host runs ahead of the device: it is
#: made to wait where the time of an allocation is asked for, and nowhere else.
PROCESSES: Mapping[str, Sequence[tuple[Mapping[str, str], Sequence[str]]]] = {
    "cpu": [({}, ["updates", "time"]), (READABLE, ["peak", "record"])],
    "cuda": [({}, ["updates", "time", "peak"]), ({"CUDA_LAUNCH_BLOCKING": "1"}, ["record"])],
}

#: Keys of a mode's figures that belong to its timeline.
TIMELINE = ("t", "gb", "seen_gb")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0; 1 if a mode failed, or if the plain loop's peak is less than its gradients, since then the
        measurement sees nothing; 2 if the command was refused.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        device = _device(options.device)
    except ValueError as error:
        parser.error(str(error))
    if options.one:
        raw = options.folder / f"{options.one}.raw.json.gz" if options.raw else None
        found = measured(options.one, SIZES[options.size], device, options.parts, raw)
        Path(options.folder, "figures.json").write_text(json.dumps(found))
        return 0
    try:
        if options.folder is not None:
            options.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            figures = {name: _figures(name, options, device, Path(scratch)) for name in options.modes}
            if options.folder is not None:
                _write(options.folder, figures, options.size, device, Path(scratch))
    except (OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({n: _without_timeline(f) for n, f in figures.items()}, indent=1))
    else:
        Console().print(_table(figures, options.size, device))
    plain = figures.get("plain", {}).get("peak_of_parameters")
    if plain is not None and plain < 1:
        print("the plain loop reads under 1.0 of its parameters: this measurement sees nothing", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m coalesce.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="write timelines and a picture there")
    sizes = "; ".join(f"{n}: {s.layers} x Linear({s.features}), batch {s.batch}" for n, s in SIZES.items())
    parser.add_argument("--size", choices=SIZES, default="small", help=f"{sizes} (default: small)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: CUDA, if there is one)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="which (default: all)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    # a process of its own for each measurement
    parser.add_argument("--one", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    return parser


def _device(text: str) -> torch.device:
    """A device that is there.

    Raises:
        ValueError: for any other.
    """
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {text}: {str(error).splitlines()[0]}; cpu is always there") from error
    if device.type not in PROCESSES:
        raise ValueError(f"--device {text}: must be one of {', '.join(PROCESSES)}")
    return device


def _figures(name: str, options: argparse.Namespace, device: torch.device, scratch: Path) -> dict[str, Any]:
    """Everything about one mode, measured in processes of its own."""
    found: dict[str, Any] = {}
    with Console(stderr=True).status(f"{name}"):
        for environment, parts in PROCESSES[device.type]:
            command = ["-m", "coalesce.memory", str(scratch), "--one", name, "--parts", *parts]
            command += ["--size", options.size, "--device", str(device), *(["--raw"] if options.folder else [])]
            alone(command, environment)
            more = json.loads(Path(scratch, "figures.json").read_text())
            # the device's own, where both count: the recorder sees fewer steps
            counters = more.pop("counters") | found.get("counters", {})
            found |= more | {"counters": counters}
    return found


def _without_timeline(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if key not in TIMELINE}


def _write(
    folder: Path, figures: Mapping[str, Mapping[str, Any]], size: str, device: torch.device, scratch: Path
) -> None:
    # it imports pandas
    from coalesce.store.files import atomic, write_json

    modes = {
        name: {key: found[key] for key in (*TIMELINE, "counters", "step_ms", "experiments", "parameter_bytes")}
        for name, found in figures.items()
    }
    about = {"size": size, "device": _device_name(device), "torch": torch.__version__, "categories": list(CATEGORIES)}
    write_json(folder / "memory_timelines.json", about | {"modes": modes})
    write_json(folder / "counters.json", {name: _without_timeline(found) for name, found in figures.items()})
    for raw in sorted(scratch.glob("*.raw.json.gz")):
        with atomic(folder / raw.name) as temporary:
            temporary.write_bytes(raw.read_bytes())
    with atomic(folder / "memory_timelines.png") as temporary:
        draw(modes, temporary, _title(size, device))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _title(size: str, device: torch.device) -> str:
    about = SIZES[size]
    return f"{about.layers} x Linear({about.features}) and a head, batch {about.batch}, AdamW, {_device_name(device)}"


def _table(figures: Mapping[str, Mapping[str, Any]], size: str, device: torch.device) -> Table:
    table = Table("", *figures, title=_title(size, device))
    for label, row in _rows(figures):
        table.add_row(label, *row)
    return table


def _rows(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Label and one text per mode."""
    all_found = figures.values()

    def row(key: str, form: str, factor: float = 1.0) -> list[str]:
        values = [found.get(key, found["counters"].get(key)) for found in all_found]
        return ["-" if v is None else format(v * factor, form) for v in values]

    yield "experiments", row("experiments", ".0f")
    yield "step, ms (median)", row("step_ms", ".1f")
    yield "step, ms (best)", row("best_step_ms", ".1f")
    best = [found["step_ms"] / found["experiments"] for found in all_found]
    yield "processor time, ms (median)", row("processor_ms", ".1f")
    yield "step per experiment, ms (median)", [f"{value:.1f}" for value in best]
    yield "parameters, MB", row("parameter_bytes", ".1f", 1e-6)
    yield "peak above rest, MB", row("peak_bytes", ".1f", 1e-6)
    yield "  of parameters", row("peak_of_parameters", ".3f")
    yield "  by the timeline", row("recorded_peak_of_parameters", ".3f")
    gradients = [max(f["gb"]["GRADIENT"]) * 1e9 / f["parameter_bytes"] for f in all_found]
    yield "most GRADIENT, of parameters", [f"{value:.3f}" for value in gradients]
    yield "allocations per step", row("allocations_per_step", ".0f")
    yield "frees per step", row("frees_per_step", ".0f")
    if any("reserved_bytes" in found["counters"] for found in all_found):
        yield "cudaMalloc per step", row("cuda_mallocs_per_step", ".1f")
        yield "cudaFree per step", row("cuda_frees_per_step", ".1f")
        yield "reserved pool, MB", row("reserved_bytes", ".1f", 1e-6)
    yield "updates from the plain loop's", row("updates_apart", ".1e")
    yield "  the plain loop's own rounding", row("rounding_apart", ".1e")


if __name__ == "__main__":
    sys.exit(main())
