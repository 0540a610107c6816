"""The languages that a sweep's values are written in: Hydra's sweep syntax, and two resolvers of our own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, overload

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, FloatRange, Glob, IntervalSweep, Override, RangeSweep, Sweep
from hydra.errors import HydraException
from omegaconf import ListConfig, OmegaConf

from coalesce.errors import ConfigError, Problem
from coalesce.search.space import Interval, Values

SYNTAX = 'a list, or a quoted text: "choice(a, b)", "range(0, 8)"'
#: More values than any sweep has; a larger count is a slip of the pen, and would fill the memory.
MOST_SPACED = 100_000


def register_resolvers() -> None:
    """Make ``${logspace:low,high,n}`` and ``${linspace:low,high,n}`` known to OmegaConf, once per process."""
    for function in (logspace, linspace):
        if not OmegaConf.has_resolver(function.__name__):
            OmegaConf.register_new_resolver(function.__name__, _as_list_config(function))


def _as_list_config(function: Callable[[float, float, int], list[float]]) -> Callable[..., ListConfig]:
    # a plain list does for reading a value, but not for `--cfg job --resolve`
    return lambda low, high, n: ListConfig(function(low, high, n))


def linspace(low: float, high: float, n: int) -> list[float]:
    """``n`` values, equally spaced; the first is ``low`` and the last is ``high``, exactly.

    Those between are rounded to 12 digits, so that they, and with them an experiment's id, are the same on every
    machine, whatever its mathematical library does in the last bit.

    >>> linspace(0, 0.5, 6)
    [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    """
    _check_ends("linspace", low, high, n)
    return _spaced(low, high, n, lambda share: low + (high - low) * share)


def logspace(low: float, high: float, n: int) -> list[float]:
    """``n`` values, equally spaced in their logarithm; otherwise as `linspace`. The ends are values, not exponents.

    >>> logspace(1e-4, 1e-1, 4)
    [0.0001, 0.001, 0.01, 0.1]
    """
    _check_ends("logspace", low, high, n)
    if low <= 0 or high <= 0:
        raise ValueError(f"logspace takes two values above 0, not {low} and {high} (they are values, not exponents)")
    start, stop = math.log10(low), math.log10(high)
    return _spaced(low, high, n, lambda share: 10 ** (start + (stop - start) * share))


def _check_ends(name: str, low: Any, high: Any, n: Any) -> None:
    for value in (low, high):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} takes two finite numbers and a count, not {value!r}")
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_SPACED:
        raise ValueError(f"{name}'s count is an integer from 1 to {MOST_SPACED}, not {n!r}")
    if n == 1 and low != high:
        raise ValueError(f"{name} takes both ends, {low} and {high}, so its count is at least 2")


def _spaced(low: float, high: float, n: int, value: Callable[[float], float]) -> list[float]:
    inside = [float(f"{value(step / (n - 1)):.12g}") for step in range(1, n - 1)]
    return [float(low), *inside, float(high)][:n]


def read_sweep(options: Callable[[str], Sequence[str]], limit: int) -> Callable[[str, str], Values]:
    """Make the function that reads Hydra's sweep syntax into values.

    Args:
        options: the options of a group, for ``glob``.
        limit: no more values than this, plus one, are written down.
    """

    def read(key: str, text: str) -> Values:
        try:
            override = OverridesParser.create().parse_override(f"value={text}")
        except HydraException as error:
            raise _wrong(key, text, f"cannot be read: {str(error).splitlines()[0]}", SYNTAX) from None
        sweep: Any = override._value
        if isinstance(sweep, IntervalSweep):
            return _interval(key, text, sweep)
        if isinstance(sweep, Glob):
            names = options(key)
            if not names:
                raise _wrong(key, text, "names options of a group, but the key is no group", SYNTAX)
            return Glob(patterns(sweep.include), patterns(sweep.exclude)).filter(list(names))
        if isinstance(sweep, RangeSweep):
            return _range(key, text, sweep, override, limit)
        if isinstance(sweep, ChoiceSweep):
            values = [Override._convert_value(value) for value in override.sweep_iterator()]
            if has_sweep(values):
                raise _wrong(key, text, "has a sweep inside a sweep", SYNTAX)
            return values
        raise _wrong(key, text, "must be a list of the values to sweep", SYNTAX)

    return read


def _interval(key: str, text: str, sweep: IntervalSweep) -> Interval:
    if sweep.tags - {"log"}:
        raise _wrong(key, text, f"has an unknown tag: {', '.join(sorted(sweep.tags - {'log'}))}", "tag(log, ...)")
    low: Any = sweep.start
    high: Any = sweep.end
    # Hydra reads the ends of interval(1, 8) as floats, those of int(interval(1, 8)) as integers
    integer = isinstance(low, int) and isinstance(high, int)
    try:
        return Interval(low, high, "log" in sweep.tags, integer)
    except ValueError as error:
        raise _wrong(key, text, str(error), "interval(low, high), tag(log, interval(low, high))") from None


def _range(key: str, text: str, sweep: RangeSweep, override: Override, limit: int) -> Sequence[Any]:
    ends = (sweep.start or 0, sweep.stop or 0, sweep.step)
    if not sweep.step or not all(math.isfinite(end) for end in ends):
        raise _wrong(key, text, "has no end", "a range of finite numbers whose step is not 0")
    values = sweep.range()
    counted = _Range(values) if isinstance(values, FloatRange) else values
    # what is longer is refused for its length, and never written down
    return counted if len(counted) > limit else list(override.sweep_iterator())


class _Range(Sequence[float]):
    """Hydra's range of floats, with a length: Hydra's own can only be run through."""

    def __init__(self, values: FloatRange):
        self._start, self._step = Decimal(values.start), Decimal(values.step)
        self._length = max(0, math.ceil((Decimal(values.stop) - self._start) / self._step))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> list[float]: ...
    def __getitem__(self, index: int | slice) -> float | list[float]:
        if isinstance(index, slice):
            return [self[i] for i in range(self._length)[index]]
        return float(self._start + range(self._length)[index] * self._step)


def _wrong(key: str, text: str, rule: str, valid: str) -> ConfigError:
    return ConfigError([Problem(key, text, rule, valid)])


def patterns(names: Sequence[Any]) -> list[str]:
    """The patterns of a glob as text: Hydra's own filter trips over those in quotes."""
    return [Override._convert_value(name) for name in names]  # type: ignore[misc]


def has_sweep(value: Any) -> bool:
    """Whether a parsed value of the command line has a sweep somewhere inside: ``{seed: range(0, 8)}``."""
    if isinstance(value, list):
        return any(has_sweep(item) for item in value)
    return (
        any(has_sweep(item) for item in value.values()) if isinstance(value, dict) else isinstance(value, Sweep | Glob)
    )
