"""A cohort's representative: its task and model, what rides in its graph, and what its data and code look like."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from coalesce.engine.objects import Path, differing, lookup, spell
from coalesce.engine.rehearsal import Rehearsal, own_code, rehearse
from coalesce.errors import TaskError
from coalesce.experiment import Cohort, Experiment
from coalesce.optim import OPTIMIZERS, SCHEDULES, Optimizer, Schedule
from coalesce.task import Data, Task


class Template:
    """What every lane of a cohort has in common.

    Args:
        cohort: the experiments; the first one is the representative.

    Attributes:
        task, model: the representative's.
        data: the cohort's.
        riding: paths of the attributes that are inputs of the graph.
        trained, fixed: names of the parameters that are updated, and of those that are not: frozen, or without a
            gradient, which `torch.optim` skips too.
        dtype: of the riding floats: the model's.

    Raises:
        TaskError: the task's own code fails, or does what lanes cannot share.
        ConfigError: the data do not fit.
    """

    def __init__(self, cohort: Cohort):
        self.cohort = cohort
        self.experiment = cohort.experiments[0]
        self.task_class = task_class(self.experiment)
        self.optimizer: type[Optimizer] = OPTIMIZERS[self.experiment.config["optimizer"]["name"]]
        self.schedule: type[Schedule] = SCHEDULES[self.experiment.config["schedule"]["name"]]
        self.task, self.model = build(self.experiment)
        self.riding = self._find_riding()
        self.data = self._load_data()
        self.rehearsal: Rehearsal = rehearse(*build(self.experiment), self.data, self.experiment)
        named = dict(self.model.named_parameters())
        self.trained = tuple(n for n, p in named.items() if p.requires_grad and n not in self.rehearsal.unused)
        self.fixed = tuple(n for n in named if n not in self.trained)
        self.dtype = next((p.dtype for p in named.values() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def static_hyper(self) -> dict[str, Any]:
        """The optimiser's configuration, of which only what does not ride is the same in every lane."""
        return dict(self.experiment.config["optimizer"])

    def roots(self) -> dict[str, object]:
        return {"task": self.task, "model": self.model}

    def lane(self, experiment: Experiment) -> tuple[nn.Module, dict[Path, Any]]:
        """Build one experiment: its model, and the values of its riding attributes.

        Raises:
            TaskError: it differs from the template in something that does not ride.
        """
        task, model = build(experiment)
        roots = {"task": task, "model": model}
        for path, mine, theirs in differing(self.roots(), roots):
            if path not in self.riding:
                raise _cannot_ride(path, mine, theirs, experiment)
        _check_shapes(self.model, model, experiment)
        return model, {path: lookup(roots, path) for path in self.riding}

    def _find_riding(self) -> tuple[Path, ...]:
        """Build one variant of the representative per swept key, and see what differs."""
        found: dict[Path, None] = {}
        for variant in self._variants():
            task, model = build(variant)
            _check_shapes(self.model, model, variant)
            for path, mine, theirs in differing(self.roots(), {"task": task, "model": model}):
                if not (_rides(mine) and _rides(theirs) and _alike(mine, theirs)):
                    raise _cannot_ride(path, mine, theirs, variant)
                found[path] = None
        return tuple(found)

    def _variants(self) -> Iterator[Experiment]:
        """Experiments that differ from the representative in one riding key of the task, or in the seed."""
        for key in self.cohort.riding:
            if key != "seed" and not key.startswith("task."):
                continue
            mine = _get(self.experiment.config, key)
            others = (_get(e.config, key) for e in self.cohort.experiments)
            value = next(v for v in others if v != mine)
            yield replace(self.experiment, config=_set(self.experiment.config, key, value))

    def _load_data(self) -> Data:
        with own_code("data()"), seeded(0), _reads(self.task) as read:
            data = self.task.data()
        if not isinstance(data, Data):
            raise TaskError(f"{self.task_class.__name__}.data() must return a coalesce.Data, not {type(data).__name__}")
        for key in self.cohort.riding:
            name = key.removeprefix("task.").split(".")[0]
            if key.startswith("task.") and name in read:
                raise TaskError(
                    f"{self.task_class.__name__}.data() reads self.{name}, which differs between the lanes of this "
                    f"graph, but lanes share their data. Name it in the task, static = ({name!r},), and each value "
                    f"gets data and a graph of its own; or use it in loss()."
                )
        return data


