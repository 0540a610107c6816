"""The parts: which commands, in which order, and how long each may take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Numbers of lanes besides a task's own.
LANES = {"mlp": (1, 16, 256, 512), "gpt": (1, 32, 128), "cnn": (1, 32, 128)}

#: Seconds of a part of a task's group, and until all of the group should be ready to measure.
GROUP_S, PATIENCE_S = 130, 75

#: Seconds of the others.
MEMORY_S, COMPILE_S = 90, 140

#: Seconds in all. A quick run tells whether everything works, on however slow a machine.
TOTAL_S, QUICK_S = 470, 1800

#: Settings that all sides have, and the ruler's arguments for them.
SETTINGS = {
    "tf32": ["--matmul-precision", "high"],
    "bfloat16": ["--precision", "bfloat16"],
    "graphs": ["--graphs"],
}

#: What is measured beside each other.
ALL = ("plain", "coalesced", "floor")


@dataclass(frozen=True)
class Part:
    """A command.

    Args:
        name: of its files.
        command: with its arguments.
        limit_s: seconds that it may take.
        prints: its results are what it prints; else it writes them to ``<name>.json`` itself.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    prints: bool = False


@dataclass(frozen=True)
class Order:
    """What is asked for.

    Args:
        out: folder of the results.
        scratch: another, for files that the parts of a group share.
        device: "cuda" or "cpu".
        quick: the smallest sizes.
        peers: those that are installed.
    """

    out: Path
    scratch: Path
    device: str
    quick: bool
    peers: Sequence[str]

    def groups(self) -> list[list[Part]]:
        """Parts that are started together, group by group. Within a group they prepare side by side, and measure in
        turns; seconds to compile are those of a group of nothing else."""
        if self.quick:
            # each kind of part once, and each task once
            lanes = self.ruler("cnn", "cnn-lanes-1", "--sides", *ALL, "--processes", "1", "--lanes", "1")
            each = [self.task("mlp")], [self.setting("gpt", "bfloat16")], [lanes]
            return [*each, [*self.beside("digits"), self.memory(), self.compiling("digits", "--lanes", "2")]]
        tasks = [
            [
                self.task(task),
                *self.beside(task),
                *self.lanes(task, lanes),
                *(self.setting(task, s) for s in self.settings),
            ]
            for task, lanes in LANES.items()
        ]
        compiling = [self.compiling("mlp", "--lanes", "64"), self.compiling("cnn", "--lanes", "8")]
        compiling.append(self.compiling("gpt", "--lanes", "8", "--layers", "4", "12"))
        return [*tasks, [self.memory()], compiling]

    @property
    def settings(self) -> list[str]:
        return [name for name in SETTINGS if self.device == "cuda" or name != "graphs"]

    def task(self, task: str) -> Part:
        """A task as it is."""
        return self.ruler(task, task, "--sides", *ALL, "--processes", *(["1"] if self.quick else ["1", "2", "4", "6"]))

    def beside(self, task: str) -> list[Part]:
        """Beside each peer: if that fails, it fails alone."""
        return [self.ruler(task, f"{task}-{peer}", "--sides", "coalesced", peer) for peer in self.peers]

    def lanes(self, task: str, lanes: Sequence[int]) -> list[Part]:
        """At other numbers of lanes."""
        sides = "--sides", "coalesced", "floor"
        return [self.ruler(task, f"{task}-lanes-{n}", *sides, "--lanes", str(n)) for n in lanes]

    def setting(self, task: str, setting: str) -> Part:
        """In another setting, on all sides."""
        return self.ruler(task, f"{task}-{setting}", "--sides", *ALL, "--processes", "1", *SETTINGS[setting])

    def ruler(self, task: str, name: str, *arguments: str) -> Part:
        """A part by `benchmarks.throughput`."""
        command = [*self.module("benchmarks.throughput", name, "--task", task), "--rates"]
        command += [
            "--turns",
            str(self.scratch / f"{task}.turns"),
            "--patience",
            str(QUICK_S if self.quick else PATIENCE_S),
        ]
        small = ["--small", "--no-compile", "--rounds", "1", "--seconds", "0.1", "--cores", "1"]
        whole = ["--rounds", "3" if name == task else "2", "--seconds", "0.3"]
        return self.part(name, [*command, *(small if self.quick else whole), *arguments], GROUP_S)

    def memory(self) -> Part:
        how = ["--size", "tiny", "--modes", "plain"] if self.quick else ["--size", "blog"]
        command = [sys.executable, "-m", "coalesce.memory", "--device", self.device, *how, "--json"]
        return self.part("memory", command, MEMORY_S, prints=True)

    def compiling(self, task: str, *arguments: str) -> Part:
        """Seconds to compile, from a cold and from a warm cache."""
        name = f"{task}-compile"
        command = [*self.module("benchmarks.compile", name, "--task", task), *arguments]
        return self.part(name, [*command, *(["--no-compile"] if self.quick else [])], COMPILE_S)

    def part(self, name: str, command: Sequence[str], limit_s: float, prints: bool = False) -> Part:
        return Part(name, command, QUICK_S if self.quick else limit_s, prints)

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return QUICK_S if self.quick else TOTAL_S

    def module(self, module: str, name: str, *arguments: str) -> list[str]:
        """A command that writes the results of a part."""
        path = self.out / f"{name}.json"
        return [sys.executable, "-m", module, "--device", self.device, "--json", str(path), *arguments]
