"""Law 7: before a sweep trains, its graphs and plain eager PyTorch compute the same.

Two experiments with different floats take two steps in lanes and, from the same states, in a plain loop. Compared is
what shows a wrong gradient: losses, buffers, the optimiser's state, and by how much each parameter changes. (Updated
parameters alone are blind: after Adam's first step a gradient eight times too large shows as 2e-7.) One call of each
evaluation graph is compared as well. What was met, with no error raised: torch 2.13.0 compiles the gradient of an
orthogonal parametrisation (with more columns than rows) wrongly, where running the same graph operation by operation
gets it right.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor

from coalesce.engine.agreement import DIVERGES, Outcome, Shift, disagreeing
from coalesce.engine.lanes import Lanes
from coalesce.engine.plain import Plain
from coalesce.engine.step import part
from coalesce.errors import TaskError
from coalesce.experiment import Experiment

#: Learning rates of the two, whatever the sweep's are: so large that a gradient shows which was computed with a weight
#: that had been updated already. They are lowered, by tens, for a model that they would blow up.
RATES = (0.1, 0.03)
_LOWEST = 1e-4

#: How many experiments are tried as the second one; one that cannot be built costs its own row, when its turn comes.
_TRIES = 8


@dataclass
class Seen:
    """What a lane did with an experiment.

    Args:
        original: as the sweep has it.
        experiment: with the check's learning rate.
        steps: the lane's state before and after each step.
        evaluations: (split, start, stop) → metrics of these samples, for the state after the last step.
    """

    original: Experiment
    experiment: Experiment
    steps: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = field(default_factory=list)
    evaluations: dict[tuple[str, int, int], Outcome] = field(default_factory=dict)


def check(lanes: Lanes, splits: Sequence[str]) -> None:
    """Compare the lanes' graphs with plain PyTorch. The lanes are left as they were, bit for bit.

    Args:
        lanes: of any width; in one lane the experiments follow each other.
        splits: those that will be evaluated.

    Raises:
        TaskError: they do not agree: with the parameters and the experiments that show it.
    """
    plain = Plain(lanes.template, lanes.device, lanes.evaluate_batch_size)
    probes = _probes(lanes, plain)
    together = [dict(zip((0, lanes.width - 1), probes, strict=True))] if lanes.width > 1 else [{0: p} for p in probes]
    # The lanes first, then one plain model after the other: no more than one stands beside the lanes in memory.
    seen = [one for placed in together for one in _watch(lanes, placed, splits)]
    wrong = [(one, found) for one in seen if (found := _compare(one, plain))]
    if wrong:
        raise _disagreement(lanes, wrong)


def _probes(lanes: Lanes, plain: Plain) -> list[Seen]:
    """The representative, and the experiment that differs from it in the most floats; at rates that suit."""
    cohort, first = lanes.template.cohort, lanes.template.experiment

    def distance(one: Experiment) -> float:
        pairs = [(_at(first.config, key), _at(one.config, key)) for key in cohort.riding]
        return sum(1 + abs(a - b) / (abs(a) + abs(b)) for a, b in pairs if a != b)

    probes = [Seen(first, _at_a_rate(first, RATES[0], plain))]
    for one in heapq.nlargest(_TRIES, [e for e in cohort.members if e is not first], distance):
        try:
            lanes.template.lane(one)
            return [*probes, Seen(one, _at_a_rate(one, RATES[1], plain))]
        except Exception:
            # whatever its own code raises, here or in training, is its own failure
            continue
    return [*probes, Seen(first, _at_a_rate(first, RATES[1], plain))]


def _at(config: object, key: str) -> float:
    for name in key.split("."):
        config = config[int(name)] if isinstance(config, list | tuple) else config[name]  # type: ignore[index]
    return float(config)  # type: ignore[arg-type]


def _at_a_rate(experiment: Experiment, rate: float, plain: Plain) -> Experiment:
    """The experiment at the largest rate, of those allowed, at which a plain step does not make the loss leap."""
    while True:
        optimizer = experiment.config["optimizer"]
        if "lr" in optimizer:
            optimizer = {**optimizer, "lr": rate}
        # one step from the start, and one in the middle, where schedules have come away from 0 and 1
        config = {**experiment.config, "optimizer": optimizer, "steps": max(experiment.steps, 2)}
        probe = replace(experiment, config=config)
        plain.fill(0, probe)
        plain.advance(1)
        first = plain.metrics["loss"]
        plain.step = probe.steps // 2
        plain.advance(1)
        if rate < 10 * _LOWEST or (plain.alive and abs(plain.metrics["loss"]) <= 10 * abs(first) + 1):
            return probe
        rate /= 10


def _watch(lanes: Lanes, placed: Mapping[int, Seen], splits: Sequence[str]) -> list[Seen]:
    """Take two steps and one evaluation of each graph, with these experiments in lanes and all other lanes idle."""

    def state(lane: int) -> dict[str, Tensor]:
        return {name: tensor[lane].clone() for name, tensor in lanes.state.items()}

    with _borrowed(lanes, placed):
        for moment in _moments(lanes):
            for lane, one in placed.items():
                lanes.state["lane/step"][lane] = moment(one.experiment)
            lanes.sync()
            before = {lane: state(lane) for lane in placed}
            lanes.advance(1)
            for lane, one in placed.items():
                one.steps.append((before[lane], state(lane)))
        for split in splits:
            # the first samples, and the last ones where another graph takes them
            own = {lane: {b - a: (a, b) for a, b in reversed(lanes.parts(lane, split))}.values() for lane in placed}
            for start_at, stop in sorted({each for parts in own.values() for each in parts}):
                metrics = lanes.evaluate_samples(split, start_at, stop)
                for lane, one in ((n, one) for n, one in placed.items() if (start_at, stop) in own[n]):
                    found = {name: values[lane].clone() for name, values in metrics.items()}
                    one.evaluations[split, start_at, stop] = found
    return list(placed.values())


@contextmanager
def _borrowed(lanes: Lanes, placed: Mapping[int, Seen]) -> Iterator[None]:
    """Put experiments into lanes, let the others stand still, and put back what was there."""
    alive = lanes.state["lane/alive"].clone()
    held = list(lanes.held)
    kept = {lane: {name: tensor[lane].clone() for name, tensor in lanes.state.items()} for lane in placed}
    try:
        lanes.state["lane/alive"].fill_(False)
        for lane, one in placed.items():
            lanes.fill(lane, one.experiment)
        yield
    finally:
        for lane, tensors in kept.items():
            for name, tensor in tensors.items():
                lanes.state[name][lane].copy_(tensor)
        lanes.state["lane/alive"].copy_(alive)
        lanes.held[:] = held
        lanes.sync()


def _moments(lanes: Lanes) -> list[Callable[[Experiment], int]]:
    """The steps that are taken: the first one, one in the middle, and the first one with a short batch, if there is."""
    template = lanes.template
    moments: list[Callable[[Experiment], int]] = [lambda one: 0, lambda one: one.steps // 2]
    if len(template.batch_sizes) > 1:

        def last(one: Experiment) -> int:
            # an experiment that ends before stands at its end, and takes none
            return min(template.batches.epoch(template.count(one, "train")) - 1, one.steps)

        moments.append(last)
    return moments


def _compare(seen: Seen, plain: Plain) -> list[str]:
    """Do in the plain loop what the lane did, and name what differs."""
    plain.fill(0, seen.experiment)
    size = seen.experiment.batch_size
    for before, after in seen.steps:
        # From the lane's own state each time: what rounding makes of one step is not held against the next.
        if not before["lane/alive"]:
            break
        if before["lane/step"] == before["lane/steps"]:
            continue

        def step(shift: Shift, start: Mapping[str, Tensor] = before) -> Outcome:
            plain.place(start)
            shift(plain.model)
            old = {n: p.detach().clone() for n, p in plain.model.named_parameters()}
            plain.advance(1)
            return _outcome(start, plain.state(), old)

        names = disagreeing(_outcome(before, after, part(before, "trained")), step, plain.model, size)
        if names:
            return names
    for (split, start, stop), found in seen.evaluations.items():

        def evaluate(shift: Shift, split: str = split, start: int = start, stop: int = stop) -> Outcome:
            plain.place(seen.steps[-1][1])
            with plain.averaged():
                shift(plain.model)
            return {f"{split}/{n}": v for n, v in plain.evaluate_samples(split, start, stop).items()}

        mine = {f"{split}/{name}": value for name, value in found.items()}
        names = disagreeing(mine, evaluate, plain.model, stop - start)
        if names:
            return names
    return []


def _outcome(before: Mapping[str, Tensor], after: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Outcome:
    """What a step did: whether it was sound; and if so, metrics, buffers, slots, and each parameter's change.

    Args:
        before: a lane's state: what it holds is compared, not what else a plain model may have made itself.
        after: after the step.
        old: the parameters before it.
    """
    outcome = {DIVERGES: ~after["lane/alive"]}
    if after["lane/alive"]:
        outcome |= {n: after[n] for n in before if n.startswith(("train/", "buffer/", "slot/"))}
        outcome |= {f"update/{n}": p.double() - old[n].double() for n, p in part(after, "trained").items()}
    return outcome


def _disagreement(lanes: Lanes, wrong: Sequence[tuple[Seen, list[str]]]) -> TaskError:
    how = "compiled graphs" if lanes.compile else "graphs"
    lines = [f"The {how} of {lanes.template.task_class.__name__} do not compute what plain PyTorch does:"]
    for one, names in wrong:
        rate = one.experiment.config["optimizer"].get("lr")
        at = "" if rate is None else f", here at the learning rate {rate:g}"
        lines.append(f"  experiment {one.original}{at}: {_told(names)}")
    compiler = (
        "Try trainer.compile=false: if that passes the check, the compiler is at fault, else coalesce is"
        if lanes.compile
        else "coalesce is at fault"
    )
    lines.append(
        f"No experiment of this graph was trained. {compiler}: please report it. trainer.stack=false trains in plain "
        f"loops meanwhile; trainer.check=false would train with the wrong numbers."
    )
    return TaskError("\n".join(lines))


def _told(names: Sequence[str]) -> str:
    """``slot/exp_avg/0.weight`` → ``0.weight (exp_avg)``: parameters and buffers by name, with what of them differs."""
    told: dict[str, list[str]] = {}
    for name in names:
        kind, _, rest = name.partition("/")
        if kind == "slot":
            kind, _, rest = rest.partition("/")
        named = kind in ("update", "buffer") or name.startswith("slot/")
        told.setdefault(rest if named else name, []).extend([kind] if named else [])
    texts = [f"{name} ({', '.join(kinds)})" if kinds else name for name, kinds in told.items()]
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")
