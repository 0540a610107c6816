"""The plain loop for debugging: the same numbers as in lanes, on the user's real objects.

Oracle: the lanes' own graph run operation by operation, which other tests hold against `torch.optim`; and Python's
debugger, which either stops in the user's line or does not.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import coalesce
from coalesce.engine.plain import Plain
from coalesce.runner.listener import Progress
from coalesce.runner.run import run
from engine_helpers import Toy, lanes_of
from engine_helpers import experiment as made
from runner_helpers import Net, Ran, Recorder, ToyW, planned, ran

ROOT = Path(coalesce.__file__).parent.parent

#: What the two must agree about: everything that a step is made of.
WAYS: dict[str, dict[str, Any]] = {
    "riding": {"params": {"task.dropout": [0.0, 0.2, 0.5], "task.scale": [0.5, 1.0]}},
    "clipped": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "clip_norm": 0.2}},
    "norm": {"arguments": {"norm": True}, "optimizer": "adam"},
    "short": {"params": {"data.remainder": ["short"], "steps": [11, 30]}, "arguments": {"norm": True}},
    "all": {
        "params": {"optimizer.lr": [0.01, 0.1], "task.dropout": [0.1, 0.3], "steps": [17, 30], "seed": [3]},
        "arguments": {"norm": True, "splits": "train val test"},
        "optimizer": {"name": "adamw", "clip_norm": 1.0, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup": 5},
    },
}


def both(way: str, double: bool) -> tuple[Ran, Ran]:
    """The experiments in lanes and in the plain loop. The batch does not divide the data: batches straddle epochs."""
    options = {"steps": 30, "batch_size": 12, "weights": True, "params": {"seed": [0, 1]}, **WAYS[way]}
    options["arguments"] = {"double": double, **options.get("arguments", {})}
    return ran(Net, **options), ran(Net, stack=False, **options)


def differences(lanes: Ran, plain: Ran) -> dict[str, float]:
    """The largest relative difference of each metric over all curves, and of the final weights."""
    assert {r.experiment.id for r in lanes.results} == {r.experiment.id for r in plain.results}
    found: dict[str, float] = {}

    def note(name: str, mine: float, theirs: float) -> None:
        found[name] = max(found.get(name, 0.0), abs(mine - theirs) / max(1.0, abs(theirs)))

    for experiment in lanes.plan.experiments:
        mine, theirs = lanes.told.curve(experiment), plain.told.curve(experiment)
        assert [(step, list(values)) for step, values in mine] == [(step, list(values)) for step, values in theirs]
        for (_, left), (_, right) in zip(mine, theirs, strict=True):
            for name in left:
                note(name, left[name], right[name])
        one, other = lanes.of(experiment), plain.of(experiment)
        assert (one.status, one.steps, one.message, one.best_step) == (
            other.status, other.steps, other.message, other.best_step,
        )  # fmt: skip
        assert one.weights is not None
        assert other.weights is not None
        assert one.weights.keys() == other.weights.keys()
        for name, weight in one.weights.items():
            assert weight.dtype == other.weights[name].dtype
            note("weights", (weight.double() - other.weights[name].double()).abs().max().item(), 0.0)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_the_plain_loop_equals_the_lanes(way: str) -> None:
    """Float64: batched and single matrix products sum in another order, some 1e-16 a step, in 30 steps."""
    found = differences(*both(way, double=True))
    assert "weights" in found
    assert all(value < 1e-12 for value in found.values()), found


def test_the_plain_loop_equals_the_lanes_in_float32() -> None:
    """The same differences in float32: some 1e-7 a step, carried on over 30 steps; far from the 1e-2 that one
    different dropout mask makes."""
    found = differences(*both("riding", double=False))
    assert all(value < 1e-5 for value in found.values()), found


def test_divergence_is_the_same() -> None:
    """case 24's rate, a loss that is infinite at once, and an update that overflows float32 while its loss does not."""
    params = {"optimizer.lr": [0.05, 1e6, 3e38], "task.scale": [1.0, 1e30]}
    options: dict[str, Any] = {"steps": 30, "weights": True}
    lanes, plain = ran(Net, params, **options), ran(Net, params, stack=False, **options)
    assert {r.status for r in lanes.results} == {"finished", "diverged"}
    for mine, theirs in zip(lanes.in_order(), plain.in_order(), strict=True):
        assert (mine.status, mine.steps, mine.message) == (theirs.status, theirs.steps, theirs.message)
        assert mine.weights is not None
        assert all(torch.isfinite(w).all() for w in mine.weights.values())
        if mine.status == "finished" or mine.steps == 0:
            assert theirs.weights is not None
            for name, weight in mine.weights.items():
                torch.testing.assert_close(weight, theirs.weights[name], rtol=1e-4, atol=1e-6)


