"""What can be wrong, said so that it can be put right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid name most like ``name``, or an empty string."""
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return found[0] if found else ""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    Args:
        key: the dotted configuration key.
        value: the value seen.
        rule: the rule that it breaks, as a phrase: "must be a finite number".
        valid: the valid values, in words.
        nearest: the valid name nearest to the one given, for misspelt names.
        source: where the value comes from: a file or "command line".
    """

    key: str
    value: object
    rule: str
    valid: str = ""
    nearest: str = ""
    source: str = ""

    def __str__(self) -> str:
        text = f"{self.key}={self.value!r}: {self.rule}"
        if self.valid:
            text += f"; valid: {self.valid}"
        if self.nearest:
            text += f"; did you mean {self.nearest!r}?"
        if self.source:
            text += f" (from {self.source})"
        return text


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, reported together before anything starts."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"{head} in the configuration:\n" + "\n".join(f"  {p}" for p in self.problems))


class TaskError(RuntimeError):
    """The user's own code failed, or does something that lanes cannot share."""


class RunFolderError(OSError):
    """A run folder cannot be written, or not be gone on from: the text says why, and what can be done."""


class LaunchError(RuntimeError):
    """Jobs cannot be started: the text says why, and what can be done."""
