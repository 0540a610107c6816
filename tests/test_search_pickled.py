"""Searches that are sent to another process, as submitit sends them, and two of them there on one study.

Oracle: the same search in this process; the laws of a shared study (`test_search_shared_study`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import coalesce
from cli_for_tests import CommandLine
from coalesce.configuration import check_search, make_search
from coalesce.errors import ConfigError
from coalesce.runner.plan import Trainer
from coalesce.search.base import Search
from coalesce.search.metric import Metric
from coalesce.search.optuna import Optuna, sampler_of
from coalesce.search.space import Interval, Space
from search_helpers import METRIC, Driver, make
from test_configuration_sweep import base
from test_search_parts import EXPERIMENTS, score, searches
from test_search_shared_study import FEW, RATES, best_of, check
from test_search_shared_study import value as valued

HERE = Path(__file__).parent
#: Drives the searches of a pickle, when so many processes have come so far, and writes what they did.
DRIVE = """
import json, pathlib, pickle, sys, time
from search_helpers import Driver
with open(sys.argv[1], "rb") as file:
    searches, score = pickle.load(file)
pathlib.Path(sys.argv[1] + ".ready").touch()
while len(list(pathlib.Path(sys.argv[1]).parent.glob("*.ready"))) < int(sys.argv[2]):
    time.sleep(0.01)
stories = {name: Driver(search, score).run().asked for name, search in searches.items()}
print(json.dumps([stories, sorted(set(sys.modules) & {"hydra", "omegaconf"})]))
"""


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, monkeypatch, capsys)


OPTIONS = "sweep.params={optimizer: [sgd, adamw], optimizer.lr: 'interval(0.01, 0.1)'}"


def start(searches: dict[str, Search], score: Any, file: Path, count: int = 1) -> subprocess.Popen[str]:
    file.write_bytes(cloudpickle.dumps((searches, score)))
    path = os.pathsep.join([str(Path(coalesce.__file__).parent.parent), str(HERE)])
    command = [sys.executable, "-W", "error::UserWarning", "-c", DRIVE, str(file), str(count)]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, cwd=file.parent
    )


def stories(process: subprocess.Popen[str]) -> tuple[dict[str, list[list[str]]], list[str]]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    told, modules = json.loads(out)
    return told, modules


def test_each_search_does_the_same_in_another_process(tmp_path: Path, cli: CommandLine) -> None:
    space = Space({"optimizer.lr": Interval(1e-4, 1.0, log=True), "task.hidden": [8, 16], "seed": [1, 2]})
    metric, kept = Metric(METRIC, "max"), sampler_of(optuna.samplers.TPESampler, {"n_startup_trials": 2})
    order = cli.order("search=optuna", "search.samples=9", "steps=30", "search.patience=5", OPTIONS)
    made, _ = make_search(
        base(steps=30),
        {"optimizer": ["adamw", "sgd"], "optimizer.lr": Interval(0.01, 0.1)},
        settings=check_search({"name": "optuna", "samples": 6}, Trainer()),
        trainer=Trainer(),
    )
    ids = [[e.id for e in EXPERIMENTS[job::2]] for job in range(2)]
    whole: dict[str, Search] = {
        **searches(),
        "optuna": Optuna(space, make, EXPERIMENTS[:2], metric, 7, 0),
        "tpe": Optuna(space, make, [], metric, 7, 0, kept),
        "command line": order.search,
        "library": made,
    }
    all_of = {**whole, **{f"part of {name}": search.part(1, ids) for name, search in whole.items()}}
    told, modules = stories(start(all_of, score, tmp_path / "pickle"))
    assert told == {name: Driver(search, score).run().asked for name, search in all_of.items()}
    assert modules == []


def test_every_option_of_a_group_that_a_search_may_choose(cli: CommandLine) -> None:
    # options of one graph are not each among the probes of the others
    for name, rate in (("slow", 0.1), ("middle", 0.2), ("fast", 0.3)):
        cli.write(f"my/optimizer/{name}.yaml", f"name: sgd\nlr: {rate}\n")
    params = "sweep.params={optimizer: [slow, middle, fast], schedule: [constant, cosine], batch_size: [32, 64]}"
    order = cli.order("--config-dir", "my", "search=optuna", "search.samples=60", "search.sampler=random", params)
    search = cloudpickle.loads(cloudpickle.dumps(order.search))
    asked = [trial.experiment for trial in search.ask(60)]
    assert len(asked) == 12
    assert {e.config["optimizer"]["lr"] for e in asked} == {0.1, 0.2, 0.3}
    with pytest.raises(KeyError, match="not composed before the search was sent"):
        search._make({"optimizer": "adamw", "schedule": "constant", "batch_size": 32})
    with pytest.raises(ConfigError):
        search._make({"optimizer": "fast", "schedule": "constant", "batch_size": 0})


def test_two_processes_on_one_study(tmp_path: Path) -> None:
    spaces = {"rates": RATES, "few": FEW}
    processes = []
    for job in range(2):
        mine: dict[str, Search] = {}
        for name, space in spaces.items():
            mine[name] = Optuna(space, make, [], Metric(METRIC, "max"), 40, 0, study="run").part(job, [(), ()])
            mine[name].keep(tmp_path / f"{name}.journal", "run")
        processes.append(start(mine, valued, tmp_path / f"pickle-{job}", 2))
    told = [stories(process)[0] for process in processes]
    for name, space in spaces.items():
        storage = JournalStorage(JournalFileBackend(str(tmp_path / f"{name}.journal")))
        trials = optuna.load_study(study_name="run", storage=storage).trials
        trained = [[one for asked in stories[name] for one in asked] for stories in told]
        check(trials, trained, 40, 2, best_of(space, trials))
