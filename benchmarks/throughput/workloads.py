"""What is trained: the tasks that ship, how many experiments of each, and what all sides are given of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coalesce.data import Data
from coalesce.engine.batches import Batches
from coalesce.engine.order import Order
from coalesce.experiment import Experiment

#: Steps of each experiment, for its schedule: far more than are taken.
STEPS = 10**6


@dataclass(frozen=True)
class Workload:
    """Experiments that differ in their seed and in their learning rate.

    Args:
        name: which.
        task: class and arguments.
        lanes: how many experiments.
        batch_size: of each.
        every: steps after which a training loss is read and recorded, on every side.
        precision: "float32" or "bfloat16" (autocast), as an experiment has it.
    """

    name: str
    task: dict[str, Any] = field(hash=False)
    lanes: int
    batch_size: int
    every: int
    precision: str = "float32"

    def experiments(self) -> tuple[list[Experiment], tuple[str, ...]]:
        """The experiments and the swept keys. Rates from 1e-4 to 1e-2, equally spaced in their logarithm."""
        from coalesce.configuration import make_experiments

        rates = np.geomspace(1e-4, 1e-2, self.lanes).tolist() if self.lanes > 1 else [1e-3]
        base = {"task": dict(self.task), "optimizer": "adamw", "schedule": "cosine", "steps": STEPS}
        base |= {"precision": self.precision}
        swept = {"seed": list(range(self.lanes)), "optimizer.lr": rates}
        return make_experiments(base | {"batch_size": self.batch_size, "seed": 0}, swept, [["seed", "optimizer.lr"]])


#: ``digits`` is a smaller one, whose data are there at once.
WORKLOADS = {
    "mlp": Workload("mlp", {"_target_": "coalesce.tasks.Mnist1dMLP"}, lanes=64, batch_size=100, every=100),
    "cnn": Workload("cnn", {"_target_": "coalesce.tasks.ResNet"}, lanes=8, batch_size=64, every=10),
    "gpt": Workload("gpt", {"_target_": "coalesce.tasks.CharLM"}, lanes=8, batch_size=16, every=10),
    "digits": Workload(
        "digits", {"_target_": "coalesce.tasks.Digits", "dropout": 0.0}, lanes=64, batch_size=64, every=100
    ),
}

#: Arguments of the tasks that make them tiny. With 4 channels, last, oneDNN's convolutions of torch 2.11 and 2.13 write
#: beyond their memory.
_SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": 8},
    "cnn": {"width": 8},
    "gpt": {"layers": 1, "width": 16, "context": 16},
    "digits": {"hidden": 8},
}


def small(workload: Workload) -> Workload:
    """Two tiny experiments of the same kind: they tell nothing but whether everything runs."""
    return replace(workload, task={**workload.task, **_SMALL[workload.name]}, lanes=2, batch_size=8)


#: What a compiler's cache is primed with: another graph than any of these.
PRIMER = Workload("primer", {"_target_": "coalesce.tasks.Digits", "hidden": 24}, lanes=2, batch_size=20, every=1)


def build(experiment: Experiment) -> tuple[Any, nn.Module]:
    """An experiment's task and model, as an ordinary script makes them."""
    arguments = dict(experiment.config["task"])
    module, _, name = arguments.pop("_target_").rpartition(".")
    task = getattr(import_module(module), name)(**arguments)
    torch.manual_seed(experiment.seed)
    return task, task.model()


def batches(experiments: Sequence[Experiment], data: Data, steps: int) -> Tensor:
    """The samples that coalesce trains the first steps on: (steps, K, B) int64."""
    places = [(e.seed, 0, data.sizes["train"]) for e in experiments]
    size = experiments[0].batch_size
    return Order(Batches(size, "straddle")).ahead(places, steps, size)


def write_given(workload: Workload, steps: int, path: Path) -> None:
    """Write what a side without torch needs: data, rates, hyperparameters, initial weights, the first batches.

    Args:
        steps: batches for so many.
        path: a file that `numpy.load` reads. Weights and buffers of all lanes are "initial/<name>", (K, ...).
    """
    experiments, _ = workload.experiments()
    task, _ = build(experiments[0])
    data = task.data()
    arrays: dict[str, Any] = {f"train/{i}": leaf.numpy() for i, leaf in enumerate(data.leaves("train"))}
    arrays["batches"] = batches(experiments, data, steps).numpy()
    arrays["lr"] = np.array([e.config["optimizer"]["lr"] for e in experiments], np.float32)
    states = [build(e)[1].state_dict() for e in experiments]
    arrays |= {f"initial/{name}": np.stack([s[name].numpy() for s in states]) for name in states[0]}
    np.savez(path, **arrays)


def hyperparameters(experiment: Experiment) -> dict[str, Any]:
    """The arguments of `torch.optim.AdamW`."""
    return {n: experiment.config["optimizer"][n] for n in ("lr", "betas", "eps", "weight_decay")}


def parts(name: str, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A batch as what the model takes and what it is to tell, for a peer that does not call the task."""
    if name == "gpt":
        (windows,) = leaves
        return windows[..., :-1].long(), windows[..., 1:].long()
    x, y = leaves
    return x, y


def loss(logits: Tensor, y: Tensor) -> Tensor:
    """The loss of all three tasks as they are configured here."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())
