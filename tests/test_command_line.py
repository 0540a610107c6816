"""``python -m coalesce``: Hydra's features, refusals, and multirun turned into the right command.

Oracle: what DESIGN.md promises of the command line, and Hydra's own flags. Commands run in this process up to the
plan, in an empty folder that must stay empty; two run as real processes.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

import coalesce
from cli_for_tests import CommandLine
from coalesce.optim import OPTIMIZERS

ROOT = Path(coalesce.__file__).parent.parent


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, monkeypatch, capsys)


# Hydra's features


def test_help_shows_groups_and_examples(cli: CommandLine) -> None:
    shown = cli("--help")
    assert shown.code == 0
    assert f"optimizer: {', '.join(sorted(OPTIMIZERS))}" in " ".join(shown.out.split())
    assert "sweep: charlm, lr_grid, mnist1d_paper" in shown.out
    assert "python -m coalesce sweep=lr_grid" in shown.out
    # Hydra substitutes $NAMES in the template; none may be left, nor an interpolation that it does not know
    assert "$APP" not in shown.out
    assert '"$(coalesce -sc install=bash)"' in shown.out


def test_the_examples_of_help_work(cli: CommandLine) -> None:
    cli.write(
        "my_task.py",
        "from tasks_for_tests import _Complete\n\nclass MyTask(_Complete):\n    def __init__(self, width: int): ...\n",
    )
    cli.write("my_conf/sweep/my_sweep.yaml", "# @package _global_\nsweep:\n  params:\n    seed: [1, 2, 3]\n")
    text = cli("--help").out.replace("\\\n", "")
    examples = [shlex.split(line)[3:] for line in text.splitlines() if line.startswith("  python -m coalesce")]
    # what goes on needs a run to go on with: tests/test_resume.py
    begun = [arguments for arguments in examples if not any(a.startswith("resume=") for a in arguments)]
    assert len(begun) == len(examples) - 3
    counts = [len(cli.order(*arguments).experiments) for arguments in begun]
    assert counts == [1, 64, 64, 16, 2, 4, 64, 1, 3, 64, 64, 1]
    del sys.modules["my_task"]


def test_cfg_shows_the_configuration(cli: CommandLine) -> None:
    shown = cli("--cfg", "job", "optimizer.lr=3e-4", "sweep=lr_grid")
    assert shown.code == 0
    assert "lr: 0.0003" in shown.out
    assert "${logspace:1e-4,1e-1,8}" in shown.out
    assert "- 0.0001" in cli("--cfg", "job", "--resolve", "sweep=lr_grid").out


@pytest.mark.parametrize("arguments", [["--info"], ["--info", "defaults"], ["--hydra-help"], ["--version"]])
def test_other_flags_of_hydra(cli: CommandLine, arguments: list[str]) -> None:
    shown = cli(*arguments)
    assert shown.code == 0
    assert len(shown.out) > 10


def test_tab_completion(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "coalesce optimizer=ad")
    shown = cli("-sc", "query=bash", program="coalesce")
    assert shown.out.split() == [f"optimizer={name}" for name in sorted(OPTIMIZERS) if name.startswith("ad")]
    assert "complete" in cli("-sc", "install=bash", program="coalesce").out


def test_overrides_and_groups(cli: CommandLine) -> None:
    order = cli.order("optimizer=sgd", "optimizer.lr=1", "steps=1e3", "++task.layers=3", "++seed=7", "trainer.width=4")
    (experiment,) = order.experiments
    assert experiment.config["optimizer"]["name"] == "sgd"
    assert experiment.config["optimizer"]["lr"] == 1.0
    assert (experiment.steps, experiment.seed, experiment.config["task"]["layers"]) == (1000, 7, 3)
    assert order.trainer.width == 4
    assert (order.name, order.runs, order.plan_only) == ("single", Path("runs"), False)


def test_plan_and_runs(cli: CommandLine) -> None:
    order = cli.order("plan=true", "runs=/proc/nowhere", "sweep.name=mine")
    # only the plan is printed: the folder need not be there to write to
    assert (order.plan_only, order.runs, order.name) == (True, Path("/proc/nowhere"), "mine")


def test_the_resolved_configuration_reads_back(cli: CommandLine) -> None:
    from omegaconf import OmegaConf

    order = cli.order("sweep=lr_grid", "seed=3")
    config = OmegaConf.create(order.yaml)
    assert config.seed == 3
    assert len(config.sweep.params["optimizer.lr"]) == 8


def test_flags_may_stand_anywhere(cli: CommandLine) -> None:
    cli.write("my_conf/sweep/mine.yaml", "# @package _global_\nsweep: {params: {seed: [1, 2]}}\n")
    order = cli.order("steps=5", "--config-dir", "my_conf", "sweep=mine")
    assert [(e.steps, e.seed) for e in order.experiments] == [(5, 1), (5, 2)]
    assert "seed:" in cli("sweep=lr_grid", "--cfg", "job", "steps=3").out


# what users type to sweep


@pytest.mark.parametrize(
    "arguments",
    [
        ["sweep.params={optimizer.lr: [0.1, 0.2]}"],
        ["sweep.params={optimizer: {lr: [0.1, 0.2]}}"],
        ["sweep.params.optimizer.lr=[0.1, 0.2]"],
        ["+sweep.params.optimizer.lr=[0.1,0.2]"],
        ["++sweep.params.optimizer.lr=[0.1,0.2]"],
        ["sweep.params.optimizer.lr=0.1,0.2"],
        ["sweep.params.optimizer.lr=choice(0.1,0.2)"],
        ['sweep.params.optimizer.lr="choice(0.1, 0.2)"'],
        ["sweep.params={optimizer.lr: choice(0.1, 0.2)}"],
        ["sweep.params.optimizer.lr=${linspace:0.1,0.2,2}"],
        ["sweep.params.optimizer.lr=range(0.1,0.25,0.1)"],
        ['+sweep.params.optimizer.lr="range(0.1, 0.25, 0.1)"'],
        ["sweep.params={optimizer.lr: [5]}", "sweep.params.optimizer.lr=[0.1,0.2]"],
    ],
)
def test_ways_to_sweep(cli: CommandLine, arguments: list[str]) -> None:
    order = cli.order(*arguments)
    assert order.keys == ("optimizer.lr",)
    assert [e.values["optimizer.lr"] for e in order.experiments] == [0.1, 0.2]


def test_the_command_line_wins_over_the_file(cli: CommandLine) -> None:
    # lr_grid has a dotted key and sgd_pairs nested ones: each can be replaced by either spelling, in its place
    for spelling in ("sweep.params.optimizer.lr=[7]", "sweep.params={optimizer: {lr: [7]}}"):
        order = cli.order("sweep=lr_grid", spelling)
        assert order.keys == ("optimizer.lr", "seed")
        assert [(e.values["optimizer.lr"], e.seed) for e in order.experiments] == [(7.0, s) for s in range(8)]
        pairs = cli.order("sweep=sgd_pairs", spelling, "sweep.params.optimizer.momentum=[0.5]")
        assert [e.values["optimizer.lr"] for e in pairs.experiments] == [7.0] * 4
    assert cli.order("sweep=lr_grid", "sweep.params.seed=null").keys == ("optimizer.lr",)


def test_a_list_of_options_sweeps_a_group(cli: CommandLine) -> None:
    order = cli.order("sweep.params={optimizer: [sgd, adam], task: [digits, mnist1d_cnn]}", "optimizer.lr=0.5")
    assert [tuple(e.values.values()) for e in order.experiments] == [
        ("sgd", "digits"),
        ("sgd", "mnist1d_cnn"),
        ("adam", "digits"),
        ("adam", "mnist1d_cnn"),
    ]
    # every option is composed as the group's file has it, and with the rest of the command
    assert {e.config["optimizer"]["lr"] for e in order.experiments} == {0.5}
    assert order.experiments[1].config["task"] == {
        "_target_": "coalesce.tasks.Mnist1dCNN",
        "channels": 25,
        "label_smoothing": 0.0,
    }
    names = cli.order('sweep.params={optimizer: "glob(adam*)"}').experiments
    assert [e.values["optimizer"] for e in names] == ["adam", "adamax", "adamw"]


def test_zip(cli: CommandLine) -> None:
    params = "sweep.params={optimizer.lr: [0.1, 0.2], schedule.warmup: [0, 5], seed: range(2)}"
    for zips in ("sweep.zip=[[optimizer.lr,schedule.warmup]]", "sweep.zip=[optimizer.lr,schedule.warmup]"):
        order = cli.order(params, zips)
        expected = [(0.1, 0, 0), (0.1, 0, 1), (0.2, 5, 0), (0.2, 5, 1)]
        assert [tuple(e.values.values()) for e in order.experiments] == expected


def test_duplicates_warn_once(cli: CommandLine) -> None:
    outcome = cli("sweep.params.seed=[1,1,2,2]")
    assert outcome.order is not None
    assert [e.seed for e in outcome.order.experiments] == [1, 2]
    assert outcome.err.count("warning") == 1


def test_keys_of_one_option_in_a_zip_group_with_it(cli: CommandLine) -> None:
    """A list in Hydra's syntax, nulls in a file, and a group taken out of the sweep again."""
    cli.write(
        "my_conf/sweep/models.yaml",
        """
# @package _global_
sweep:
  params:
    task: "choice(mnist1d_mlp, mnist1d_cnn, digits)"
    steps: [10, 20, 30]
    task.channels: [null, 7, null]
    task.hidden: [5, null, 6]
    seed: "range(0, 2)"
  zip: [[task, steps, task.channels, task.hidden]]
""",
    )
    order = cli.order("--config-dir", "my_conf", "sweep=models")
    rows = [("mnist1d_mlp", 10, None, 5), ("mnist1d_cnn", 20, 7, None), ("digits", 30, None, 6)]
    assert [tuple(e.values.values()) for e in order.experiments] == [(*row, seed) for row in rows for seed in (0, 1)]
    assert [e.config["task"].get("channels") for e in order.experiments[1:4]] == [None, 7, 7]
    alone = cli.order("task=mnist1d_cnn", "task.channels=7", "steps=20", "seed=1")
    assert alone.experiments[0].id == order.experiments[3].id
    outcome = cli("--config-dir", "my_conf", "sweep=models", "steps=3", "task=digits", "sweep.params.seed=[4]")
    assert outcome.order is not None
    assert [e.steps for e in outcome.order.experiments] == [10, 20, 30]
    assert [line.partition(",")[0] for line in outcome.err.splitlines()] == [
        *("warning: steps=3 changes nothing", "warning: task=digits changes nothing")
    ]
    outcome = cli("--config-dir", "my_conf", "sweep=models", "steps=3", "sweep.params.steps=null")
    assert (outcome.err, [e.steps for e in outcome.order.experiments] if outcome.order else []) == ("", [3] * 6)