def test_a_diverged_lane_keeps_its_buffers_finite() -> None:
    params = {"optimizer.lr": [1e-2, 1e20]}
    options: dict[str, Any] = {"arguments": {"norm": True}, "weights": True}
    for done in (ran(Net, params, **options), ran(Net, params, stack=False, **options)):
        broken = done.in_order()[1]
        assert broken.weights is not None
        assert all(torch.isfinite(w).all() for w in broken.weights.values())


# real objects


class Looks(Net):
    """Looks at what it is given, branches on it, and reads it out."""

    seen: ClassVar[list[tuple[Any, ...]]] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, _ = batch
        loss = super().loss(model, batch)
        if loss > 0:
            kind = type(x) is Tensor and not isinstance(x, FakeTensor)
            type(self).seen.append((type(model), type(self.scale), type(self.dropout), kind, loss.item(), x.tolist()))
        return loss


def test_loss_sees_real_objects() -> None:
    Looks.seen.clear()
    plan = planned(Looks, {"task.scale": [0.5, 2.0]}, steps=3, stack=False)
    rehearsed = len(Looks.seen)
    results = run(plan)
    assert rehearsed > 0
    # each cohort is rehearsed again, and then each of two experiments takes three steps
    steps = Looks.seen[-6:]
    for model, scale, dropout, is_plain, loss, x in steps:
        assert model is nn.Sequential
        assert (scale, dropout) == (float, float)
        assert is_plain
        assert loss > 0
        assert (len(x), len(x[0])) == (8, 4)
    # what it read out is what was recorded
    assert [r.metrics["train/loss"] for r in results] == [steps[2][4], steps[5][4]]


class Stops(Net):
    """Raises once it is armed."""

    armed: ClassVar[bool] = False

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if type(self).armed:
            raise ZeroDivisionError("the user's own")
        return super().loss(model, batch)


