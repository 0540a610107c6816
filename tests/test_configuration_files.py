"""Configuration files: those that are shipped, a user's own, and what YAML makes of numbers.

Oracle: the rules' and the tasks' own defaults, case 29 of CASES.md as a file, and `numpy.logspace` / `numpy.linspace`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from cli_for_tests import CommandLine
from coalesce.__main__ import conf_folder
from coalesce.configuration import make_experiments, rides
from coalesce.configuration.language import linspace, logspace, register_resolvers
from coalesce.experiment import group
from coalesce.optim import OPTIMIZERS, SCHEDULES
from coalesce.runner.plan import Trainer

CONF = conf_folder()
FILES = sorted(CONF.rglob("*.yaml"))
GROUPS = {"task", "optimizer", "schedule", "sweep", "search", "launcher", "trainer"}


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, monkeypatch, capsys)


def load(name: str) -> dict[str, Any]:
    found = OmegaConf.to_container(OmegaConf.load(CONF / name))
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


# what is shipped


def test_every_group_is_there() -> None:
    assert {path.name for path in CONF.iterdir() if path.is_dir()} == GROUPS


@pytest.mark.parametrize(("section", "rules"), [("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)])
def test_every_rule_has_a_file_with_its_defaults(section: str, rules: dict[str, Any]) -> None:
    assert {path.stem for path in (CONF / section).iterdir()} == set(rules)
    for name, rule in rules.items():
        defaults, problems = rule.check({}, section)
        assert problems == []
        written = load(f"{section}/{name}.yaml")
        assert written == defaults
        assert list(written) == list(defaults)


@pytest.mark.parametrize("option", ["digits", "mnist1d_mlp", "mnist1d_cnn", "mnist1d_gru", "resnet", "charlm"])
def test_tasks_have_their_defaults(option: str) -> None:
    written = load(f"task/{option}.yaml")
    short = {"task": written["_target_"], "optimizer": "sgd", "schedule": "constant"}
    (experiment,) = make_experiments({**short, "steps": 1, "batch_size": 1, "seed": 0})[0]
    assert experiment.config["task"] == written


def test_the_trainer_has_its_defaults() -> None:
    # a list in the file, a tuple in the class, which cannot be changed; `every` follows a smaller evaluate_every
    assert load("trainer/default.yaml") == {**vars(Trainer()), "show": [], "every": None}
    assert Trainer().show == ()


def test_every_option_composes(cli: CommandLine) -> None:
    for path in FILES:
        group_name, option = path.parent.name, path.stem
        if group_name in GROUPS and option != "custom":
            # a search needs something to search in
            beside = ["sweep=lr_grid"] if group_name == "search" else []
            assert cli.order(f"{group_name}={option}", *beside).experiments


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(CONF)) for path in FILES])
def test_every_key_is_explained(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert all(len(line) <= 120 for line in lines)
    # a block of keys may share the comment above it; defaults and Hydra's own node explain themselves as a whole
    for number, line in enumerate(lines):
        if re.match(r"(hydra|defaults):", line):
            assert lines[number - 1].startswith("#")
        if re.match(r"(hydra):", line):
            break
        if re.match(r"( {2})?\w[\w.]*: [^$]", line) and "override" not in line:
            above = lines[:number][::-1]
            comment = next(i for i, text in enumerate(above) if text.strip().startswith("#"))
            assert all(text.strip() for text in above[:comment]), f"{path.name}: {line}"


def test_the_main_job(cli: CommandLine) -> None:
    order = cli.order("sweep=lr_grid")
    assert order.name == "lr_grid"
    assert order.keys == ("optimizer.lr", "seed")
    assert len(order.experiments) == 64
    rates = [e.values["optimizer.lr"] for e in order.experiments[::8]]
    assert rates == pytest.approx(np.logspace(-4, -1, 8), rel=1e-11)
    assert (rates[0], rates[-1]) == (1e-4, 1e-1)
    assert [e.seed for e in order.experiments[:8]] == list(range(8))
    first = order.experiments[0]
    assert first.config["task"] == {
        "_target_": "coalesce.tasks.Digits",
        "hidden": 64,
        "layers": 2,
        "dropout": 0.1,
        "label_smoothing": 0.0,
    }
    assert (first.steps, first.batch_size, first.config["optimizer"]["name"]) == (2000, 64, "adamw")
    assert (first.config["schedule"]["name"], first.config["schedule"]["warmup"]) == ("cosine", 100)
    (cohort,) = group(order.experiments, rides)
    assert cohort.riding == ("optimizer.lr", "seed")


def test_an_experiment_has_the_same_id_however_it_is_asked_for(cli: CommandLine) -> None:
    (experiment,) = cli.order("schedule.warmup=100").experiments
    # the id recorded in test_configuration_sweep.py, there from plain dictionaries
    assert experiment.id == "db28fff83186"


def test_name_patterns_are_given_on_the_command_line(cli: CommandLine) -> None:
    """Without quotes: Hydra's grammar has none for the keys of a mapping."""
    sweep = "sweep.params={optimizer.lr_factors.*bias: [2, 0.5], seed: [0, 1]}"
    order = cli.order("optimizer.no_decay=[*.bias]", "optimizer.lr_factors={head.*: 0.1}", sweep)
    found = [e.config["optimizer"]["lr_factors"] for e in order.experiments]
    assert found == [{"*bias": f, "head.*": 0.1} for f in (2.0, 2.0, 0.5, 0.5)]
    assert order.experiments[0].config["optimizer"]["no_decay"] == ["*.bias"]
    (cohort,) = group(order.experiments, rides)
    assert cohort.riding == ("optimizer.lr_factors.*bias", "seed")