# multirun


MULTIRUN = [
    (["-m", "optimizer.lr=0.1,0.01"], ["sweep.params={optimizer.lr: [0.1, 0.01]}"], 2),
    (["optimizer.lr=0.1,0.01"], ["sweep.params={optimizer.lr: [0.1, 0.01]}"], 2),
    (["--multirun", "seed=range(0,3)"], ['sweep.params={seed: "range(0, 3)"}'], 3),
    (["--multi", "seed=range(0,10,5)"], ['sweep.params={seed: "range(0, 10, 5)"}'], 2),
    (["-m", "optimizer=sgd,adamw"], ["sweep.params={optimizer: [sgd, adamw]}"], 2),
    (["-m", "optimizer=glob(*)"], ['sweep.params={optimizer: "glob([*])"}'], len(OPTIMIZERS)),
    (
        ["steps=5", "-m", "optimizer.betas=[0.9,0.99],[0.5,0.9]", "+task.layers=choice(1,2)"],
        ["steps=5", "sweep.params={optimizer.betas: [[0.9,0.99], [0.5,0.9]], task.layers: [1, 2]}"],
        4,
    ),
    (["-m", "sweep=lr_grid", "seed=1,2"], ["sweep=lr_grid", "sweep.params={seed: [1, 2]}"], 16),
    (["-m", "sweep=lr_grid"], ["sweep=lr_grid"], 64),
    (["hydra.mode=MULTIRUN", "seed=3"], ["seed=3"], 1),
    (["optimizer.lr=tag(log,interval(1e-3,1))"], ["sweep.params={optimizer.lr: ${logspace:0.001,1.0,8}}"], 8),
    (["-m", "task.dropout=interval(0,0.7)"], ["sweep.params={task.dropout: ${linspace:0.0,0.7,8}}"], 8),
    (
        ["search=random", "search.samples=5", "optimizer.lr=tag(log,interval(1e-3,1))"],
        ["search=random", "search.samples=5", 'sweep.params={optimizer.lr: "tag(log, interval(0.001, 1.0))"}'],
        5,
    ),
    (["-m", "optimizer.lr=0.1,0.2", "sweep.params.seed=1,2"], None, 4),
]


