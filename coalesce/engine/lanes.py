"""K experiments as lanes of one graph: the stacked state, and what can be done with it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import vmap

from coalesce import kernels
from coalesce.engine.compiling import lift_constants
from coalesce.engine.lane import lane_metrics, observed, riding_hyperparameters
from coalesce.engine.pieces import choose, cut_at
from coalesce.engine.step import build_step, part
from coalesce.engine.tape import Tape
from coalesce.engine.template import Template
from coalesce.engine.trace import trace
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
    """

    steps: list[int]
    alive: list[bool]
    metrics: Mapping[str, list[float]]


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
    """

    def __init__(
        self,
        template: Template,
        width: int,
        device: torch.device | str = "cpu",
        compile: bool = True,
        evaluate_batch_size: int = 1024,
        pieces: Sequence[str] | None = None,
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
        self.data = template.data.to(self.device)
        self.state = self._allocate()
        self._step: tuple[Tape, list[Tensor]] | None = None
        self._evaluations: dict[int, tuple[Tape, list[Tensor]]] = {}

    def fill(self, lane: int, experiment: Experiment) -> None:
        """Put an experiment in its initial state into a lane. Compiles nothing.

        Raises:
            TaskError: the experiment's own code fails, or it does not fit the graph.
        """
        for name, value in self._initial(experiment).items():
            self.state[name][lane].copy_(value)

    def clear(self, lane: int) -> None:
        """Let a lane stand still from now on."""
        self.state["lane/alive"][lane] = False

    def prepare_step(self) -> None:
        """Trace and compile the step, unless that was done."""
        if self._step is None:
            leaves = self.data.leaves("train")
            module, constants = build_step(self.template, self.state, leaves, self.pieces)
            inputs = [*self.state.values(), *leaves, *constants]
            self._step = (self._tape(module, inputs, [*self.state], len(constants)), inputs)

    def advance(self, count: int) -> None:
        """Take ``count`` steps in every lane that is filled, sound and not at its end.

        Raises:
            TaskError: at the first call, if the task's code cannot be traced.
        """
        self.prepare_step()
        assert self._step is not None
        run, inputs = self._step
        with torch.no_grad():
            for _ in range(count):
                run(*inputs)

    def read(self) -> Reading:
        """Where the lanes stand."""
        metrics = {name: value.tolist() for name, value in part(self.state, "train").items()}
        return Reading(self.state["lane/step"].tolist(), self.state["lane/alive"].tolist(), metrics)

    def prepare_evaluation(self, split: str) -> None:
        """Trace and compile what a split needs, unless that was done."""
        for size in {stop - start for start, stop in self._chunks(split)}:
            if size not in self._evaluations:
                self._evaluations[size] = self._build_evaluation(size)

    def evaluate(self, split: str) -> dict[str, list[float]]:
        """Each metric of the task over a whole split, averaged over its samples.

        Returns:
            name → (K,).
        """
        names = self.template.rehearsal.metrics
        total = torch.zeros(len(names), self.width, dtype=torch.float64, device=self.device)
        for start, stop in self._chunks(split):
            found = self.evaluate_samples(split, start, stop)
            if found:
                total += torch.stack(list(found.values())) * (stop - start)
        return dict(zip(names, (total / self.data.sizes[split]).tolist(), strict=True))

    def evaluate_samples(self, split: str, start: int, stop: int) -> dict[str, Tensor]:
        """Each metric of the task over the samples of one call of an evaluation graph.

        Args:
            start, stop: a piece as `chunks` cuts the split.

        Returns:
            name → (K,) float64, on the lanes' device.
        """
        self.prepare_evaluation(split)
        run, constants = self._evaluations[stop - start]
        with torch.no_grad():
            found = run(*self._evaluated(), *[leaf[start:stop] for leaf in self.data.leaves(split)], *constants)
        return {n: f.to(torch.float64) for n, f in zip(self.template.rehearsal.metrics, found, strict=True)}

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

    def _chunks(self, split: str) -> list[tuple[int, int]]:
        return chunks(self.data.sizes[split], self.evaluate_batch_size)

    def _evaluated_names(self) -> list[str]:
        averaged = self.template.static_hyper["ema"] is not None
        kinds = (f"slot/{AVERAGE}/" if averaged else "trained/", "fixed/", "buffer/", "riding/")
        return [*(n for n in self.state if n.startswith(kinds)), "lane/key", "lane/step"]

    def _evaluated(self) -> list[Tensor]:
        """The part of the state that an evaluation reads."""
        return [self.state[name] for name in self._evaluated_names()]

    def _build_evaluation(self, size: int) -> tuple[Tape, list[Tensor]]:
        template = self.template
        names, instance = self._evaluated_names(), template.fresh()

        def evaluate(*inputs: Tensor) -> list[Tensor]:
            state = dict(zip(names, inputs, strict=False))
            batch = template.data.unflatten(inputs[len(names) :])
            weights = part(state, "trained") | part(state, f"slot/{AVERAGE}") | part(state, "fixed")
            riding = {path: state[f"riding/{i}"] for i, path in enumerate(template.riding)}

            def one(weights: Any, buffers: Any, riding: Any, key: Tensor, step: Tensor) -> dict[str, Tensor]:
                return lane_metrics(template, instance, weights, buffers, riding, key, step, batch)

            found = vmap(one)(weights, part(state, "buffer"), riding, state["lane/key"], state["lane/step"])
            return [found[n] for n in template.rehearsal.metrics]

        leaf = self.data.leaves("train")
        examples = [*self._evaluated(), *[t.new_empty((size, *t.shape[1:])) for t in leaf]]
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
