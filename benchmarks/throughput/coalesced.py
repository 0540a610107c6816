"""The side of coalesce: the runner runs a plan, with a run folder, and is stopped and let go on at its boundaries."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from coalesce import kernels  # first: it speaks to what torch loads

# isort: split
from benchmarks.throughput import replayed
from benchmarks.throughput.place import Place
from benchmarks.throughput.spent import Inside, Spent, parts
from benchmarks.throughput.worker import Channel, Pace
from benchmarks.throughput.workloads import STEPS, Workload
from coalesce.configuration import check_trainer, rides
from coalesce.engine.lanes import Lanes
from coalesce.experiment import Experiment
from coalesce.memory.measure import peak
from coalesce.runner.listener import Listener, Progress
from coalesce.runner.plan import Plan
from coalesce.runner.planning import make_plan
from coalesce.runner.run import run
from coalesce.store.beat import Beat
from coalesce.store.paths import RunPaths
from coalesce.store.writer import RunWriter


class Enough(Exception):
    """Ends a run from outside."""


class Watch(Listener):
    """Notes when what happens, and what has been spent until then."""

    def __init__(self) -> None:
        self.inside = Inside()
        self.at: dict[str, tuple[Spent, Spent]] = {}
        self._note("begun")

    def _note(self, what: str) -> None:
        self.at[what] = Spent.now(), self.inside.spent

    def compiling(self, cohort: int, what: str) -> None:
        if "compiling" not in self.at:
            self._note("compiling")

    def checking(self, cohort: int) -> None:
        self._note("compiled")

    def seconds(self) -> dict[str, float]:
        """Of tracing and compiling the step and the evaluation, by the clock and in parts (see `spent`), and of all
        until the first boundary."""
        self._note("first")
        self.at.setdefault("compiled", self.at["first"])
        before, after = self.at["compiling"], self.at["compiled"]
        first = self.at["first"][0] - self.at["begun"][0]
        told = parts(after[0] - before[0], after[1] - before[1])
        return {**told, "first_s": first.clock, "first_processor_s": first.processor}


class Losses(Watch):
    """Keeps the losses of the first steps, and stops the run then."""

    def __init__(self, steps: int, lane_of: Mapping[str, int]):
        super().__init__()
        self.rows = [[float("nan")] * len(lane_of) for _ in range(steps)]
        self.lane_of = lane_of
        self.told: dict[str, float] = {}

    def metrics(self, experiment: Experiment, step: int, values: Mapping[str, Any]) -> None:
        if "train/loss" in values:
            self.rows[step - 1][self.lane_of[experiment.id]] = values["train/loss"]

    def advanced(self, progress: Progress) -> None:
        self.told = self.told or self.seconds()
        if progress.steps >= len(self.rows) * len(self.lane_of):
            raise Enough


class Gate(Watch):
    """Lets the run go on while this side has its turn, and no further; between two turns it waits for a command."""

    def __init__(self, channel: Channel, plan: Plan):
        super().__init__()
        self.channel, self.plan = channel, plan
        self.steps = 0
        self.pace: Pace | None = None
        self.first = True

    def advanced(self, progress: Progress) -> None:
        steps, self.steps = progress.steps - self.steps, progress.steps
        if self.first:
            self.first = False
            self.channel.reply({"answer": self.seconds()})
        elif self.pace is not None:
            if not self.pace.mark(steps):
                return
            self.channel.reply({"answer": self.pace.result()})
        command = self.channel.read()
        if command["do"] == "end":
            raise Enough
        self.pace = Pace(command["start"], command["end"])


class Coalesced:
    """The process of this side.

    Args:
        workload: what is trained.
        place: where.
        threads: of torch.
        compile: as `Trainer` has it.
        graphs: the step is replayed as a CUDA graph, see `replayed`.
    """

    def __init__(
        self, workload: dict[str, Any], place: dict[str, Any], threads: int, compile: bool = True, graphs: bool = False
    ):
        self.channel = Channel()
        self.place = Place(**place)
        self.place.settle()
        if graphs:
            replayed.install()
        self.workload = Workload(**workload)
        self.threads, self.compile = threads, compile
        self.folder = tempfile.TemporaryDirectory()
        self._plan: Plan | None = None

    def plan(self, every: int) -> Plan:
        """What `coalesce.sweep` would run of it: only the evaluations come at the end alone."""
        experiments, keys = self.workload.experiments()
        settings = {"width": max(2, self.workload.lanes), "threads": self.threads, "compile": self.compile}
        settings |= {"every": every, "evaluate_every": STEPS}
        settings |= {"matmul_precision": self.place.matmul or kernels.EXACT}
        trainer = check_trainer({**settings, "monitor": "val/loss", "device": self.place.device})
        if self._plan is None:
            self._plan = make_plan(self.workload.name, keys, experiments, rides, trainer)
        return replace(self._plan, trainer=replace(self._plan.trainer, every=every))

    def losses(self, steps: int) -> dict[str, Any]:
        """Losses of the first steps of all experiments: (steps, K), and the seconds that the compiler took."""
        plan = self.plan(1)
        told = Losses(steps, {e.id: lane for lane, e in enumerate(plan.experiments)})
        self._run(plan, told)
        return {"losses": told.rows, **told.told}

    def prepare(self) -> None:
        """Run; commands are obeyed at the run's boundaries from here on until "end" comes."""
        plan = self.plan(self.workload.every)
        self._run(plan, Gate(self.channel, plan))

    def memory(self) -> dict[str, int | None]:
        """Bytes of one lane's state, what a step takes above it, and what the plan says of both together."""
        plan = self.plan(self.workload.every)
        (planned,) = plan.cohorts
        chosen = planned.pieces, planned.lowerings, planned.checkpoint
        with kernels.threads(self.threads):
            lanes = Lanes(planned.template, planned.width, self.place.device, self.compile, 1024, *chosen)
            for lane, experiment in enumerate(plan.experiments):
                lanes.fill(lane, experiment)
            lanes.advance(2)
            step = peak(lambda: lanes.advance(1), device=self.place.device)
        width = planned.width
        return {
            "state": lanes.bytes // width,
            "step": None if step is None else step // width,
            "planned": planned.bytes_per_lane,
        }

    def _run(self, plan: Plan, watch: Watch) -> None:
        paths = RunPaths.create(Path(self.folder.name), self.workload.name)
        with suppress(Enough), watch.inside.counting():
            run(plan, [RunWriter(paths), Beat(paths), watch], rides=rides)

    def serve(self) -> None:
        """Obey commands; never returns."""
        while True:
            command = self.channel.read()
            do = command.pop("do")
            if do == "prepare":
                self.prepare()
                self.channel.reply({"answer": None})
            else:
                self.channel.reply({"answer": getattr(self, do)(**command)})


if __name__ == "__main__":
    Coalesced(**json.loads(sys.argv[1])).serve()