@pytest.mark.parametrize(("given", "right", "count"), MULTIRUN, ids=[" ".join(row[0]) for row in MULTIRUN])
def test_multirun_is_refused_with_the_right_command(
    cli: CommandLine, given: list[str], right: list[str] | None, count: int
) -> None:
    said = cli.refused(*given)
    (command,) = re.findall(r"^  (python -m coalesce.*)$", said, re.MULTILINE)
    arguments = shlex.split(command)[3:]
    assert right is None or arguments == right
    assert len(cli.order(*arguments).experiments) == count


def test_what_no_sweep_can_vary_becomes_commands(cli: CommandLine) -> None:
    said = cli.refused("-m", "sweep=lr_grid,single", "trainer.width=1,2", "seed=1,2")
    commands = re.findall(r"^  python -m coalesce (.*)$", said, re.MULTILINE)
    seeds = "'sweep.params={seed: [1, 2]}'"
    assert commands == [
        f"sweep={sweep} trainer.width={width} {seeds}" for sweep in ("lr_grid", "single") for width in (1, 2)
    ]
    assert "sweep, trainer.width: no part of an experiment" in said
    assert "and so on" in cli.refused("-m", "trainer.width=range(1,100)")


def test_the_command_is_called_as_the_user_called_it(cli: CommandLine) -> None:
    said = cli("-m", "seed=1,2", program="/usr/local/bin/coalesce").err
    assert "\n  coalesce 'sweep.params={seed: [1, 2]}'\n" in said


