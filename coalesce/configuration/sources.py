"""Where a value of the composed configuration was written: the command line, or which file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser

from coalesce.errors import Problem

COMMAND_LINE = "command line"
#: Plain scalars that YAML 1.1, which OmegaConf reads, takes for another number than most people.
MISREAD = (
    (re.compile(r"[-+]?0[0-7_]+"), "an octal number"),
    (re.compile(r"[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"), "a number to the base 60"),
)


@dataclass(frozen=True)
class File:
    """A configuration file that took part.

    Args:
        path: where it is.
        package: the dotted key that its content stands at; "" for the root.
    """

    path: Path
    package: str

    @property
    def name(self) -> str:
        """As the user would write it: relative to where he is, if it lies below."""
        return str(self.path.relative_to(Path.cwd()) if self.path.is_relative_to(Path.cwd()) else self.path)


class Sources:
    """What of a configuration comes from where.

    Args:
        overrides: what Hydra was given on the command line.
        groups: the names of groups; ``sweep=lr_grid`` chooses a file and gives no value.
        files: those that took part; later ones override earlier ones.
    """

    def __init__(self, overrides: Sequence[str], groups: Collection[str], files: Sequence[File]):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        self.given: set[str] = set()
        for override in (o for o in parsed if o.key_or_group not in groups):
            self.given |= set(_keys(override.value(), override.key_or_group))
        self._files = [(file, _scalars(file)) for file in files]

    def __call__(self, key: str) -> str:
        """The source of a dotted key, or an empty text."""
        if _is_in(key, self.given):
            return COMMAND_LINE
        for file, scalars in reversed(self._files):
            if _is_in(key, (name for name, _ in scalars)):
                return file.name
        return ""

    def misread(self) -> Iterator[Problem]:
        """Numbers in the files that YAML 1.1 reads otherwise than they look: ``010`` is 8, ``1:30`` is 90."""
        for file, scalars in self._files:
            for key, node in scalars:
                if node.style is None and not _is_in(key, self.given):
                    for pattern, name in MISREAD:
                        if pattern.fullmatch(node.value):
                            rule = f"YAML reads this as {name}"
                            valid = "a decimal number without a leading zero, or a text in quotes"
                            yield Problem(key, node.value, rule, valid, source=file.name)


def _is_in(key: str, given: Iterable[str]) -> bool:
    """Whether a key, or a mapping or list that holds it, or one that it holds, is among those given."""
    return any(key == name or key.startswith(name + ".") or name.startswith(key + ".") for name in given)


def _keys(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _keys(item, f"{key}.{name}")
    else:
        yield key


def _scalars(file: File) -> list[tuple[str, yaml.ScalarNode]]:
    """Every scalar of a file, with its dotted key. Hydra has read the file before, so it is good YAML."""
    root = yaml.compose(file.path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    return list(_below(root, file.package))


def _below(node: Any, key: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    if isinstance(node, yaml.ScalarNode):
        yield key, node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _below(item, key)
    elif isinstance(node, yaml.MappingNode):
        for name, item in node.value:
            if name.value != "defaults" or key:
                yield from _below(item, f"{key}.{name.value}" if key else str(name.value))


def files_of(hydra: HydraConf) -> list[File]:
    """The files of our own groups that Hydra composed, lowest priority first.

    Args:
        hydra: the node ``hydra`` of the composed configuration.
    """
    # our folder comes first in Hydra's search path, then the user's; of files of one name the first counts
    folders = [Path(s.path) for s in hydra.runtime.config_sources if s.schema == "file"]
    chosen = [(f"{group}/{option}", group) for group, option in hydra.runtime.choices.items() if group != "sweep"]
    # the group `sweep` is composed last, after the primary file
    ordered = [*chosen, (str(hydra.job.config_name), ""), (f"sweep/{hydra.runtime.choices.get('sweep')}", "sweep")]
    result = []
    for name, group in (pair for pair in ordered if not pair[1].startswith("hydra/")):
        path = next((p for folder in folders if (p := folder / f"{name}.yaml").is_file()), None)
        if path is not None:
            result.append(File(path, _package(path, group)))
    return result


def _package(path: Path, group: str) -> str:
    header = re.match(r"\s*#\s*@package\s+(\S+)", path.read_text(encoding="utf-8"))
    if header is None:
        return group.replace("/", ".").partition("@")[0]
    return "" if header[1] == "_global_" else header[1]
