"""Timelines of memory as stacked areas, one panel per mode, all on one scale."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coalesce.memory.timeline import CATEGORIES

#: Category → colour. Paul Tol's "bright" scheme, which colour-blind readers can tell apart; what rests is pale, and the
#: gradients have the one red.
COLOURS = {
    "PARAMETER": "#BBBBBB",
    "OPTIMIZER_STATE": "#DDDDDD",
    "INPUT": "#222222",
    "ACTIVATION": "#4477AA",
    "GRADIENT": "#EE3344",
    "AUTOGRAD_DETAIL": "#66CCEE",
    "TEMPORARY": "#CCBB44",
}

#: How many of them are a GB, and what they are called.
UNITS = ((1, "GB"), (1e3, "MB"), (1e6, "kB"), (1e9, "bytes"))

TITLES = {
    "plain": "plain eager loop",
    "hook": "hook: coalesce.BackProp",
    "compiled": "compiled step",
    "coalesced": "coalesced step",
}


def draw(modes: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the timelines of some modes.

    Several experiments' memory is divided by their number, so that all panels have one scale.

    Args:
        modes: as `memory_timelines.json` has them: ``t``, ``gb``, ``step_ms``, ``experiments``.
        path: of the PNG.
        title: of the figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 2.4 * len(modes) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(modes), 1, sharey=True, squeeze=False)[:, 0]
    totals = {
        name: [sum(now) / mode["experiments"] for now in zip(*mode["gb"].values(), strict=True)]
        for name, mode in modes.items()
    }
    top = max(max(total) for total in totals.values())
    factor, unit = next((f, u) for f, u in UNITS if top * f >= 1)
    for panel, (name, mode) in zip(panels, modes.items(), strict=True):
        count, total = mode["experiments"], totals[name]
        values = [[gb * factor / count for gb in mode["gb"][category]] for category in CATEGORIES]
        panel.stackplot(mode["t"], values, colors=[COLOURS[c] for c in CATEGORIES], step="post", linewidth=0)
        panel.axhline(max(total) * factor, color="black", linewidth=0.7, linestyle=":")
        many = f" of {count} experiments, memory per experiment" if count > 1 else ""
        panel.set_title(f"{TITLES.get(name, name)}{many}", loc="left", fontsize=10)
        gradient = max(mode["gb"]["GRADIENT"]) * factor / count
        rise = (max(total) - total[0]) * factor
        panel.set_title(
            f"peak above rest {rise:.3g} {unit}, gradients up to {gradient:.3g} {unit}", loc="right", fontsize=10
        )
        panel.set_xlim(mode["t"][0], mode["t"][-1])
        panel.set_ylabel(f"{unit} per experiment" if count > 1 else f"memory, {unit}")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(0, 1.05 * top * factor)
    panels[-1].set_xlabel("time, ms (two steps, slowed by the recording)")
    keys = [Patch(color=COLOURS[category], label=category) for category in CATEGORIES]
    figure.legend(handles=keys[::-1], loc="outside right upper", frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150, format="png")
