"""What `coalesce.compile_step` refuses, and in which words.

Oracle: the contract in its docstring: an error names what was seen, what is valid, and the way out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from compile_step_helpers import BATCHES, cross_entropy, network


def sgd(model: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def step_of(model: Any, loss_fn: Any = cross_entropy, **options: Any) -> Any:
    return coalesce.compile_step(model, loss_fn, options.pop("optimizer", None) or sgd(model), compile=False, **options)


class Mine(torch.optim.SGD):
    pass


def hooked(model: Any) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def watched(model: Any) -> torch.optim.Optimizer:
    model[0].weight.register_hook(lambda g: g * 2)
    return sgd(model)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (Mine, TypeError, r"Mine; .*no subclasses: SGD, Adam, AdamW, NAdam.*coalesce\.BackProp"),
        (lambda m: torch.optim.LBFGS(m.parameters()), TypeError, "LBFGS"),
        (lambda m: torch.optim.Muon([m[0].weight]), TypeError, "bfloat16"),
        (lambda m: coalesce.BackProp(m, sgd(m))[1], TypeError, "BackPropOptimizer"),
        (lambda m: None, TypeError, "NoneType"),
        (lambda m: sgd(m, maximize=True), ValueError, r"param_groups\[0\]\['maximize'\] is True.*negative loss"),
        (lambda m: sgd(network()), ValueError, r"shape \(8, 10\) that is not the model's"),
        (hooked, ValueError, "step post-hook"),
        (watched, ValueError, r"0\.weight has a gradient hook"),
    ],
)
def test_optimizers_that_are_refused(make: Callable[[Any], Any], kind: type[Exception], words: str) -> None:
    model = network()
    optimizer = make(model.parameters()) if make is Mine else make(model)
    with pytest.raises(kind, match=words):
        coalesce.compile_step(model, cross_entropy, optimizer)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda m: {"loss_fn": 3}, TypeError, "loss_fn must be a function"),
        (lambda m: {"model": torch.compile(m)}, TypeError, "compiled or scripted already"),
        (lambda m: {"model": m.state_dict()}, TypeError, "must be an nn.Module"),
        (lambda m: {"clip_norm": 0.0}, ValueError, "clip_norm=0.0: must be a positive number"),
        (lambda m: {"seed": -1}, ValueError, "seed=-1"),
        (lambda m: {"pieces": ["layer*"]}, ValueError, r"pieces=\['layer\*'\].*0, 1, 2, 3"),
    ],
)
def test_arguments_that_are_refused(change: Callable[[Any], Any], kind: type[Exception], words: str) -> None:
    model = network()
    given = {"model": model, "loss_fn": cross_entropy, "optimizer": sgd(model), **change(model)}
    with pytest.raises(kind, match=words):
        coalesce.compile_step(**given)


def branches(model: Any, batch: Any) -> Tensor:
    loss = cross_entropy(model, batch)
    return loss if loss > 0 else -loss  # the line


def masks(model: Any, batch: Any) -> Tensor:
    scores = model(batch[0])
    return scores[scores > 0].sum()  # the line


def fails(model: Any, batch: Any) -> Tensor:
    return model(batch[0][:, :3]).sum()  # the line


def draws(model: Any, batch: Any) -> Tensor:
    return model(batch[0] + torch.distributions.Gamma(1.0, 1.0).sample()).sum()  # the line


def draws_from_a_generator(model: Any, batch: Any) -> Tensor:
    return model(batch[0] + torch.rand(1, generator=torch.Generator())).sum()  # the line


def copies(model: Any, batch: Any) -> Tensor:
    twin = copy.deepcopy(model)  # the line
    return (model(batch[0]) - twin(batch[0]).detach()).square().sum()


OUTSIDE = torch.zeros(3, dtype=torch.float64)


def writes_outside(model: Any, batch: Any) -> Tensor:
    scores = model(batch[0])
    OUTSIDE.add_(scores.detach().mean(0))  # the line
    return scores.sum()


def looks_up(model: Any, batch: Any) -> Tensor:
    return model(batch[0]).sum() + F.embedding(batch[1], torch.ones(3, 2), max_norm=0.5).sum()  # the line


class Asks(torch.autograd.Function):
    """Under vmap there is no value."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * float(x.detach().sum())  # the line

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def asks_in_a_function(model: Any, batch: Any) -> Tensor:
    return Asks.apply(model(batch[0])).sum()  # the line


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (branches, r"asks for the value of a tensor.*beside the loss"),
        (masks, r"A graph needs one shape"),
        (fails, r"mat1 and mat2"),
        (draws, r"draws from torch's global generator.*where the data or the model are made"),
        (draws_from_a_generator, r"generator with a state"),
        (copies, r"copy\.deepcopy\(\) of a tensor of the graph.*register_buffer"),
        (writes_outside, r"writes what the graph computes into a tensor that is not its own"),
        (looks_up, r"max_norm=0\.5 writes into its weight"),
        (asks_in_a_function, r"Asks, a torch\.autograd\.Function, cannot run under torch\.vmap"),
    ],
)
def test_errors_show_the_users_line(loss_fn: Any, words: str) -> None:
    """And speak of one model: of no lanes, and of no methods and attributes of a task."""
    step = step_of(network(), loss_fn)
    with pytest.raises(coalesce.TaskError, match=rf"(?s){words}.*# the line") as found:
        step(BATCHES[0])
    text = str(found.value)
    assert re.search(r"test_compile_step_errors\.py", text)
    assert not re.search(r"\blanes?\b|static = |ride here|data\(\)|model\(\)", text)