def test_sweeps_leave_room_for_other_groups(cli: CommandLine) -> None:
    order = cli.order("sweep=lr_grid", "task=mnist1d_mlp", "optimizer=sgd", "schedule=constant")
    assert order.experiments[0].config["optimizer"]["name"] == "sgd"
    assert order.experiments[0].config["task"]["_target_"] == "coalesce.tasks.Mnist1dMLP"


# a user's own files


CASE_29 = """
# @package _global_
defaults:
  - override /optimizer: sgd
optimizer:
  momentum: 0.9
  clip_norm: None
  nesterov: off
sweep:
  params:
    optimizer.lr: [1e-3, 3e-4, 1.0e-2, 1e4, 1]
"""


def test_case_29_a_file_with_every_spelling(cli: CommandLine) -> None:
    cli.write("my/sweep/numbers.yaml", CASE_29)
    order = cli.order("--config-dir", "my", "sweep=numbers")
    rates = [e.values["optimizer.lr"] for e in order.experiments]
    assert rates == [0.001, 0.0003, 0.01, 10000.0, 1.0]
    assert {type(rate) for rate in rates} == {float}
    assert {(e.config["optimizer"]["clip_norm"], e.config["optimizer"]["nesterov"]) for e in order.experiments} == {
        (None, False)
    }
    assert len(group(order.experiments, rides)) == 1
    assert order.name == "numbers"


def test_case_29_what_is_no_number_is_told_with_its_file(cli: CommandLine) -> None:
    cli.write("my/sweep/numbers.yaml", CASE_29.replace("1e4, 1]", "123E456, 'fast']"))
    said = cli.refused("--config-dir", "my", "sweep=numbers")
    assert "2 problems" in said
    assert "optimizer.lr=inf: must be finite" in said
    assert "optimizer.lr='fast': must be a number" in said
    assert said.count("(from my/sweep/numbers.yaml)") == 2


MISREAD = """
# @package _global_
steps: 0100
batch_size: "0100"
task:
  dropout: 1:30
  label_smoothing: 0.05
sweep:
  params:
    seed: [010, 8]
"""


def test_numbers_that_yaml_reads_otherwise_than_they_look(cli: CommandLine) -> None:
    cli.write("my/sweep/misread.yaml", MISREAD)
    said = cli.refused("--config-dir", "my", "sweep=misread")
    assert "steps='0100': YAML reads this as an octal number" in said
    assert "task.dropout='1:30': YAML reads this as a number to the base 60" in said
    assert "sweep.params.seed='010': YAML reads this as an octal number" in said
    # in quotes it is text, and ambiguous as a number all the same
    assert "batch_size='0100': must be an integer; a leading zero is octal" in said
    assert said.count("(from my/sweep/misread.yaml)") == said.count("\n  ") == 4


def test_each_problem_has_its_source(cli: CommandLine) -> None:
    cli.write("my/optimizer/mine.yaml", "name: sgd\nlr: fast\nmomentum: quick\n")
    cli.write("my/sweep/mine.yaml", "# @package _global_\noptimizer:\n  momentum: slow\nbatch_size: 0\n")
    said = cli.refused("--config-dir", "my", "optimizer=mine", "sweep=mine", "steps=0", "+optimizer.dampening=x")
    sources = dict(re.findall(r"^  ([\w.]+)=.*\(from (.*)\)$", said, re.MULTILINE))
    assert sources == {
        "optimizer.lr": "my/optimizer/mine.yaml",
        "optimizer.momentum": "my/sweep/mine.yaml",
        "batch_size": "my/sweep/mine.yaml",
        "steps": "command line",
        "optimizer.dampening": "command line",
    }