def test_an_error_in_training_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception itself, with its own traceback: that is what post-mortem debugging needs."""

    class Arms(Recorder):
        def advanced(self, progress: Progress) -> None:
            super().advanced(progress)
            monkeypatch.setattr(Stops, "armed", True)

    recorder = Arms()
    with pytest.raises(ZeroDivisionError, match="the user's own") as caught:
        run(planned(Stops, stack=False), [recorder])
    assert caught.traceback[-1].path == Path(__file__)
    assert caught.traceback[-1].name == "loss"
    assert recorder.errors == [caught.value]
    assert len(recorder.progress) == 1
    assert recorder.compiled == []


def test_a_copy_goes_on_as_it_does_in_a_lane() -> None:
    """With the samples and the draws of whom it was copied from, and a rate of its own."""
    given = {"dtype": "float64", "dropout": 0.3}
    rates = ((0.1, 0), (0.02, 5))
    one, other = (made(Toy, given, {"name": "sgd", "lr": rate}, steps=20, seed=seed) for rate, seed in rates)
    lanes = lanes_of([one, other])
    plain = Plain(lanes.template)
    plain.fill(0, one)
    for each, lane in ((lanes, 1), (plain, 0)):
        each.advance(5)
        (saved,) = each.save([0])
        each.go_on(lane, other, saved)
        each.advance(5)
    for name, value in plain.state_dict(0).items():
        torch.testing.assert_close(lanes.state_dict(1)[name], value, rtol=1e-12, atol=1e-12)


class Sparse(Net):
    """Uses its second head for some batches only, chosen by Python: no graph could, plain PyTorch does."""

    used: ClassVar[list[bool]] = []

    def model(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        both = bool(x[0, 0] > 0)
        type(self).used.append(both)
        return (model[0](x) + (model[1](x) if both else 0.0) - y).square().mean()

    def metrics(self, model: Any, batch: Any) -> dict[str, Tensor]:
        return {"loss": model[0](batch[0]).square().mean(), "second": model[1].weight.square().sum()}


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    """As torch.optim leaves it: no decay, no step."""
    Sparse.used.clear()
    rule = {"name": "sgd", "weight_decay": 0.5}
    done = ran(Sparse, optimizer=rule, steps=12, seed=2, stack=False, every=1, evaluate_every=1)
    used = Sparse.used[-12:]
    assert used[0], "the rehearsal's batch is the first: with another seed it would not use the head at all"
    assert not all(used)
    curve = [values["val/second"] for _, values in done.told.curve(done.plan.experiments[0]) if "val/second" in values]
    stood = [new == old for old, new in itertools.pairwise(curve)]
    assert stood == [not use for use in used[1:]]


def test_what_a_task_returns_is_read_before_the_update() -> None:
    """toy-w returns its weight beside the loss, as it was when the loss was computed."""
    (result,) = ran(ToyW, stack=False, steps=3, batch_size=1, monitor="val/w").results
    assert result.metrics["train/w"] == pytest.approx(0.64, rel=1e-12)
    assert result.metrics["val/w"] == pytest.approx(0.512, rel=1e-12)


def test_evaluation_in_pieces_of_any_size() -> None:
    """20 validation samples in pieces of 7, 7 and 6: the mean over samples, not over pieces."""
    whole = ran(Net, stack=False, arguments={"double": True})
    pieces = ran(Net, stack=False, arguments={"double": True}, evaluate_batch_size=7)
    for name, value in whole.results[0].metrics.items():
        assert pieces.results[0].metrics[name] == pytest.approx(value, rel=1e-12)


# the debugger

TASK = """
import coalesce, torch
from torch import nn

class Mine(coalesce.Task):
    def __init__(self, rate: float = 0.5):
        self.rate = rate

    def data(self):
        x = torch.arange(8.0)[:, None]
        return coalesce.Data(train=(x, 2 * x), val=(x, 2 * x))

    def model(self):
        return nn.Linear(1, 1)

    def loss(self, model, batch):
        x, y = batch
        error = (model(x) - y).square().mean()
        breakpoint()
        return self.rate * error

    def metrics(self, model, batch):
        return {"error": (model(batch[0]) - batch[1]).abs().mean()}
"""


def test_a_breakpoint_in_loss(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # at each stop, of which the rehearsal makes some before the two steps
    look = "p 'looked', type(model).__name__, self.rate, error.item() > 0, x.shape"
    commands = [look, "c"] * 100
    command = ["task=custom", "task._target_=mine.Mine", "steps=2", "batch_size=4", "trainer.stack=false"]
    command += ["trainer.monitor=val/error", "trainer.mode=min"]
    done = subprocess.run(
        [sys.executable, "-m", "coalesce", *command],
        cwd=tmp_path, env=environment, input="\n".join(commands), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    stops = done.stdout.count("(Pdb) ") // 2
    assert stops >= 3
    assert done.stdout.count("('looked', 'Linear', 0.5, True, torch.Size([4, 1]))") == stops
    # it stops in the user's function, on the user's line
    assert done.stdout.count("mine.py(20)loss()\n-> return self.rate * error") == stops
    assert "1 finished" in done.stdout
