"""Evaluating lanes: one graph per size of a batch, for all lanes at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from coalesce.data import Data, gather
from coalesce.engine.compiling import lift_constants
from coalesce.engine.lane import lane_metrics, lane_outputs
from coalesce.engine.pieces import cut_at
from coalesce.engine.shares import Shares
from coalesce.engine.step import State, part
from coalesce.engine.summary import Evaluation, Part, Summaries
from coalesce.engine.tape import Tape
from coalesce.engine.template import Template
from coalesce.engine.trace import trace
from coalesce.experiment import Experiment
from coalesce.optim.options import AVERAGE


def chunks(size: int, most: int) -> list[tuple[int, int]]:
    """Cut ``range(size)`` into pieces (start, stop) of ``most``, the last one shorter."""
    return [(start, min(start + most, size)) for start in range(0, size, most)]


def evaluated_names(template: Template, names: Sequence[str]) -> list[str]:
    """The part of the lanes' state that an evaluation reads: what a lane's metrics follow from."""
    averaged = template.static_hyper["ema"] is not None
    kinds = (f"slot/{AVERAGE}/" if averaged else "trained/", "fixed/", "buffer/", "riding/")
    return [*(n for n in names if n.startswith(kinds)), "lane/key", "lane/step"]


class Evaluations:
    """The graphs that evaluate lanes, and what is made of their results. It holds no state of a lane.

    Args:
        template: of the cohort.
        shares: how the lanes are shared out.
        width: K, of which results are given; the state has all lanes of all shares.
        names: of the whole state, in the order in which graphs take it.
        data: on the lanes' device; ``tables``: split → the folds' table there, where lanes train on folds.
        batch_size: samples per lane in one call.
        compile: compile the graphs, or run them operation by operation.
        pieces, lowerings: as in `Lanes`.
    """

    def __init__(
        self,
        template: Template,
        shares: Shares,
        width: int,
        names: Sequence[str],
        data: Data,
        tables: Mapping[str, Sequence[Tensor]],
        batch_size: int,
        compile: bool,
        pieces: Sequence[str],
        lowerings: Mapping[str, str],
    ):
        self.template, self.shares, self.width = template, shares, width
        self.data, self.tables = data, tables
        self.batch_size, self.compile, self.pieces, self.lowerings = batch_size, compile, pieces, lowerings
        self.names = evaluated_names(template, names)
        self._summaries = Summaries(template)
        self._graphs: dict[tuple[int, bool], tuple[Tape, list[Tensor]]] = {}

    def prepare(self, split: str, state: State) -> None:
        """Trace and compile what a split needs, unless that was done."""
        own = self.template.has_own(split)
        for count in self.template.counts(split):
            for start, stop in chunks(count, self.batch_size):
                if (stop - start, own) not in self._graphs:
                    self._graphs[stop - start, own] = self._build(stop - start, own, state)

    def measure(self, split: str, state: State, held: Sequence[Experiment]) -> Evaluation:
        """Each metric of the task over a whole split, averaged over its samples; and the task's outputs.

        Args:
            state: at least the entries that an evaluation reads.
            held: what stands in each lane.
        """
        names, device = self.template.rehearsal.metrics, state["lane/step"].device
        total = torch.zeros(len(names), self.width, dtype=torch.float64, device=device)
        parts: list[Part] = []
        for start, stop in sorted({each for experiment in held for each in self.parts(experiment, split)}):
            metrics, outputs = self.samples(split, start, stop, state)
            if metrics:
                found = torch.stack(list(metrics.values()))
                if self.template.has_own(split):
                    # a lane whose fold has no such part was given one sample again and again: that must not count
                    mine = [(start, stop) in self.parts(experiment, split) for experiment in held]
                    found = torch.where(torch.tensor(mine, device=device), found, 0.0)
                total += found * (stop - start)
            if outputs:
                parts.append((start, stop, {n: t.to("cpu", copy=True) for n, t in outputs.items()}))
        counts = torch.tensor([self.template.count(experiment, split) for experiment in held], device=device)
        return Evaluation(dict(zip(names, (total / counts).tolist(), strict=True)), parts)

    def summary(self, lane: int, experiment: Experiment, split: str, evaluation: Evaluation) -> dict[str, float]:
        """What the task's `summary` makes of a lane's outputs; empty if it has none.

        Raises:
            TaskError: the user's code fails.
        """
        if not evaluation.parts:
            return {}
        outputs = evaluation.outputs(lane, self.parts(experiment, split))
        return self._summaries.of(lane, experiment, split, outputs)

    def parts(self, experiment: Experiment, split: str) -> list[tuple[int, int]]:
        """The parts (start, stop) in which an experiment's samples of a split are evaluated."""
        return chunks(self.template.count(experiment, split), self.batch_size)

    def samples(self, split: str, start: int, stop: int, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Each metric over some samples (K,), and what the task gives for each of them (K, stop - start, …)."""
        self.prepare(split, state)
        names, outputs = self.template.rehearsal.metrics, self.template.rehearsal.outputs
        run, constants = self._graphs[stop - start, self.template.has_own(split)]
        states = [*zip(*(self.shares.cut(state[n]) for n in self.names), strict=True)]
        batches = self._batches(split, start, stop, state)

        def evaluate(share: int) -> list[Tensor]:
            with torch.no_grad():
                return run(*states[share], *batches[share], *constants)

        parts = self.shares.run(evaluate)
        found = [torch.cat(each)[: self.width] if len(each) > 1 else each[0] for each in zip(*parts, strict=True)]
        metrics = {n: f.to(torch.float64) for n, f in zip(names, found[: len(names)], strict=True)}
        return metrics, dict(zip(outputs, found[len(names) :], strict=True))

    def _batches(self, split: str, start: int, stop: int, state: State) -> list[Sequence[Tensor]]:
        """The leaves of some samples for each share: (size, …), or (lanes, size, …) where lanes have their own.

        A lane that has fewer gets its last one repeated.
        """
        if not self.template.has_own(split):
            return [[leaf[start:stop] for leaf in self.data.leaves(split)]] * len(self.shares)
        rows, first, counts = self.tables[split]
        fold = state["lane/fold"]
        place = torch.minimum(torch.arange(start, stop, device=fold.device), counts[fold][:, None] - 1)
        samples = self.shares.cut(rows[first[fold][:, None] + place])
        return [[gather(leaf, mine) for leaf in self.data.leaves("train")] for mine in samples]

    def _build(self, size: int, own: bool, state: State) -> tuple[Tape, list[Tensor]]:
        """The graph that evaluates a batch of one size: the same for all lanes, or of each lane's own samples."""
        template, names = self.template, self.names
        instance, outputs = template.fresh(self.lowerings), template.rehearsal.outputs

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

        shape = (self.shares.lanes, size) if own else (size,)
        leaves = [t.new_empty((*shape, *t.shape[1:])) for t in self.data.leaves("train")]
        examples = [*(self.shares.cut(state[n])[0] for n in names), *leaves]
        with cut_at(instance.model, self.pieces):
            module = trace(evaluate, examples)
        constants = lift_constants(module)
        with self.shares.prepare():
            tape = Tape.of_lanes(module, [*examples, *constants], names, len(constants), self.compile)
        return tape, constants
