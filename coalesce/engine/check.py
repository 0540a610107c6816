"""Law 7: before a sweep trains, the compiled graphs and plain eager PyTorch compute the same.

Two experiments with different floats take two steps in lanes and in plain loops. What is compared is what shows a wrong
gradient: losses, buffers and the optimiser's state. (Updated parameters alone are blind: after Adam's first step a
gradient eight times too large shows as 2e-7.) It has found a gradient that the compiler got wrong where running the
same graph operation by operation got it right: torch 2.13.0, an orthogonal parametrisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coalesce.engine.step import part
from coalesce.errors import TaskError
from coalesce.experiment import Experiment

if TYPE_CHECKING:
    from coalesce.engine.lanes import Lanes
    from coalesce.engine.plain import Plain

STEPS = 2

#: Large enough that a layer's gradient that is computed with a weight that was updated already shows.
_RATES = (0.03, 0.1)

#: What may differ, in norm: of a tensor's own size, or of this share of the largest of its kind, if it is smaller than
#: that. (A bias in front of BatchNorm has a gradient of zero in mathematics, and noise in numbers.)
_SHARE = 1e-2


def check_step(lanes: Lanes) -> None:
    """Compare two steps, from the same state each. The lanes are left as they were.

    Raises:
        TaskError: with the names of what differs.
    """
    plain = _plain(lanes)
    for placed in _placements(lanes, _probes(lanes)):
        with _borrowed(lanes, placed):
            # From the lanes' own state at each step: Adam makes a whole update of a gradient that is nothing but
            # rounding, and what one step makes of it is not to be held against the next.
            for _ in range(STEPS):
                before = {lane: {n: t[lane].clone() for n, t in lanes.state.items()} for lane in placed}
                lanes.advance(1)
                for lane, probe in placed.items():
                    wrong = _step_differs(lanes, lane, probe, plain, before[lane])
                    if wrong:
                        raise _differs(lanes, probe, wrong)


def _step_differs(lanes: Lanes, lane: int, probe: Experiment, plain: Plain, before: Mapping[str, Tensor]) -> list[str]:
    """Take the step in a plain loop that a lane took, and name what differs."""
    plain.fill(0, probe)
    plain.step = int(before["lane/step"])
    named = {**dict(plain.model.named_parameters()), **dict(plain.model.named_buffers())}
    with torch.no_grad():
        for kind in ("trained", "fixed", "buffer"):
            for name, value in part(before, kind).items():
                named[name].copy_(value)
        for name, slots in plain.slots.items():
            plain.slots[name] = {slot: before[f"slot/{slot}/{name}"].clone() for slot in slots}
    if not before["lane/alive"]:
        return []
    plain.advance(1)
    reading, sound = lanes.read(), plain.read()
    if sound.alive[0] != reading.alive[lane]:
        return ["the step at which it diverges"]
    if not sound.alive[0]:
        return []
    mine = {f"train/{n}": torch.tensor(v[lane]) for n, v in reading.metrics.items()}
    mine |= {n: t[lane] for n, t in lanes.state.items() if n.startswith(("slot/", "buffer/"))}
    theirs = {f"train/{n}": torch.tensor(v[0]) for n, v in sound.metrics.items()}
    # a buffer that the step made where there was None is not a lane's state
    theirs |= {f"buffer/{n}": b for n, b in plain.model.named_buffers() if f"buffer/{n}" in mine}
    theirs |= {f"slot/{s}/{n}": t for n, slots in plain.slots.items() for s, t in slots.items()}
    return _unlike(mine, theirs, _tolerance(lanes), lanes.template.experiment.batch_size)


def check_evaluation(lanes: Lanes, split: str) -> None:
    """Compare the metrics of a split. The lanes are left as they were.

    Raises:
        TaskError: with the names of what differs.
    """
    plain = _plain(lanes)
    for placed in _placements(lanes, _probes(lanes)):
        with _borrowed(lanes, placed):
            found = lanes.evaluate(split)
            for lane, probe in placed.items():
                plain.fill(0, probe)
                mine = {n: torch.tensor(v[lane]) for n, v in found.items()}
                theirs = {n: torch.tensor(v[0]) for n, v in plain.evaluate(split).items()}
                wrong = _unlike(mine, theirs, _tolerance(lanes), lanes.data.sizes[split])
                if wrong:
                    raise _differs(lanes, probe, [f"{split}/{name}" for name in wrong])


def _plain(lanes: Lanes) -> Plain:
    # here, since the plain loop stands on what lanes define
    from coalesce.engine.plain import Plain

    return Plain(lanes.template, lanes.device, lanes.evaluate_batch_size)


def _probes(lanes: Lanes) -> list[Experiment]:
    """The representative, and the experiment that differs from it in the most floats; at rates that suit."""
    experiments = lanes.template.cohort.experiments
    differs = lanes.template.cohort.riding
    first = experiments[0]

    def distance(one: Experiment) -> int:
        return sum(_at(one.config, key) != _at(first.config, key) for key in differs)

    chosen = [first, next((one for one in sorted(experiments, key=distance, reverse=True) if _fits(lanes, one)), first)]
    return [
        replace(
            one,
            config={
                **one.config,
                "optimizer": {**one.config["optimizer"], "lr": rate},
                "steps": max(one.steps, STEPS),
            },
        )
        for one, rate in zip(chosen, _RATES, strict=True)
    ]


def _fits(lanes: Lanes, one: Experiment) -> bool:
    """Whether an experiment can be built for the graph; if not, that is its own failure, when its turn comes."""
    try:
        lanes.template.lane(one)
    except TaskError:
        return False
    return True


def _at(config: object, key: str) -> object:
    for name in key.split("."):
        config = config[int(name)] if isinstance(config, list | tuple) else config[name]  # type: ignore[index]
    return config


def _placements(lanes: Lanes, probes: list[Experiment]) -> Iterator[dict[int, Experiment]]:
    """All probes at once, in the first and the last lane; one after the other where there is one lane."""
    if lanes.width == 1:
        yield from ({0: probe} for probe in probes)
    else:
        yield {0: probes[0], lanes.width - 1: probes[1]}


@contextmanager
def _borrowed(lanes: Lanes, placed: Mapping[int, Experiment]) -> Iterator[None]:
    """Put experiments into lanes, let the others stand still, and put back what was there."""
    alive = lanes.state["lane/alive"].clone()
    kept = {lane: {name: tensor[lane].clone() for name, tensor in lanes.state.items()} for lane in placed}
    try:
        lanes.state["lane/alive"].fill_(False)
        for lane, one in placed.items():
            lanes.fill(lane, one)
        yield
    finally:
        for lane, tensors in kept.items():
            for name, tensor in tensors.items():
                lanes.state[name][lane].copy_(tensor)
        lanes.state["lane/alive"].copy_(alive)


def _tolerance(lanes: Lanes) -> float:
    """What rounding may make of two computations of a few operations each; a fault is a share of the whole."""
    dtypes = [p.dtype for p in lanes.template.model.parameters() if p.is_floating_point()]
    return 10 * max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5


def _unlike(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float, samples: int) -> list[str]:
    """The names of tensors that differ by more than a share of their size.

    Args:
        samples: over which a metric is a mean.
    """
    largest: dict[str, float] = {}
    for name, value in theirs.items():
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), _size(value))
    wrong = []
    for name, value in theirs.items():
        scale = max(_size(value), _SHARE * largest[_kind(name)])
        a, b = mine[name].double(), value.double()
        # what is infinite or NaN must be so in both
        same = torch.equal(torch.isfinite(a), torch.isfinite(b))
        off = _size(torch.where(torch.isfinite(b), a - b, 0.0))
        if not same or off > tolerance * scale + _undecided(name, value, samples):
            wrong.append(name)
    return wrong


def _undecided(name: str, value: Tensor, samples: int) -> float:
    """What two samples may change in a metric that counts samples: where scores are equal but for rounding, their order
    is not decided."""
    if name.startswith(("slot/", "buffer/")) or name == "train/loss" or not torch.isfinite(value):
        return 0.0
    for unit in (1.0, 1.0 / samples):
        if abs(float(value) / unit - round(float(value) / unit)) < 1e-4:
            return 2 * unit
    return 0.0


def _kind(name: str) -> str:
    """Slots of one name are compared with each other; everything else is of a kind of its own."""
    return name.rsplit("/", 1)[0] if name.startswith("slot/") else name


def _size(value: Tensor) -> float:
    value = value.double()
    return float(torch.linalg.vector_norm(torch.where(torch.isfinite(value), value, 0.0)))


def _differs(lanes: Lanes, probe: Experiment, names: list[str]) -> TaskError:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return TaskError(
        f"The graph of {lanes.template.task_class.__name__} does not compute what plain PyTorch does (experiment "
        f"{probe}, learning rate {probe.config['optimizer']['lr']:g}): {shown} differ. Nothing was trained. Try "
        f"compile=false; if that helps, the compiler is at fault, else coalesce is: please report it."
    )
