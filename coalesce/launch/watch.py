"""Watching jobs until each has ended, and starting those again that died."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from coalesce.errors import LaunchError
from coalesce.launch.base import Launcher, Look, Work
from coalesce.store.jobs import JobRecord, Standing, read_standing, write_record
from coalesce.store.paths import RunPaths

#: Looks in a row that must find a job gone before it counts as dead: what it wrote last may take a while to be seen
#: on a shared file system. Where its process ended without an error it has written it, and more patience is due.
LOOKS, LOOKS_WELL = 3, 60


@dataclass(frozen=True)
class JobView:
    """All that is known of a job.

    Args:
        record: how it was submitted.
        standing: what it wrote last; None: nothing yet.
        look: what its launcher says.
    """

    record: JobRecord
    standing: Standing | None
    look: Look


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        record: as it was submitted last.
        status: "ended": all that it had to do is done; "interrupted": it was cancelled, and can go on; "broke": an
            error of the task or of the run; "died": its process ended without a word, as often as was tried.
        message: which job it was and why, for whoever reads the results.
    """

    record: JobRecord
    status: str
    message: str = ""


def watch(
    paths: RunPaths,
    launcher: Launcher,
    works: Mapping[int, Work],
    records: Iterable[JobRecord],
    retries: int,
    show: Callable[[Sequence[JobView]], None],
    poll_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Outcome]:
    """Look at jobs until each has ended. One that died is started again.

    Args:
        paths: the run folder.
        launcher: that started them.
        works: number → what the job does.
        records: how they were submitted.
        retries: how often each may be started again.
        show: told what is known of all jobs, after every look.
        poll_s: seconds between two looks.
        sleep: waits, for tests.

    Returns:
        How each ended, by its number.
    """
    jobs = {record.number: record for record in records}
    outcomes: dict[int, Outcome] = {}
    missed = dict.fromkeys(jobs, 0)
    while True:
        open_ids = [record.id for number, record in jobs.items() if number not in outcomes]
        looks = launcher.look(open_ids)
        views = []
        for number, record in sorted(jobs.items()):
            # after the look: a job that was gone by then has written all that it will
            standing = standing_of(paths, record)
            look = looks.get(record.id, Look("gone"))
            views.append(JobView(record, standing, look))
            if number in outcomes:
                continue
            missed[number] = missed[number] + 1 if look.state == "gone" else 0
            outcome = _outcome(views[-1], missed[number])
            if outcome is None:
                continue
            if outcome.status == "died" and record.attempt < retries:
                try:
                    jobs[number] = again(paths, launcher, works[number], record)
                except LaunchError as error:
                    outcome = replace(outcome, message=f"{outcome.message}; it cannot be started again: {error}")
                else:
                    missed[number] = 0
                    continue
            outcomes[number] = outcome
        show(views)
        if len(outcomes) == len(jobs):
            return [outcomes[number] for number in sorted(outcomes)]
        sleep(poll_s)


def again(paths: RunPaths, launcher: Launcher, work: Work, record: JobRecord) -> JobRecord:
    """Start a job again.

    Raises:
        LaunchError: it cannot be.
    """
    (submitted,) = launcher.submit([work], paths.submissions)
    attempt, now = record.attempt + 1, time.time()
    fresh = replace(record, launcher=launcher.name, id=submitted.id, attempt=attempt, submitted=now, log=submitted.log)
    write_record(paths, fresh)
    return fresh


def standing_of(paths: RunPaths, record: JobRecord) -> Standing | None:
    """What a job wrote last, if it was this attempt of it."""
    standing = read_standing(RunPaths(paths.folder, record.number))
    return standing if standing is not None and standing.id == record.id else None


def _outcome(view: JobView, missed: int) -> Outcome | None:
    """How a job ended, if it has.

    Args:
        missed: looks in a row that found it gone.
    """
    record, standing, look = view.record, view.standing, view.look
    name = f"job {record.number} ({record.id})"
    log = f"; what it printed: {record.log}" if record.log else ""
    if standing is not None and standing.state == "ended":
        return Outcome(record, "ended")
    if standing is not None and standing.state == "broke":
        return Outcome(record, "broke", f"{name} broke off: {standing.message}{log}")
    if missed < (LOOKS_WELL if look.well else LOOKS):
        return None
    if look.cancelled:
        return Outcome(record, "interrupted", f"{name} was cancelled")
    if standing is not None and standing.state == "interrupted" and not look.reason:
        # nobody knows more than that it was told to end
        return Outcome(record, "interrupted", f"{name}: {standing.message}")
    why = look.reason or "its process is gone"
    if standing is None:
        why += "; it has written nothing into the run folder, which its node must see"
    return Outcome(record, "died", f"{name} died: {why}{log}")
