"""`load_model` gives a plain module that equals the lane.

Oracle: the weights that the runner handed out; the metrics of the row, computed anew by the plain module and the task.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import coalesce
import runner_helpers
from coalesce.errors import TaskError
from coalesce.runner.run import run
from coalesce.store.paths import RunPaths
from coalesce.store.read import load_weights
from coalesce.store.writer import RunWriter
from run_fakes import drive, grid, plan, result
from runner_helpers import Net, planned

ARGUMENTS = {"norm": True, "dropout": 0.3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four networks with BatchNorm and dropout."""
    folder = tmp_path_factory.mktemp("run")
    params = {"optimizer.lr": [0.1, 0.01], "seed": [0, 1]}
    run(planned(Net, params, arguments=ARGUMENTS, weights=True), [RunWriter(RunPaths(folder))])
    return folder


def measured(model: nn.Module) -> float:
    """The task's metric on the whole validation split, in the mode in which the model is."""
    task = Net(**ARGUMENTS)  # type: ignore[arg-type]
    data = task.data()
    with torch.no_grad():
        return float(task.metrics(model, data.batch("val", torch.arange(data.sizes["val"])))["loss"])


def test_a_model_equals_its_lane(trained: Path) -> None:
    frame = coalesce.load(trained)
    assert len(frame) == 4
    for name, loss in zip(frame["experiment"], frame["val/loss"], strict=True):
        model = coalesce.load_model(trained, name, which="last")
        assert type(model) is nn.Sequential
        assert measured(model) == pytest.approx(loss, rel=1e-5)
        kept = load_weights(trained, name, "last")
        assert kept.keys() == model.state_dict().keys()
        assert all(torch.equal(kept[key], tensor) for key, tensor in model.state_dict().items())


def test_it_is_in_evaluation_mode_on_the_cpu_and_can_be_trained_on(trained: Path) -> None:
    name = coalesce.load(trained)["experiment"][0]
    model = coalesce.load_model(str(trained), name, which="last")
    assert not any(module.training for module in model.modules())
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    before = torch.get_rng_state()
    coalesce.load_model(trained, name, which="last")
    assert torch.equal(torch.get_rng_state(), before)
    model.train()
    x = torch.ones(8, 4, requires_grad=True)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_best_experiment_by_monitor_and_mode(trained: Path) -> None:
    frame = coalesce.load(trained)  # monitor val/loss, mode min
    best = str(frame.sort_values("best/val/loss")["experiment"].iloc[0])
    found = coalesce.load_model(trained, "best", "last").state_dict()
    assert all(torch.equal(tensor, found[key]) for key, tensor in load_weights(trained, best, "last").items())


def made_up(folder: Path, bests: list[float], **weights: Any) -> list[str]:
    """A run of ``Net`` whose experiments have these best values and weights; nothing is trained."""
    experiments = grid(task___target_=["runner_helpers.Net"], task__hidden=[4], seed=list(range(len(bests))))
    results = [
        result(one, 0.5, best, best_step=None if math.isnan(best) else 10)
        for one, best in zip(experiments, bests, strict=True)
    ]
    writing = RunWriter(RunPaths(folder))
    filled = []
    for number, ended in enumerate(results):
        state = {key: torch.full_like(value, number) for key, value in Net(hidden=4).model().state_dict().items()}
        given = {key: {n: t + add for n, t in state.items()} for key, add in weights.items()}
        filled.append(type(ended)(**{**vars(ended), **given}))
    drive(writing, plan(experiments), filled)
    return [one.id for one in experiments]


def first(model: nn.Module) -> float:
    return next(iter(model.parameters())).flatten()[0].item()


def test_best_and_last_weights(tmp_path: Path) -> None:
    ids = made_up(tmp_path, [0.1, math.nan, 0.7, 0.3], weights=0.0, best_weights=0.5)
    assert first(coalesce.load_model(tmp_path, ids[3])) == 3.5
    assert first(coalesce.load_model(tmp_path, ids[3], "best")) == 3.5
    assert first(coalesce.load_model(tmp_path, ids[3], "last")) == 3.0
    # the best is the third, and NaN is none
    assert first(coalesce.load_model(tmp_path)) == 2.5
    assert first(coalesce.load_model(tmp_path, "best", which="last")) == 2.0
    assert {path.name for path in RunPaths(tmp_path).weights_folder.iterdir()} == {
        f"{name}{which}.safetensors" for name in ids for which in ("", "-best")
    }


def test_no_best_weights_says_which_there_are(tmp_path: Path) -> None:
    ids = made_up(tmp_path, [math.nan], weights=0.0)
    with pytest.raises(FileNotFoundError, match=r"no best weights .*val/accuracy was never finite; which='last'"):
        coalesce.load_model(tmp_path, ids[0])
    with pytest.raises(LookupError, match=r"of the 1 experiments .* none that ended well has a finite val/accuracy"):
        coalesce.load_model(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    ids = made_up(tmp_path, [0.5])
    for which in ("best", "last"):
        with pytest.raises(FileNotFoundError, match=r"only with trainer\.weights=true"):
            coalesce.load_model(tmp_path, ids[0], which)


def test_names_that_are_wrong(tmp_path: Path) -> None:
    ids = made_up(tmp_path, [0.5], weights=0.0, best_weights=0.0)
    with pytest.raises(ValueError, match="which='lst': must be one of 'best', 'last'"):
        coalesce.load_model(tmp_path, ids[0], "lst")
    with pytest.raises(LookupError, match="did you mean 'best'"):
        coalesce.load_model(tmp_path, "bset")
    with pytest.raises(LookupError, match="no such experiment"):
        coalesce.load_model(tmp_path, "../../secret")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        coalesce.load_model(tmp_path / "nowhere")


def test_a_task_that_is_not_there_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(tmp_path, [0.5], weights=0.0, best_weights=0.0)
    with monkeypatch.context() as patched:
        patched.delattr(runner_helpers, "Net")
        with pytest.raises(TaskError, match=r"runner_helpers\.Net of the run .* cannot be imported.*PYTHONPATH"):
            coalesce.load_model(tmp_path)


def test_a_task_that_builds_another_model_by_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(tmp_path, [0.5], weights=0.0, best_weights=0.0)
    monkeypatch.setattr(Net, "model", lambda self: nn.Linear(4, 1))
    with pytest.raises(TaskError, match=r"runner_helpers\.Net builds another model by now .*(?s:.*)0\.weight"):
        coalesce.load_model(tmp_path)


def test_reading_weights_imports_no_task(tmp_path: Path) -> None:
    made_up(tmp_path, [0.5], weights=0.0, best_weights=0.0)
    paths = RunPaths(tmp_path)
    data = json.loads(paths.plan.read_text())
    data["experiments"][0]["config"]["task"]["_target_"] = "nowhere.Task"
    paths.plan.write_text(json.dumps(data))
    assert load_weights(tmp_path).keys() == Net(hidden=4).model().state_dict().keys()
