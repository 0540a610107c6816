"""What jobs agree on: the first decides, and the others obey (law 1)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from coalesce.runner.plan import Plan
from coalesce.store.decisions import agreed, decided
from coalesce.store.files import read_json, write_json_first
from coalesce.store.paths import RunPaths
from run_fakes import grid, plan


def measured(width: int, lowering: str, pieces: tuple[str, ...] = (), again: tuple[str, ...] = ()) -> Plan:
    """A job's plan, as it has measured it for itself."""
    made = plan(grid(seed=[0, 1]))
    how = {"width": width, "lowerings": {"conv": lowering}, "pieces": pieces, "checkpoint": again}
    return replace(made, cohorts=tuple(replace(c, **how) for c in made.cohorts))  # type: ignore[arg-type]


def test_the_first_decides_and_the_others_obey(tmp_path: Path) -> None:
    first, second = measured(8, "grouped", ("a",), ("b",)), measured(5, "columns")
    assert agreed(RunPaths(tmp_path, 3), first) == first
    (planned,) = agreed(RunPaths(tmp_path, 0), second).cohorts
    (mine,) = second.cohorts
    assert planned.cohort == mine.cohort
    assert (planned.width, planned.lowerings) == (8, {"conv": "grouped"})
    assert (planned.pieces, planned.checkpoint) == (("a",), ("b",))
    # one that comes later finds it before it measures
    (found,) = decided(RunPaths(tmp_path, 7), [mine.cohort.shape, "nobody has come to this one"])
    assert (found.width, found.lowerings, found.cohort.shape) == (8, {"conv": "grouped"}, mine.cohort.shape)
    assert not list(RunPaths(tmp_path).jobs_folder.glob(".*"))


def test_a_cohort_that_could_not_be_planned_decides_nothing(tmp_path: Path) -> None:
    agreed(RunPaths(tmp_path, 0), measured(0, ""))
    assert agreed(RunPaths(tmp_path, 1), measured(4, "columns")) == measured(4, "columns")


@pytest.mark.parametrize("round", range(5))
def test_of_many_at_once_one_is_the_first(round: int, tmp_path: Path) -> None:
    file = tmp_path / "decision.json"
    with ThreadPoolExecutor(16) as pool:
        first = list(pool.map(lambda number: write_json_first(file, {"number": number}), range(64)))
    assert sum(first) == 1
    assert read_json(file) == {"number": first.index(True)}
    assert list(tmp_path.iterdir()) == [file]