# refusals


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["optimizer=adamz"], ["optimizer/adamz", "adamw", "Did you mean optimizer=adam?"]),
        (["sweep=lr_gird"], ["sweep/lr_gird", "Did you mean sweep=lr_grid?"]),
        (["stpes=3"], ["stpes", "Did you mean 'steps'"]),
        (["optimizr=sgd"], ["optimizr", "Did you mean 'optimizer'"]),
        (["optimizer.lr=[0.1"], ["[0.1"]),
        (["--config-dir", "nowhere"], ["nowhere"]),
        (["--cfg", "job", "--info"], ["Only one of"]),
        (["--help", "optimizer=adamz"], ["optimizer/adamz"]),
        (["sweep=null"], ["Config group override must be a string"]),
        (["+task.layers=3"], ["An item is already at 'task.layers'"]),
        (["~sweep.params.seed"], ["sweep.params.seed"]),
        (["--bogus"], ["unrecognized arguments: --bogus"]),
        (["--experimental-rerun", "config.pickle"], ["no code from data"]),
        (["--cfg", "everything"], ["invalid choice"]),
    ],
)
def test_what_hydra_refuses(cli: CommandLine, arguments: list[str], says: list[str]) -> None:
    said = cli.refused(*arguments)
    assert all(part in said for part in says), said
    assert len(said.splitlines()) < 30


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["optimizer.lrr=1"], ["optimizer.lrr=1: unknown key", "did you mean 'lr'?", "(from command line)"]),
        (["task.hiden=1"], ["task.hiden=1: unknown argument", "did you mean 'hidden'?"]),
        (["+foo=1"], ["foo=1: unknown key"]),
        (["optimizer.lr=fast"], ["optimizer.lr='fast': must be a number"]),
        (["optimizer.lr=123E456"], ["optimizer.lr=inf: must be finite"]),
        (["optimizer.lr=[0.1,0.2]"], ["'sweep.params={optimizer.lr: [0.1, 0.2]}'"]),
        (["optimizer.lr=${nothing}"], ["optimizer.lr='${nothing}': cannot be resolved", "nothing"]),
        (["steps=010"], ["steps='010'", "octal"]),
        (["sweep.params.optimizer.lr=${logspace:0,1,3}"], ["cannot be resolved", "values, not exponents"]),
        (["sweep.params.optimizer.lr=interval(1e-4,1)"], ["continuous", "search=random", "${logspace:0.0001,1,8}"]),
        (['sweep.params.optimizer.lr="choice(0.1"'], ["cannot be read", '"range(0, 8)"']),
        (['sweep.params.optimizer.lr="fast"'], ["must be a list of the values"]),
        (['sweep.params.seed="range(0,8,0)"'], ["has no end"]),
        (['sweep.params.seed="glob(*)"'], ["the key is no group"]),
        (["sweep.params.seed=[]"], ["has no values to sweep"]),
        (["sweep.params=3"], ["sweep.params=3: must be a mapping"]),
        (['sweep.params.seed="range(0,1000000000)"'], ["1000000000 experiments", "sweep.limit"]),
        (['sweep.params.optimizer.lr="range(0,1e9,0.5)"'], ["2000000000 experiments"]),
        (["sweep.params.seed=[1,2,3]", "sweep.limit=2"], ["3 experiments"]),
        (["sweep.limit=0"], ["sweep.limit=0: must be at least 1"]),
        (["sweep.nmae=x"], ["sweep.nmae='x': unknown key", "did you mean 'name'?"]),
        (["sweep.name=' '"], ["sweep.name=' ': must not be empty"]),
        (["search.name=gird"], ["search.name='gird': unknown search", "did you mean 'grid'?"]),
        (["launcher.jobs=3"], ["launcher.jobs=3: unknown key for launcher=process"]),
        (["trainer.device=gpu", "plan=perhaps"], ["trainer.device='gpu'", "plan='perhaps'"]),
        (["runs=''"], ["runs='': must name a folder"]),
        (["runs=/proc/nowhere"], ["runs='/proc/nowhere': the folder '/proc' cannot be written"]),
        (["task=custom"], ["task._target_='???': is missing"]),
        (["sweep.params={optimizer: [sgd, adan]}"], ["optimizer='adan': unknown option", "did you mean 'adam'?"]),
        (["sweep.params={optimizer: [sgd, adam]}", "optimizer.eps=1"], ["unknown key for optimizer 'sgd'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_we_refuse(cli: CommandLine, arguments: list[str], says: list[str]) -> None:
    said = cli.refused(*arguments)
    assert all(part in said for part in says), said
    assert len(re.findall(r"^  \S", said, re.MULTILINE)) == len([a for a in arguments if "plan" in a]) + 1


def test_a_runs_folder_that_is_a_file(cli: CommandLine) -> None:
    cli.write("taken", "text")
    assert "is a file" in cli.refused("runs=taken")
    assert "is a file" in cli.refused("runs=taken/below")


def test_everything_is_reported_at_once(cli: CommandLine) -> None:
    said = cli.refused("optimizer.lr=-1", "trainer.every=0", "steps=0", "runs=/proc/x", "+foo=1", "sweep.zip=[a]")
    assert "6 problems" in said
