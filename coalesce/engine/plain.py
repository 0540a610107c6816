"""One experiment alone in a plain eager loop, for debugging: a breakpoint in `loss` works, tracebacks are the user's.

The same batches, draws, update rules and schedules as in a lane, on the real model, with autograd's own backward pass
and neither tracing nor vmap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from coalesce.engine.evaluations import chunks
from coalesce.engine.lane import hyperparameters, observed, riding_hyperparameters, scheduled
from coalesce.engine.lanes import Reading
from coalesce.engine.order import Order
from coalesce.engine.precision import autocast
from coalesce.engine.rehearsal import check_outputs, check_scalars, split_loss
from coalesce.engine.rules import Rules
from coalesce.engine.summary import Evaluation, Part, Summaries
from coalesce.engine.template import Template, build
from coalesce.experiment import Experiment
from coalesce.optim.options import AVERAGE, apply
from coalesce.random import key_of, seed_of


class Plain:
    """What `Lanes` is at width 1, unstacked.

    Args:
        template: of the cohort.
        device: where to train.
        evaluate_batch_size: samples per call of `metrics`.
    """

    width = 1

    def __init__(self, template: Template, device: torch.device | str = "cpu", evaluate_batch_size: int = 1024):
        self.template = template
        self.device = torch.device(device)
        self.evaluate_batch_size = evaluate_batch_size
        self.data = template.own_data(template.experiment).to(self.device)
        self.summaries = Summaries(template)
        self._order = Order(template.batches)
        self.step, self.alive, self.finite = 0, False, True
        self.kept: dict[str, Tensor] = {}

    def prepare_step(self) -> None:
        """Nothing to compile."""

    def prepare_evaluation(self, split: str) -> None:
        """Nothing to compile."""

    def fill(self, lane: int, experiment: Experiment) -> None:
        """Start an experiment from its initial state."""
        config = experiment.config
        self.experiment = experiment
        self.data = self.template.own_data(experiment).to(self.device)
        self.task, self.model = build(experiment)
        self.model.to(self.device)
        self.key = key_of(experiment.seed).to(self.device)
        self.optimizer = riding_hyperparameters(self.template.optimizer, config["optimizer"])
        self.schedule = riding_hyperparameters(self.template.schedule, config["schedule"])
        self.verdict = self.template.schedule.init(config["schedule"])
        named = dict(self.model.named_parameters())
        self.slots = {n: self.template.slots(n, named[n].detach(), experiment) for n in self.template.trained}
        self.metrics = {n: float("nan") for n in ("loss", *self.template.rehearsal.extras)}
        self.step, self.alive, self.finite = 0, True, True
        self.kept = {}

    def clear(self, lane: int) -> None:
        """Stand still from now on."""
        self.alive = False

    def advance(self, count: int) -> None:
        """Take ``count`` steps, fewer at the experiment's end or if it diverges."""
        for _ in range(count):
            if self.alive and self.step < self.experiment.steps:
                self._advance()

    def read(self) -> Reading:
        """Where the experiment stands, as `Lanes.read` tells it."""
        return Reading([self.step], [self.alive], {n: [v] for n, v in self.metrics.items()}, [self.finite])

    def evaluate(self, split: str) -> dict[str, list[float]]:
        """Every metric of a split, as `Lanes.evaluate` tells it."""
        evaluation = self.measure(split)
        return evaluation.metrics | {n: [v] for n, v in self.summary(0, split, evaluation).items()}

    def measure(self, split: str, best: bool = False) -> Evaluation:
        """Each metric over a split, averaged over its samples, and the task's outputs; of what `keep` kept, or now."""
        if best:
            now = self._lasting()
            self._load(self.kept)
            try:
                return self.measure(split)
            finally:
                self._load(now)
        total = dict.fromkeys(self.template.rehearsal.metrics, 0.0)
        size = self.data.sizes[split]
        parts: list[Part] = []
        for start, stop in chunks(size, self.evaluate_batch_size):
            metrics, outputs = self._evaluate_samples(split, start, stop)
            for name, value in metrics.items():
                total[name] += float(value) * (stop - start)
            if outputs:
                parts.append((start, stop, {n: t[None].cpu() for n, t in outputs.items()}))
        return Evaluation({name: [value / size] for name, value in total.items()}, parts)

    def summary(self, lane: int, split: str, evaluation: Evaluation) -> dict[str, float]:
        """What the task's `summary` makes of its outputs; empty if it has none."""
        if not evaluation.parts:
            return {}
        outputs = evaluation.outputs(0, chunks(self.data.sizes[split], self.evaluate_batch_size))
        return self.summaries.of(0, self.experiment, split, outputs)

    def evaluate_samples(self, split: str, start: int, stop: int) -> dict[str, Tensor]:
        """Each metric over some samples of a split, 0-d; and what the task gives for each of them."""
        metrics, outputs = self._evaluate_samples(split, start, stop)
        return metrics | {f"output {n}".rstrip(): t for n, t in outputs.items()}

    def _evaluate_samples(self, split: str, start: int, stop: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.model.eval()
        known = self.template.rehearsal
        batch = self.data.batch(split, torch.arange(start, stop, device=self.device))
        outputs: dict[str, Tensor] = {}
        with torch.no_grad(), self.averaged(), autocast(self.experiment, self.device):
            with Rules(self.key, self._count(self.step), {}):
                found = check_scalars(self.task.metrics(self.model, batch), "metrics()")
            if known.outputs:
                with Rules(self.key, self._count(self.step), {}):
                    outputs = check_outputs(self.task.outputs(self.model, batch), "outputs()", stop - start)
        metrics = {name: found[name].detach() for name in known.metrics}
        return metrics, {name: outputs[name].detach() for name in known.outputs}

    def state(self) -> dict[str, Tensor]:
        """A copy of what steps change, under the names that `Lanes.state` gives it, without a lane dimension."""
        named = dict(self.model.named_parameters())
        state = {f"trained/{n}": named[n].detach().clone() for n in self.template.trained}
        state |= {f"buffer/{n}": b.clone() for n, b in self.model.named_buffers()}
        state |= {f"slot/{slot}/{n}": t for n, slots in self.slots.items() for slot, t in slots.items()}
        state |= {f"train/{n}": torch.tensor(v, dtype=torch.float64) for n, v in self.metrics.items()}
        return {**state, "lane/step": torch.tensor(self.step), "lane/alive": torch.tensor(self.alive)}

    def place(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a lane's state: its parameters, buffers, optimiser state and step.

        Args:
            state: one lane's part of `Lanes.state`, of an experiment that `fill` was given.
        """
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        with torch.no_grad():
            for name, value in state.items():
                kind, _, rest = name.partition("/")
                if kind in ("trained", "fixed", "buffer"):
                    named[rest].copy_(value)
        self.slots = {n: {s: state[f"slot/{s}/{n}"].clone() for s in slots} for n, slots in self.slots.items()}
        self.step, self.alive = int(state["lane/step"]), bool(state["lane/alive"])

    def observe(self, values: Mapping[int, float]) -> None:
        """Let the schedule judge the experiment, as `Lanes.observe` does."""
        if 0 in values:
            value = torch.tensor(values[0], dtype=torch.float64)
            lr, step = self.optimizer["lr"], self._count(self.step)
            self.verdict = observed(self.template, self.verdict, value, step, lr, self.schedule)

    def keep(self, lanes: Sequence[int]) -> None:
        """Keep what the metrics follow from, as `Lanes.keep` does."""
        if lanes:
            self.kept = self._lasting()

    def _lasting(self) -> dict[str, Tensor]:
        return {n: t.clone() for n, t in self.state().items() if not n.startswith("train/")}

    def _load(self, state: Mapping[str, Tensor]) -> None:
        alive, finite = self.alive, self.finite
        self.place(state)
        self.alive, self.finite = alive, finite

    def save(self, lanes: Sequence[int]) -> list[dict[str, Tensor]]:
        """All of the experiment's state, on the CPU, for `put`."""
        state = self.state() | {f"verdict/{n}": t for n, t in self.verdict.items()}
        # whose samples and draws they are: a copy goes on with those of whom it was copied from
        state |= {"lane/key": self.key, "lane/finite": torch.tensor(self.finite)}
        state |= {f"best/{n}": t for n, t in self.kept.items()}
        return [{n: t.cpu() for n, t in state.items()} for _ in lanes]

    def put(self, lane: int, experiment: Experiment, saved: Mapping[str, Tensor]) -> None:
        """Put an experiment in the state that `save` gave of it."""
        self.fill(lane, experiment)
        here = {*self.save([0])[0]}
        for name in here ^ {n for n in saved if not n.startswith("best/")}:
            raise ValueError(f"the saved state of experiment {experiment} is another model's: see {name}")
        self.place({n: t for n, t in saved.items() if not n.startswith("best/")})
        self.kept = {n.removeprefix("best/"): t for n, t in saved.items() if n.startswith("best/")}
        self.verdict = {n: saved[f"verdict/{n}"] for n in self.verdict}
        self.metrics = {n: float(saved[f"train/{n}"]) for n in self.metrics}
        self.finite, self.key = bool(saved["lane/finite"]), saved["lane/key"].to(self.device)

    def go_on(self, lane: int, experiment: Experiment, saved: Mapping[str, Tensor]) -> None:
        """As `Lanes.go_on`."""
        kept = self.kept
        self.put(lane, experiment, saved)
        self.kept = kept

    def state_dict(self, lane: int, raw: bool = False, best: bool = False) -> dict[str, Tensor]:
        """The model's, on the CPU; ``raw`` and ``best`` as in `Lanes.state_dict`."""
        if best:
            now = self._lasting()
            self._load(self.kept)
            try:
                return self.state_dict(lane, raw)
            finally:
                self._load(now)
        with nullcontext() if raw else self.averaged():
            return {n: t.detach().cpu().clone() for n, t in self.model.state_dict().items()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the moving average of its weights, where there is one."""
        named = dict(self.model.named_parameters())
        averages = {n: state[AVERAGE] for n, state in self.slots.items() if AVERAGE in state}
        raw = {n: named[n].data for n in averages}
        try:
            for name, average in averages.items():
                named[name].data = average
            yield
        finally:
            for name, weight in raw.items():
                named[name].data = weight

    def _count(self, value: int) -> Tensor:
        return torch.tensor(value, dtype=torch.int64, device=self.device)

    def _advance(self) -> None:
        template, config = self.template, self.experiment.config
        count, samples = template.accumulate, self.data.sizes["train"]
        index = self._order.batch(seed_of(self.key), self.step, samples).to(self.device)
        size = len(index)
        self.model.train()
        self.model.zero_grad()
        before = {n: b.clone() for n, b in self.model.named_buffers()}
        metrics: dict[str, float] = {}
        for number, piece in enumerate(index.split(template.batches.size // count)):
            # of equal ones exactly their number
            shares = size / len(piece)
            batch = self.data.batch("train", piece)
            stream = Rules(self.key, self._count(self.step * count + number), {})
            with autocast(self.experiment, self.device), stream:
                loss, extras = split_loss(self.task.loss(self.model, batch), f"{type(self.task).__name__}.loss()")
            self.finite = bool(torch.isfinite(loss))
            if not self.finite:
                return self._break(before)
            # before the update: what the task returned may be a parameter itself
            found = {"loss": loss.item(), **{n: float(v.detach()) for n, v in extras.items()}}
            metrics = {n: metrics.get(n, 0.0) + v / shares for n, v in found.items()}
            (loss / shares).backward()
        named = dict(self.model.named_parameters())
        trained = [named[n] for n in self.template.trained]
        if self.optimizer.get("clip_norm") is not None:
            if self.optimizer.get("clip_value") is not None:
                torch.nn.utils.clip_grad_value_(trained, float(self.optimizer["clip_value"]))
            torch.nn.utils.clip_grad_norm_(trained, float(self.optimizer["clip_norm"]))
        riding = dict(self.optimizer)
        clock = self._count(self.step), self._count(self.experiment.steps)
        riding |= scheduled(template, riding, self.schedule, self.verdict, *clock)
        hyper = hyperparameters(template.optimizer, config["optimizer"], riding)
        sound = True
        with torch.no_grad():
            for name in self.template.trained:
                param, grad = named[name], named[name].grad
                if grad is None:
                    # this step's loss had no use for it; torch.optim skips it too
                    continue
                old, names, after = self.slots[name], template.names[name], self._count(self.step + 1)
                new, slots = apply(template.optimizer, param, grad, old, hyper, names, after)
                # as in a lane: an entry that would break keeps its last value
                kept = torch.isfinite(new)
                whole = kept.all()
                sound = sound and bool(whole)
                masks = {n: kept if v.shape == param.shape else whole for n, v in slots.items()}
                self.slots[name] = {n: torch.where(masks[n], v, old[n]) for n, v in slots.items()}
                param.copy_(torch.where(kept, new, param))
        if not sound:
            return self._break(before)
        self.metrics = metrics
        self.step += 1

    def _break(self, buffers: Mapping[str, Tensor]) -> None:
        """Stand still, with the buffers of the last step that was taken."""
        self.alive = False
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])