def task_class(experiment: Experiment) -> type[Task]:
    """The class that an experiment's ``task._target_`` names."""
    module, _, name = experiment.config["task"]["_target_"].rpartition(".")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def build(experiment: Experiment) -> tuple[Task, nn.Module]:
    """An experiment's task, and its model as ``torch.manual_seed(seed)`` makes it. The global generators stay as
    they were."""
    arguments = {k: v for k, v in experiment.config["task"].items() if k != "_target_"}
    with seeded(experiment.seed):
        with own_code(f"the task's constructor, experiment {experiment}"):
            task = task_class(experiment)(**arguments)
        torch.manual_seed(experiment.seed)
        with own_code(f"model(), experiment {experiment}"):
            model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"{type(task).__name__}.model() must return an nn.Module, not {type(model).__name__}")
    return task, model


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's, NumPy's and Python's global generators for a while."""
    import numpy as np

    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        # only the CPU's generator: models are built there, whatever device they train on
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def _reads(task: Task) -> Iterator[set[str]]:
    """Record which attributes of a task are read."""
    cls, names = type(task), set[str]()

    def record(self: Task, name: str) -> Any:
        names.add(name)
        return cls.__getattribute__(self, name)

    # __slots__ and an unchanged layout, so that the instance may take the class for a while
    recording = type(cls.__name__, (cls,), {"__getattribute__": record, "__slots__": (), "__module__": cls.__module__})
    task.__class__ = recording
    try:
        yield names
    finally:
        task.__class__ = cls


def _rides(value: Any) -> bool:
    return isinstance(value, float | Tensor)


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype
    return not isinstance(a, Tensor) and not isinstance(b, Tensor)


def _cannot_ride(path: Path, mine: Any, theirs: Any, experiment: Experiment) -> TaskError:
    def show(value: Any) -> str:
        return f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)

    return TaskError(
        f"{spell(path)} is {show(theirs)} in experiment {experiment} and {show(mine)} in another of the same graph, "
        f"but only floats and tensors of one shape can differ between lanes. If it follows from a float of the "
        f"task, name that float in the task, static = (...,): it then picks another graph. If it follows from the "
        f"seed, draw it as a tensor, or make it an argument of the task."
    )


def _check_shapes(mine: nn.Module, theirs: nn.Module, experiment: Experiment) -> None:
    def shapes(model: nn.Module) -> Mapping[str, tuple[Any, ...]]:
        named = [*model.named_parameters(), *model.named_buffers()]
        return {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in named}

    left, right = shapes(mine), shapes(theirs)
    for name in [*left, *(n for n in right if n not in left)]:
        if left.get(name) != right.get(name):
            raise TaskError(
                f"model() builds another model for experiment {experiment}: {name} has (shape, dtype, "
                f"requires_grad) {right.get(name, 'nothing')} where the other lanes have {left.get(name, 'nothing')}. "
                f"Lanes of one graph need one structure: it follows from a float of the task or from the seed. Name "
                f"the float in the task, static = (...,), or make the structure an int argument."
            )


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[int(part)] if isinstance(config, list | tuple) else config[part]
    return config


def _set(config: Any, key: str, value: Any) -> Any:
    head, _, rest = key.partition(".")
    if isinstance(config, list | tuple):
        return [v if i != int(head) else _set(v, rest, value) if rest else value for i, v in enumerate(config)]
    return {k: v if k != head else _set(v, rest, value) if rest else value for k, v in config.items()}