def writes(model: Any, batch: Any) -> Tensor:
    model[0].weight.data.clamp_(-0.1, 0.1)
    return cross_entropy(model, batch)


def counts(model: Any, batch: Any) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return cross_entropy(model, batch) / model.calls


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda m, b: m(b[0]), r"must return a scalar floating-point tensor.*not a \(17, 3\) tensor"),
        (lambda m, b: (cross_entropy(m, b), {"x": 1.0}), "'x' must be a real scalar tensor"),
        (lambda m, b: b[0].sum(), "no trainable parameter"),
        (writes, r"writes() writes into the parameter 0\.weight".replace("()", r"\(\)")),
        (counts, r"changes model\.calls from 1 to 2"),
    ],
)
def test_losses_that_are_refused(loss_fn: Any, words: str) -> None:
    model = network()
    step = step_of(model, loss_fn)
    with pytest.raises(coalesce.TaskError, match=words):
        step(BATCHES[0])


def test_a_failed_call_changes_nothing() -> None:
    model = network()
    step = step_of(model, branches)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(coalesce.TaskError):
        step(BATCHES[0])
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert step.count == step.graphs == 0


def test_batches_of_something_else() -> None:
    step = step_of(network())
    with pytest.raises(TypeError, match=r"batch\[1\] is a list|batch\[1\]\[0\] is a int.*torch\.as_tensor"):
        step((BATCHES[0][0], [1] * 17))


@pytest.mark.thorough
def test_graphs_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = BATCHES[0]
    monkeypatch.setattr("coalesce.engine.single.step.MOST_GRAPHS", 2)
    step = step_of(network())
    for size in (2, 3, 2):
        step((x[:size], y[:size]))
    with pytest.raises(RuntimeError, match=r"graph number 3 .*\(2, 10\).*pad batches"):
        step((x[:4], y[:4]))
    model = network()
    model.beta = 0.0
    step = step_of(model, lambda m, b: cross_entropy(m, b) * (1 + m.beta))
    for model.beta in (0.1, 0.2):
        step((x, y))
    model.beta = 0.3
    with pytest.raises(RuntimeError, match=r"model\.beta from 0\.1 to 0\.2.*into the batch, as a tensor"):
        step((x, y))


def test_a_parameter_that_is_replaced() -> None:
    """The optimiser still has the old one: a plain loop would train neither, in silence."""
    model = network()
    step = step_of(model)
    step(BATCHES[0])
    model[3].weight = nn.Parameter(model[3].weight.detach().clone())
    with pytest.raises(ValueError, match=r"shape \(3, 8\) that is not the model's.*replaced"):
        step(BATCHES[0])


def test_state_that_was_left_behind() -> None:
    model = network()
    step = step_of(model, optimizer=torch.optim.Adam(model.parameters()))
    step(BATCHES[0])
    model.float()
    with pytest.raises(
        RuntimeError, match=r"exp_avg of 0\.weight is .*float64.*load_state_dict\(optimizer\.state_dict"
    ):
        step((BATCHES[0][0].float(), BATCHES[0][1]))


def test_two_parameters_in_one_place() -> None:
    model: Any = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    model[1].weight = nn.Parameter(model[0].weight.data)
    step = step_of(model, lambda m, b: m(b).square().sum())
    with pytest.raises(RuntimeError, match=r"0\.weight and 1\.weight are two tensors in one place"):
        step(torch.ones(3, 10))
