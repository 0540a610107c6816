"""The four ways of training one and the same model: a plain loop, a hook, a compiled step, a coalesced step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from coalesce.configuration import make_experiments, rides
from coalesce.data import Data
from coalesce.engine.backprop import BackProp
from coalesce.engine.lanes import Lanes
from coalesce.engine.single import compile_step
from coalesce.engine.step import part
from coalesce.engine.tape import Segment, Tape
from coalesce.engine.template import Template
from coalesce.experiment import group
from coalesce.memory.timeline import (
    ACTIVATION,
    AUTOGRAD_DETAIL,
    GRADIENT,
    INPUT,
    OPTIMIZER_STATE,
    PARAMETER,
    TEMPORARY,
    Recorder,
    update,
)
from coalesce.random import epoch_order
from coalesce.task import Task

CLASSES = 10
#: Lanes of the coalesced step.
WIDTH = 4


@dataclass(frozen=True)
class Size:
    """Of the model.

    Args:
        layers: Linear(features, features), before the head, Linear(features, 10).
        features: of each.
        batch: samples.
    """

    layers: int
    features: int
    batch: int


SIZES = {"tiny": Size(4, 256, 32), "small": Size(12, 1024, 256), "blog": Size(12, 8192, 2048)}


class Stack(Task):
    """A stack of Linear layers and a head, on noise.

    Args:
        layers, features, batch: see `Size`. No activation is as large as a parameter, by which gradients are told.
    """

    def __init__(self, layers: int = 12, features: int = 1024, batch: int = 256):
        if batch in (features, CLASSES, 1) or features == CLASSES:
            raise ValueError(f"batch={batch}: an activation would be as large as a parameter of {features} features")
        self.layers, self.features, self.batch = layers, features, batch

    def data(self) -> Data:
        x = torch.randn(self.batch, self.features)
        return Data(train=(x, torch.arange(self.batch) % CLASSES))

    def model(self) -> nn.Module:
        layers = [nn.Linear(self.features, self.features) for _ in range(self.layers)]
        for layer in layers:
            # torch's own have a variance of 1 / (3 features): the gradients of the first layers would vanish below
            # AdamW's eps
            layer.weight.data.mul_(3**0.5)
        return nn.Sequential(*layers, nn.Linear(self.features, CLASSES))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch)}


class Mode(Protocol):
    """One way of training, ready to go. Its steps are numbered from its first one."""

    #: Experiments that it trains at once.
    width: int

    @property
    def known(self) -> Mapping[str, Sequence[Tensor]]:
        """Category → tensors that are there between steps."""

    def step(self) -> object:
        """Train for one step."""

    def record(self, recorder: Recorder) -> None:
        """Train for one step that is being recorded."""

    def parameters(self, lane: int) -> Mapping[str, Tensor]:
        """Those of an experiment."""

    def batch(self, lane: int, step: int) -> Any:
        """The batch that an experiment is trained on at a step, as `Stack.loss` takes it."""


class AdamW(torch.optim.AdamW):
    """torch's own, whose steps a recorder sees, whoever calls them."""

    def step(self, closure: Any = None) -> Any:
        with update():
            return super().step(closure)


class Eager:
    """A plain loop, with torch's optimiser or with that of `coalesce.BackProp`."""

    width = 1

    def __init__(self, size: Size, device: torch.device, hook: bool = False):
        self.task = Stack(**asdict(size))
        self.model: nn.Module = seeded_model(self.task, 0).to(device)
        self.data = _data(self.task, device)
        self.optimizer: torch.optim.Optimizer = AdamW(self.model.parameters())
        if hook:
            self.model, self.optimizer = BackProp(self.model, self.optimizer)

    @property
    def known(self) -> Mapping[str, Sequence[Tensor]]:
        state = [t for slots in self.optimizer.state.values() for t in slots.values()]
        return {PARAMETER: [*self.model.parameters()], OPTIMIZER_STATE: state, INPUT: [*self.data]}

    def step(self) -> None:
        loss = self.task.loss(self.model, self.data)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def record(self, recorder: Recorder) -> None:
        with recorder.span(TEMPORARY, kept=ACTIVATION):
            loss = self.task.loss(self.model, self.data)
        # BackProp walks back in the optimiser's step
        with recorder.span(AUTOGRAD_DETAIL, gradients=[p.nbytes for p in self.model.parameters()]):
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self, lane: int) -> Mapping[str, Tensor]:
        return {n: p.detach() for n, p in self.model.named_parameters()}

    def batch(self, lane: int, step: int) -> Any:
        return self.data


class Compiled(Eager):
    """The same, its step compiled by `coalesce.compile_step`."""

    def __init__(self, size: Size, device: torch.device):
        super().__init__(size, device)
        # torch's own class, of which compile_step knows the rule; it never calls the optimiser's step
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._step = compile_step(self.model, self.task.loss, self.optimizer)

    def step(self) -> None:
        self._step(self.data)

    def record(self, recorder: Recorder) -> None:
        with watch(recorder):
            self.step()


