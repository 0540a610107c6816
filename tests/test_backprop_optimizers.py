"""Every optimiser of `torch.optim` under `coalesce.BackProp`, by law.

Oracle: the plain loop with the same class. Equality is that of bits: the same kernels run on the same numbers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coalesce
from backprop_helpers import (
    FEATURES,
    Make,
    X,
    assert_same_state,
    assert_same_weights,
    assert_trains_alike,
    cosine,
    network,
    train,
    two_groups,
    watch,
)

OPTIM = torch.optim


class Words(nn.Module):
    """Counts of words looked up in a sparse table: its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(FEATURES, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.abs().long().clamp(max=FEATURES - 1)).mean(1)


def words() -> nn.Module:
    torch.manual_seed(3)
    return Words()


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Muon's; what it does not take is frozen."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    return [p for p in model.parameters() if p.requires_grad]


def row(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda model: kind(two_groups(model), **options)


ROWS: dict[str, Make] = {
    "SGD": row(OPTIM.SGD, lr=0.1),
    "SGD, momentum": row(OPTIM.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, maximize": row(OPTIM.SGD, lr=0.001, maximize=True),
    "Adam": row(OPTIM.Adam, lr=0.01, weight_decay=0.1),
    "AdamW": row(OPTIM.AdamW, lr=0.01),
    "AdamW, amsgrad": row(OPTIM.AdamW, lr=0.01, amsgrad=True),
    "RMSprop": row(OPTIM.RMSprop, lr=0.01),
    "RMSprop, centered": row(OPTIM.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": row(OPTIM.Adagrad, lr=0.1, lr_decay=0.01),
    "Adadelta": row(OPTIM.Adadelta),
    "Adamax": row(OPTIM.Adamax, lr=0.01),
    "NAdam": row(OPTIM.NAdam, lr=0.01),
    "RAdam": row(OPTIM.RAdam, lr=0.01),
    "ASGD": row(OPTIM.ASGD, lr=0.1),
    "Rprop": row(OPTIM.Rprop, lr=0.01),
    "Adafactor": row(OPTIM.Adafactor, lr=0.01),
    "Muon": lambda model: OPTIM.Muon(matrices(model), lr=0.02),
    "SparseAdam": lambda model: OPTIM.SparseAdam(model.parameters(), lr=0.01),
}
DENSE = [name for name in ROWS if name != "SparseAdam"]
#: Rules with state of each kind; the others equal the plain loop, and do the rest as one of them does.
KINDS = ("SGD, momentum", "AdamW", "RMSprop, centered", "NAdam", "Adafactor", "Muon", "SparseAdam")


def some(names: Iterable[str]) -> list[Any]:
    """All of them, those that are no kind of their own marked thorough."""
    return [pytest.param(name, marks=[] if name in KINDS else pytest.mark.thorough) for name in names]


def build(name: str) -> nn.Module:
    return words() if name == "SparseAdam" else network()


def wrapped(name: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(name)
    return coalesce.BackProp(model, ROWS[name](model), **options)


def test_every_optimizer_has_a_row() -> None:
    kinds = {kind for kind in vars(OPTIM).values() if isinstance(kind, type) and issubclass(kind, OPTIM.Optimizer)}
    rows = {type(make(build(name))) for name, make in ROWS.items()}
    assert rows == kinds - {OPTIM.Optimizer, OPTIM.LBFGS}


@pytest.mark.parametrize("name", ROWS)
def test_equals_the_plain_loop(name: str) -> None:
    assert_trains_alike(ROWS[name], lambda: build(name), schedule=cosine)


@pytest.mark.parametrize("name", some(ROWS))
def test_accumulates_as_the_plain_loop(name: str) -> None:
    assert_trains_alike(ROWS[name], lambda: build(name), accumulate=4, options={"accumulate": 4})


@pytest.mark.parametrize("name", some(DENSE))
def test_clips_as_the_plain_loop(name: str) -> None:
    norms = []

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())

    assert_trains_alike(ROWS[name], lambda: build(name), clip=clip, options={"clip_norm": 0.1, "clip_value": 0.05})
    assert max(norms) > 0.1, "the bound must cut, or nothing was tested"


@pytest.mark.parametrize("name", some(ROWS))
def test_state_goes_to_the_plain_optimizer_and_back(name: str) -> None:
    """5 steps under BackProp, 5 in the plain loop, 5 under another BackProp: as 15 plain steps."""
    straight = build(name)
    reference = ROWS[name](straight)
    for seed in range(3):
        train(straight, reference, 5, seed=seed)

    model, stepped = wrapped(name)
    train(model, stepped, 5, seed=0)
    plain = build(name)
    optimizer = ROWS[name](plain)
    plain.load_state_dict(model.state_dict())
    optimizer.load_state_dict(stepped.state_dict())
    train(plain, optimizer, 5, seed=1)
    model, stepped = wrapped(name)
    model.load_state_dict(plain.state_dict())
    stepped.load_state_dict(optimizer.state_dict())
    train(model, stepped, 5, seed=2)
    assert_same_weights(model, straight)
    assert_same_state(stepped, reference)


@pytest.mark.parametrize("name", some(ROWS))
def test_gradients_never_coexist(name: str) -> None:
    model, stepped = wrapped(name)
    alive = watch(model)
    train(model, stepped, 2)
    assert len(alive) == 4 * sum(p.requires_grad for p in model.parameters())
    assert max(alive) == 0


def test_the_watch_sees_gradients_that_coexist() -> None:
    model = network()
    alive = watch(model)
    train(model, ROWS["SGD"](model), 1)
    assert alive == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("name", some(ROWS))
def test_repeats_itself(name: str) -> None:
    once, again = wrapped(name), wrapped(name)
    assert train(*once, 10) == train(*again, 10)
    assert_same_weights(once[0], again[0])


def test_half_precision_and_mixed_dtypes() -> None:
    def make() -> nn.Module:
        model = network()
        model[3].to(torch.bfloat16)
        model[3].register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
        model[3].register_forward_hook(lambda _, args, output: output.float())
        return model

    assert_trains_alike(ROWS["AdamW"], make)


def test_moving_the_model_afterwards() -> None:
    """`.double()` puts other memory into the same parameters."""
    plain, twin = network(), network()
    optimizer = ROWS["SGD"](plain)
    model, stepped = coalesce.BackProp(twin, ROWS["SGD"](twin))
    for one, step in ((plain, optimizer), (model, stepped)):
        one.double()
        one.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        train(one, step, 10)
    assert plain[0].weight.dtype == torch.float64
    assert_same_weights(model, plain)


def test_options_that_are_loaded_stay_off() -> None:
    """A state saved by a fused optimiser would switch fusing on again."""
    plain = network()
    fused = OPTIM.Adam(plain.parameters(), lr=0.01, fused=True)
    train(plain, fused, 2)
    twin = network()
    model, stepped = coalesce.BackProp(twin, OPTIM.Adam(twin.parameters(), lr=0.01))
    with pytest.warns(UserWarning, match="fused=True is switched off"):
        stepped.load_state_dict(copy.deepcopy(fused.state_dict()))
    assert stepped.param_groups[0]["fused"] is False
    train(model, stepped, 2)
    assert stepped.state_dict()["state"][0]["step"] == 4
    assert X.shape[0] == 4


@pytest.mark.parametrize("name", ["foreach", "fused"])
def test_batched_updates_are_switched_off_with_a_word(name: str) -> None:
    plain, twin = network(), network()
    make: Callable[..., torch.optim.Optimizer] = functools.partial(OPTIM.AdamW, lr=0.01)
    given = make(two_groups(twin), **{name: True})
    with pytest.warns(UserWarning, match=f"{name}=True is switched off"):
        model, stepped = coalesce.BackProp(twin, given)
    reference = make(two_groups(plain), **{name: False})
    assert train(model, stepped) == train(plain, reference)
    assert_same_weights(model, plain)
