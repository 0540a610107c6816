"""Law 1 over time: 200 experiments of unequal lengths through 16 lanes, each as it would be alone at that width.

Oracle: the same graph with the experiment in one lane and nothing in the others. Everything is compared bit for bit.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from coalesce.engine.compiling import compilations
from coalesce.engine.lanes import Lanes
from coalesce.runner.run import run
from coalesce.search.base import Listed
from runner_helpers import Net, Recorder, planned

WIDTH = 16


@pytest.mark.slow
def test_200_experiments_through_16_lanes() -> None:
    draw = random.Random(5)
    lengths = [draw.randint(1, 60) for _ in range(50)]
    params = {"steps": lengths, "seed": range(4), "optimizer.lr": [draw.uniform(0.001, 0.3) for _ in range(50)]}
    dropout = [draw.uniform(0.0, 0.5) for _ in range(50)]
    plan = planned(
        Net,
        params | {"task.dropout": dropout},
        zip=[["steps", "optimizer.lr", "task.dropout"]],
        optimizer={"name": "adamw"},
        schedule={"name": "cosine", "warmup": 3},
        arguments={"splits": "train val test"},
        width=WIDTH,
        every=10,
        compile=True,
    )
    assert len(plan.experiments) == 200
    first, before = Recorder(), compilations()
    run(plan, [first])
    # a step, and an evaluation of 20 and one of 12 samples
    assert [what for _, what in first.compiled] == ["step", "evaluation on val", "evaluation on test"]
    assert compilations() - before == 4

    order = draw.sample(range(200), 200)
    shuffled = Recorder()
    run(plan, [shuffled], search=Listed([plan.experiments[n] for n in order]))

    planned_cohort = plan.cohorts[0]
    alone = Lanes(planned_cohort.template, WIDTH, pieces=planned_cohort.pieces, lowerings=planned_cohort.lowerings)
    for result, other in zip(by_id(first), by_id(shuffled), strict=True):
        lane = draw.randrange(WIDTH)
        alone.fill(lane, result.experiment)
        alone.advance(result.experiment.steps)
        metrics = {f"{split}/{n}": v[lane] for split in ("val", "test") for n, v in alone.evaluate(split).items()}
        weights = alone.state_dict(lane)
        alone.clear(lane)
        for found in (result, other):
            assert (found.status, found.steps) == ("finished", result.experiment.steps)
            assert found.weights is not None
            assert all(torch.equal(found.weights[name], tensor) for name, tensor in weights.items())
            assert {n: v for n, v in found.metrics.items() if not n.startswith("train/")} == metrics
        assert first.curve(result.experiment) == shuffled.curve(result.experiment)


def by_id(recorder: Recorder) -> list[Any]:
    return sorted(recorder.results, key=lambda result: str(result.experiment.id))
