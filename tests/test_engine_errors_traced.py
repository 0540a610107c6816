"""Tasks that train alone and cannot be traced: the error shows the user's own line and the way out.

Oracle: by hand, one task per fault. The line is looked up in this file by the comment that marks it.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coalesce.configuration import rides
from coalesce.errors import TaskError
from coalesce.experiment import group
from engine_helpers import lanes_of, template_of
from errors_helpers import Small, error_line, two

pytestmark = pytest.mark.filterwarnings("ignore:.*__array_wrap__:DeprecationWarning")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


class Order(Small):
    def use(self, scores: Tensor) -> Tensor:
        return torch.cdist(scores, scores[:3], self.a)  # mark: order


class Distances(nn.Module):
    def __init__(self, order: float):
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, x[:3], self.order)  # mark: order of layer


class OrderOfLayer(Small):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), Distances(self.a))


class Branch(Small):
    def use(self, scores: Tensor) -> Tensor:
        if self.a > 0.15:  # mark: branch
            scores = scores * 2
        return scores


class BranchOnData(Small):
    def use(self, scores: Tensor) -> Tensor:
        if scores.isnan().any():  # mark: branch on data
            raise ValueError("NaN")
        return scores


class Item(Small):
    def use(self, scores: Tensor) -> Tensor:
        return scores * scores.mean().item()  # mark: item


class MathFunction(Small):
    def use(self, scores: Tensor) -> Tensor:
        return scores * math.sqrt(self.a)  # mark: math


class Rounded(Small):
    def use(self, scores: Tensor) -> Tensor:
        return scores * (1 + round(self.a))  # mark: rounded


class Table(Small):
    def use(self, scores: Tensor) -> Tensor:
        return scores * {0.2: 1.0, 0.1: 2.0}[self.a]  # mark: table


class NumpyFunction(Small):
    def use(self, scores: Tensor) -> Tensor:
        return scores * np.sqrt(self.a)  # mark: numpy


class Counts(Small):
    """Once these raised when the whole graph was finished, with no line."""

    def use(self, scores: Tensor) -> Tensor:
        return scores * torch.bincount(scores.argmax(1), minlength=3)  # mark: counts


class Repeats(Small):
    def use(self, scores: Tensor) -> Tensor:
        scores.repeat_interleave(torch.tensor([1, 2, 1]), 1)  # mark: repeats
        return scores


class Copied(Small):
    def loss(self, model: Any, batch: Any) -> Any:
        x, _ = batch
        twin = copy.deepcopy(model)  # mark: copied
        return super().loss(model, batch) + F.mse_loss(model(x), twin(x).detach())


#: Task, mark of the line, patterns. `a` differs between two lanes.
IN_A_GRAPH: list[tuple[type[Small], str, list[str]]] = [
    (Order, "order", [r"cdist\(\) takes only a Python number where task\.a stands", r'static = \("a",\)']),
    (
        OrderOfLayer,
        "order of layer",
        [r"where model\.1\.order stands", r"follows from task\.a\. .*static = \(\"a\",\)"],
    ),
    (Branch, "branch", [r"__bool__\(\) asks for the value", r"Floats that ride here: task\.a", r"static = "]),
    (BranchOnData, "branch on data", [r"__bool__\(\) asks for the value", r"torch\.where"]),
    (Item, "item", [r"item\(\) asks for the value", "Return the value beside the loss or as a metric"]),
    (Counts, "counts", [r"bincount\(\) gives a result whose shape depends on the values", "one_hot"]),
    (Repeats, "repeats", [r"repeat_interleave\(\) gives a result whose shape depends", "output_size"]),
    (MathFunction, "math", [r"__float__\(\) takes only a Python number where task\.a stands"]),
    (
        Rounded,
        "rounded",
        [r"TypeError: type Tensor doesn't define __round__", r"in lanes tensors stand at task\.a, .*\n?.*static = "],
    ),
    (Table, "table", [r"KeyError", r"in lanes tensors stand at task\.a, .*\n?.*static = "]),
    (
        Copied,
        "copied",
        [r"copy\.deepcopy\(\) of a tensor of the graph", r"x\.detach\(\)\.clone\(\)", "register_buffer"],
    ),
    (NumpyFunction, "numpy", [r"__array__\(\) takes only a Python number where task\.a stands"]),
]


@pytest.mark.parametrize(("task", "mark", "patterns"), IN_A_GRAPH, ids=[task.__name__ for task, *_ in IN_A_GRAPH])
def test_what_cannot_be_traced(task: type[Small], mark: str, patterns: list[str]) -> None:
    # it trains alone
    template_of(two(task)[:1])
    with pytest.raises(TaskError) as caught:
        lanes_of(two(task)).prepare_step()
    text = str(caught.value)
    for pattern in patterns:
        assert re.search(pattern, text), text
    assert error_line(__file__, mark) in text


def test_a_static_float_splits_instead() -> None:
    cohorts = group(two(StaticBranch), rides)
    assert [cohort.riding for cohort in cohorts] == [(), ()]
    lanes_of([cohorts[0].experiments[0]]).prepare_step()


class StaticBranch(Branch):
    static: ClassVar[tuple[str, ...]] = ("a",)
