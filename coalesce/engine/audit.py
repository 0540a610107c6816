"""Before anything is traced: does a lane's loss depend only on what the lane has of its own?

A graph is traced from one experiment. Whatever its code takes from elsewhere would be the same in every lane and at
every step, silently: a float in a place that is not followed, a counter, NumPy's generator, a view of a parameter that
was taken beforehand. Plain eager calls find it. What another experiment computes with its own objects, the
representative's objects must compute too, bit for bit, once that experiment's tensors and attributes are put in.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from coalesce.data import Data
from coalesce.engine.instance import Instance
from coalesce.engine.objects import Path, attributes, lookup, spell
from coalesce.engine.precision import autocast
from coalesce.engine.rehearsal import check_outputs, check_scalars, own_code, split_loss
from coalesce.engine.rules import Rules
from coalesce.errors import TaskError
from coalesce.experiment import Experiment
from coalesce.random import epoch_order, key_of
from coalesce.task import defines

#: What two ways of the same computation may differ by, in units of the dtype's precision and of the largest entry:
#: nothing, as a rule; the last bits where the alignment of a tensor in memory picks another kernel.
_SAME = 16.0

#: What a float that becomes a 0-d tensor may change, relative to the loss. It is rounded to the model's dtype; code
#: that asks for its type, or looks it up in a dict, computes something else.
_CLOSE = 1e-3


@dataclass
class Outcome:
    """What one step's code computed, by name."""

    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Audit:
    """The checks of one cohort.

    Args:
        make: builds an experiment.
        experiment: the representative.
        variants: swept key → the representative with another value of it alone.
        origins: path of each attribute that rides → the swept key that it follows from.
        data: the cohort's, on the CPU.
        dtype: of the floats that ride.
    """

    make: Callable[[Experiment], Instance]
    experiment: Experiment
    variants: Mapping[str, Experiment]
    origins: Mapping[Path, str]
    data: Data
    dtype: torch.dtype

    def run(self) -> None:
        """All checks.

        Raises:
            TaskError: the task depends on something that lanes cannot have each of its own.
        """
        self._check_state()
        self._check_reach("", self.experiment)
        for key, variant in self.variants.items():
            self._check_reach(key, variant)

    def _check_state(self) -> None:
        """A second call must give what a first one would."""
        used, new = self.make(self.experiment), self.make(self.experiment)
        name = used.name
        self._outcome(used, self.experiment, 0)
        counted = _numbers(used)
        _shift(used.model)
        _shift(new.model)
        with torch.no_grad():
            # by name, since a call may have made a buffer that was None
            kept = dict(used.model.named_buffers())
            for buffer_name, buffer in new.model.named_buffers():
                buffer.copy_(kept[buffer_name])
        with _undrawn(name):
            second = self._outcome(used, self.experiment, 1)
        for path, value in _numbers(used).items():
            before = counted.get(path, value)
            if type(before) is not type(value) or before != value:
                raise TaskError(
                    f"{name} changes {spell(path)} from {before!r} to {value!r} in a step, but the graph of a step is "
                    f"traced once: it would keep the value of the first. Keep what changes from step to step in a "
                    f"buffer of the model (register_buffer), of which each lane has its own. A value to be logged is "
                    f"returned beside the loss: return loss, {{'name': tensor}}."
                )
        first = self._outcome(new, self.experiment, 1)
        wrong = _unlike(first.values, second.values)
        if wrong:
            raise TaskError(
                f"{name}: {wrong} when it is called again, with the same parameters, buffers and batch. It keeps "
                f"something from call to call, draws from a generator of its own, or looks at a clock; but the graph "
                f"of a step is traced once. Keep what changes from step to step in a buffer of the model "
                f"(register_buffer), of which each lane has its own."
            )

    def _check_reach(self, key: str, variant: Experiment) -> None:
        """The representative's objects with a variant's tensors and attributes must be that variant.

        Args:
            key: which one differs; empty for the representative itself, with other weights.
        """
        own = self.make(variant)
        if not key:
            _shift(own.model)
        riding = {path: lookup(own.roots, path) for path in self.origins}
        tensors = own.tensors()
        lent = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in tensors.items()}
        rounded = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in tensors.items()}
        expected = self._outcome(own, variant, 0, tensors)
        # not built before: what a constructor leaves in a global is then the representative's
        host = self.make(self.experiment)
        with host.holding(lent, riding):
            found = self._outcome(host, variant, 0, lent)
        wrong = (
            _unlike(expected.values, found.values)
            or _unlike(expected.gradients, found.gradients, "the gradient of ", floor=_largest(expected.gradients))
            or _unlike(expected.buffers, found.buffers, "the buffer ")
        )
        if wrong:
            raise self._cannot_reach(key, wrong)
        scalars = {
            p: v if isinstance(v, Tensor) else torch.tensor(float(v), dtype=self.dtype) for p, v in riding.items()
        }
        if scalars:
            with host.holding(rounded, scalars):
                found = self._outcome(host, variant, 0, riding=scalars)
            coarse = max(torch.finfo(p.dtype).eps for p in tensors.values() if p.is_floating_point())
            if self.experiment.precision == "bfloat16":
                coarse = torch.finfo(torch.bfloat16).eps
            wrong = _unlike(expected.values, found.values, tolerance=max(_CLOSE, 4 * coarse))
            if wrong:
                raise TaskError(
                    f"{host.name}: {wrong} when {' and '.join(spell(p) for p in scalars)} are 0-d tensors instead of "
                    f"floats, as they are inside a graph whose lanes differ in them. Use them in arithmetic alone, "
                    f"or name the task's argument in static = (...,), so that each value picks another graph."
                )

    def _cannot_reach(self, key: str, wrong: str) -> TaskError:
        name = self.make(self.experiment).name
        if not key:
            return TaskError(
                f"{name}: {wrong} when the model gets other weights. The task reaches a parameter or buffer not "
                f"only through the model, but through a reference that was taken before: a view or a slice of it, a "
                f"hook on it, a local variable of model(). Reach it through the model, in loss() or in forward()."
            )
        argument = key.removeprefix("task.").split(".")[0]
        way = f"or name it in the task, static = ({argument!r},), so that each value picks another graph"
        if key == "seed":
            way = "or register it as a buffer of the model"
        return TaskError(
            f"{name}: {wrong} when {key} differs, although every attribute that follows from {key} was put in. It "
            f"is kept where it is not followed: in an object without attributes, in a local variable, in a global. "
            f"Keep it in an attribute of the task or of a module, {way}."
        )

    def _outcome(
        self,
        instance: Instance,
        experiment: Experiment,
        step: int,
        leaves: Mapping[str, Tensor] | None = None,
        riding: Mapping[Path, Any] | None = None,
    ) -> Outcome:
        """Loss and metrics of one step; and with tensors by name, their gradients and the buffers afterwards."""
        key, count = key_of(experiment.seed), self.data.sizes["train"]
        # any samples will do, if those of another step are others
        batch = self.data.batch("train", epoch_order(experiment.seed, step, count)[: experiment.batch_size])
        named = {spell(p): v for p, v in (riding or {}).items()}
        origins = {spell(p): origin for p, origin in self.origins.items()}
        stream = key, torch.tensor(step), named
        outcome = Outcome()
        instance.model.train()
        mixed = autocast(experiment)
        with mixed, own_code(f"{instance.name}.loss()", named), Rules(*stream, origins=origins, watch=True):
            loss, extras = split_loss(instance.task.loss(instance.model, batch), f"{instance.name}.loss()")
        outcome.values = {"the loss": loss.detach(), **{n: v.detach() for n, v in extras.items()}}
        if leaves is not None:
            outcome.gradients = _gradients(loss, leaves)
            outcome.buffers = {n: t.detach().clone() for n, t in instance.model.named_buffers()}
        split = next((s for s in ("val", "test") if s in self.data.sizes), None)
        if split is not None:
            instance.model.eval()
            size = min(self.data.sizes[split], experiment.batch_size)
            batch = self.data.batch(split, torch.arange(size))
            what, rules = f"{instance.name}.metrics()", Rules(*stream, origins=origins, watch=True)
            with torch.no_grad(), autocast(experiment), own_code(what, named), rules:
                found = check_scalars(instance.task.metrics(instance.model, batch), f"{instance.name}.metrics()")
            outcome.values |= {f"the metric {n}": v for n, v in found.items()}
            if defines(type(instance.task), "outputs"):
                what = f"{instance.name}.outputs()"
                rules = Rules(*stream, origins=origins, watch=True)
                with torch.no_grad(), autocast(experiment), own_code(what, named), rules:
                    given = check_outputs(instance.task.outputs(instance.model, batch), what, size)
                outcome.values |= {f"the output {n}".strip(): v.detach() for n, v in given.items()}
        return outcome


