"""Arguments before Hydra sees them: spellings that it would refuse and that can only mean one thing, and multirun."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    OverrideType,
    Quote,
    QuotedString,
    RangeSweep,
    Sweep,
    Transformer,
)
from hydra.errors import HydraException

from coalesce.configuration.language import has_sweep, patterns
from coalesce.experiment import GROUPS, KEYS

PARAMS = "sweep.params"
#: Nodes of our own, of which we know better than Hydra which keys there are.
NODES = (*GROUPS, "sweep", "trainer", "search", "launcher")
MULTIRUN = ("-m", "--multirun")
#: So many commands are printed where one would not do.
PRINTED = 8
#: So many values are taken from an interval, unless one of these searches draws from it.
FROM_INTERVAL = 8
DRAWING = ("random", "optuna")


def adapt(overrides: Sequence[str]) -> list[str]:
    """Overrides in a spelling that Hydra takes.

    - ``sweep.params.optimizer.lr=[0.1, 0.2]`` and ``sweep.params.seed=range(0, 3)`` become entries of the mapping
      ``sweep.params``: to Hydra the one has an unknown key and the other asks for multirun.
    - An unknown key of ``task``, ``optimizer``, ... is let through: our own check names the valid and the nearest,
      and reports it together with everything else.

    What Hydra's grammar does not allow stays as it is; Hydra says what is wrong with it.
    """
    return [_adapt(line) for line in overrides]


def _adapt(line: str) -> str:
    override = _parse(line)
    if override is None or override.type is OverrideType.DEL or override.package is not None:
        return line
    key = override.key_or_group
    if key == PARAMS or key.startswith(PARAMS + "."):
        value = override._value
        if key != PARAMS:
            value = {key[len(PARAMS) + 1 :]: value}
        if isinstance(value, dict):
            return f"++{PARAMS}={_text(value)}"
    if "." in key and key.split(".")[0] in NODES and override.type is OverrideType.CHANGE and not _sweeps(override):
        return f"++{line}"
    return line


def refuse_multirun(program: str, arguments: Sequence[str], overrides: Sequence[str], multirun: bool) -> str:
    """What to say to a command that asks Hydra for multirun, with the command that is meant; "" if it asks for none.

    Args:
        program: how the program was called.
        arguments: all of its arguments, in order.
        overrides: those of them that are overrides.
        multirun: whether a flag asks for it; a sweep among the overrides does as well.
    """
    parsed = {line: override for line in overrides if (override := _parse(line)) is not None}
    sweeps = {line: o for line, o in parsed.items() if _sweeps(o) and not _is_param(o)}
    modes = {line for line, o in parsed.items() if o.key_or_group == "hydra.mode"}
    multirun = multirun or any("MULTIRUN" in line.upper() for line in modes)
    if not multirun and not sweeps:
        return ""
    rest = [a for a in arguments if a not in sweeps and a not in modes and not _is_flag(a)]
    inside: dict[str, Override] = {}
    outside: dict[str, Override] = {}
    for line, override in sweeps.items():
        (inside if _in_experiment(override.key_or_group) else outside)[line] = override
    draws = any(o.key_or_group == "search" and o._value in DRAWING for o in parsed.values())
    words = {o.key_or_group: _values_text(o, draws) for o in inside.values()}
    new = [f"{PARAMS}={{{', '.join(f'{key}: {text}' for key, text in words.items())}}}"] if words else []
    listed = [[f"{o.get_key_element()}={value}" for value in _each(o)] for o in outside.values()]
    commands = [shlex_join([program, *rest, *chosen, *new]) for chosen in itertools.product(*listed)]
    reasons = []
    if multirun or inside:
        reasons.append("a whole sweep trains in one process; Hydra's multirun (-m) would start one for every value.")
    if outside:
        names = ", ".join(o.key_or_group for o in outside.values())
        reasons.append(f"{names}: no part of an experiment, so each value is a run of its own.")
    if any(o.is_interval_sweep() for o in inside.values()) and not draws:
        drawing = "search=random or search=optuna draw from all of it"
        reasons.append(f"An interval is continuous: the command takes {FROM_INTERVAL} values from it; {drawing}.")
    reasons.append("Run:" if len(commands) == 1 else "Run one after the other:")
    shown = [f"  {command}" for command in commands[:PRINTED]]
    more = ["  … and so on"] if len(commands) > PRINTED else []
    return "\n".join([*reasons, *shown, *more])


def shlex_join(words: Sequence[str]) -> str:
    """A command as one types it; the program itself may be several words (``python -m coalesce``)."""
    return " ".join([words[0], *(shlex.quote(word) for word in words[1:])])


def program_name(argv0: str) -> str:
    """How the program was called, as one would type it again."""
    return "python -m coalesce" if argv0.endswith(".py") else Path(argv0).name


def hints(overrides: Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
    """Plain keys on the command line that are none of ``names``, and their values: what Hydra refuses may be these."""
    parsed = [override for line in overrides if (override := _parse(line)) is not None]
    return [
        (o.key_or_group, str(o._value))
        for o in parsed
        if re.fullmatch(r"\w+", o.key_or_group) and o.key_or_group not in names
    ]


def _parse(line: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(line)
    except HydraException:
        return None


def _sweeps(override: Override) -> bool:
    return override.is_sweep_override()


def _is_param(override: Override) -> bool:
    return override.key_or_group.startswith(PARAMS)


def _in_experiment(key: str) -> bool:
    return key.split(".")[0] in KEYS


def _is_flag(argument: str) -> bool:
    # argparse takes any unambiguous beginning of a long flag
    return argument in MULTIRUN or (argument.startswith("--mu") and MULTIRUN[1].startswith(argument))


def _each(override: Override) -> list[str]:
    """The values of a sweep outside of experiments, one by one, where they can be listed."""
    if (override.is_choice_sweep() and not isinstance(override._value, Glob)) or override.is_range_sweep():
        return list(itertools.islice(override.sweep_string_iterator(), PRINTED + 1))
    return ["<value>"]


def _values_text(override: Override, draws: bool) -> str:
    value = override._value
    if isinstance(value, ChoiceSweep):
        return "[" + ", ".join(override.sweep_string_iterator()) + "]"
    if isinstance(value, IntervalSweep) and not draws:
        # a continuous range has no values of its own: the command takes some from it
        low, high = float(value.start or 0), float(value.end or 0)
        return f"${{{'logspace' if 'log' in value.tags and low > 0 else 'linspace'}:{low},{high},{FROM_INTERVAL}}}"
    return _text(value)


def _text(value: Any) -> str:
    """A parsed value as Hydra's grammar writes it; sweeps inside a mapping become quoted texts, or lists."""
    if isinstance(value, ChoiceSweep) and not value.shuffle and not has_sweep(value.list):
        return "[" + ", ".join(Transformer.str(item) for item in value.list) + "]"
    if isinstance(value, Sweep | Glob):
        return QuotedString(_sweep_text(value), Quote.double).with_quotes()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{Transformer.str(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return Transformer.str(value)


def _sweep_text(value: Sweep | Glob) -> str:
    if isinstance(value, Glob):
        exclude = f", exclude=[{', '.join(patterns(value.exclude))}]" if value.exclude else ""
        return f"glob([{', '.join(patterns(value.include))}]{exclude})"
    if isinstance(value, ChoiceSweep):
        text = f"choice({', '.join(_text(item) for item in value.list)})"
    elif isinstance(value, RangeSweep):
        text = f"range({value.start}, {value.stop}" + (f", {value.step})" if value.step != 1 else ")")
    else:
        assert isinstance(value, IntervalSweep)
        ends: list[Any] = [value.start, value.end]
        text = f"interval({ends[0]}, {ends[1]})"
        # as int(interval(1, 8)) leaves them
        text = f"int({text})" if all(isinstance(end, int) for end in ends) else text
    if value.tags:
        text = f"tag({', '.join(sorted(value.tags))}, {text})"
    return f"shuffle({text})" if getattr(value, "shuffle", False) else text
