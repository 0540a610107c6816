"""Small tasks, a listener that writes everything down, and a short way from parameters to results.

Everything runs uncompiled unless a test says otherwise: the graphs are the same, and nothing takes ten seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.configuration import check_trainer, make_experiments, rides
from coalesce.experiment import Experiment
from coalesce.runner import planning
from coalesce.runner.listener import Listener, Progress, Result
from coalesce.runner.plan import Plan
from coalesce.runner.planning import make_plan
from coalesce.runner.run import run


class Weight(nn.Module):
    """One scalar weight, 1.0 at the start, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class ToyW(coalesce.Task):
    """toy-w of CASES.md: loss w², so that SGD multiplies w by 1 - 2 lr at each step.

    ``score`` is highest at w = 0.6 and NaN below ``blind``.
    """

    def __init__(self, splits: str = "train val", blind: float = -1.0):
        self.splits, self.blind = splits, blind

    def data(self) -> coalesce.Data:
        splits: dict[str, Any] = {split: (torch.ones(1, dtype=torch.float64),) for split in self.splits.split()}
        return coalesce.Data(**splits)

    def model(self) -> nn.Module:
        return Weight()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        (x,) = batch
        return model(x).square().mean(), {"w": model.w}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        w: Any = model.w
        return {"w": w, "score": torch.where(w < self.blind, torch.nan, -(w - 0.6).square())}


class Net(coalesce.Task):
    """Linear(4, hidden)-(BatchNorm)-tanh-Dropout-Linear(hidden, 1) on 64 made-up samples, in either precision."""

    def __init__(
        self,
        hidden: int = 16,
        dropout: float = 0.0,
        scale: float = 1.0,
        norm: bool = False,
        double: bool = False,
        splits: str = "train val",
    ):
        self.hidden, self.dropout, self.scale = hidden, dropout, scale
        self.norm, self.double, self.splits = norm, double, splits
        self.dtype = torch.float64 if double else torch.float32

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(0)

        def split(count: int) -> tuple[Tensor, Tensor]:
            x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
            y = torch.sin(x.sum(1, keepdim=True))
            return x.to(self.dtype), y.to(self.dtype)

        sizes = {"train": 64, "val": 20, "test": 12}
        splits: dict[str, Any] = {name: split(sizes[name]) for name in self.splits.split()}
        return coalesce.Data(**splits)

    def model(self) -> nn.Module:
        norm = [nn.BatchNorm1d(self.hidden)] if self.norm else []
        # no bias in front of the norm: its gradient is zero but for rounding, which Adam would make steps of
        ends = nn.Linear(4, self.hidden, bias=not self.norm), nn.Linear(self.hidden, 1)
        return nn.Sequential(ends[0], *norm, nn.Tanh(), nn.Dropout(self.dropout), ends[1]).to(self.dtype)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return self.scale * F.mse_loss(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        out = model(x)
        return {"loss": F.mse_loss(out, y), "error": (out - y).abs().mean()}


class Picky(Net):
    """Its model cannot be built for a ``scale`` from 2 to a thousand."""

    def model(self) -> nn.Module:
        if 2 < self.scale < 1000:
            raise ValueError(f"no model for {self.scale}")
        return super().model()


class ToyMlp(coalesce.Task):
    """toy-mlp of CASES.md: Linear(10, hidden)-ReLU-Linear(hidden, 3) on 17 samples."""

    def __init__(self, hidden: int = 33):
        self.hidden = hidden

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(17, 10, generator=generator)
        y = torch.randint(3, (17,), generator=generator)
        return coalesce.Data(train=(x, y), val=(x, y), classes=3)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 3))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


@dataclass
class Recorder(Listener):
    """Writes down all that it is told."""

    calls: list[str] = field(default_factory=list)
    rows: list[tuple[str, int, dict[str, float]]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    errors: list[BaseException | None] = field(default_factory=list)
    compiled: list[tuple[int, str]] = field(default_factory=list)

    def started(self, plan: Plan) -> None:
        self.calls.append("started")

    def compiling(self, cohort: int, what: str) -> None:
        self.calls.append("compiling")
        self.compiled.append((cohort, what))

    def checking(self, cohort: int) -> None:
        self.calls.append("checking")

    def metrics(self, experiment: Experiment, step: int, values: Mapping[str, Any]) -> None:
        self.calls.append("metrics")
        self.rows.append((experiment.id, step, dict(values)))

    def ended(self, result: Result) -> None:
        self.calls.append("ended")
        self.results.append(result)

    def advanced(self, progress: Progress) -> None:
        self.calls.append("advanced")
        self.progress.append(progress)

    def planned(self, plan: Plan) -> None:
        self.calls.append("planned")

    def narrowed(self, cohort: int, width: int, message: str) -> None:
        self.calls.append("narrowed")

    def closed(self, error: BaseException | None) -> None:
        self.calls.append("closed")
        self.errors.append(error)

    def steps(self, experiment: Experiment, metric: str) -> list[int]:
        """The steps at which a metric of an experiment was told."""
        return [step for name, step, values in self.rows if name == experiment.id and metric in values]

    def curve(self, experiment: Experiment) -> list[tuple[int, dict[str, float]]]:
        """Everything that was told of an experiment."""
        return [(step, values) for name, step, values in self.rows if name == experiment.id]


def planned(
    task: type[coalesce.Task],
    params: Mapping[str, Any] | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    optimizer: Any = "sgd",
    schedule: Any = "constant",
    steps: int = 20,
    batch_size: int = 8,
    seed: int = 0,
    order: Sequence[int] | None = None,
    zip: Sequence[Sequence[str]] = (),
    **trainer: Any,
) -> Plan:
    """A plan, uncompiled unless the trainer's settings say otherwise.

    Args:
        arguments: of the task.
        order: permutes the experiments.
        zip: groups of keys whose values run together.
    """
    base = {
        "task": {"_target_": f"{task.__module__}.{task.__qualname__}", **(arguments or {})},
        "optimizer": optimizer,
        "schedule": schedule,
        "steps": steps,
        "batch_size": batch_size,
        "seed": seed,
    }
    settings = {"compile": False, "monitor": "val/loss", "mode": "min", "every": 5, "evaluate_every": 10, **trainer}
    checked = check_trainer(settings)
    experiments, keys = make_experiments(base, params, zip, trainer=checked)
    if order is not None:
        experiments = [experiments[index] for index in order]
    return make_plan("made_up", keys, experiments, rides, checked)


def ran(task: type[coalesce.Task], params: Mapping[str, Any] | None = None, **options: Any) -> Ran:
    """Plan and run; see `planned`."""
    # the run traces what the plan would
    with patch.object(planning, "_check_traces"):
        plan = planned(task, params, **options)
    recorder = Recorder()
    run(plan, [recorder])
    # as they were told, with the weights
    return Ran(plan, recorder.results, recorder)


@dataclass(frozen=True)
class Ran:
    """A run that is over."""

    plan: Plan
    results: list[Result]
    told: Recorder

    def of(self, experiment: Experiment) -> Result:
        """An experiment's result, with the weights that listeners are told."""
        (result,) = [result for result in self.told.results if result.experiment.id == experiment.id]
        return result

    def in_order(self) -> list[Result]:
        """The results in the sweep's order."""
        return [self.of(experiment) for experiment in self.plan.experiments]

    def curves(self) -> dict[str, Any]:
        """Everything measured, by experiment: curve, status, steps, last and best values."""
        return {
            r.experiment.id: (
                self.told.curve(r.experiment),
                r.status,
                r.steps,
                dict(r.metrics),
                dict(r.best),
                r.best_step,
            )
            for r in self.results
        }
