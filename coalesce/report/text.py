"""Numbers, values, sizes and durations as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from rich.console import Console


def number(value: float, digits: int = 4) -> str:
    """A float with few digits: exact if five do, else with ``digits`` significant ones.

    >>> [number(v) for v in (0.001, 1.2e-4, 0.00026826957952797256, 0.99999, 10000.0, 1234567.8, float("nan"))]
    ['0.001', '1.2e-4', '2.683e-4', '0.99999', '10000', '1.235e6', 'nan']
    """
    if not math.isfinite(value):
        return str(value)
    exact = len(Decimal(repr(value)).normalize().as_tuple().digits)
    if exact <= 5:
        # 0.99999 as a beta is not 1
        digits = exact
    exponent = math.floor(math.log10(abs(value))) if value else 0
    if -3 <= exponent < 6:
        return f"{value:.{max(digits, exponent + 1)}g}"
    return _tidy(f"{value:.{digits - 1}e}")


def metric(value: float, digits: int = 4) -> str:
    """A measured float with so many significant digits, zeros kept, so that a column of them lines up.

    >>> [metric(v) for v in (0.97, 1.0, 12.3456, 12345.6, 1.2e-5, float("nan"))]
    ['0.9700', '1.000', '12.35', '12346', '1.200e-5', 'nan']
    """
    if not math.isfinite(value):
        return str(value)
    exponent = math.floor(math.log10(abs(value))) if value else 0
    if -3 <= exponent < 6:
        return f"{value:.{max(0, digits - 1 - exponent)}f}"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(power)}"


def _tidy(text: str) -> str:
    mantissa, _, power = text.partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}"


def value(item: Any) -> str:
    """A configuration value as it would be written in YAML, floats as `number` writes them.

    >>> [value(v) for v in (True, None, 8, 1e-4, "adam", (0.9, 0.999))]
    ['true', 'null', '8', '1e-4', 'adam', '[0.9, 0.999]']
    """
    if isinstance(item, Mapping):
        return "{" + ", ".join(f"{key}: {value(part)}" for key, part in item.items()) + "}"
    if isinstance(item, list | tuple):
        return "[" + ", ".join(map(value, item)) + "]"
    if item is None:
        return "null"
    if isinstance(item, bool):
        return str(item).lower()
    return number(item) if isinstance(item, float) else str(item)


def values(swept: Mapping[str, Any]) -> str:
    """The swept values of one experiment on one line.

    >>> values({"optimizer.lr": 1e-3, "seed": 3})
    'optimizer.lr=0.001, seed=3'
    """
    return ", ".join(f"{key}={value(item)}" for key, item in swept.items())


def distinct(items: Iterable[Any]) -> list[str]:
    """The values of one key, each with as few digits as keep the unequal ones apart.

    >>> distinct([0.123456789, 0.123456788, 1e-4])
    ['0.123456789', '0.123456788', '1e-4']
    """
    items = list(items)
    count = len({value(item) if not isinstance(item, float) else repr(item) for item in items})
    texts = [value(item) for item in items]
    digits = 4
    while len(set(texts)) < count and digits < 17:
        digits += 1
        texts = [number(item, digits) if isinstance(item, float) else value(item) for item in items]
    return texts


def size(count: float) -> str:
    """A number of bytes.

    >>> [size(n) for n in (17, 2048, 52_900_000, 3 * 2**30)]
    ['17 B', '2.0 KiB', '50.4 MiB', '3.0 GiB']
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def duration(seconds: float) -> str:
    """A span of time.

    >>> [duration(s) for s in (0.42, 42, 150, 7500, 200_000)]
    ['0.4 s', '42 s', '2:30 min', '2:05 h', '2 d 7 h']
    """
    whole = round(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 2 * 86400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def rate(value: float) -> str:
    """A speed with two digits, as `number` writes them, or as a whole number.

    >>> [rate(v) for v in (1234.5, 99.123456, 0.123456, 0.0)]
    ['1,234', '99', '0.12', '0']
    """
    return f"{value:,.0f}" if value >= 100 else number(value, 2)


def count(number: int, noun: str) -> str:
    """A number and its noun, which takes an s.

    >>> count(1, "experiment"), count(128000, "step")
    ('1 experiment', '128,000 steps')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def ellipsis(console: Console) -> str:
    """Three dots, as the console's encoding can show them."""
    return "..." if console.options.ascii_only else "…"


def say(console: Console, line: str, style: str = "", wrap: bool = True) -> None:
    """Print a sentence as it stands: brackets in values are no markup.

    Args:
        console: where to print.
        line: the text.
        style: rich's.
        wrap: break it between words at a terminal's margin; a path would not survive that. What goes to a file is
            never broken.
    """
    soft = not (wrap and console.is_terminal)
    console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=soft)
