"""What will run: every experiment, its cohort, the width of each cohort, and what it is thought to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coalesce.experiment import Cohort, Experiment


@dataclass(frozen=True)
class Trainer:
    """How experiments are run; nothing here belongs to an experiment's id (but see `Hyper.follows`: some stand in for
    settings of the experiment's that were left open).

    Args:
        width: lanes per graph, or "auto": as many as the cohort has experiments, at most 128, and no more than there is
            memory for.
        memory_gib: the most that lanes and their data may take of the device's memory (GiB) where ``width`` is "auto";
            None: all that is free.
        every: steps between two host boundaries, where metrics are recorded and lanes are read out and refilled. Left
            out, or None, beside a smaller ``evaluate_every``, it is that.
        evaluate_every: steps of an experiment between two evaluations; a multiple of ``every``.
        evaluate_batch_size: samples per lane in one call of the evaluation graph.
        pieces: patterns of the names of modules at which the step's graph is cut into segments; "auto": blocks that
            repeat, and the layers of a large model; none: one graph.
        checkpoint: modules whose activations the backward pass computes again rather than keep: "auto" (blocks that
            repeat), a number of pieces, or patterns of names; none by default.
        convolution: how convolutions of all lanes are lowered: "auto" takes the fastest for each shape by measuring,
            "grouped" is what vmap does; see `engine.rules.lowerings` for the others.
        compile: compile the graphs (true), or run the same graphs operation by operation (false).
        check: before a cohort trains, compare its graphs with plain eager PyTorch, and stop if they differ.
        stack: false runs each experiment alone in a plain eager loop, for debugging: a breakpoint in ``loss`` works.
        device: "auto", "cpu" or "cuda".
        monitor, mode: the metric that "best" looks at, and whether "max" or "min" of it is best.
        show: more metrics that are summed up beside it at the end of a run: ``("test/accuracy",)``.
        threads: CPU threads of torch, or None: as many as torch takes by itself. Recorded, since results may
            depend on it in the last bit.
        matmul_precision: how exactly products of float32 are computed, by torch's names: "highest", "high" or "medium".
        weights: keep the final and the best weights of every experiment, where a run has a folder.
        on_error: what to do when an experiment fails: "continue" with the others, or "stop".
        snapshot_minutes: minutes between two snapshots of all lanes, which a run goes on from that was killed; 0: at
            every host boundary; None: only when a signal ends the run.
    """

    width: int | str = "auto"
    memory_gib: float | None = None
    every: int = 100
    evaluate_every: int = 500
    evaluate_batch_size: int = 1024
    pieces: str | tuple[str, ...] = "auto"
    checkpoint: str | int | tuple[str, ...] | None = None
    convolution: str = "auto"
    compile: bool = True
    check: bool = True
    stack: bool = True
    device: str = "auto"
    monitor: str = "val/accuracy"
    mode: str = "max"
    show: tuple[str, ...] = ()
    threads: int | None = None
    matmul_precision: str = "highest"
    weights: bool = True
    on_error: str = "continue"
    snapshot_minutes: float | None = 5.0


@dataclass(frozen=True)
class PlannedCohort:
    """A cohort and how it will run.

    Args:
        cohort: the experiments.
        width: lanes of its graph.
        pieces: the modules at which the graph is cut; where it is cut may show in the last bit.
        checkpoint: the modules that the backward pass computes again.
        lowerings: name of each convolution → how it is lowered, which shows in the last bits.
        parameters: parameters of one lane (elements).
        bytes_per_lane: what one lane takes at the most: its state (parameters, optimiser, buffers), its best state and
            snapshots as far as they are kept on the device, and its gradients and activations of one step.
        bytes_shared: the data that all lanes read, and what a step takes whatever its width.
        bytes_free: what the cohort could take when this was decided; None: not known.
        template: what the planner built of the cohort (a `coalesce.engine.template.Template`), for the run to use;
            without it the run builds its own.
    """

    cohort: Cohort
    width: int
    parameters: int
    bytes_per_lane: int
    bytes_shared: int
    bytes_free: int | None = None
    pieces: tuple[str, ...] = ()
    checkpoint: tuple[str, ...] = ()
    lowerings: Mapping[str, str] = field(default_factory=dict)
    template: Any = field(default=None, repr=False, compare=False)

    @property
    def bytes(self) -> int:
        return self.bytes_shared + self.width * self.bytes_per_lane


@dataclass(frozen=True)
class Plan:
    """Everything that a run is about to do.

    Args:
        name: the sweep's name.
        keys: the swept keys, dotted, in the sweep's order.
        experiments: in the sweep's order, each once.
        cohorts: in the order they run.
        trainer: with ``device`` and ``threads`` resolved.
        expected: experiments that a search will have asked for at the end, which makes them as it goes.
        failed: id → what kept an experiment from being planned: its data, its model or its loss raise.
        search: the kind of the search that asks for the experiments, as the run knows it; "": not known yet.
    """

    name: str
    keys: tuple[str, ...]
    experiments: tuple[Experiment, ...]
    cohorts: tuple[PlannedCohort, ...]
    trainer: Trainer
    failed: Mapping[str, str] = field(default_factory=dict)
    expected: int = 0
    search: str = ""

    @property
    def count(self) -> int:
        """Experiments in all."""
        return max(len(self.experiments), self.expected)
