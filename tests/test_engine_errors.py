"""Tasks that cannot run: one error before anything is trained, which shows the user's own line and the way out.

Oracle: by hand, one task per fault. The line is looked up in this file by the comment that marks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.engine.lanes import Lanes
from coalesce.errors import ConfigError, TaskError
from engine_helpers import experiment, template_of
from errors_helpers import Small, error_line, two


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


class Raises(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        return self.deeper({})

    def deeper(self, config: Mapping[str, Any]) -> Any:
        return config["scale"]  # mark: raises


class WrongShape(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0][:, :2]), batch[1])  # mark: wrong shape


class RaisesInMetrics(Small):
    def metrics(self, model: Any, batch: Any) -> Any:
        return {"x": batch["x"]}  # mark: raises in metrics


class RaisesInModel(Small):
    def model(self) -> nn.Module:
        return nn.Linear(4, -3)  # mark: raises in model


class RaisesInConstructor(Small):
    def __init__(self, a: float = 0.2):
        raise ValueError("no such thing")  # mark: raises in constructor


class RaisesInData(Small):
    def data(self) -> coalesce.Data:
        return coalesce.Data(train=torch.zeros(3, 4) + torch.zeros(5))  # mark: raises in data


class DataReads(Small):
    def data(self) -> coalesce.Data:
        return coalesce.Data(train=(torch.randn(11, 4) * self.a, torch.arange(11) % 3))  # mark: data reads


class DataNames(Small):
    def data(self) -> coalesce.Data:
        assert f"cache-{self.a:.2f}.pt"  # mark: data names
        return super().data()


class DataReadsDerived(Small):
    def __init__(self, a: float = 0.2):
        self.config = {"size": 11, "noise": a / 2}

    def use(self, scores: Tensor) -> Tensor:
        return scores * self.config["noise"]

    def data(self) -> coalesce.Data:
        x = torch.zeros(self.config["size"], 4)  # type: ignore[call-overload]
        return coalesce.Data(train=(x + self.config["noise"], torch.arange(11) % 3))  # mark: data reads derived


class VectorLoss(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class IntegerLoss(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch[0]).argmax()


class FloatLoss(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch[0]).sum().item()


class ExtraCalledLoss(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        loss = super().loss(model, batch)
        return loss, {"loss": loss}


class VectorExtra(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        scores = model(batch[0])
        return scores.sum(), {"scores": scores}


class VectorMetric(Small):
    def metrics(self, model: Any, batch: Any) -> Any:
        return {"hits": model(batch[0]).argmax(-1) == batch[1]}


class FloatMetric(Small):
    def metrics(self, model: Any, batch: Any) -> Any:
        return {"one": 1.0}


class NoDict(Small):
    def metrics(self, model: Any, batch: Any) -> Any:
        return super().metrics(model, batch)["loss"]


class Detached(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        return super().loss(model, batch).detach()


class AllFrozen(Small):
    def model(self) -> nn.Module:
        return nn.Linear(4, 3).requires_grad_(False)


class NoModel(Small):
    def model(self) -> Any:
        return lambda x: x


class NoData(Small):
    def data(self) -> Any:
        return torch.zeros(3)


class Lazy(Small):
    """A layer that is called in training only."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(3))

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x) if model.training else model[0](x), y)


class Sparse(Small):
    def model(self) -> nn.Module:
        return nn.Embedding(7, 3, sparse=True)

    def use(self, scores: Tensor) -> Tensor:
        return scores.mean(1)

    def data(self) -> coalesce.Data:
        return coalesce.Data(train=(torch.arange(44).view(11, 4) % 7, torch.arange(11) % 3))


