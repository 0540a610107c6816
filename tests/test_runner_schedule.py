"""Lanes over time by law, on lanes made of numbers: whatever the steps, widths, intervals and breaks.

Oracle: what each experiment alone would be told, computed here from its own numbers, without lanes or a queue.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coalesce.runner.cohort as runner
from coalesce.engine.lanes import Reading
from coalesce.engine.summary import Evaluation
from coalesce.errors import TaskError
from coalesce.experiment import Cohort, Experiment
from coalesce.runner.plan import Plan, PlannedCohort, Trainer
from coalesce.runner.run import run
from run_fakes import experiment
from runner_helpers import Recorder


@dataclass(frozen=True)
class Course:
    """What happens to one experiment.

    Args:
        steps: to take.
        breaks: the step at which its loss turns NaN; beyond ``steps``, never. 0: it cannot be built.
        judged: its schedule looks at a metric after so many stops of the trainer, or never.
        monitor: that metric.
    """

    steps: int
    breaks: int
    judged: int | None
    monitor: str

    @property
    def taken(self) -> int:
        return min(self.steps, max(self.breaks - 1, 0))

    @property
    def status(self) -> str:
        return "failed" if self.breaks == 0 else "finished" if self.taken == self.steps else "diverged"


def train_loss(seed: int, step: int) -> float:
    return seed + step / 1000


def score(seed: int, step: int) -> float:
    """A validation metric that jumps about; at every fifth place it is NaN or infinite."""
    value = random.Random(seed * 1000 + step).choice([*range(8), math.nan, math.inf])
    return float(value)


class NumberLanes:
    """Lanes whose state is a step count each."""

    def __init__(self, template: Any, width: int, *_: Any):
        self.courses: dict[int, Course] = template.courses
        self.judged: list[tuple[int, int, float]] = template.judged
        self.held: list[Experiment | None] = [None] * width
        self.steps = [0] * width
        self.alive = [False] * width
        self.device = torch.device("cpu")

    def prepare_step(self) -> None: ...

    def prepare_evaluation(self, split: str) -> None: ...

    def fill(self, lane: int, experiment: Experiment) -> None:
        assert self.held[lane] is None, "a lane that is busy was filled"
        self.held[lane], self.steps[lane], self.alive[lane] = experiment, 0, True
        if self.courses[experiment.seed].breaks == 0:
            raise TaskError("cannot be built")

    def clear(self, lane: int) -> None:
        self.held[lane], self.alive[lane] = None, False

    def advance(self, count: int) -> None:
        assert count > 0
        for lane, held in enumerate(self.held):
            if held is not None:
                course = self.courses[held.seed]
                # it breaks when its bad step is tried, not before
                self.alive[lane] = min(self.steps[lane] + count, course.steps) < course.breaks
                self.steps[lane] = min(self.steps[lane] + count, course.taken)

    def read(self) -> Reading:
        pairs = zip(self.held, self.steps, strict=True)
        loss = [train_loss(held.seed, step) if held is not None else math.nan for held, step in pairs]
        return Reading(list(self.steps), list(self.alive), {"loss": loss})

    def measure(self, split: str, best: bool = False) -> Evaluation:
        assert split == "val"
        pairs = zip(self.held, self.steps, strict=True)
        return Evaluation({"score": [score(held.seed, step) if held is not None else 0.0 for held, step in pairs]})

    def summary(self, lane: int, split: str, evaluation: Evaluation) -> dict[str, float]:
        return {}

    def observe(self, values: Mapping[int, float]) -> None:
        assert values, "asked to judge nobody"
        for lane, value in values.items():
            held = self.held[lane]
            assert held is not None
            self.judged.append((held.seed, self.steps[lane], value))


COURSES = st.builds(
    Course,
    st.integers(1, 40),
    st.one_of(st.just(10**9), st.integers(0, 45)),
    st.none() | st.integers(1, 3),
    st.sampled_from(["val/score", "train/loss"]),
)


@given(
    courses=st.lists(COURSES, min_size=1, max_size=12),
    width=st.integers(1, 5),
    every=st.integers(1, 12),
    factor=st.integers(1, 4),
    mode=st.sampled_from(["max", "min"]),
    cohorts=st.integers(1, 3),
)
def test_each_experiment_is_told_what_it_would_be_told_alone(
    courses: list[Course], width: int, every: int, factor: int, mode: str, cohorts: int
) -> None:
    experiments = tuple(
        experiment({"seed": n, "steps": course.steps, "schedule": schedule(course, every)})
        for n, course in enumerate(courses)
    )
    dealt = [experiments[n::cohorts] for n in range(cohorts) if experiments[n::cohorts]]
    planned = tuple(PlannedCohort(Cohort(n, members, ()), width, 1, 1, 1) for n, members in enumerate(dealt))
    trainer = Trainer(
        every=every,
        evaluate_every=every * factor,
        monitor="val/score",
        mode=mode,
        threads=1,
        check=False,
        weights=False,
    )
    plan = Plan("made_up", ("seed", "steps"), experiments, planned, trainer)
    judged: list[tuple[int, int, float]] = []
    template = SimpleNamespace(courses=dict(enumerate(courses)), evaluated=("val",), judged=judged)
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Lanes", NumberLanes)
        patch.setattr(runner, "Template", lambda cohort, audit: template)
        results = run(plan, [recorder])
    assert sorted(r.experiment.seed for r in results) == list(range(len(courses)))
    assert results == recorder.results
    for result in results:
        seed, course = result.experiment.seed, courses[result.experiment.seed]
        assert (result.status, result.steps) == (course.status, course.taken)
        curve = alone(seed, course, every, every * factor)
        assert str(recorder.curve(result.experiment)) == str(curve), "as text, since NaN is unequal to itself"
        values = {step: v["val/score"] for step, v in curve if math.isfinite(v.get("val/score", math.nan))}
        pick = max if mode == "max" else min
        # of equal ones the first
        best = pick(values, key=lambda step: values[step]) if values else None
        assert result.best_step == best
        assert dict(result.best) == ({"val/score": values[best]} if best is not None else {})
        assert str([entry[1:] for entry in judged if entry[0] == seed]) == str(judgements(seed, course, every))
    check_progress(recorder, plan)


def schedule(course: Course, every: int) -> dict[str, Any]:
    if course.judged is None:
        return {"name": "constant"}
    return {"name": "plateau", "monitor": course.monitor, "every": every * course.judged}


def judgements(seed: int, course: Course, every: int) -> list[tuple[int, float]]:
    """The steps at which an experiment is judged, and the metric: by its own clock, as long as it goes on."""
    if course.judged is None:
        return []
    metric = score if course.monitor == "val/score" else train_loss
    own = every * course.judged
    return [(step, metric(seed, step)) for step in range(own, course.taken + 1, own) if step < course.steps]


def alone(seed: int, course: Course, every: int, evaluate_every: int) -> list[tuple[int, dict[str, float]]]:
    """What an experiment is told of: at each multiple of ``every`` that it reaches, and at its end."""
    curve: list[tuple[int, dict[str, float]]] = []
    for step in range(1, course.taken + 1):
        ends = step == course.taken
        if step % every and not ends:
            continue
        curve.append((step, {"train/loss": train_loss(seed, step)}))
        # one that broke in between is looked at too late: only its last sound loss is known
        sound = step % every == 0 or course.status == "finished"
        asked = course.monitor == "val/score" and step in dict(judgements(seed, course, every))
        if sound and (step % evaluate_every == 0 or step == course.steps or asked):
            curve.append((step, {"val/score": score(seed, step)}))
    return curve


def check_progress(recorder: Recorder, plan: Plan) -> None:
    """Counts only rise, and lanes stand empty only when nobody waits for one."""
    told = recorder.progress
    for before, after in itertools.pairwise(told):
        assert before.steps <= after.steps <= after.total_steps <= before.total_steps
        assert before.experiments <= after.experiments
    for progress in told:
        members = len(plan.cohorts[progress.cohort].cohort.experiments)
        earlier = sum(len(c.cohort.experiments) for c in plan.cohorts[: progress.cohort])
        waiting_or_running = members - (progress.experiments - earlier)
        assert progress.lanes == min(progress.width, waiting_or_running)
