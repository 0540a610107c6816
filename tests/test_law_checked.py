"""Law 7: a graph that does not compute what plain PyTorch does is found before the sweep trains.

Oracle: faults put into the runner by hand, of the kinds that were met in practice; a sound graph passes, and the lanes
are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.engine import lanes as module
from coalesce.engine import step
from coalesce.engine.check import check_step
from coalesce.engine.lanes import Lanes
from coalesce.errors import TaskError
from coalesce.experiment import Experiment
from engine_helpers import experiment, template_of
from test_engine_models import ReadsBelow


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


class Small(coalesce.Task):
    """With a bias in front of BatchNorm, whose gradient is noise, and a parameter of much smaller gradients."""

    def __init__(self, a: float = 0.2):
        self.a = a

    def data(self) -> coalesce.Data:
        x = torch.linspace(-1, 1, 80).sin().view(20, 4)
        return coalesce.Data(train=(x, torch.arange(20) % 3), val=(x[:9], torch.arange(9) % 3))

    def model(self) -> nn.Module:
        hidden = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(self.a)]
        return nn.Sequential(*hidden, nn.Linear(5, 3))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=self.a)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(-1) == y).float().mean()}


def experiments(optimizer: str = "adamw") -> list[Experiment]:
    rates = [1e3, 1e-3, 0.1]
    return [experiment(Small, {"a": 0.1 * i}, {"name": optimizer, "lr": rates[i]}, seed=i) for i in range(3)]


Fault = Callable[[dict[str, Tensor]], None]


@cache
def sound_lanes(optimizer: str) -> Lanes:
    lanes = Lanes(template_of(experiments(optimizer)), 2, compile=False)
    lanes.prepare_step()
    return lanes


def scale(name: str, factor: float) -> Fault:
    def fault(state: dict[str, Tensor]) -> None:
        state[name].mul_(factor)

    return fault


def last_lane_is_the_first(name: str) -> Fault:
    """A constant of the template's baked into the graph."""

    def fault(state: dict[str, Tensor]) -> None:
        state[name][-1].copy_(state[name][0])

    return fault


def last_lane_is_dead(state: dict[str, Tensor]) -> None:
    state["lane/alive"][-1] = False


FAULTS = {
    # after Adam's first step a gradient eight times too large shows as 2e-7 in the parameter
    "a gradient 8 times too large": (scale("slot/exp_avg/4.weight", 8.0), "adamw", r"slot/exp_avg/4\.weight differ"),
    "a gradient of 0": (scale("slot/momentum/0.weight", 0.0), "sgd", r"slot/momentum/0\.weight differ"),
    "a gradient off by 18 %": (scale("slot/momentum/1.weight", 1.18), "sgd", r"slot/momentum/1\.weight differ"),
    "a stale buffer": (scale("buffer/1.num_batches_tracked", 0), "sgd", r"buffer/1\.num_batches_tracked differ"),
    "statistics off": (scale("buffer/1.running_var", 1.05), "sgd", r"buffer/1\.running_var differ"),
    "one lane's loss in another": (last_lane_is_the_first("train/loss"), "sgd", "train/loss differ"),
    "one lane's state in another": (last_lane_is_the_first("slot/momentum/4.bias"), "sgd", r"momentum/4\.bias differ"),
    "it diverges": (last_lane_is_dead, "sgd", "the step at which it diverges"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, optimizer, message = FAULTS[name]
    lanes = sound_lanes(optimizer)
    check_step(lanes)
    assert lanes._step is not None
    run, inputs = lanes._step

    def broken(*given: Tensor) -> Any:
        run(*given)
        fault(lanes.state)

    monkeypatch.setattr(lanes, "_step", (broken, inputs))
    with pytest.raises(TaskError, match=rf"does not compute what plain PyTorch does.*: .*{message}"):
        check_step(lanes)


def test_a_read_after_the_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter is updated where its gradient is born, although a lower layer has yet to read it."""
    monkeypatch.setattr(step, "_readers", lambda node: [])
    lanes = Lanes(template_of([experiment(ReadsBelow, {"a": 0.2})]), 1, compile=False)
    with pytest.raises(TaskError, match=r"slot/momentum/first\.weight.* differ"):
        lanes.prepare_step()


def test_what_failed_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_graph(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*given: Tensor) -> None:
            graph(*given)
            lanes.state["slot/momentum/0.bias"].add_(1)

        return run

    monkeypatch.setattr(module, "compile_graph", compile_graph)
    lanes = Lanes(template_of(experiments("sgd")), 2)
    lanes.fill(0, experiments("sgd")[1])
    before = {name: tensor.clone() for name, tensor in lanes.state.items()}
    for _ in range(2):
        # not only at the first call
        with pytest.raises(TaskError, match=r"slot/momentum/0\.bias differ"):
            lanes.advance(1)
    kept = [name for name in before if not name.startswith(("train/", "slot/momentum/0.bias"))]
    assert all(torch.equal(before[name], lanes.state[name]) for name in kept)


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_sound_graph_passes_and_the_lanes_are_left_alone(width: int, optimizer: str) -> None:
    lanes = Lanes(template_of(experiments(optimizer)), width, compile=False)
    lanes.fill(width - 1, experiments(optimizer)[2])
    before = {name: tensor.clone() for name, tensor in lanes.state.items()}
    lanes.prepare_step()
    lanes.prepare_evaluation("val")
    for name, tensor in before.items():
        torch.testing.assert_close(lanes.state[name], tensor, rtol=0.0, atol=0.0, equal_nan=True)
    # the sweep's own rates go up to 1000, and do not disturb the check
    assert lanes.read().alive == [lane == width - 1 for lane in range(width)]


def test_an_evaluation_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_graph(graph: Any, inputs: Any) -> Callable[..., Any]:
        # the first metric of one lane in all
        return lambda *given: [graph(*given)[0][:1].expand(2), graph(*given)[1]]

    monkeypatch.setattr(module, "compile_graph", compile_graph)
    lanes = Lanes(template_of(experiments()), 2)
    with pytest.raises(TaskError, match=r"does not compute what plain PyTorch does.*: val/loss differ"):
        lanes.evaluate("val")
    with pytest.raises(TaskError, match="val/loss differ"):
        lanes.evaluate("val")