class Coalesced:
    """Compiled lanes of the engine, seeds 0 to ``width`` - 1."""

    def __init__(self, size: Size, device: torch.device, width: int = WIDTH, compile: bool = True):
        self.width, self.size = width, size
        # experiments know their task by its importable name
        task = {"_target_": f"{Stack.__module__}.{Stack.__qualname__}", **asdict(size)}
        self.lanes = fill_lanes(task, width, size.batch, device, compile)
        self.data = _data(Stack(**asdict(size)), torch.device("cpu"))

    @property
    def known(self) -> Mapping[str, Sequence[Tensor]]:
        kinds: dict[str, list[Tensor]] = {PARAMETER: [], OPTIMIZER_STATE: [], INPUT: [*self.lanes.data.leaves("train")]}
        for name, tensor in self.lanes.state.items():
            # clocks, rates and the last loss, some bytes a lane, count as the optimiser's
            kinds[PARAMETER if name.startswith("trained/") else OPTIMIZER_STATE].append(tensor)
        return kinds

    def step(self) -> None:
        self.lanes.advance(1)
        # what a step allocates it frees, or the recorder would have to know of it
        self.lanes.order.forget()

    def record(self, recorder: Recorder) -> None:
        # whether the loss was finite is known from the forward pass alone
        with watch(recorder, [*self.lanes.state].index("lane/finite")):
            self.step()

    def parameters(self, lane: int) -> Mapping[str, Tensor]:
        return {n: t[lane] for n, t in part(self.lanes.state, "trained").items()}

    def batch(self, lane: int, step: int) -> Any:
        order = epoch_order(lane, step, self.size.batch)
        return tuple(leaf[order] for leaf in self.data)


#: Name → what makes it, in the order in which they are shown.
MODES: dict[str, Callable[[Size, torch.device], Mode]] = {
    "plain": Eager,
    "hook": lambda size, device: Eager(size, device, hook=True),
    "compiled": Compiled,
    "coalesced": Coalesced,
}


def seeded_model(task: Task, seed: int) -> nn.Module:
    """As the engine builds it: on the CPU, under the experiment's own seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model()


def _data(task: Task, device: torch.device) -> tuple[Tensor, ...]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tuple(leaf.to(device) for leaf in task.data().leaves("train"))


def fill_lanes(
    task: Mapping[str, Any],
    width: int,
    batch_size: int,
    device: torch.device | str = "cpu",
    compile: bool = True,
    optimizer: str | Mapping[str, Any] = "adamw",
) -> Lanes:
    """Lanes of seeds 0 to ``width`` - 1 that train without an end.

    Args:
        task: ``_target_`` and its arguments.
        optimizer: its name, or ``name`` and hyperparameters.
    """
    base = {"task": dict(task), "optimizer": optimizer, "schedule": "constant", "steps": 10**6, "seed": 0}
    experiments, _ = make_experiments(base | {"batch_size": batch_size}, {"seed": range(width)})
    (cohort,) = group(experiments, rides)
    lanes = Lanes(Template(cohort), width, device=device, compile=compile, shared=False)
    for lane, experiment in enumerate(experiments):
        lanes.fill(lane, experiment)
    return lanes


@contextmanager
def watch(recorder: Recorder, forward: int | None = None) -> Iterator[None]:
    """Tell a recorder what the segments of a tape allocate.

    Args:
        forward: the number of an input of the tape into which a value is copied that depends on the forward pass alone,
            and on all of it; by default the tape's first result, the loss, is such a value.
    """
    watched = _Watched(recorder, forward)
    before, Tape.around = Tape.around, watched
    try:
        yield
    finally:
        Tape.around = before


class _Watched:
    """Runs a tape's segments and says of what each hands on what it is.

    The place of a value in the whole graph tells: what the forward pass's result depends on belongs to the forward
    pass, and is an INPUT if no parameter stands before it. Everything else belongs to the backward pass.
    """

    def __init__(self, recorder: Recorder, forward: int | None):
        self.recorder = recorder
        self.forward = forward
        self._parameters: dict[fx.Node, int] = {}
        self._results: set[fx.Node] | None = None

    def __call__(
        self, segment: Segment, run: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        for node, tensor in zip(segment.inputs, arguments, strict=True):
            if self.recorder.category(tensor) == PARAMETER:
                self._parameters[node] = tensor.untyped_storage().nbytes()
        written = {n.args[0].name for n in segment.module.graph.nodes if n.target is torch.ops.aten.copy_.default}
        holders = [n for n in segment.module.graph.nodes if n.op == "placeholder"]
        pairs = zip(holders, segment.inputs, strict=True)
        updated = [
            self._parameters[node] for holder, node in pairs if holder.name in written and node in self._parameters
        ]
        with self.recorder.span(TEMPORARY, gradients=updated):
            results = run(*arguments)
        for node, result in zip(segment.outputs, results, strict=True):
            self.recorder.mark(self._category(node, result), result)
        return results

    def _category(self, node: fx.Node, value: Tensor) -> str:
        if self._results is None:
            self._results = _ancestors(self._forward_result(node.graph))
        if node in self._results:
            return ACTIVATION if _ancestors(node) & self._parameters.keys() else INPUT
        size = value.untyped_storage().nbytes()
        return GRADIENT if size in self._parameters.values() else AUTOGRAD_DETAIL

    def _forward_result(self, graph: fx.Graph) -> fx.Node:
        nodes = list(graph.nodes)
        if self.forward is None:
            return nodes[-1].args[0][0]
        holder = [n for n in nodes if n.op == "placeholder"][self.forward]
        copies = [n for n in nodes if n.target is torch.ops.aten.copy_.default and n.args[0] is holder]
        return copies[-1].args[1]


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """A value and all that it is computed from."""
    found, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return found