def _gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # By backward(), so that hooks on a parameter have their effect: in a lane they have none.
    wanted = {n: t for n, t in leaves.items() if t.requires_grad}
    loss.backward()
    return {n: t.grad for n, t in wanted.items() if t.grad is not None}


def _shift(model: nn.Module) -> None:
    """Other weights in the same memory."""
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.mul_(1.25).add_(0.01)


def _numbers(instance: Instance) -> dict[Path, Any]:
    kinds = bool | int | float | str | bytes
    return {path: value for path, value in attributes(instance.roots) if isinstance(value, kinds)}


@contextmanager
def _undrawn(name: str) -> Iterator[None]:
    """Refuse code that draws from the global generators of Python or NumPy."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state(legacy=False) if numpy else None
    yield
    after = random.getstate(), numpy.random.get_state(legacy=False) if numpy else None
    for module, x, y in (("random", before[0], after[0]), ("numpy.random", before[1], after[1])):
        if str(x) != str(y):
            raise TaskError(
                f"{name} draws from the generator of the module {module} in a step, which a graph cannot: it would "
                f"repeat the numbers of its trace for ever. Draw by torch.rand, torch.randn and their like, which take "
                f"the lane's own stream, or outside the graph in data() or model()."
            )


def _largest(values: Mapping[str, Tensor]) -> float:
    """The size of the largest entry. A gradient that is zero in mathematics is noise of that size times the precision:
    a bias in front of BatchNorm."""
    return max((float(v.nan_to_num(0.0, 0.0, 0.0).abs().max()) for v in values.values() if v.numel()), default=0.0)


def _unlike(
    mine: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    what: str = "",
    tolerance: float = 0.0,
    floor: float = 0.0,
) -> str:
    """Which value differs, and by how much; empty if none does.

    Args:
        tolerance: relative to a tensor's largest entry; 0 for what rounding explains.
        floor: least size that a tensor's rounding is measured by.
    """
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None:
            return f"{what}{name} is there only in one of two cases"
        if not _same(a, b, tolerance, floor):
            return f"{what}{name} is {_show(b)} instead of {_show(a)}"
    return ""


def _same(a: Tensor, b: Tensor, tolerance: float, floor: float) -> bool:
    if a.shape != b.shape:
        return False
    if torch.equal(a, b) or a.numel() == 0:
        return True
    if a.is_floating_point() and not tolerance:
        tolerance = _SAME * torch.finfo(a.dtype).eps
    a, b = a.detach().double(), b.detach().double()
    scale = torch.where(torch.isfinite(a), a, 0.0).abs().max()
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * max(float(scale), floor), equal_nan=True)


def _show(value: Tensor) -> str:
    if value.dim() == 0:
        return f"{value.item():.9g}"
    return f"a tensor of norm {value.detach().double().norm().item():.9g}"
