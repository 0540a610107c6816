"""Experiments of unequal lengths through three lanes, and what may happen to them meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from coalesce.engine.lanes import Lanes
from coalesce.runner import planning
from coalesce.runner.listener import Result
from coalesce.runner.plan import Plan
from coalesce.runner.snapshot import Snapshot
from coalesce.search.base import Ending, Report, Search, Trial, Verdict
from runner_helpers import Net, Recorder, planned

PARAMS = {"seed": range(3), "steps": [20, 35, 13]}
USUAL: dict[str, Any] = {
    "optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.05},
    "schedule": {"name": "plateau", "patience": 0, "factor": 0.5, "threshold": 0.5},
    "arguments": {"dropout": 0.2, "splits": "train val test"},
    "width": 3,
    "every": 5,
    "evaluate_every": 5,
}


class Keeper(Recorder):
    """Takes a snapshot at each boundary, and may end the run at one of them."""

    def __init__(self, at: int = -1, early: bool = False):
        super().__init__()
        self.at, self.early, self.count = at, early, 0
        self.snapshots: list[Snapshot] = []

    def snapshot(self, take: Callable[[], Snapshot]) -> None:
        found = take()
        # what a file would keep of it
        facts = json.loads(json.dumps(dict(found.facts)))
        self.snapshots.append(Snapshot(facts, {name: t.clone() for name, t in found.tensors.items()}))
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt

    def wants_boundary(self) -> bool:
        return self.early


PLANS: dict[str, Plan] = {}


def plan_of(params: Mapping[str, Any] = PARAMS, **options: Any) -> Plan:
    """A plan, which a run does not change, and which is made once."""
    name = repr((params, options))
    if name not in PLANS:
        with patch.object(planning, "_check_traces"):
            PLANS[name] = planned(Net, params, **{**USUAL, **options})
    return PLANS[name]


def outcome(results: Sequence[Result], recorder: Recorder | None = None) -> dict[str, Any]:
    """Everything that must not depend on what happened meanwhile."""
    found = {}
    for r in results:
        told = recorder.curve(r.experiment) if recorder else []
        weights = {n: t.tolist() for w in (r.weights, r.best_weights) if w for n, t in w.items()}
        best = r.best_step, dict(r.best)
        found[r.experiment.id] = str((r.status, r.steps, dict(r.metrics), best, r.message, weights, told))
    return found


class Scripted(Search):
    """Says what it was told to say: (id, step) → verdict."""

    asks_again = True

    def __init__(self, generations: Sequence[Sequence[Trial]], says: Mapping[tuple[str, int], Verdict] | None = None):
        self.generations, self.says = list(generations), says or {}
        self.told: list[Report] = []
        self.endings: list[Ending] = []
        self.place = 0

    def ask(self, width: int) -> Sequence[Trial]:
        self.place += 1
        return self.generations[self.place - 1] if self.place <= len(self.generations) else []

    def tell(self, reports: Sequence[Report]) -> Mapping[str, Verdict]:
        self.told += reports
        found = {r.experiment.id: self.says.get((r.experiment.id, r.step)) for r in reports}
        return {name: verdict for name, verdict in found.items() if verdict is not None}

    def ended(self, ending: Ending) -> None:
        self.endings.append(ending)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place = state["place"]

    @property
    def count(self) -> int:
        return len({trial.experiment.id for generation in self.generations for trial in generation})


class Dreaming(Scripted):
    """Does not know its experiments beforehand."""

    lists = False


def broken_once(monkeypatch: pytest.MonkeyPatch, at: int, error: Callable[[], Exception]) -> list[int]:
    """Let the n-th call of advance run out of memory in the middle: half of the state is written."""
    calls: list[int] = []
    advance = Lanes.advance

    def failing(self: Lanes, count: int) -> None:
        calls.append(self.width)
        if len(calls) == at:
            advance(self, count)
            for name, value in self.state.items():
                if name.startswith("trained/"):
                    value.mul_(3)
            raise error()
        advance(self, count)

    monkeypatch.setattr(Lanes, "advance", failing)
    return calls


def failing_once(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    at: int,
    error: Callable[[], Exception],
    passes: Callable[..., bool] = lambda *given: False,
) -> list[int]:
    """Let the n-th call of a method of the lanes run out of memory; calls that ``passes`` says so of do not count."""
    calls: list[int] = []
    usual = getattr(Lanes, method)

    def failing(self: Lanes, *given: Any, **named: Any) -> Any:
        if not passes(*given):
            calls.append(self.width)
            if len(calls) == at:
                raise error()
        return usual(self, *given, **named)

    monkeypatch.setattr(Lanes, method, failing)
    return calls


ERRORS: dict[str, Callable[[], Exception]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
    ),
    "python": MemoryError,
}