class Norms(Sparse):
    """In a module within the model, whose path the error gives."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Identity(), nn.EmbeddingBag(7, 3, max_norm=0.5)))

    def use(self, scores: Tensor) -> Tensor:
        return scores


class Complex(Small):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, dtype=torch.complex64))


class SparseBuffer(Small):
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 3))
        model.register_buffer("graph", torch.eye(4).to_sparse())
        return model


class Target(Small):
    """Its second weights follow the first; in the first step, where both are equal, the write changes nothing."""

    def model(self) -> nn.Module:
        model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)])
        model[1].load_state_dict(model[0].state_dict())
        return model

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        loss = F.cross_entropy(model[0](x), y) + F.mse_loss(model[0](x), model[1](x) + 1)
        with torch.no_grad():
            model[1].weight.mul_(0.5).add_(model[0].weight, alpha=0.5)
        return loss

    def metrics(self, model: Any, batch: Any) -> Any:
        return {"size": model[1].weight.norm()}


class Logs(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        loss = super().loss(model, batch)
        self.last = loss.item()
        return loss


class FrozenByFloat(Small):
    def model(self) -> nn.Module:
        model = nn.Linear(4, 3)
        model.weight.requires_grad_(self.a < 0.15)
        return model


#: Task, mark of the line or nothing, pattern.
BEFORE_TRACING: list[tuple[type[Small], str, str]] = [
    (Raises, "raises", r"Raises\.loss\(\) raised KeyError: 'scale'"),
    (WrongShape, "wrong shape", r"WrongShape\.loss\(\) raised RuntimeError: mat1 and mat2"),
    (RaisesInMetrics, "raises in metrics", r"metrics\(\) raised TypeError"),
    (RaisesInModel, "raises in model", r"model\(\), experiment .* raised RuntimeError"),
    (RaisesInConstructor, "raises in constructor", r"constructor, experiment .* raised ValueError: no such thing"),
    (RaisesInData, "raises in data", r"data\(\) raised RuntimeError"),
    (DataReads, "data reads", r"data\(\) reads task\.a, which follows from task\.a .* static = \('a',\)"),
    (DataNames, "data names", r"data\(\) reads task\.a"),
    (DataReadsDerived, "data reads derived", r"reads task\.config\['noise'\], which follows from task\.a"),
    (VectorLoss, "", r"must return a scalar floating-point tensor, .* not a \(8,\) tensor"),
    (IntegerLoss, "", r"must return a scalar floating-point tensor, .* not a \(\) tensor of torch\.int64"),
    (FloatLoss, "", r"must return a scalar floating-point tensor, .* not float"),
    (ExtraCalledLoss, "", r"a scalar named 'loss' beside the loss"),
    (VectorExtra, "", r"'scores' must be a real scalar tensor, not a \(8, 3\) tensor"),
    (VectorMetric, "", r"metrics\(\): 'hits' must be a real scalar tensor, not a \(4,\) tensor"),
    (FloatMetric, "", r"'one' must be a real scalar tensor, not a float"),
    (NoDict, "", r"metrics\(\) must be a dict of name → scalar tensor, not Tensor"),
    (Detached, "", r"no trainable parameter has a part in"),
    (AllFrozen, "", r"no trainable parameter has a part in"),
    (NoModel, "", r"must return an nn\.Module, not function"),
    (NoData, "", r"must return a coalesce\.Data, not Tensor"),
    (Lazy, "", r"model\(\): 1 has no shape, since loss\(\) does not call it"),
    (Sparse, "", r"weight has a sparse gradient"),
    (Norms, "", r"embedding_bag\(\) with max_norm=0\.5 writes into its weight(.|\n)*In the model's 0\.1, EmbeddingBag"),
    (Complex, "", r"1\.weight is torch\.complex64, but lanes train real parameters"),
    (SparseBuffer, "", r"graph is sparse \(torch\.sparse_coo\), but lanes are stacked densely"),
    (Target, "", r"loss\(\) writes into the parameter 1\.weight(.|\n)*target network's do, are buffers"),
    (Logs, "", r"changes task\.last from (.|\n)*to be logged is returned beside the loss"),
    (FrozenByFloat, "", r"weight has \(shape, dtype, requires_grad\)"),
]


@pytest.mark.parametrize(
    ("task", "mark", "pattern"), BEFORE_TRACING, ids=[task.__name__ for task, *_ in BEFORE_TRACING]
)
def test_what_is_found_before_tracing(task: type[Small], mark: str, pattern: str) -> None:
    with pytest.raises(TaskError, match=pattern) as caught:
        template_of(two(task))
    if mark:
        assert error_line(__file__, mark) in str(caught.value)


class OneBadLabel(Small):
    """Out of range in one split only."""

    where = "val"

    def data(self) -> coalesce.Data:
        x, labels = torch.linspace(-1, 1, 44).view(11, 4), torch.arange(11) % 3
        splits = {name: (x, labels.clone()) for name in ("train", "val", "test")}
        splits[self.where][1][7] = 3
        return coalesce.Data(splits["train"], splits["val"], splits["test"])


class OneBadTestLabel(OneBadLabel):
    where = "test"


class OneBadTrainLabel(OneBadLabel):
    where = "train"


@pytest.mark.parametrize("task", [OneBadLabel, OneBadTestLabel, OneBadTrainLabel])
def test_a_label_out_of_range_is_found_in_any_split(task: type[OneBadLabel]) -> None:
    with pytest.raises(ConfigError) as caught:
        template_of([experiment(task, {"a": 0.1})])
    (problem,) = caught.value.problems
    assert problem.key == f"task.data.{task.where}"
    assert problem.value == 3
    assert "0 to 2" in problem.valid
    assert "sample 7" in problem.rule


def test_a_lane_that_does_not_fit_is_refused_when_it_is_filled() -> None:
    # the variants that are looked at beforehand agree; this experiment, with both floats changed, does not
    experiments = [experiment(Both, {"a": a, "b": b}) for a, b in ((0.1, 0.1), (0.9, 0.1), (0.1, 0.9), (0.9, 0.9))]
    lanes = Lanes(template_of(experiments), 2, compile=False)
    with pytest.raises(TaskError, match=r"task\.depth is 2 in experiment .* and 1 in another"):
        lanes.fill(1, experiments[3])
    lanes.fill(1, experiments[2])
    lanes.advance(1)
    assert lanes.read().steps == [0, 1]


class Both(Small):
    def __init__(self, a: float = 0.2, b: float = 0.2):
        self.a, self.b = a, b
        self.depth = 2 if a > 0.5 and b > 0.5 else 1

    def use(self, scores: Tensor) -> Tensor:
        return scores * (self.a + self.b)
