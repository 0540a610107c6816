"""Watching jobs: what they wrote counts before what the launcher says, and what died is started again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coalesce.errors import LaunchError
from coalesce.launch.base import Launcher, Look, Submitted, Work
from coalesce.launch.watch import LOOKS, LOOKS_WELL, JobView, Outcome, watch
from coalesce.store.jobs import JobRecord, Standing, read_records, write_record, write_standing
from coalesce.store.paths import RunPaths

STANDING = Standing("training", "a0", "node1", "cpu", "", 0.0, 0.0)


class Scripted(Launcher):
    """A launcher whose looks are written down beforehand; the last one stays.

    Args:
        looks: id → what it says, look by look.
    """

    name = "scripted"

    def __init__(self, looks: Mapping[str, Sequence[Look]]):
        self.looks = {name: list(script) for name, script in looks.items()}
        self.submitted: list[int] = []
        self.refuses = False

    def submit(self, works: Sequence[Work], folder: Path) -> Sequence[Submitted]:
        if self.refuses:
            raise LaunchError("no more")
        self.submitted += [work.number for work in works]
        return [Submitted(f"{'abc'[work.number]}{self.submitted.count(work.number)}", "its.log") for work in works]

    def look(self, ids: Sequence[str]) -> Mapping[str, Look]:
        return {name: self.looks[name].pop(0) if len(self.looks[name]) > 1 else self.looks[name][0] for name in ids}

    def cancel(self, ids: Sequence[str]) -> None:
        raise AssertionError("nobody asked for it")


class Job:
    """Stands in for work."""

    def __init__(self, number: int):
        self.number = number

    def within(self, environment: Mapping[str, str]) -> Job:
        return self

    def __call__(self) -> None:
        raise AssertionError("it is for another process")


def record(paths: RunPaths, number: int = 0) -> JobRecord:
    made = JobRecord(number, "scripted", f"{'abc'[number]}0", 0, ("x", "y"), 2, 20, 0.0, "its.log")
    write_record(paths, made)
    return made


def say(paths: RunPaths, number: int = 0, **facts: object) -> None:
    """What a job writes."""
    write_standing(RunPaths(paths.folder, number), replace(STANDING, id=f"{'abc'[number]}0", **facts))  # type: ignore[arg-type]


def watched(
    paths: RunPaths, launcher: Launcher, records: Sequence[JobRecord], retries: int = 2, limit: int = 60
) -> tuple[list[Outcome], list[Sequence[JobView]]]:
    """The outcomes, and everything that was shown."""
    shown: list[Sequence[JobView]] = []
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        assert len(naps) < limit, "it watches for ever"

    works = {r.number: Job(r.number) for r in records}
    outcomes = watch(paths, launcher, works, records, retries, shown.append, 0.5, sleep)
    assert naps == [0.5] * (len(shown) - 1)
    return outcomes, shown


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    made = RunPaths(tmp_path)
    made.jobs_folder.mkdir()
    return made


def test_what_a_job_wrote_counts_first(paths: RunPaths) -> None:
    records = [record(paths, number) for number in (0, 1)]
    say(paths, 0, state="ended", steps=20)
    say(paths, 1, state="broke", message="ValueError: so it is")
    # Slurm still shows them: they are coming to their ends
    outcomes, shown = watched(paths, Scripted({"a0": [Look("running")], "b0": [Look("running")]}), records)
    assert [(o.status, o.message) for o in outcomes] == [
        ("ended", ""),
        ("broke", "job 1 (b0) broke off: ValueError: so it is; what it printed: its.log"),
    ]
    assert [view.standing.steps for view in shown[0] if view.standing] == [20, 0]


def test_waiting_and_unknown_are_no_ends(paths: RunPaths) -> None:
    launcher = Scripted({"a0": [*[Look("waiting", "Resources")] * 20, *[Look("unknown")] * 20, Look("gone")]})
    outcomes, shown = watched(paths, launcher, [record(paths)], retries=0)
    assert [view.look.reason for (view,) in shown[:20]] == ["Resources"] * 20
    (outcome,) = outcomes
    assert outcome.status == "died"
    assert len(shown) == 40 + LOOKS
    assert outcome.message.startswith(
        "job 0 (a0) died: its process is gone; it has written nothing into the run folder"
    )
    assert outcome.message.endswith("what it printed: its.log")


def test_what_died_is_started_again_and_then_given_up(paths: RunPaths) -> None:
    say(paths, state="training", steps=7)
    gone = [Look("running"), Look("gone", "NODE_FAIL")]
    launcher = Scripted({"a0": gone, "a1": gone, "a2": gone})
    outcomes, _ = watched(paths, launcher, [record(paths)], retries=2)
    assert launcher.submitted == [0, 0]
    (outcome,) = outcomes
    assert outcome.status == "died"
    assert "NODE_FAIL" in outcome.message
    (kept,) = read_records(paths)
    assert (kept.id, kept.attempt, kept.experiments, kept.log) == ("a2", 2, ("x", "y"), "its.log")


def test_what_was_started_again_may_end_well(paths: RunPaths) -> None:
    say(paths, state="training", steps=7)

    class Revives(Scripted):
        def submit(self, works: Sequence[Work], folder: Path) -> Sequence[Submitted]:
            submitted = super().submit(works, folder)
            write_standing(RunPaths(paths.folder, 0), replace(STANDING, id="a1", state="ended"))
            return submitted

    outcomes, _ = watched(paths, Revives({"a0": [Look("gone")], "a1": [Look("running")]}), [record(paths)])
    assert [outcome.status for outcome in outcomes] == ["ended"]


def test_an_earlier_attempts_word_is_out_of_date(paths: RunPaths) -> None:
    """Its file says that it broke, and the next attempt has not written yet."""
    say(paths, state="broke", message="long ago")
    made = replace(record(paths), id="a1")
    outcomes, shown = watched(paths, Scripted({"a1": [Look("running"), Look("gone")]}), [made], retries=0)
    assert outcomes[0].status == "died"
    assert shown[0][0].standing is None


@pytest.mark.parametrize(
    ("look", "standing", "status"),
    [
        # scancel: Slurm knows it
        (Look("gone", "CANCELLED", cancelled=True), "training", "interrupted"),
        # a local process that was told to end, and saved itself
        (Look("gone"), "interrupted", "interrupted"),
        # it was told to end and then its node failed: it goes on elsewhere
        (Look("gone", "NODE_FAIL"), "interrupted", "died"),
    ],
)
def test_what_was_told_to_end_is_not_started_again(look: Look, standing: str, status: str, paths: RunPaths) -> None:
    say(paths, state=standing, message="ended by SIGTERM")
    launcher = Scripted({"a0": [look], "a1": [look], "a2": [look]})
    outcomes, _ = watched(paths, launcher, [record(paths)])
    assert [outcome.status for outcome in outcomes] == [status]
    assert launcher.submitted == ([] if status == "interrupted" else [0, 0])


def test_a_job_that_is_queued_again_is_waited_for(paths: RunPaths) -> None:
    """Its time was up: it has the same name, and is away from the queue for a moment."""
    say(paths, state="interrupted", message="ended by SIGUSR2")
    looks = [*[Look("gone")] * (LOOKS - 1), Look("waiting", "BeginTime"), Look("running")]

    class Goes(Scripted):
        def look(self, ids: Sequence[str]) -> Mapping[str, Look]:
            found = super().look(ids)
            if found["a0"].state == "running":
                say(paths, state="ended")
            return found

    outcomes, shown = watched(paths, Goes({"a0": looks}), [record(paths)])
    assert [outcome.status for outcome in outcomes] == ["ended"]
    assert len(shown) == LOOKS + 1


def test_what_ended_well_has_written_what_is_not_seen_yet(paths: RunPaths) -> None:
    """A shared file system shows the last word a minute late: it is not started again."""
    say(paths, state="training", steps=7)
    looks = itertools.count()

    class Late(Scripted):
        def look(self, ids: Sequence[str]) -> Mapping[str, Look]:
            if next(looks) == LOOKS_WELL - 2:
                say(paths, state="ended")
            return super().look(ids)

    launcher = Late({"a0": [Look("gone", "COMPLETED", well=True)]})
    outcomes, _ = watched(paths, launcher, [record(paths)], limit=LOOKS_WELL)
    assert [outcome.status for outcome in outcomes] == ["ended"]
    assert launcher.submitted == []


def test_one_that_cannot_be_started_again_does_not_end_the_others(paths: RunPaths) -> None:
    records = [record(paths, number) for number in (0, 1)]

    class Refuses(Scripted):
        def look(self, ids: Sequence[str]) -> Mapping[str, Look]:
            if "b0" in ids and len(self.looks["b0"]) == 1:
                say(paths, 1, state="ended")
            return super().look(ids)

    launcher = Refuses({"a0": [Look("gone", "NODE_FAIL")], "b0": [*[Look("running")] * 10, Look("gone")]})
    launcher.refuses = True
    outcomes, _ = watched(paths, launcher, records)
    assert [outcome.status for outcome in outcomes] == ["died", "ended"]
    assert "NODE_FAIL" in outcomes[0].message
    assert outcomes[0].message.endswith("it cannot be started again: no more")
