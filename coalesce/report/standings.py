"""What a job's own word and its launcher's come to, and those of all jobs together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coalesce.launch.watch import JobView
from coalesce.report import text

#: Seconds without a word after which a job that should be training is marked.
SILENT_S = 60.0

#: What a job is doing that is at work.
BUSY = ("starting", "planning", "compiling", "training", "silent")
#: What somebody should look at.
TROUBLES = ("silent", "interrupted", "cancelled", "died", "broke")
#: Of these it is said for how long.
LASTING = ("silent", "planning", "compiling")
#: States after which nothing more comes of a job as it was submitted.
DONE = ("ended", "interrupted", "cancelled", "died", "broke")

_STYLES = {"ended": "green", "training": "", "waiting": "dim", "unknown": "dim", "saved": "dim"}


@dataclass(frozen=True)
class State:
    """What a job is doing.

    Args:
        kind: one word.
        why: what there is to say of it, on one line; or "".
    """

    kind: str
    why: str = ""

    @property
    def line(self) -> str:
        """All of it."""
        if not self.why:
            return self.kind
        return f"{self.kind} for {self.why}" if self.kind in LASTING else f"{self.kind}: {self.why}"

    @property
    def style(self) -> str:
        """How it is shown."""
        return "red" if self.kind in TROUBLES else _STYLES.get(self.kind, "")


def state_of(view: JobView, now: float) -> State:
    """What a job is doing, as far as can be known: what it says itself counts first.

    Args:
        now: seconds since 1970.
    """
    standing, look = view.standing, view.look
    said = _line(standing.message) if standing is not None else ""
    if standing is not None and standing.state in ("ended", "broke"):
        return State(standing.state, said)
    if look.state == "gone":
        if look.cancelled:
            return State("cancelled", look.reason)
        if standing is not None and standing.state == "interrupted" and not look.reason:
            return State("interrupted", said)
        return State("died", look.reason or "its process is gone")
    if look.state == "waiting":
        # what was interrupted is saved, and has been queued again
        return State("saved" if standing is not None and standing.state == "interrupted" else "waiting", look.reason)
    if standing is None:
        return State("starting") if look.state == "running" else State("unknown", look.reason)
    if standing.state == "interrupted":
        # its launcher brings it back
        return State("saved", said)
    quiet_s = max(0.0, now - standing.written)
    if standing.state == "training":
        return State("silent", text.duration(quiet_s)) if quiet_s > SILENT_S else State("training")
    # while it plans or compiles it has no time to speak
    return State(standing.state, text.duration(quiet_s) if quiet_s >= 10 else "")


def _line(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[0] if lines else ""


@dataclass(frozen=True)
class Total:
    """All jobs together.

    Args:
        done: what part of the experiment-steps, 0 to 1.
        ended, count: experiments that ended, and all of them.
        failed: of those that ended.
        left: time left; or "".
        facts: what there is to say, in words.
        monitor, best: the metric, its best value and whose it is; None: none was measured.
    """

    done: float
    ended: int
    count: int
    failed: int
    left: str
    facts: tuple[str, ...]
    monitor: str
    best: tuple[float, str] | None


def total_of(views: Sequence[JobView], mode: str, now: float) -> Total:
    """Add up all jobs.

    Args:
        mode: whether the "max" or the "min" of the monitored metric is best.
        now: seconds since 1970.
    """
    states = [state_of(view, now).kind for view in views]
    steps = total_steps = ended = count = failed = 0
    for view in views:
        standing, record = view.standing, view.record
        total_steps += standing.total_steps if standing is not None and standing.total_steps else record.steps
        count += standing.total_experiments if standing is not None and standing.total_experiments else record.count
        if standing is not None:
            steps += standing.steps
            ended += standing.experiments
            failed += standing.failed
    heard = [view.standing for view in views if view.standing is not None]
    bests = [(standing.best, standing.best_id) for standing in heard if standing.best is not None]
    best = (max if mode == "max" else min)(bests, key=lambda entry: entry[0]) if bests else None
    trains = [view.standing for view, kind in zip(views, states, strict=True) if kind == "training"]
    speed = sum(standing.speed for standing in trains if standing is not None)
    left = _left(views, states)
    # one process is at work, or there would be nothing to show
    at_work = [f"{sum(kind in BUSY for kind in states)} of {text.count(len(views), 'job')} at work"]
    facts = at_work if len(views) > 1 else []
    facts += [f"{text.rate(speed)} steps/s"] if speed else []
    facts += [f"{ended:,}/{count:,} ended"]
    facts += [f"{failed:,} failed"] if failed else []
    facts += [left] if left else []
    # where steps are not known beforehand, experiments tell how far it is
    done = steps / total_steps if total_steps else ended / max(count, 1)
    monitor = next((standing.monitor for standing in heard if standing.monitor), "")
    return Total(min(done, 1.0), ended, count, failed, left, tuple(facts), monitor, best)


def _left(views: Sequence[JobView], states: Sequence[str]) -> str:
    """How long it will take until the last job has ended: they run beside each other."""
    longest, unknown = 0.0, False
    for view, kind in zip(views, states, strict=True):
        standing = view.standing
        if kind in DONE:
            continue
        if kind != "training" or standing is None or standing.speed <= 0:
            unknown = True
        else:
            longest = max(longest, (standing.total_steps - standing.steps) / standing.speed)
    if longest <= 0:
        return ""
    # of a job that has not begun to train nobody knows how fast it will be
    return f"{'at least ' if unknown else ''}{text.duration(longest)} left"
