"""Searches on the command line: the group's files, and Hydra's intervals.

Oracle: `make_search` with the same values in Python, and the messages' own words.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_for_tests import CommandLine
from coalesce.runner.plan import Trainer
from coalesce.search.base import Listed
from coalesce.search.halving import Asha, Halving
from coalesce.search.optuna import Optuna
from coalesce.search.population import Population
from coalesce.search.random import drawn
from coalesce.search.space import Interval, Space
from coalesce.search.stopping import Stopping


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, monkeypatch, capsys)


SPACE = [
    "sweep.params.optimizer.lr=tag(log, interval(1e-4, 1e-1))",
    'sweep.params.task.hidden="int(interval(8, 64))"',
    "sweep.params.task.dropout=interval(0, 0.5)",
    "sweep.params.seed=range(0, 2)",
]


def test_random_draws_from_hydras_intervals(cli: CommandLine) -> None:
    order = cli.order("search=random", "search.samples=5", "search.seed=3", *SPACE)
    space = Space(
        {
            "optimizer.lr": Interval(1e-4, 1e-1, log=True),
            "task.hidden": Interval(8, 64, integer=True),
            "task.dropout": Interval(0, 0.5),
            "seed": range(2),
        }
    )
    assert [dict(e.values) for e in order.experiments] == list(drawn(space, 5, 3))
    assert order.search.count == 10
    assert order.keys == tuple(space.keys)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ([], Listed),
        (["search=halving", "search.min_steps=500"], Halving),
        (["search=asha", "search.factor=3"], Asha),
        (["search=pbt", "search.interval=1000"], Population),
        (["search=optuna", "search.sampler=random"], Optuna),
        (["search=optuna", "search.sampler={_target_: optuna.samplers.QMCSampler, seed: 1}"], Optuna),
        (["search.patience=3"], Stopping),
    ],
)
def test_every_search(cli: CommandLine, arguments: list[str], kind: type) -> None:
    order = cli.order("sweep=lr_grid", *arguments)
    assert type(order.search) is kind
    assert len(order.experiments) == (64 if kind is not Optuna else 2)


def test_an_evaluation_has_a_boundary(cli: CommandLine) -> None:
    assert cli.order("trainer.evaluate_every=50").trainer == Trainer(every=50, evaluate_every=50)
    assert cli.order().trainer == Trainer()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["search=asah"], ["search/asah", "Did you mean search=asha?"]),
        (["search=asha", "search.min_stpes=5"], ["unknown key for search=asha", "did you mean 'min_steps'?"]),
        (
            ["search=asha", "search.min_steps=70"],
            [
                "search.min_steps=70: val/accuracy is not measured there",
                "trainer.evaluate_every, which is 500",
                "command",
            ],
        ),
        (["search=random", "search.samples=many"], ["search.samples='many': must be an integer"]),
        # what is wrong with the trainer is told by itself
        (["search=asha", "trainer.evaluate_every=170"], ["1 problem", "must be a multiple of trainer.every"]),
        # and an unknown search does not make every interval wrong
        (["search.name=asah", SPACE[0]], ["1 problem", "unknown search", "did you mean 'asha'?"]),
        ([SPACE[0]], ["continuous", "search=random", "${logspace:0.0001,0.1,8}"]),
        (["search=random", "sweep.params.optimizer.lr=interval(1, 0)"], ["1.0 is not below 0.0"]),
        (["search=random", "sweep.params.optimizer.lr=tag(lgo, interval(0, 1))"], ["has an unknown tag: lgo"]),
        (["search=random", "sweep.params.optimizer.lr=tag(log, interval(0, 1))"], ["above 0"]),
        (
            ["search=random", 'sweep.params.task.hidden="interval(8, 64)"'],
            ["int(interval(8.0, 64.0))", "(from command"],
        ),
        (
            ["search=pbt", "sweep.params.optimizer.lr=[0.1, 0.2]", "sweep.params.task.hidden=[8, 16]"],
            ["this sweep has 2, by task.hidden"],
        ),
    ],
    ids=lambda value: " ".join(value)[:70],
)
def test_what_is_refused(cli: CommandLine, arguments: list[str], says: list[str]) -> None:
    said = cli.refused(*arguments)
    assert all(part in said for part in says), said
