"""Lanes over time: filling, refilling, evaluating, best values, divergence and failures.

Oracle: by hand. toy-w trained by SGD has w = (1 - 2 lr)^t after t steps, so every curve, best value and overflow is
known in advance; at which steps something is recorded follows from `every`, `evaluate_every` and `steps`. Where runs
are compared with each other, equal means equal bits.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from coalesce.runner.listener import Listener, Progress
from coalesce.runner.run import run
from coalesce.store.frames import results_frame
from runner_helpers import Net, Picky, Ran, ToyW, planned, ran

# toy-w is one sample; its only loss metrics are these
TOY: dict[str, Any] = {"batch_size": 1, "monitor": "val/w"}


def w_after(steps: int, rate: float) -> float:
    return (1 - 2 * rate) ** steps


# lanes over time


QUEUE: dict[str, Any] = {"optimizer.lr": [0.3, 0.1, 0.03, 0.01, 0.003], "steps": [13, 20], "task.dropout": [0.3]}
NORM = {"norm": True}


@pytest.fixture(scope="module")
def done() -> Ran:
    """Ten experiments through four lanes, with buffers."""
    return ran(Net, QUEUE, arguments=NORM, width=4)


def test_ten_experiments_through_four_lanes(done: Ran) -> None:
    """Case 27: refilled, in one graph, each with its own number of steps; the last lanes stand empty."""
    assert [c.width for c in done.plan.cohorts] == [4]
    assert done.told.compiled == [(0, "step"), (0, "evaluation on val")]
    assert sorted(r.experiment.id for r in done.results) == sorted(e.id for e in done.plan.experiments)
    assert {r.status for r in done.results} == {"finished"}
    assert all(r.steps == r.experiment.steps for r in done.results)
    assert max(p.lanes for p in done.told.progress) == 4
    assert done.told.progress[-1].lanes == 0
    wide = ran(Net, QUEUE, arguments=NORM, width=10)
    for mine, theirs in zip(done.in_order(), wide.in_order(), strict=True):
        assert mine.experiment.id == theirs.experiment.id
        assert mine.metrics.keys() == theirs.metrics.keys()
        # 20 float32 steps of values around 1: sums of 4 and 16 terms in another order, a few units in the last place
        assert all(mine.metrics[n] == pytest.approx(theirs.metrics[n], rel=1e-5, abs=1e-6) for n in mine.metrics)


def test_the_frame_is_in_the_sweeps_order(done: Ran) -> None:
    ended = [r.experiment.id for r in done.results]
    asked = [e.id for e in done.plan.experiments]
    assert ended != asked, "with unequal steps they end in another order"
    frame = results_frame(done.results, done.plan.keys, asked)
    assert list(frame["experiment"]) == asked
    assert list(zip(frame["optimizer.lr"], frame["steps"], strict=True)) == list(
        itertools.product(QUEUE["optimizer.lr"], QUEUE["steps"])
    )
    assert list(frame["steps_done"]) == list(frame["steps"])


def test_the_queues_order_changes_no_bit(done: Ran) -> None:
    """Law 1: lane, neighbours, and what ran in a lane before leave no trace."""
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
    again = ran(Net, QUEUE, arguments=NORM, width=4, order=order)
    assert again.curves() == done.curves()


def test_every_cohort_runs_at_its_width() -> None:
    done = ran(Net, {"task.hidden": [4, 8], "seed": [0, 1, 2]}, width="auto")
    assert [(r.cohort, r.width) for r in done.in_order()] == [(0, 3)] * 3 + [(1, 3)] * 3
    assert [cohort for cohort, what in done.told.compiled if what == "step"] == [0, 1]
    assert {p.cohort for p in done.told.progress} == {0, 1}
    assert {p.cohorts for p in done.told.progress} == {2}


# what is recorded, and when


@pytest.mark.parametrize(
    ("steps", "every", "evaluate_every", "train", "val"),
    [
        (20, 5, 10, [5, 10, 15, 20], [10, 20]),
        # steps are no multiple of every
        (13, 5, 10, [5, 10, 13], [10, 13]),
        (12, 5, 5, [5, 10, 12], [5, 10, 12]),
        # fewer steps than every; fewer than evaluate_every
        (3, 5, 10, [3], [3]),
        (5, 5, 10, [5], [5]),
        (20, 5, 100, [5, 10, 15, 20], [20]),
        (1, 1, 1, [1], [1]),
        (3, 1, 2, [1, 2, 3], [2, 3]),
    ],
)
def test_which_steps_are_recorded(
    steps: int, every: int, evaluate_every: int, train: list[int], val: list[int]
) -> None:
    done = ran(ToyW, {"optimizer.lr": [0.1, 0.01]}, steps=steps, every=every, evaluate_every=evaluate_every, **TOY)
    for experiment in done.plan.experiments:
        rate = experiment.values["optimizer.lr"]
        assert done.told.steps(experiment, "train/loss") == train
        assert done.told.steps(experiment, "val/w") == val
        for step, values in done.told.curve(experiment):
            # the training loss is that of the step's own forward pass, before its update
            if "train/loss" in values:
                assert values["train/loss"] == pytest.approx(w_after(step - 1, rate) ** 2, rel=1e-12)
                assert values["train/w"] == pytest.approx(w_after(step - 1, rate), rel=1e-12)
            if "val/w" in values:
                assert values["val/w"] == pytest.approx(w_after(step, rate), rel=1e-12)


def test_the_recorded_steps_do_not_depend_on_the_neighbours() -> None:
    """Lanes are refilled in the middle of others, which have more or fewer steps than ``every``."""
    lengths = [3, 12, 20, 5, 7, 31, 1]
    done = ran(ToyW, {"steps": lengths}, width=3, **TOY)
    for experiment in done.plan.experiments:
        last = experiment.steps
        assert done.told.steps(experiment, "train/loss") == sorted({*range(5, last + 1, 5), last})
        assert done.told.steps(experiment, "val/w") == sorted({*range(10, last + 1, 10), last})
        assert done.of(experiment).metrics["val/w"] == pytest.approx(w_after(last, 0.1), rel=1e-12)


def test_a_metric_is_recorded_once_per_step() -> None:
    rates = [0.1, 1e10, 1e30, 1e100, 1e200]
    done = ran(ToyW, {"optimizer.lr": rates, "steps": [4, 15, 23]}, width=4, **TOY)
    keys = [(name, step, metric) for name, step, values in done.told.rows for metric in values]
    assert len(keys) == len(set(keys))
    assert {r.status for r in done.results} == {"finished", "diverged"}


def test_how_often_it_is_looked_at_changes_no_number() -> None:
    params = {"seed": [0, 1], "task.dropout": [0.2]}
    often = ran(Net, params, arguments=NORM, every=1, evaluate_every=1, weights=True)
    seldom = ran(Net, params, arguments=NORM, every=7, evaluate_every=700, weights=True)
    for mine, theirs in zip(often.in_order(), seldom.in_order(), strict=True):
        assert mine.metrics == theirs.metrics
        assert mine.weights is not None
        assert theirs.weights is not None
        assert all(torch.equal(weight, theirs.weights[name]) for name, weight in mine.weights.items())


def test_the_test_split_is_looked_at_once_at_the_end() -> None:
    done = ran(Net, {"seed": [0, 1], "steps": [7, 20]}, arguments={"splits": "train val test"})
    for experiment in done.plan.experiments:
        assert done.told.steps(experiment, "test/loss") == [experiment.steps]
        assert {"test/loss", "test/error", "val/loss", "val/error", "train/loss"} == set(done.of(experiment).metrics)
        # of the best state beside those of the last
        assert set(done.of(experiment).best) == {"val/loss", "val/error", "test/loss", "test/error"}


@pytest.mark.parametrize("splits", ["train", "train val", "train test"])
def test_splits_may_be_missing(splits: str) -> None:
    done = ran(ToyW, {"optimizer.lr": [0.1, 0.2]}, arguments={"splits": splits}, **{**TOY, "monitor": "train/loss"})
    names = {name.partition("/")[0] for r in done.results for name in r.metrics}
    assert names == set(splits.split())
    for result in done.results:
        # the loss falls all the way, so the last step is the best; what is best is the monitored split's
        tested = {"test/w", "test/score"} if "test" in splits else set()
        assert (result.best_step, set(result.best)) == (20, {"train/loss", "train/w"} | tested)
        if tested:
            assert result.metrics["test/w"] == pytest.approx(
                w_after(20, result.experiment.values["optimizer.lr"]), rel=1e-12
            )


# best values


def test_best_is_the_highest_or_the_lowest() -> None:
    params = {"optimizer.lr": [0.1, 0.02]}
    kept: dict[str, Any] = {**TOY, "every": 1, "evaluate_every": 1, "steps": 10, "monitor": "val/score"}
    highest = ran(ToyW, params, mode="max", **kept)
    for result in highest.results:
        rate = result.experiment.values["optimizer.lr"]
        scores = {step: -((w_after(step, rate) - 0.6) ** 2) for step in range(1, 11)}
        best = max(scores, key=scores.__getitem__)
        assert result.best_step == best
        assert result.best["val/score"] == pytest.approx(scores[best], rel=1e-9)
        # the other metrics of the same evaluation come with it; the last ones are kept beside
        assert result.best["val/w"] == pytest.approx(w_after(best, rate), rel=1e-12)
        assert result.metrics["val/w"] == pytest.approx(w_after(10, rate), rel=1e-12)
    assert [r.best_step for r in highest.in_order()] == [2, 10]
    lowest = ran(ToyW, params, mode="min", **kept)
    assert [r.best_step for r in lowest.in_order()] == [10, 1]
    for done, pick in ((highest, max), (lowest, min)):
        told = done.told.progress[-1].best
        assert told is not None
        assert told[0] == pick(r.best["val/score"] for r in done.results)
        assert done.of(told[1]).best["val/score"] == told[0]


def test_of_equal_values_the_first_is_the_best() -> None:
    done = ran(ToyW, {"optimizer.lr": [0.0]}, every=1, evaluate_every=1, steps=4, **TOY)
    assert done.results[0].best_step == 1


@pytest.mark.parametrize("mode", ["max", "min"])
def test_nan_never_wins(mode: str) -> None:
    """w is 0.8, 0.64, 0.512, 0.41 …: the score is NaN from the third step on, and the experiment goes on."""
    kept: dict[str, Any] = {**TOY, "every": 1, "evaluate_every": 1, "steps": 5, "monitor": "val/score", "mode": mode}
    done = ran(ToyW, {"optimizer.lr": [0.1, 0.3]}, arguments={"blind": 0.6}, **kept)
    seeing, blind = done.in_order()
    assert (seeing.status, seeing.best_step) == ("finished", 2 if mode == "max" else 1)
    assert math.isnan(seeing.metrics["val/score"])
    # w is 0.4 after its first step: never measured
    assert (blind.status, blind.best_step, blind.best) == ("finished", None, {})
    told = done.told.progress[-1].best
    assert told is not None
    assert told[1].id == seeing.experiment.id


# divergence


def test_divergence_by_hand() -> None:
    """lr 1e10 multiplies w by -2e10 a step: w² overflows float64 for the first time at |w| > 1.3e154, which is at
    the loss of step 16, after 15 updates; lr 1e200 breaks at the loss of step 2."""
    done = ran(ToyW, {"optimizer.lr": [1e10, 0.1, 1e200]}, **TOY, weights=True)
    late, sound, early = done.in_order()
    assert (late.status, late.steps) == ("diverged", 15)
    assert (early.status, early.steps) == ("diverged", 1)
    assert (sound.status, sound.steps, sound.message) == ("finished", 20, "")
    assert "at step 16" in late.message
    assert "at step 2" in early.message
    # the last finite state is kept, and what was measured up to there
    assert late.weights is not None
    assert late.weights["w"].item() == pytest.approx(w_after(15, 1e10), rel=1e-9)
    assert late.metrics["train/loss"] == pytest.approx(w_after(14, 1e10) ** 2, rel=1e-9)
    assert done.told.steps(late.experiment, "train/loss") == [5, 10, 15]
    assert done.told.steps(late.experiment, "val/w") == [10]
    assert done.told.steps(early.experiment, "train/loss") == [1]
    assert early.best_step is None


def test_what_diverged_is_not_the_best_of_the_run() -> None:
    """lr 1e10 has by far the largest w at its evaluation at step 10, and breaks at step 16."""
    done = ran(ToyW, {"optimizer.lr": [1e10, 0.1]}, **{**TOY, "mode": "max"})
    best = [p.best for p in done.told.progress]
    assert best[1] is not None
    assert best[-1] is not None
    assert best[1][1].values["optimizer.lr"] == 1e10
    assert best[-1][1].values["optimizer.lr"] == 0.1
    # its own row still has what it had measured
    assert done.in_order()[0].best_step == 10


# failures


def test_what_fails_or_diverges_costs_its_experiment_alone() -> None:
    """A model that cannot be built, and a loss that is infinite at once: neither leaves anything behind in its lane."""
    done = ran(Picky, {"task.scale": [1.0, 2.0, 3.0, 1e39, 1.5, 4.0]}, width=2)
    rows = done.in_order()
    assert [r.status for r in rows] == ["finished", "finished", "failed", "diverged", "finished", "failed"]
    for result in (rows[2], rows[5]):
        assert (result.steps, dict(result.metrics), result.best_step, result.weights) == (0, {}, None, None)
        assert f"no model for {result.experiment.values['task.scale']}" in result.message
        assert "runner_helpers.py" in result.message
        assert 'raise ValueError(f"no model' in result.message
    broken = rows[3]
    # there is nothing to record at step 0
    assert (broken.steps, done.told.curve(broken.experiment), dict(broken.metrics)) == (0, [], {})
    assert "at step 1" in broken.message
    without = ran(Picky, {"task.scale": [1.0, 2.0, 1.5]}, width=2)
    curves = done.curves()
    assert without.curves() == {name: curves[name] for name in without.curves()}
    last = done.told.progress[-1]
    assert (last.experiments, last.total_experiments, last.steps, last.total_steps) == (6, 6, 60, 60)


# what else a result and the progress tell


def test_progress_adds_up() -> None:
    done = ran(ToyW, {"optimizer.lr": [0.1, 1e10, 0.01], "steps": [7, 20]}, width=2, **TOY)
    progress = done.told.progress
    assert [p.steps for p in progress] == sorted(p.steps for p in progress)
    # steps are those that were done; what the diverged ones leave undone is not to be done any longer
    assert progress[0].total_steps == 3 * 27
    assert progress[-1].steps == progress[-1].total_steps == sum(r.steps for r in done.results) < 3 * 27
    assert [p.experiments for p in progress] == sorted(p.experiments for p in progress)
    assert (progress[-1].experiments, progress[-1].total_experiments) == (6, 6)
    assert all(0 <= p.lanes <= p.width == 2 for p in progress)
    assert all(0 < p.training_s <= p.elapsed_s for p in progress)


def test_where_it_ran() -> None:
    plan = planned(ToyW, {"optimizer.lr": [0.1, 0.2, 0.3]}, width=2, threads=1, **TOY)
    results = run(plan, job=3)
    assert {(r.job, r.device, r.width, r.cohort) for r in results} == {(3, "cpu", 2, 0)}
    assert all(0 < r.seconds < 60 for r in results)


def test_the_plans_threads_are_obeyed_and_put_back() -> None:
    seen: list[int] = []

    class Looks(Listener):
        def advanced(self, progress: Progress) -> None:
            seen.append(torch.get_num_threads())

    torch.set_num_threads(2)
    run(planned(ToyW, stack=False, threads=1, **TOY), [Looks()])
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


def test_weights_only_where_asked_for() -> None:
    assert all(r.weights is None for r in ran(ToyW, weights=False, stack=False, **TOY).in_order())
    (kept,) = ran(ToyW, weights=True, stack=False, **TOY).in_order()
    assert kept.weights is not None
    assert kept.weights["w"].item() == pytest.approx(w_after(20, 0.1), rel=1e-12)


def test_weights_are_those_of_the_end_though_the_lane_is_refilled() -> None:
    rates = [0.1, 0.2, 0.05, 0.3]
    done = ran(ToyW, {"optimizer.lr": rates}, width=2, weights=True, **TOY)
    for result, rate in zip(done.in_order(), rates, strict=True):
        assert result.weights is not None
        assert result.weights["w"].item() == pytest.approx(w_after(20, rate), rel=1e-12)
