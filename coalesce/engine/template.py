"""A cohort's representative: its task and model, what rides in its graph, and what its data and code look like."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from numbers import Rational, Real
from typing import Any

import torch
from torch import Tensor, nn

from coalesce.engine import lazy
from coalesce.engine.audit import Audit
from coalesce.engine.batches import Batches
from coalesce.engine.folds import Folds, read_folds
from coalesce.engine.instance import Instance
from coalesce.engine.objects import Alias, Path, differing, forbidden, installed, lookup, spell
from coalesce.engine.rehearsal import Rehearsal, own_code, rehearse
from coalesce.errors import ConfigError, Problem, TaskError
from coalesce.experiment import Cohort, Experiment
from coalesce.optim import OPTIMIZERS, SCHEDULES, Optimizer, Schedule
from coalesce.optim.groups import config_of, unmatched
from coalesce.optim.options import AVERAGE
from coalesce.task import Data, Task, defines


class Template:
    """What every lane of a cohort has in common.

    Args:
        cohort: the experiments; the first one is the representative.
        audit: look for what a lane could not have of its own. Needless for experiments that run unstacked, whose code
            may keep a counter or print.

    Attributes:
        task, model: the representative's.
        data: the cohort's, shared by all of its lanes.
        folds: index sets over the training split, of which each experiment has one; or None.
        batches: how its samples become batches.
        riding: paths of the attributes that are inputs of the graph.
        origins: each of these paths → the swept key that it follows from.
        variants: swept key of the task → the representative with another value of it alone.
        trained, fixed: names of the parameters that are updated, and of those that are not: frozen, or without a
            gradient, which `torch.optim` skips too.
        names: parameter → all its names, of which a tied one has several.
        dtype: of the riding floats: the model's, but not below float32, in which a rate of 0.1 keeps its value.

    Raises:
        TaskError: the task's own code fails, or does what lanes cannot share.
        ConfigError: the data do not fit, or a name pattern of the optimiser matches no parameter.
    """

    def __init__(self, cohort: Cohort, audit: bool = True):
        self.cohort = cohort
        self.experiment = cohort.members[0]
        self.task_class = task_class(self.experiment)
        self.batches = Batches(self.experiment.batch_size, self.experiment.remainder)
        self.optimizer: type[Optimizer] = OPTIMIZERS[self.experiment.config["optimizer"]["name"]]
        self.schedule: type[Schedule] = SCHEDULES[self.experiment.config["schedule"]["name"]]
        self.task, self.model = build(self.experiment)
        self._noise = self._find_noise()
        self.variants: dict[str, Experiment] = {}
        self.origins = self._find_riding()
        self.riding = tuple(self.origins)
        self.data = self._load_data()
        self.folds = self._load_folds()
        own = self.own_data(self.experiment)
        self.rehearsal: Rehearsal = rehearse(*build(self.experiment), own, self.experiment)
        named = dict(self.model.named_parameters())
        self.trained = tuple(n for n, p in named.items() if p.requires_grad and n not in self.rehearsal.unused)
        self.fixed = tuple(n for n in named if n not in self.trained)
        self.names = _all_names(self.model)
        problems = unmatched(self.optimizer, self.static_hyper, self.names.values())
        if problems:
            raise ConfigError(problems)
        self.dtype = _riding_dtype(self.model)
        if audit:
            Audit(_instance, self.experiment, self.variants, self.origins, own, self.dtype).run()

    @property
    def static_hyper(self) -> dict[str, Any]:
        """The optimiser's configuration, of which only what does not ride is the same in every lane."""
        return dict(self.experiment.config["optimizer"])

    def slots(self, name: str, param: Tensor, experiment: Experiment) -> dict[str, Tensor]:
        """A parameter's optimiser state at the start of an experiment: name → tensor."""
        config = config_of(self.optimizer, experiment.config["optimizer"], self.names[name])
        state = self.optimizer.init(param, config)
        return state if config["ema"] is None else {**state, AVERAGE: param.clone()}

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a lane's parameters, buffers and optimiser state."""
        tensors = dict(self.model.named_parameters())
        slots = [t for n in self.trained for t in self.slots(n, tensors[n].detach(), self.experiment).values()]
        return sum(t.nbytes for t in [*tensors.values(), *self.model.buffers(), *slots])

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step."""
        return int(self.static_hyper["accumulate"])

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes of the batches that occur: that of a full one, and then those of short ones."""
        # of all folds, so that a graph does not depend on which of them the cohort has
        return self.batches.sizes(self.counts("train"))

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The splits that the experiments can be evaluated on."""
        return tuple(s for s in ("val", "test") if s in self.data.sizes or (s == "val" and self.folds is not None))

    def counts(self, split: str) -> list[int]:
        """Samples of a split; where each fold has its own, of every fold."""
        if self.folds is not None and self.has_own(split):
            return self.folds.counts(split)
        return [self.data.sizes[split]]

    def count(self, experiment: Experiment, split: str) -> int:
        """Samples of a split of an experiment."""
        return self.counts(split)[experiment.fold if self.has_own(split) and experiment.fold is not None else 0]

    def has_own(self, split: str) -> bool:
        """Whether each experiment has its own samples in a split."""
        return self.folds is not None and split != "test"

    def own_data(self, experiment: Experiment) -> Data:
        """The splits of one experiment; a copy, where it trains on a fold."""
        return self.data if self.folds is None else self.folds.data(self.data, experiment.fold or 0)

    def roots(self) -> dict[str, object]:
        return {"task": self.task, "model": self.model}

    def fresh(self, lowerings: Mapping[str, str] | None = None) -> Instance:
        """The representative, built anew."""
        return _instance(self.experiment, lowerings)

    def lane(self, experiment: Experiment) -> tuple[nn.Module, dict[Path, Any]]:
        """Build one experiment: its model, and the values of its riding attributes.

        Raises:
            TaskError: it differs from the template in something that does not ride.
        """
        built = _instance(experiment)
        _check_shapes(self.model, built.model, experiment)
        for path, mine, theirs in differing(self.roots(), built.roots):
            if path in self._noise:
                continue
            if path not in self.origins or not _ride(mine, theirs):
                raise _cannot_ride(path, mine, theirs, experiment)
        return built.model, {path: lookup(built.roots, path) for path in self.riding}

    def _find_noise(self) -> frozenset[Path]:
        """What differs between two builds of the same experiment (the time, an address): not the experiment's.

        Raises:
            TaskError: the initial weights do.
        """
        again = self.fresh()
        _check_shapes(self.model, again.model, self.experiment)
        theirs = again.tensors()
        for name, tensor in Instance(self.task, self.model).tensors().items():
            if not torch.equal(tensor.nan_to_num(), theirs[name].nan_to_num()):
                raise TaskError(
                    f"{self.task_class.__name__}.model() builds another {name} each time, with the same seed. torch's, "
                    f"NumPy's and Python's global generators are seeded before it is called: draw from these, not "
                    f"from a generator with a seed of its own or from the clock."
                )
        return frozenset(path for path, _, _ in differing(self.roots(), again.roots))

    def _find_riding(self) -> dict[Path, str]:
        """Build variants of the representative, and see what differs."""
        found: dict[Path, str] = {}
        for key, variant, built in self._built_variants():
            self.variants.setdefault(key, variant)
            _check_shapes(self.model, built.model, variant)
            for path, mine, theirs in differing(self.roots(), built.roots):
                if path in self._noise:
                    continue
                if not _ride(mine, theirs):
                    raise _cannot_ride(path, mine, theirs, variant)
                found.setdefault(path, key)
        return found

    def _built_variants(self) -> Iterator[tuple[str, Experiment, Instance]]:
        """Experiments that differ from the representative in one riding key of the task, or in the seed.

        Two for each float, with its smallest and its largest value, since what follows from it may be bounded:
        min(a, 0.5). One that cannot be built is passed over: that is its own failure, when its turn comes.
        """
        for key in self.cohort.riding:
            if key != "seed" and not key.startswith("task."):
                continue
            mine = _get(self.experiment.config, key)
            others = list(dict.fromkeys(v for e in self.cohort.members if (v := _get(e.config, key)) != mine))
            if not others:
                continue
            left = 1 if key == "seed" else 2
            for value in dict.fromkeys(others if key == "seed" else [min(others), max(others), *others]):
                variant = self.experiment.varied({key: value})
                try:
                    built = _instance(variant)
                except TaskError:
                    continue
                yield key, variant, built
                left -= 1
                if not left:
                    break

    def _load_data(self) -> Data:
        name = self.task_class.__name__
        # a build of its own: what data() leaves in attributes is not the experiment's
        built = self.fresh()
        held = {path: forbidden(self._no_data_from(path)) for path in self.riding}
        with installed(built.roots, held), own_code(f"{name}.data()"), seeded(0):
            data = built.task.data()
        if not isinstance(data, Data):
            raise TaskError(f"{name}.data() must return a coalesce.Data, not {type(data).__name__}")
        return data

    def samples(self, experiment: Experiment, split: str) -> Any:
        """A whole split of an experiment, with the structure of a batch, on the CPU."""
        if self.folds is None or not self.has_own(split):
            return self.data.unflatten(self.data.leaves(split))
        return self.data.batch("train", self.folds.rows[split][experiment.fold or 0])

    def _load_folds(self) -> Folds | None:
        """What the task's folds are, if the experiments train on folds.

        Raises:
            ConfigError: there are none, or not this one, or they do not fit the data.
        """
        if self.experiment.fold is None:
            return None
        name = self.task_class.__name__
        if not defines(self.task_class, "folds"):
            rule = f"{name} defines no folds(self, data)"
            raise ConfigError([Problem("data.fold", self.experiment.fold, rule, "null, or a task that defines folds")])
        built = self.fresh()
        held = {path: forbidden(self._no_data_from(path, "folds")) for path in self.riding}
        with installed(built.roots, held), own_code(f"{name}.folds()"), seeded(0):
            returned = built.task.folds(self.data)
            # a generator runs only now, under the same seed
            folds = read_folds(list(returned) if isinstance(returned, Iterator) else returned, self.data)
        valid = f"0 to {len(folds) - 1}, or null: no fold"
        wanted = dict.fromkeys(e.fold for e in self.cohort.members if e.fold is not None)
        problems = [Problem("data.fold", f, f"{name} has no such fold", valid) for f in wanted if f >= len(folds)]
        if problems:
            raise ConfigError(problems)
        return folds

    def _no_data_from(self, path: Path, method: str = "data") -> str:
        argument = self.origins[path].removeprefix("task.").split(".")[0]
        way = "draw such numbers in model(), or in loss() by dropout"
        if self.origins[path] != "seed":
            way = (
                f"name it in the task, static = ({argument!r},), and each value gets data and a graph of its own; or "
                f"use it in loss()"
            )
        return (
            f"{self.task_class.__name__}.{method}() reads {spell(path)}, which follows from {self.origins[path]} and "
            f"differs between the lanes of this graph, but lanes share their data: {way}."
        )


def _all_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {found[0]: tuple(found) for found in names.values()}


def _riding_dtype(model: nn.Module) -> torch.dtype:
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    return torch.promote_types(first, torch.float32)


def _instance(experiment: Experiment, lowerings: Mapping[str, str] | None = None) -> Instance:
    return Instance(*build(experiment), lowerings)


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
        name = type(task).__name__
        if not isinstance(model, nn.Module):
            raise TaskError(f"{name}.model() must return an nn.Module, not {type(model).__name__}")
        if isinstance(model, torch.jit.ScriptModule):
            raise TaskError(f"{name}.model() must return a plain nn.Module: lanes cannot share a scripted one")
        lazy.finish(task, model, arguments, lambda: _data_of(task_class(experiment)(**arguments)))
    for path, parameter in model.named_parameters():
        if parameter.is_complex():
            raise TaskError(
                f"{name}.model(): {path} is {parameter.dtype}, but lanes train real parameters. Keep a real one with a "
                f"last dimension of 2, and take torch.view_as_complex(...) of it in forward()."
            )
    for path, tensor in Instance(task, model).tensors().items():
        if tensor.layout != torch.strided:
            raise TaskError(
                f"{name}.model(): {path} is sparse ({tensor.layout}), but lanes are stacked densely. Keep "
                f"{path}.to_dense(), or its indices and values, and add up by index_add in forward()."
            )
    return task, model


def _data_of(task: Task) -> Any:
    with own_code(f"{type(task).__name__}.data()"), seeded(0):
        return task.data()


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


def _ride(mine: Any, theirs: Any) -> bool:
    """Whether two values may stand in two lanes of one graph."""
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return mine.shape == theirs.shape and mine.dtype == theirs.dtype
    return all(isinstance(v, Real) and not isinstance(v, Rational) for v in (mine, theirs))


def _cannot_ride(path: Path, mine: Any, theirs: Any, experiment: Experiment) -> TaskError:
    def show(value: Any) -> str:
        if isinstance(value, Alias):
            return f"the parameter or buffer {value.name}"
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
