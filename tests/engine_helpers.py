"""Experiments of a task class, lanes of them, and the plain loops that they are compared with.

The plain loop stands on stock PyTorch alone: `nn.Module`, `torch.optim`, `torch.optim.lr_scheduler`, autograd. Of
coalesce it uses the two streams that are defined as functions of (seed, position) and of (seed, step, call), so that
both sides see the same batches and the same dropout masks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import coalesce
from coalesce.configuration import rides
from coalesce.engine.lanes import Lanes
from coalesce.engine.rules import Rules
from coalesce.engine.template import Template, task_class
from coalesce.experiment import DATA, Experiment, group
from coalesce.optim import OPTIMIZERS, SCHEDULES
from coalesce.random import Purpose, bits, epoch_order, key_of, uniform
from coalesce.task import Task
from optim_rows import BY_RULE
from schedule_oracles import make_scheduler

Config = Mapping[str, Any]


class Toy(coalesce.Task):
    """Linear(10, 33)-ReLU-Dropout-Linear(33, 3) on 57 samples: sizes that leave a tail in every vector of the CPU.

    The numbers are drawn in float32 whatever the dtype is, so that two dtypes start from the same ones.
    """

    def __init__(self, dropout: float = 0.0, smoothing: float = 0.0, dtype: str = "float32"):
        self.dropout = dropout
        self.smoothing = smoothing
        self.dtype = getattr(torch, dtype)

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(57, 10, generator=generator).to(self.dtype)
        y = torch.randint(3, (57,), generator=generator)
        return coalesce.Data(train=(x, y), val=(x[:20], y[:20]), classes=3)

    def model(self) -> nn.Module:
        layers = [nn.Linear(10, 33), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(33, 3)]
        return nn.Sequential(*layers).to(self.dtype)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> coalesce.task.Loss:
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=self.smoothing)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(-1) == y).double().mean()}


def experiment(
    task: type[Task],
    arguments: Config | None = None,
    optimizer: Config | str = "sgd",
    schedule: Config | str = "constant",
    steps: int = 10,
    batch_size: int = 8,
    seed: int = 0,
    data: Config | None = None,
    precision: str = "float32",
) -> Experiment:
    """One experiment of a task class that stands at the top level of a module."""

    def resolve(rules: Mapping[str, Any], given: Config | str, key: str) -> dict[str, Any]:
        config = {"name": given} if isinstance(given, str) else dict(given)
        resolved, problems = rules[config["name"]].check(config, key)
        assert not problems, problems
        return dict(resolved)

    return Experiment(
        {
            "task": {"_target_": f"{task.__module__}.{task.__qualname__}", **(arguments or {})},
            "optimizer": resolve(OPTIMIZERS, optimizer, "optimizer"),
            "schedule": resolve(SCHEDULES, schedule, "schedule"),
            "steps": steps,
            "batch_size": batch_size,
            "seed": seed,
            "data": {**DATA, **(data or {})},
            "precision": precision,
        }
    )


def template_of(experiments: Sequence[Experiment]) -> Template:
    """The template of experiments that share one graph."""
    cohorts = group(experiments, rides)
    assert len(cohorts) == 1, f"these experiments make {len(cohorts)} cohorts"
    return Template(cohorts[0])


def lanes_of(
    experiments: Sequence[Experiment], width: int | None = None, compile: bool = False, **options: Any
) -> Lanes:
    """Lanes of one cohort, each filled with the experiment of its number."""
    lanes = Lanes(template_of(experiments), width or len(experiments), compile=compile, **options)
    for lane, one in enumerate(experiments):
        lanes.fill(lane, one)
    return lanes


@dataclass
class Alone:
    """An experiment in a plain loop. ``averaged`` holds the moving average of the weights, where there is one."""

    task: Task
    model: nn.Module
    averaged: AveragedModel | None = None
    losses: list[float] = field(default_factory=list)


def train_alone(
    experiment: Experiment, steps: int | None = None, after: Callable[..., None] | None = None, draws: bool = False
) -> Alone:
    """The experiment as stock PyTorch trains it.

    Args:
        steps: how many of its steps to take; all by default.
        after: called with (step, task, model) after each update.
        draws: its loss draws by torch's random functions, for which the rules of a lane are used.
    """
    alone = build_alone(experiment)
    task, model = alone.task, alone.model
    optimizer, scheduler = make_optimizer(model, experiment)
    options, size = experiment.config["optimizer"], experiment.batch_size
    count, decay = options["accumulate"], options["ema"]
    if decay is not None:
        alone.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    data, key = task.data(), key_of(experiment.seed)
    indices = indices_of(experiment, data.sizes["train"])
    for step in range(experiment.steps if steps is None else steps):
        index = next(indices)
        model.train()
        optimizer.zero_grad()
        losses = []
        for number, piece in enumerate(index.split(size // count)):
            call = step * count + number
            stream = Rules(key, torch.tensor(call), {}) if draws else stream_dropout(key, call)
            mixed = torch.autocast("cpu", torch.bfloat16, enabled=experiment.precision == "bfloat16")
            with mixed, stream:
                loss = task.loss(model, data.batch("train", piece))
            loss = loss[0] if isinstance(loss, tuple) else loss
            # micro-batches weigh by their samples: the last one of a short batch may be shorter
            (loss * len(piece) / len(index)).backward()
            losses.append(loss.item() * len(piece) / len(index))
        if options["clip_value"] is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), options["clip_value"])
        if options["clip_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
        optimizer.step()
        scheduler.step()
        if alone.averaged is not None:
            alone.averaged.update_parameters(model)
        alone.losses.append(sum(losses))
        if after is not None:
            after(step, task, model)
    return alone


#: Graphs of a step that is not cut: what stands in front of it, and its own.
GRAPHS = 2


def indices_of(experiment: Experiment, count: int) -> Iterator[Tensor]:
    """The samples of an experiment's batches: cut out of one endless row, or from torch's own `DataLoader`.

    Args:
        count: N, samples of the training split.
    """
    size = experiment.batch_size
    left = torch.zeros(0, dtype=torch.int64)
    for epoch in itertools.count():
        order = epoch_order(experiment.seed, epoch, count)
        if experiment.remainder == "straddle":
            left = torch.cat([left, order])
            while len(left) >= size:
                yield left[:size]
                left = left[size:]
        else:
            sampler = order.tolist()
            yield from DataLoader(range(count), size, sampler=sampler, drop_last=experiment.remainder == "drop")  # type: ignore[arg-type]


def build_alone(experiment: Experiment) -> Alone:
    """The task, and the model as `torch.manual_seed` makes it."""
    arguments = {k: v for k, v in experiment.config["task"].items() if k != "_target_"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        task = task_class(experiment)(**arguments)
        torch.manual_seed(experiment.seed)
        return Alone(task, task.model())


def make_optimizer(model: nn.Module, experiment: Experiment) -> tuple[torch.optim.Optimizer, Any]:
    """The `torch.optim` class that the configuration names, with parameter groups, and its learning rate scheduler."""
    config = experiment.config["optimizer"]
    optimizer = BY_RULE[config["name"]].build(dict(model.named_parameters()), config)
    return optimizer, make_scheduler(optimizer, experiment.config["schedule"], experiment.steps)


@contextmanager
def stream_dropout(key: Tensor, step: int) -> Iterator[None]:
    """Layers that draw do so from the stream of (key, step), call after call. What is done with the draws is written
    out by hand, as torch's documentation and the papers have it."""
    calls = 0

    def mask(shape: Sequence[int], dtype: torch.dtype, p: float) -> Tensor:
        nonlocal calls
        calls += 1
        return uniform(key, torch.tensor(step), calls, shape, dtype) >= p

    def fine(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Of 53 bits."""
        nonlocal calls
        calls += 1
        assert dtype == torch.float64
        words = bits(key, Purpose.DRAW, torch.tensor(step), calls, 2 * math.prod(shape)).view(2, *shape)
        return ((words[0] << 21) + (words[1] >> 11)).double() / 2.0**53

    def channels(input: Tensor) -> Sequence[int]:
        return (*input.shape[:2], *[1] * (input.dim() - 2))

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training:
            return input
        return torch.where(mask(input.shape, input.dtype, p), input / (1 - p) if p < 1 else input, 0.0)

    def dropout_channels(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training:
            return input
        return torch.where(mask(channels(input), input.dtype, p), input / (1 - p), 0.0)

    def alpha(input: Tensor, p: float, shape: Sequence[int]) -> Tensor:
        """SELU's lowest value where it is dropped; then mean 0 and variance 1 again."""
        lowest = -1.6732632423543772 * 1.0507009873554805
        q = 1 - p
        scale = (q + lowest**2 * q * (1 - q)) ** -0.5
        dropped = torch.where(mask(shape, input.dtype, p), input, lowest)
        return scale * dropped - scale * (1 - q) * lowest

    def alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        return alpha(input, p, input.shape) if training else input

    def feature_alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        return alpha(input, p, channels(input)) if training else input

    def rrelu(
        input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
    ) -> Tensor:
        slope = fine(input.shape, input.dtype) * (upper - lower) + lower if training else (lower + upper) / 2
        return torch.where(input > 0, input, input * slope)

    def fractional(function: Callable[..., Any], dims: int) -> Callable[..., Any]:
        """torch takes the numbers that say where the windows lie."""

        def pool(input: Tensor, *args: Any, _random_samples: None = None, **kwargs: Any) -> Any:
            return function(input, *args, _random_samples=fine((*input.shape[:2], dims), input.dtype), **kwargs)

        return pool

    stock = F.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """With dropout as the documentation of `scaled_dot_product_attention` defines it, without a boolean mask."""
        if dropout_p == 0:
            return stock(query, key, value, attn_mask, 0.0, is_causal, **options)
        assert not options
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
        if is_causal:
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        scores = scores if attn_mask is None else scores + attn_mask
        return dropout(torch.softmax(scores, dim=-1), dropout_p) @ value

    def recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
        """Layer by layer, dropout between them; masks of shape (D, T, B)."""

        def layers(input: Tensor, hx: Any, weights: Any, bias: bool, count: int, p: float, *rest: bool) -> Any:
            train, bidirectional, batch_first = rest
            x, ends = input.transpose(0, 1) if batch_first else input, []
            states, directions = (hx,) if isinstance(hx, Tensor) else hx, 2 if bidirectional else 1
            per = len(weights) // count
            for i in range(count):
                start = tuple(s[i * directions : (i + 1) * directions] for s in states)
                own = weights[i * per : (i + 1) * per]
                one = start[0] if isinstance(hx, Tensor) else start
                if i and p:
                    x = dropout(x.permute(2, 0, 1), p, train).permute(1, 2, 0)
                x, *end = function(x, one, own, bias, 1, 0.0, train, bidirectional, False)
                ends.append(end)
            return x.transpose(0, 1) if batch_first else x, *(torch.cat(e) for e in zip(*ends, strict=True))

        return layers

    by_hand = {
        "dropout": dropout,
        "dropout1d": dropout_channels,
        "dropout2d": dropout_channels,
        "dropout3d": dropout_channels,
        "alpha_dropout": alpha_dropout,
        "feature_alpha_dropout": feature_alpha_dropout,
        "rrelu": rrelu,
        "fractional_max_pool2d": fractional(F.fractional_max_pool2d, 2),
        "fractional_max_pool3d": fractional(F.fractional_max_pool3d, 3),
        "scaled_dot_product_attention": attention,
    }
    with ExitStack() as stack:
        for name, function in by_hand.items():
            stack.enter_context(patch.object(F, name, function))
        for name in ("gru", "lstm"):
            stack.enter_context(patch.object(torch._VF, name, recurrent(getattr(torch, name))))
        yield


def worst(lanes: Lanes, lane: int, model: nn.Module, leave_out: Sequence[str] = ()) -> float:
    """The largest difference between a lane's weights and buffers and a plain model's."""
    mine, theirs = lanes.state_dict(lane), model.state_dict()
    assert mine.keys() == theirs.keys()
    pairs = [(mine[n].double(), theirs[n].double()) for n in theirs if n not in leave_out and theirs[n].numel()]
    return max((a - b).abs().max().item() for a, b in pairs)