def test_files_that_yaml_cannot_read(cli: CommandLine) -> None:
    cli.write("my/sweep/broken.yaml", "# @package _global_\nsweep: [\n")
    assert "broken.yaml" in cli.refused("--config-dir", "my", "sweep=broken")


@pytest.mark.parametrize("text", ["sweep:\n  params: {seed: [1, 2]}\n", "defaults:\n  - override /task: digits\n"])
def test_a_file_that_forgets_where_its_keys_belong(cli: CommandLine, text: str) -> None:
    # also where the line is there, but not the first one
    for head in ("", "# my_conf/sweep/mine.yaml\n# @package _global_\n"):
        cli.write("my_conf/sweep/mine.yaml", head + text)
        assert "first line" in (said := cli.refused("--config-dir", "my_conf", "sweep=mine"))
        assert "'# @package _global_'" in said


def test_a_key_swept_twice_in_a_file(cli: CommandLine) -> None:
    text = "# @package _global_\nsweep:\n  params:\n    optimizer.lr: [1]\n    optimizer:\n      lr: [2]\n"
    cli.write("my/sweep/twice.yaml", text)
    assert "optimizer.lr=[2]: is swept twice" in cli.refused("--config-dir", "my", "sweep=twice")
    # the command line decides
    order = cli.order("--config-dir", "my", "sweep=twice", "sweep.params.optimizer.lr=[3]")
    assert [e.values["optimizer.lr"] for e in order.experiments] == [3.0]


def test_a_users_own_options_are_swept_with_ours(cli: CommandLine) -> None:
    cli.write("my/optimizer/fast.yaml", "name: sgd\nlr: 1\n")
    cli.write("my/task/toy.yaml", "_target_: tasks_for_tests.Toy\nhidden: 3\n")
    arguments = ["--config-dir", "my", "task=toy"]
    order = cli.order(*arguments, "sweep.params={optimizer: [fast, adamw], optimizer.lr: [1, 2]}")
    assert [tuple(e.values.values()) for e in order.experiments] == [
        ("fast", 1.0),
        ("fast", 2.0),
        ("adamw", 1.0),
        ("adamw", 2.0),
    ]
    said = cli.refused(*arguments, "sweep.params={optimizer: [fats]}")
    assert "did you mean 'fast'?" in said


def test_a_task_beside_the_command(cli: CommandLine) -> None:
    code = "from tasks_for_tests import _Complete\nclass Mine(_Complete):\n    def __init__(self, width: float): ...\n"
    cli.write("beside_task.py", code)
    (experiment,) = cli.order("task=custom", "task._target_=beside_task.Mine", "task.width=3").experiments
    assert experiment.config["task"] == {"_target_": "beside_task.Mine", "width": 3.0}


# spaced values


def test_logspace_takes_values_and_both_ends() -> None:
    assert logspace(1e-4, 1e-1, 4) == [0.0001, 0.001, 0.01, 0.1]
    assert logspace(1, 0.01, 3) == [1.0, 0.1, 0.01]
    assert logspace(3e-4, 3e-4, 1) == [3e-4]


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9), st.integers(2, 50))
def test_spaced_values_are_those_of_numpy(low: float, high: float, n: int) -> None:
    for ours, theirs in ((logspace, np.geomspace), (linspace, np.linspace)):
        values = ours(low, high, n)
        assert (values[0], values[-1], len(values)) == (low, high, n)
        # 12 digits are kept
        assert values == pytest.approx(theirs(low, high, n), rel=1e-11)
        assert all(float(f"{value:.12g}") == value for value in values[1:-1])


@pytest.mark.parametrize(
    "text",
    [
        "${logspace:0,1,3}",
        "${logspace:-1,1,3}",
        "${logspace:1,2,1}",
        "${logspace:1,2,0}",
        "${logspace:1,2,2.5}",
        "${linspace:a,2,3}",
        "${linspace:1,inf,3}",
        "${linspace:1,2,1000000000}",
        "${linspace:true,2,3}",
    ],
)
def test_wrong_spacings(text: str) -> None:
    register_resolvers()
    with pytest.raises(InterpolationResolutionError, match=r"linspace|logspace"):
        OmegaConf.create({"values": text})["values"]


def test_resolvers_are_registered_once() -> None:
    register_resolvers()
    register_resolvers()
    assert list(OmegaConf.create({"values": "${linspace:0,0.5,6}"})["values"]) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
