"""K experiments as lanes of one graph: the stacked state, and what can be done with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import vmap

from coalesce import kernels
from coalesce.data import gather
from coalesce.engine.compiling import lift_constants
from coalesce.engine.lane import lane_metrics, lane_outputs, observed, riding_hyperparameters
from coalesce.engine.pieces import choose, cut_at
from coalesce.engine.step import build_step, part
from coalesce.engine.summary import Evaluation, Part, Summaries
from coalesce.engine.tape import Tape
from coalesce.engine.template import Template
from coalesce.engine.trace import trace
from coalesce.errors import TaskError
from coalesce.experiment import Experiment
from coalesce.optim.options import AVERAGE
from coalesce.random import key_of


@dataclass(frozen=True)
class Reading:
    """The lanes at a host boundary, on the CPU.

    Args:
        steps: (K,) updates done.
        alive: (K,) whether the lane is sound; a diverged one is not.
        metrics: name → (K,) float64, of each lane's last sound step.
        finite: (K,) whether the loss of the step at which a lane broke was finite: then an update was not.
    """

    steps: list[int]
    alive: list[bool]
    metrics: Mapping[str, list[float]]
    finite: Sequence[bool] = ()


def chunks(size: int, most: int) -> list[tuple[int, int]]:
    """Cut ``range(size)`` into pieces (start, stop) of ``most``, the last one shorter."""
    return [(start, min(start + most, size)) for start in range(0, size, most)]


class Lanes:
    """The stacked state of K lanes and the graphs that move it.

    An empty lane holds the template's initial weights and takes no step. Nothing here waits for the device except
    `read`, `evaluate` and `state_dict`.

    Args:
        template: of the cohort.
        width: K.
        device: where the state lies.
        compile: compile the graphs, or run them operation by operation.
        evaluate_batch_size: samples per call of the evaluation graph.
        pieces: names of the modules at which the graphs are cut into segments; None: see `pieces.choose`.
        lowerings: how convolutions are lowered, see `measure.choose_lowerings`; by itself as vmap does it.
        checkpoint: names of the modules that the backward pass computes again, see `pieces.recomputed`.
    """

    def __init__(
        self,
        template: Template,
        width: int,
        device: torch.device | str = "cpu",
        compile: bool = True,
        evaluate_batch_size: int = 1024,
        pieces: Sequence[str] | None = None,
        lowerings: Mapping[str, str] | None = None,
        checkpoint: Sequence[str] = (),
    ):
        if torch.device(device).type == "cpu" and not kernels.lanes_agree():
            warnings.warn(
                f"products were computed in this process before coalesce was imported, so that their last bit depends "
                f"on the lane: import coalesce first, or set {kernels.VARIABLE}={kernels.STRICT} in the environment",
                stacklevel=2,
            )
        self.template = template
        self.width = width
        self.device = torch.device(device)
        self.compile = compile
        self.evaluate_batch_size = evaluate_batch_size
        self.pieces = choose(template.model, width) if pieces is None else tuple(pieces)
        self.lowerings = lowerings or {}
        self.checkpoint = tuple(checkpoint)
        self.data = template.data.to(self.device)
        folds = template.folds
        self._tables = {s: [t.to(self.device) for t in folds.table(s)] for s in ("train", "val")} if folds else {}
        self.state = self._allocate()
        self._steps: dict[int, tuple[Tape, list[Tensor]]] = {}
        # Where each lane stands, as far as the host knows: it must know which graph is due, and may not wait for the
        # device to ask. A lane that broke is thought to go on until the next reading, which costs calls, not results.
        self._at = [(0, 0)] * width
        #: What stands in each lane: the representative, until another is put there.
        self.held: list[Experiment] = [template.experiment] * width
        self._summaries = Summaries(template)
        self._evaluations: dict[tuple[int, bool], tuple[Tape, list[Tensor]]] = {}

    def fill(self, lane: int, experiment: Experiment) -> None:
        """Put an experiment in its initial state into a lane. Compiles nothing.

        Raises:
            TaskError: the experiment's own code fails, or it does not fit the graph.
        """
        for name, value in self._initial(experiment).items():
            self.state[name][lane].copy_(value)
        self._at[lane] = 0, experiment.steps
        self.held[lane] = experiment

    def clear(self, lane: int) -> None:
        """Let a lane stand still from now on."""
        self.state["lane/alive"][lane] = False
        self._at[lane] = 0, 0

    def prepare_step(self) -> None:
        """Trace and compile the step for batches of each size that occurs, unless that was done."""
        data = [*self.data.leaves("train"), *self._tables.get("train", [])]
        for size in self.template.batch_sizes:
            if size not in self._steps:
                with _short_batch(size, self.template.batches.size):
                    how = self.pieces, size, self.lowerings, self.checkpoint
                    module, constants = build_step(self.template, self.state, data, *how)
                inputs = [*self.state.values(), *data, *constants]
                self._steps[size] = (self._tape(module, inputs, [*self.state], len(constants)), inputs)

    def advance(self, count: int) -> None:
        """Take ``count`` steps in every lane that is filled, sound and not at its end.

        Raises:
            TaskError: at the first call, if the task's code cannot be traced.
        """
        self.prepare_step()
        for size in self._calls(count):
            run, inputs = self._steps[size]
            with torch.no_grad():
                run(*inputs)

    def _calls(self, count: int) -> list[int]:
        """The sizes of the batches of the next ``count`` steps, in the order in which their graphs are to be called."""
        ends = [min(step + count, end) for step, end in self._at]
        before, self._at = self._at, [(end, last) for end, (_, last) in zip(ends, self._at, strict=True)]
        if len(self._steps) == 1:
            return [self.template.batches.size] * count
        counts = [self.template.count(held, "train") for held in self.held]
        lanes = [(step, end, n) for (step, _), end, n in zip(before, ends, counts, strict=True)]
        torch.add(self.state["lane/step"], count, out=self.state["lane/until"])
        return self.template.batches.calls(lanes)

    def read(self) -> Reading:
        """Where the lanes stand."""
        metrics = {name: value.tolist() for name, value in part(self.state, "train").items()}
        steps, alive, finite = (self.state[f"lane/{n}"].tolist() for n in ("step", "alive", "finite"))
        reading = Reading(steps, alive, metrics, finite)
        self._stand(reading)
        return reading

    def sync(self) -> None:
        """Look where the lanes stand, after their state was written from outside; `read` does so too."""
        self._stand(Reading(self.state["lane/step"].tolist(), self.state["lane/alive"].tolist(), {}))

    def _stand(self, reading: Reading) -> None:
        lanes = zip(reading.steps, reading.alive, self.state["lane/steps"].tolist(), strict=True)
        self._at = [(step, end if sound else step) for step, sound, end in lanes]

    def prepare_evaluation(self, split: str) -> None:
        """Trace and compile what a split needs, unless that was done."""
        own = self.template.has_own(split)
        for count in self.template.counts(split):
            for start, stop in chunks(count, self.evaluate_batch_size):
                if (stop - start, own) not in self._evaluations:
                    self._evaluations[stop - start, own] = self._build_evaluation(stop - start, own)

    def evaluate(self, split: str) -> dict[str, list[float]]:
        """Every metric of a split: the averages, and what the task's `summary` makes of its outputs.

        Returns:
            name → (K,).

        Raises:
            TaskError: the user's summary fails.
        """
        evaluation = self.measure(split)
        summaries = [self.summary(lane, split, evaluation) for lane in range(self.width)]
        return evaluation.metrics | {n: [found[n] for found in summaries] for n in self.template.rehearsal.summaries}

    def measure(self, split: str) -> Evaluation:
        """Each metric of the task over a whole split, averaged over its samples; and the task's outputs."""
        names = self.template.rehearsal.metrics
        total = torch.zeros(len(names), self.width, dtype=torch.float64, device=self.device)
        parts: list[Part] = []
        for start, stop in sorted({each for lane in range(self.width) for each in self.parts(lane, split)}):
            metrics, outputs = self._evaluate_samples(split, start, stop)
            if metrics:
                found = torch.stack(list(metrics.values()))
                if self.template.has_own(split):
                    # a lane whose fold has no such part was given one sample again and again: that must not count
                    mine = [(start, stop) in self.parts(lane, split) for lane in range(self.width)]
                    found = torch.where(torch.tensor(mine, device=self.device), found, 0.0)
                total += found * (stop - start)
            if outputs:
                parts.append((start, stop, {n: t.to("cpu", copy=True) for n, t in outputs.items()}))
        counts = torch.tensor([self.template.count(held, split) for held in self.held], device=self.device)
        return Evaluation(dict(zip(names, (total / counts).tolist(), strict=True)), parts)

    def summary(self, lane: int, split: str, evaluation: Evaluation) -> dict[str, float]:
        """What the task's `summary` makes of a lane's outputs; empty if it has none.

        Raises:
            TaskError: the user's code fails.
        """
        if not evaluation.parts:
            return {}
        outputs = evaluation.outputs(lane, self.parts(lane, split))
        return self._summaries.of(lane, self.held[lane], split, outputs)

    def parts(self, lane: int, split: str) -> list[tuple[int, int]]:
        """The parts (start, stop) in which a lane's samples of a split are evaluated."""
        return chunks(self.template.count(self.held[lane], split), self.evaluate_batch_size)

    def evaluate_samples(self, split: str, start: int, stop: int) -> dict[str, Tensor]:
        """What one call of an evaluation graph gives: each metric of the task over these samples, and its outputs.

        Args:
            start, stop: one of `parts`, of some lane. Of the others nothing is to be read.

        Returns:
            name → (K,) float64, and "output" and its name → (K, stop - start, …), on the lanes' device.
        """
        metrics, outputs = self._evaluate_samples(split, start, stop)
        return metrics | {f"output {n}".rstrip(): t for n, t in outputs.items()}

    def _evaluate_samples(self, split: str, start: int, stop: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.prepare_evaluation(split)
        names, outputs = self.template.rehearsal.metrics, self.template.rehearsal.outputs
        run, constants = self._evaluations[stop - start, self.template.has_own(split)]
        with torch.no_grad():
            found = run(*self._evaluated(), *self._batch(split, start, stop), *constants)
        metrics = {n: f.to(torch.float64) for n, f in zip(names, found[: len(names)], strict=True)}
        return metrics, dict(zip(outputs, found[len(names) :], strict=True))

    def _batch(self, split: str, start: int, stop: int) -> list[Tensor]:
        """The leaves of some samples: (size, …), or (K, size, …) where lanes have their own.

        A lane that has fewer gets its last one repeated.
        """
        if not self.template.has_own(split):
            return [leaf[start:stop] for leaf in self.data.leaves(split)]
        rows, first, counts = self._tables[split]
        fold = self.state["lane/fold"]
        place = torch.minimum(torch.arange(start, stop, device=self.device), counts[fold][:, None] - 1)
        return [gather(leaf, rows[first[fold][:, None] + place]) for leaf in self.data.leaves("train")]

    def observe(self, values: Mapping[int, float]) -> None:
        """Let the schedule judge some lanes by the metric that it monitors. The others stay as they are.

        Args:
            values: lane → its metric, which may be NaN.
        """
        value = torch.full((self.width,), torch.nan, dtype=torch.float64)
        for lane, one in values.items():
            value[lane] = one
        seen = torch.zeros(self.width, dtype=torch.bool)
        seen[list(values)] = True
        value, seen = value.to(self.device), seen.to(self.device)
        before = part(self.state, "verdict")
        judge = vmap(lambda *lane: observed(self.template, *lane))
        clock, lr = self.state["lane/step"], self.state["optimizer/lr"]
        after = judge(before, value, clock, lr, part(self.state, "schedule"))
        for name, old in before.items():
            old.copy_(torch.where(seen, after[name], old))

    def state_dict(self, lane: int, raw: bool = False) -> dict[str, Tensor]:
        """A lane's weights and buffers as a plain model's `state_dict`, on the CPU. The template's model is not
        touched by training.

        Args:
            lane: which.
            raw: the weights as they are trained, where ``optimizer.ema`` keeps an average of them.
        """
        model = self.template.model
        state = part(self.state, "trained") | part(self.state, "fixed") | part(self.state, "buffer")
        state |= {} if raw else part(self.state, f"slot/{AVERAGE}")
        tied = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
        everything = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        kept = model.state_dict()
        return {n: state[tied[id(t)]][lane].detach().cpu().clone() for n, t in everything if n in kept}

    @property
    def bytes(self) -> int:
        """Memory of the stacked state."""
        return sum(t.nbytes for t in self.state.values())

    def _initial(self, experiment: Experiment) -> dict[str, Tensor]:
        """One lane's state before its first step, in the order in which the graph takes it."""
        template = self.template
        model, riding = template.lane(experiment)
        tensors = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
        state = {f"trained/{n}": tensors[n] for n in template.trained}
        state |= {f"fixed/{n}": tensors[n] for n in template.fixed}
        state |= {f"buffer/{n}": t.detach() for n, t in model.named_buffers()}
        for name in template.trained:
            slots = template.slots(name, tensors[name], experiment)
            state |= {f"slot/{slot}/{name}": t for slot, t in slots.items()}
        for i, value in enumerate(riding.values()):
            rides = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=template.dtype)
            state[f"riding/{i}"] = rides
        for kind, rule in (("optimizer", template.optimizer), ("schedule", template.schedule)):
            found = riding_hyperparameters(rule, experiment.config[kind])
            state |= {f"{kind}/{n}": t for n, t in found.items()}
        verdict = template.schedule.init(experiment.config["schedule"])
        state |= {f"verdict/{n}": t for n, t in verdict.items()}
        state["lane/key"] = key_of(experiment.seed)
        state["lane/step"] = torch.tensor(0)
        state["lane/steps"] = torch.tensor(experiment.steps)
        state["lane/alive"] = torch.tensor(True)
        state["lane/finite"] = torch.tensor(True)
        if template.folds is not None:
            state["lane/fold"] = torch.tensor(experiment.fold)
        if len(template.batch_sizes) > 1:
            # how far the lane goes in this `advance`: its graphs are called more often than it moves
            state["lane/until"] = torch.tensor(0)
        for name in ("loss", *template.rehearsal.extras):
            state[f"train/{name}"] = torch.tensor(float("nan"), dtype=torch.float64)
        return state

    def _allocate(self) -> dict[str, Tensor]:
        one = self._initial(self.template.experiment)
        one["lane/alive"] = torch.tensor(False)
        return {
            name: value.to(self.device).expand(self.width, *value.shape).clone(memory_format=torch.contiguous_format)
            for name, value in one.items()
        }

    def _evaluated_names(self) -> list[str]:
        averaged = self.template.static_hyper["ema"] is not None
        kinds = (f"slot/{AVERAGE}/" if averaged else "trained/", "fixed/", "buffer/", "riding/")
        return [*(n for n in self.state if n.startswith(kinds)), "lane/key", "lane/step"]

    def _evaluated(self) -> list[Tensor]:
        """The part of the state that an evaluation reads."""
        return [self.state[name] for name in self._evaluated_names()]

    def _build_evaluation(self, size: int, own: bool) -> tuple[Tape, list[Tensor]]:
        """The graph that evaluates a batch of one size: the same for all lanes, or of each lane's own samples."""
        template = self.template
        names, instance, outputs = self._evaluated_names(), template.fresh(self.lowerings), template.rehearsal.outputs

        def evaluate(*inputs: Tensor) -> list[Tensor]:
            state = dict(zip(names, inputs, strict=False))
            batch = template.data.unflatten(inputs[len(names) :])
            weights = part(state, "trained") | part(state, f"slot/{AVERAGE}") | part(state, "fixed")
            riding = {path: state[f"riding/{i}"] for i, path in enumerate(template.riding)}

            def one(weights: Any, buffers: Any, riding: Any, key: Tensor, step: Tensor, batch: Any) -> Any:
                mine = template, instance, weights, buffers, riding, key, step, batch
                return lane_metrics(*mine), lane_outputs(*mine, size) if outputs else {}

            lanes = weights, part(state, "buffer"), riding, state["lane/key"], state["lane/step"]
            metrics, given = vmap(one, in_dims=(0, 0, 0, 0, 0, 0 if own else None))(*lanes, batch)
            return [*(metrics[n] for n in template.rehearsal.metrics), *(given[n] for n in outputs)]

        shape = (self.width, size) if own else (size,)
        leaves = [t.new_empty((*shape, *t.shape[1:])) for t in self.data.leaves("train")]
        examples = [*self._evaluated(), *leaves]
        with cut_at(instance.model, self.pieces):
            module = trace(evaluate, examples)
        constants = lift_constants(module)
        return self._tape(module, [*examples, *constants], names, len(constants)), constants

    def _tape(self, module: fx.GraphModule, inputs: Sequence[Tensor], names: Sequence[str], constants: int) -> Tape:
        """A graph that takes some of the state, data, and constants."""
        cheap = [
            i
            for i, name in enumerate(names)
            if name.startswith(("lane/", "riding/", "optimizer/", "schedule/", "verdict/"))
        ]
        return Tape(module, inputs, self.compile, [*cheap, *range(len(inputs) - constants, len(inputs))])


@contextmanager
def _short_batch(size: int, full: int) -> Iterator[None]:
    """Say of an error that only the short batch has that it is that batch's."""
    try:
        yield
    except TaskError as error:
        if size == full:
            raise
        raise TaskError(
            f"{error}\nThis is the short batch of {size} at the end of an epoch; batches of {full} pass. "
            f"data.remainder=drop leaves it out, data.remainder=straddle fills it up."
        ) from error
