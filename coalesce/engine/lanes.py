"""K experiments as lanes of one graph: the stacked state, and what can be done with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from coalesce import kernels
from coalesce.engine import preparing
from coalesce.engine.evaluations import Evaluations
from coalesce.engine.lane import initial_state, observed
from coalesce.engine.order import Order
from coalesce.engine.pieces import choose
from coalesce.engine.shares import Shares
from coalesce.engine.step import build_step, part
from coalesce.engine.summary import Evaluation
from coalesce.engine.tape import Tape
from coalesce.engine.template import Template
from coalesce.errors import TaskError
from coalesce.experiment import Experiment
from coalesce.optim.options import AVERAGE
from coalesce.random import seed_of


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
        shared: whether compiled lanes are shared out among the threads of a CPU, see `shares`.
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
        shared: bool = True,
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
        self.pieces = choose(template.model, width) if pieces is None else tuple(pieces)
        self.lowerings = lowerings or {}
        self.checkpoint = tuple(checkpoint)
        self.shares = Shares.of(template, width, self.device, compile and shared)
        self.data = template.data.to(self.device)
        folds = template.folds
        self._tables = {s: [t.to(self.device) for t in folds.table(s)] for s in ("train", "val")} if folds else {}
        # of all shares; the K lanes are the first ones
        self._whole = self._allocate(initial_state(template, template.experiment))
        self.state = {name: value[:width] for name, value in self._whole.items()}
        self._steps: dict[int, tuple[Tape, list[Tensor]]] = {}
        self.order = Order(template.batches)
        # Where each lane stands, as far as the host knows: it must know which graph is due, and may not wait for the
        # device to ask. A lane that broke is thought to go on until the next reading, which costs calls, not results.
        self._at = [(0, 0)] * width
        # by which it takes its samples: a copied lane goes on with those of whom it was copied from
        self._seeds = [0] * width
        #: What stands in each lane: the representative, until another is put there.
        self.held: list[Experiment] = [template.experiment] * width
        how = evaluate_batch_size, compile, self.pieces, self.lowerings
        self._evaluations = Evaluations(template, self.shares, width, [*self.state], self.data, self._tables, *how)
        self._best: dict[str, Tensor] = {}

    def fill(self, lane: int, experiment: Experiment) -> None:
        """Put an experiment in its initial state into a lane. Compiles nothing.

        Raises:
            TaskError: the experiment's own code fails, or it does not fit the graph.
        """
        self._write(lane, experiment, initial_state(self.template, experiment))

    def clear(self, lane: int) -> None:
        """Let a lane stand still from now on."""
        self.state["lane/alive"][lane] = False
        self._at[lane] = 0, 0

    def prepare_step(self) -> None:
        """Trace and compile the step for batches of each size that occurs, unless that was done."""
        data = [*self.data.leaves("train"), *self._tables.get("train", [])]
        for size in self.template.batch_sizes:
            if size not in self._steps:
                if self.compile:
                    preparing.begin(self.device.type)
                with _short_batch(size, self.template.batches.size):
                    how = self.pieces, size, self.lowerings, self.checkpoint
                    index = torch.zeros(self.shares.lanes, size, dtype=torch.int64, device=self.device)
                    state = {name: self.shares.cut(value)[0] for name, value in self._whole.items()}
                    module, constants = build_step(self.template, state, [index, *data], *how)
                shared = [*data, *constants]
                with self.shares.prepare():
                    inputs = [*state.values(), index, *shared]
                    tape = Tape.of_lanes(module, inputs, [*state], len(constants), self.compile)
                self._steps[size] = (tape, shared)

    def advance(self, count: int) -> None:
        """Take ``count`` steps in every lane that is filled, sound and not at its end.

        Raises:
            TaskError: at the first call, if the task's code cannot be traced.
        """
        self.prepare_step()
        lanes = [
            (seed, step, min(step + count, end), self.template.count(held, "train"))
            for seed, held, (step, end) in zip(self._seeds, self.held, self._at, strict=True)
        ]
        self._at = [(until, end) for (_, _, until, _), (_, end) in zip(lanes, self._at, strict=True)]
        if "lane/until" in self.state:
            torch.add(self.state["lane/step"], count, out=self.state["lane/until"])
        # nobody is in the lanes that fill up the last share
        lanes += [(0, 0, 0, lanes[0][-1])] * (self.shares.width - self.width)
        states = [*zip(*(self.shares.cut(value) for value in self._whole.values()), strict=True)]
        for size, samples in self.order.calls(lanes, count):
            indices = self.shares.cut(samples.to(self.device, non_blocking=True), 1)
            self.shares.run(partial(self._take, size, states, indices))

    def _take(self, size: int, states: Sequence[Sequence[Tensor]], indices: Sequence[Tensor], share: int) -> None:
        """Take the steps of one share that have these samples, (steps, lanes, size)."""
        run, shared = self._steps[size]
        with torch.no_grad():
            for index in indices[share]:
                run(*states[share], index, *shared)

    def read(self) -> Reading:
        """Where the lanes stand."""
        metrics = {name: value.tolist() for name, value in part(self.state, "train").items()}
        steps, alive, finite = (self.state[f"lane/{n}"].tolist() for n in ("step", "alive", "finite"))
        reading = Reading(steps, alive, metrics, finite)
        self._stand(reading)
        return reading

    def sync(self) -> None:
        """Look where the lanes stand and whose samples they take, after their state was written from outside."""
        self._seeds = [seed_of(key) for key in self.state["lane/key"].cpu()]
        self._stand(Reading(self.state["lane/step"].tolist(), self.state["lane/alive"].tolist(), {}))

    def _stand(self, reading: Reading) -> None:
        lanes = zip(reading.steps, reading.alive, self.state["lane/steps"].tolist(), strict=True)
        self._at = [(step, end if sound else step) for step, sound, end in lanes]

    def prepare_evaluation(self, split: str) -> None:
        """Trace and compile what a split needs, unless that was done."""
        self._evaluations.prepare(split, self._whole)

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

    def measure(self, split: str, best: bool = False) -> Evaluation:
        """Each metric of the task over a whole split, averaged over its samples; and the task's outputs.

        Args:
            best: of the states that `keep` kept, not of the present ones. Of a lane that has none nothing is to be
                read.
        """
        return self._evaluations.measure(split, self._kept() if best else self._whole, self.held)

    def summary(self, lane: int, split: str, evaluation: Evaluation) -> dict[str, float]:
        """What the task's `summary` makes of a lane's outputs; empty if it has none.

        Raises:
            TaskError: the user's code fails.
        """
        return self._evaluations.summary(lane, self.held[lane], split, evaluation)

    def parts(self, lane: int, split: str) -> list[tuple[int, int]]:
        """The parts (start, stop) in which a lane's samples of a split are evaluated."""
        return self._evaluations.parts(self.held[lane], split)

    def evaluate_samples(self, split: str, start: int, stop: int) -> dict[str, Tensor]:
        """What one call of an evaluation graph gives: each metric of the task over these samples, and its outputs.

        Args:
            start, stop: one of `parts`, of some lane. Of the others nothing is to be read.

        Returns:
            name → (K,) float64, and "output" and its name → (K, stop - start, …), on the lanes' device.
        """
        metrics, outputs = self._evaluations.samples(split, start, stop, self._whole)
        return metrics | {f"output {n}".rstrip(): t for n, t in outputs.items()}

    def keep(self, lanes: Sequence[int]) -> None:
        """Keep what the metrics of some lanes follow from, as it is now, in place of what was kept of them before."""
        index = torch.tensor(lanes, dtype=torch.int64, device=self.device)
        for name, kept in self._kept().items():
            kept.index_copy_(0, index, self.state[name].index_select(0, index))

    def _kept(self) -> dict[str, Tensor]:
        if not self._best:
            self._best = {name: self._whole[name].clone() for name in self._evaluations.names}
            self._best |= {n: self._whole[n] for n in self._whole if n == "lane/fold"}
        return self._best

    def save(self, lanes: Sequence[int]) -> list[dict[str, Tensor]]:
        """All of the state of some lanes, on the CPU, for `put`."""
        index = torch.tensor(lanes, dtype=torch.int64, device=self.device)
        both = self.state | {f"best/{name}": kept for name, kept in self._best.items()}
        found = {name: value.index_select(0, index).cpu() for name, value in both.items()}
        return [{name: value[i] for name, value in found.items()} for i in range(len(lanes))]

    def put(self, lane: int, experiment: Experiment, saved: Mapping[str, Tensor]) -> None:
        """Put an experiment into a lane, in the state that `save` gave of it.

        Raises:
            TaskError: the experiment's own code fails, or it does not fit the graph.
            ValueError: the state is another graph's.
        """
        state = self._fitting(experiment, saved)
        best = {name.removeprefix("best/"): tensor for name, tensor in saved.items() if name.startswith("best/")}
        # whether it fits the graph
        self.template.lane(experiment)
        self._write(lane, experiment, state)
        if best:
            kept = self._kept()
            for name, value in best.items():
                kept[name][lane].copy_(value)

    def go_on(self, lane: int, experiment: Experiment, saved: Mapping[str, Tensor]) -> None:
        """Let a lane go on from a state as whoever it was saved of would with the floats of this experiment.

        What the lane itself kept as its best stays.

        Raises:
            TaskError: the experiment's own code fails, or it does not fit the graph.
            ValueError: the state is another graph's.
        """
        floats = initial_state(self.template, experiment)
        state = self._fitting(experiment, saved)
        state |= {n: t for n, t in floats.items() if n.startswith(("riding/", "optimizer/", "schedule/"))}
        self._write(lane, experiment, state)

    def _write(self, lane: int, experiment: Experiment, state: Mapping[str, Tensor]) -> None:
        for name, value in state.items():
            self.state[name][lane].copy_(value)
        self._at[lane] = int(state["lane/step"]), int(state["lane/steps" if state["lane/alive"] else "lane/step"])
        self._seeds[lane] = seed_of(state["lane/key"])
        self.held[lane] = experiment

    def _fitting(self, experiment: Experiment, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What was saved of a lane's present state, if it is this graph's."""
        state = {name: tensor for name, tensor in saved.items() if not name.startswith("best/")}
        for name in sorted({*self.state, *state}):
            here, there = self.state.get(name), state.get(name)
            if here is None or there is None or here.shape[1:] != there.shape or here.dtype != there.dtype:
                raise ValueError(f"the saved state of experiment {experiment} is another graph's: see {name}")
        return state

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

    def state_dict(self, lane: int, raw: bool = False, best: bool = False) -> dict[str, Tensor]:
        """A lane's weights and buffers as a plain model's `state_dict`, on the CPU. The template's model is not
        touched by training.

        Args:
            lane: which.
            raw: the weights as they are trained, where ``optimizer.ema`` keeps an average of them.
            best: those that `keep` kept.
        """
        model, whole = self.template.model, self._kept() if best else self.state
        state = part(whole, "trained") | part(whole, "fixed") | part(whole, "buffer")
        state |= {} if raw else part(whole, f"slot/{AVERAGE}")
        tied = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
        everything = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        kept = model.state_dict()
        return {n: state[tied[id(t)]][lane].detach().cpu().clone() for n, t in everything if n in kept}

    @property
    def evaluate_batch_size(self) -> int:
        """Samples per lane in one call of an evaluation graph."""
        return self._evaluations.batch_size

    @property
    def bytes(self) -> int:
        """Memory of the stacked state."""
        return sum(t.nbytes for t in self._whole.values())

    def _allocate(self, one: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state of all shares' lanes, empty ones."""
        found = {}
        for name, value in {**one, "lane/alive": torch.tensor(False)}.items():
            stacked = value.to(self.device).expand(self.shares.width, *value.shape)
            found[name] = stacked.clone(memory_format=torch.contiguous_format)
        return found


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
