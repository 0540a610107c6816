"""What is computed again is chosen while a run is planned, written into the plan, and obeyed.

Oracle: the names by hand; the regions that the hooks of a traced step note; the same run without it, bit for bit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coalesce.engine import pieces
from coalesce.errors import ConfigError
from coalesce.runner.run import run
from coalesce.store.plans import plan_json
from runner_helpers import Net, planned, ran

LRS = {"optimizer.lr": [0.1, 0.03]}
SHORT: dict[str, Any] = {"steps": 5, "check": False}


class Deep(Net):
    """Net with three blocks that repeat, of names of their own."""

    def model(self) -> nn.Module:
        stem, blocks = nn.Linear(4, 5), nn.Sequential(*[self.block() for _ in range(3)])
        return nn.ModuleDict({"stem": stem, "blocks": blocks, "head": nn.Linear(5, 1)}).to(self.dtype)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.out(model, x), y)

    def out(self, model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, nn.ModuleDict)
        out: Tensor = model["head"](model["blocks"](model["stem"](x)))
        return out

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules whose regions were noted while a step was traced."""
    noted: list[nn.Module] = []
    leave = pieces._leave

    def noting(region: Any, module: nn.Module, args: Any, output: Any) -> None:
        if region is not None:
            noted.append(module)
        leave(region, module, args, output)

    monkeypatch.setattr(pieces, "_leave", noting)
    return noted


def kinds(modules: list[nn.Module]) -> list[tuple[str, ...]]:
    """By the names of their parameters."""
    return [tuple(name for name, _ in module.named_parameters()) for module in modules]


BLOCK = ("0.weight", "0.bias", "2.weight", "2.bias")
LAYER = ("weight", "bias")


@pytest.mark.parametrize(
    ("given", "names", "traced"),
    [
        (None, [], []),
        ("auto", ["blocks.0", "blocks.1", "blocks.2"], [BLOCK] * 3),
        (["blocks.[02]"], ["blocks.0", "blocks.2"], [BLOCK] * 2),
        (["stem", "blocks.?.2"], ["stem", "blocks.0.2", "blocks.1.2", "blocks.2.2"], [LAYER] * 4),
    ],
)
def test_what_was_asked_for_is_planned_written_and_run(
    given: Any, names: list[str], traced: list[Any], regions: list[nn.Module]
) -> None:
    plan = planned(Deep, LRS, checkpoint=given, **SHORT)
    assert plan.cohorts[0].checkpoint == tuple(names)
    (cohort,) = json.loads(json.dumps(plan_json(plan)))["cohorts"]
    assert cohort["checkpoint"] == names
    regions.clear()
    run(plan)
    assert kinds(regions) == traced


def test_the_plan_is_obeyed_whatever_the_setting_says(regions: list[nn.Module]) -> None:
    plan = planned(Deep, LRS, checkpoint="auto", **SHORT)
    other = replace(plan.cohorts[0], checkpoint=("blocks.1",))
    regions.clear()
    run(replace(plan, cohorts=(other,)))
    assert kinds(regions) == [BLOCK]


def test_it_changes_no_number() -> None:
    settings: dict[str, Any] = {"optimizer": "adamw", "weights": True}
    plain, mine = (ran(Deep, LRS, checkpoint=given, **settings) for given in (None, ("blocks.*",)))
    assert mine.curves() == plain.curves()
    for one, other in zip(mine.in_order(), plain.in_order(), strict=True):
        assert one.weights
        assert other.weights
        assert all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    """All wrong ones together, of either setting."""
    with pytest.raises(ConfigError) as caught:
        planned(Deep, LRS, checkpoint=["blocks.0", "block.1", "haed"], pieces=["stm"])
    found = [(p.key, p.value, p.nearest) for p in caught.value.problems]
    assert found == [
        ("trainer.pieces", "stm", "stem"),
        ("trainer.checkpoint", "block.1", "blocks.1"),
        ("trainer.checkpoint", "haed", "head"),
    ]
    assert all("matches no module of Deep's model" in p.rule for p in caught.value.problems)
    assert "blocks.1.2" in caught.value.problems[1].valid


class Other(Deep):
    """The same with blocks that have another name."""

    def __init__(self, named: str = "blocks", **given: Any):
        super().__init__(**given)
        self.named = named

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.ModuleDict)
        model[self.named] = model.pop("blocks")
        return model

    def out(self, model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, nn.ModuleDict)
        out: Tensor = model["head"](model[self.named](model["stem"](x)))
        return out


def test_a_pattern_must_match_in_every_cohort() -> None:
    """Each has a model of its own."""
    both = {"task.named": ["blocks", "layers"]}
    with pytest.raises(ConfigError) as caught:
        planned(Other, both, checkpoint=["blocks.*"])
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("trainer.checkpoint", "blocks.*")
    assert "layers.0" in problem.valid
    plan = planned(Other, both, checkpoint="auto")
    assert [c.checkpoint[0] for c in plan.cohorts] == ["blocks.0", "layers.0"]


def test_without_stacking_nothing_is_computed_again() -> None:
    """Though a pattern that is wrong is told."""
    assert planned(Deep, LRS, checkpoint=["blocks.*"], stack=False).cohorts[0].checkpoint == ()
    with pytest.raises(ConfigError, match=r"trainer\.checkpoint"):
        planned(Deep, LRS, checkpoint=["block.*"], stack=False)
