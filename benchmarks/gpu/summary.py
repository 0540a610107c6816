"""What all parts found, in one place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.running import Outcome


def summary(out: Path, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How the parts ended, and their figures.

    Returns:
        ``parts``, of each its outcome; ``machine``, as the first part that was measured describes it; ``rates``, the
        experiment-steps per second of each part of the ruler's, and what coalesced is over them; ``others``, what the
        other parts wrote, as it is.
    """
    found: dict[str, Any] = {"parts": [asdict(o) for o in outcomes], "machine": None, "rates": {}, "others": {}}
    for outcome in outcomes:
        figures = _read(out / f"{outcome.name}.json")
        if figures is None:
            continue
        if "tasks" not in figures:
            found["others"][outcome.name] = figures
            continue
        found["machine"] = found["machine"] or figures["machine"]
        for (row,) in figures["tasks"].values():
            found["rates"][outcome.name] = _rates(row)
    return found


def _read(path: Path) -> Any:
    """What a part wrote, if it came so far."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _rates(row: Mapping[str, Any]) -> dict[str, Any]:
    work = {name: one for side in row["sides"].values() for name, one in side["work"].items()}
    compiled = {name: side["compile"] for name, side in row["sides"].items() if "compile" in side}
    return {
        "lanes": row["lanes"],
        "experiment_steps_per_s": {name: {k: one[k] for k in ("median", "min", "max")} for name, one in work.items()},
        "coalesced_over": {peer: ratio["wall"] for peer, ratio in row.get("ratios", {}).items()},
        "losses_apart": row["apart"],
        "compile_s": compiled,
        "others_were_done_preparing": row.get("others were done preparing"),
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The summary to be read."""
    for name, row in found["rates"].items():
        rates = row["experiment_steps_per_s"]
        yield f"{name} ({row['lanes']} lanes), experiment-steps/s; coalesced over it"
        for way, one in rates.items():
            ratio = row["coalesced_over"].get(way.partition(",")[0])
            shown = f"{ratio['median']:8.2f}" if ratio and ratio["against"] == way else ""
            yield f"  {way:44}{one['median']:12.0f}  ({one['min']:.0f}-{one['max']:.0f}){shown}"
    failed = [part for part in found["parts"] if part["rc"]]
    for part in failed:
        yield f"FAILED {part['name']} (exit code {part['rc']} after {part['seconds']:.0f} s):"
        yield from (f"    {line}" for line in part["last_lines"])
    yield f"{len(found['parts']) - len(failed)} parts done, {len(failed)} failed"
