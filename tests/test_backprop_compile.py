"""`torch.compile` and `coalesce.BackProp` in one another.

Oracle: the plain loop over the model compiled in the same way, bit for bit; the count of compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coalesce
from backprop_helpers import CLASSES, FEATURES, X, adam, network, train

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _from_nothing() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole(model: nn.Module, backend: Any = "aot_eager", fullgraph: bool = False, dynamic: bool = False) -> nn.Module:
    compiled: Any = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    assert isinstance(compiled, nn.Module)
    return compiled


def by_blocks(model: Blocks) -> nn.Module:
    for block in model.blocks:
        block.compile()
    return model


def in_place(model: Blocks) -> nn.Module:
    model.compile()
    return model


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "whole": lambda model: whole(model, backend="inductor"),
    "in place": in_place,
    "by blocks": by_blocks,
}


def losses(way: Callable[[Any], nn.Module], order: str) -> list[float]:
    torch._dynamo.reset()
    model: nn.Module = Blocks()
    if order == "plain":
        model = way(model)
        optimizer: torch.optim.Optimizer = adam(model)
    elif order == "compiled, then given":
        model = way(model)
        model, optimizer = coalesce.BackProp(model, adam(model))
    else:
        model, optimizer = coalesce.BackProp(model, adam(model))
        model = way(model)
    found = train(model, optimizer, 10)
    with torch.no_grad():
        found += train_free(model)
    return found + train(model, optimizer, 10)


def train_free(model: nn.Module) -> list[float]:
    return model(X[0]).flatten().tolist()


@pytest.mark.parametrize("order", ["compiled, then given", "given, then compiled"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "whole" else pytest.mark.thorough) for n in WAYS])
def test_a_compiled_model_trains_as_it_does_in_a_plain_loop(name: str, order: str) -> None:
    assert losses(WAYS[name], order) == losses(WAYS[name], "plain")


def test_the_model_inside_is_compiled() -> None:
    """As one graph, as without BackProp: what stands around it is left alone."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model, optimizer = coalesce.BackProp(given := Blocks(), adam(given))
    train(whole(model, backend=backend), optimizer, 3)
    assert len(graphs) == 1


def test_fullgraph() -> None:
    """Around a class of one's own it holds for what is inside. torch's own containers are traced from outside, where
    the halt is in the way: then the message has the way out."""
    own, optimizer = coalesce.BackProp(given := Blocks(), adam(given))
    train(whole(own, fullgraph=True), optimizer, 2)
    model: nn.Module = network()
    model, optimizer = coalesce.BackProp(model, adam(model))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the plain model and give that to BackProp"):
        train(whole(model, fullgraph=True), optimizer, 1)
    model = whole(network(), fullgraph=True)
    model, optimizer = coalesce.BackProp(model, adam(model))
    train(model, optimizer, 2)


def test_micro_batches_of_two_shapes_compile_anew_between_them() -> None:
    """The compiler looks at .grad of the parameters: nothing may stand there that it cannot read."""
    model = whole(Blocks())
    model, optimizer = coalesce.BackProp(model, adam(model), accumulate=2)
    for _ in range(2):
        for rows in (17, 5):
            model(X[0, :rows]).square().mean().backward()
        optimizer.step()
