"""How convolutions are lowered is chosen once, written into the plan, and obeyed.

Oracle: the numbers by vmap's own lowering, in float64 to 1e-10 after some steps; the folder's plan.json.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.configuration import check_trainer
from coalesce.engine.rules.lowerings import LOWERINGS
from coalesce.errors import ConfigError
from coalesce.runner.run import run
from coalesce.store.plans import plan_json
from runner_helpers import Net, planned, ran


class Small(coalesce.Task):
    """Two convolutions of odd sizes and a pooled layer, on noise."""

    def __init__(self, double: bool = True):
        self.dtype = torch.float64 if double else torch.float32

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(40, 3, 7, 5, generator=generator, dtype=torch.float64).to(self.dtype)
        y = torch.randint(4, (40,), generator=generator)
        return coalesce.Data(train=(x[:24], y[:24]), val=(x[24:], y[24:]), classes=4)

    def model(self) -> nn.Module:
        layers = nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 7, 3, 2), nn.Tanh(), nn.Flatten(2)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(7, 4)).to(self.dtype)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


NAMES = [
    "conv2d input=3x7x5 weight=5x3x3x3 padding=1x1 float64",
    "conv2d input=5x7x5 weight=7x5x3x3 stride=2x2 float64",
]
LRS = {"optimizer.lr": [0.1, 0.03, 0.01]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the lowerings that were traced."""
    taken: list[str] = []
    for name, lowering in LOWERINGS.items():

        def run(*given: Any, name: str = name, run: Any = lowering.run) -> Tensor:
            taken.append(name)
            found: Tensor = run(*given)
            return found

        monkeypatch.setitem(LOWERINGS, name, lowering._replace(run=run))
    return taken


@pytest.mark.parametrize("choice", ["grouped", *LOWERINGS])
def test_what_was_asked_for_is_planned_and_run(choice: str, calls: list[str]) -> None:
    plan = planned(Small, LRS, convolution=choice, monitor="val/loss")
    assert plan.cohorts[0].lowerings == dict.fromkeys(NAMES, choice)
    calls.clear()
    run(plan)
    assert set(calls) == {choice} - {"grouped"}


def test_the_plan_is_obeyed_whatever_is_the_fastest_now(calls: list[str]) -> None:
    plan = planned(Small, LRS, monitor="val/loss")
    assert set(plan.cohorts[0].lowerings) == set(NAMES)
    other = replace(plan.cohorts[0], lowerings={NAMES[1]: "single"})
    calls.clear()
    run(replace(plan, cohorts=(other,)))
    assert set(calls) == {"single"}


def test_the_plan_of_a_run_folder_tells_the_lowerings() -> None:
    plan = planned(Small, LRS, convolution="columns", monitor="val/loss")
    (cohort,) = json.loads(json.dumps(plan_json(plan)))["cohorts"]
    assert cohort["convolutions"] == dict.fromkeys(NAMES, "columns")


def test_every_lowering_gives_the_same_numbers() -> None:
    """20 steps of AdamW in float64; the same sums in another order."""
    found = {}
    for choice in ("grouped", *LOWERINGS):
        results = ran(Small, LRS, optimizer="adamw", convolution=choice, monitor="val/loss", weights=True).results
        found[choice] = [r.weights or {} for r in results]
    for choice in LOWERINGS:
        for mine, theirs in zip(found[choice], found["grouped"], strict=True):
            assert len(mine) == 6
            for name in mine:
                torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-10)


def test_mixed_precision_finds_its_choice(calls: list[str]) -> None:
    """The plain step sees float32 before autocast, the lanes what autocast made of it: one name."""
    settings: dict[str, Any] = {"arguments": {"double": False}, "convolution": "columns", "monitor": "val/loss"}
    plan = planned(Small, {**LRS, "precision": ["bfloat16"]}, **settings)
    assert {name.split()[-1] for name in plan.cohorts[0].lowerings} == {"bfloat16"}
    calls.clear()
    run(plan)
    assert set(calls) == {"columns"}


def test_without_convolutions_or_stacking_there_is_nothing_to_choose() -> None:
    assert planned(Net, monitor="val/error").cohorts[0].lowerings == {}
    assert planned(Small, monitor="val/loss", stack=False).cohorts[0].lowerings == {}


def test_an_unknown_lowering_names_the_known() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.convolution") as caught:
        check_trainer({"convolution": "colums"})
    assert "auto, grouped, single, channels_last, columns" in str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize("choice", LOWERINGS)
def test_compiled_lanes_agree_bit_for_bit(choice: str) -> None:
    """Law 1: the same experiment in any lane of eight, beside any neighbours. float32, odd sizes, so that lanes lie at
    all alignments."""
    settings: dict[str, Any] = {"arguments": {"double": False}, "convolution": choice, "weights": True}
    settings |= {"monitor": "val/loss", "optimizer": "adamw", "compile": True, "width": 8}
    forward = ran(Small, {"optimizer.lr": [0.01 * 1.3**i for i in range(8)]}, **settings)
    backward = ran(Small, {"optimizer.lr": [0.01 * 1.3**i for i in reversed(range(8))]}, **settings)
    theirs = {r.experiment.id: r.weights or {} for r in backward.results}
    for result in forward.results:
        assert result.weights
        for name, weight in result.weights.items():
            assert torch.equal(weight, theirs[result.experiment.id][name]), name
