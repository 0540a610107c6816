"""Tables over swept keys that keep to the console's width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coalesce.experiment import GROUPS
from coalesce.report import text

#: Makes a table: with columns for these swept keys, and their names broken after the dots or not.
Build = Callable[[Sequence[str], bool], Table]


def print_fitting(
    build: Build, values: Sequence[Mapping[str, Any]], keys: Sequence[str], console: Console, note: str = ""
) -> None:
    """Print a table with a column for each swept key.

    Where it is too wide, the keys' names are broken; and where that is not enough, the keys that a swept group decides
    (each task has its number of steps) move into a table of their own, which has a column for each option.

    Args:
        build: makes the table.
        values: swept key → value, of everything that the keys' columns tell apart.
        keys: in the order of the sweep.
        console: where to print. What fits in no way is left to rich, which folds the values.
        note: a sentence below the table, if any.
    """
    decided = _decided(values, keys)
    undecided = telling(values, keys)
    for kept, broken in ((keys, False), (keys, True), (undecided, False), (undecided, True)):
        table = build(kept, broken)
        if _fits(table, console):
            break
    console.print(table)
    if note:
        text.say(console, f"{note}\n")
    if list(kept) != list(keys):
        for group in GROUPS:
            _print_decided(group, [key for key in keys if decided.get(key) == group], values, console)


def telling(values: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """The swept keys that tell experiments apart: those that no swept group decides.

    >>> telling([{"task": "mlp", "steps": 10, "seed": 0}, {"task": "cnn", "steps": 20, "seed": 0}],
    ...         ["task", "steps", "seed"])
    ['task', 'seed']
    """
    decided = _decided(values, keys)
    return [key for key in keys if key not in decided]


def header(key: str, broken: bool) -> Text:
    """A swept key as the head of its column."""
    return Text(key.replace(".", ".\n") if broken else key)


def _decided(values: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, str]:
    """Keys other than the seed that have one value for each option of a swept group, and that group."""
    found: dict[str, str] = {}
    for group in (key for key in keys if key in GROUPS):
        options = {repr(row.get(group)) for row in values}
        for key in (key for key in keys if key not in (*GROUPS, "seed") and key not in found):
            if len({repr((row.get(group), row.get(key))) for row in values}) == len(options):
                found[key] = group
    return found


def _fits(table: Table, console: Console) -> bool:
    # measured without the console's bound, to which rich would cut the answer
    return console.measure(table, options=console.options.update(max_width=100_000)).maximum <= console.width


def _print_decided(group: str, keys: Sequence[str], values: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not keys:
        return
    rows = list({repr(row.get(group)): row for row in values}.values())
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(Text(f"decided by {group}"), no_wrap=True)
    for row in rows:
        table.add_column(Text(text.value(row.get(group))), justify="right")
    for key in keys:
        table.add_row(Text(key), *(Text(cell) for cell in text.distinct(row.get(key) for row in rows)))
    if _fits(table, console):
        console.print(table)
    else:
        text.say(console, f"Decided by {group}, and not shown for want of width: {', '.join(keys)}")
