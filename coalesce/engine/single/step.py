"""The compiled step: which graph a call takes, and what it runs on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from coalesce.engine import preparing
from coalesce.engine.backprop.model import Halting
from coalesce.engine.instance import Instance
from coalesce.engine.pieces import choose, matching, recomputed
from coalesce.engine.single import groups
from coalesce.engine.single.first import attributes_kept, rehearse
from coalesce.engine.single.graph import Code, Update, build
from coalesce.engine.single.groups import Group
from coalesce.engine.single.inputs import Inputs, bind, places
from coalesce.engine.single.watch import Numbers, Read, changed
from coalesce.engine.tape import Tape
from coalesce.errors import TaskError
from coalesce.random import key_of
from coalesce.task import Loss

#: Graphs that one step may come to: batch shapes, modes, numbers in attributes.
MOST_GRAPHS = 8

#: Inputs that follow from keys, steps and rates alone.
_CHEAP = ("lane/", "optimizer/", "clock/", "clip/")

Mixed = Callable[[], AbstractContextManager[Any]]


@dataclass
class _Graph:
    """A traced step.

    Args:
        tape: takes state, leaves and constants.
        updates: trained parameter → how.
        slots: trained parameter → its slots' names, ours → torch's.
        extras: names of the scalars beside the loss.
        inputs: the user's tensors.
        own: name → input that is none of these: rates, key, count.
        constants: tensors that the user's code reaches past the model.
        kept: where it keeps these, and which they were.
    """

    tape: Tape
    updates: Mapping[str, Update]
    slots: Mapping[str, Mapping[str, str]]
    extras: tuple[str, ...]
    inputs: Inputs
    own: Mapping[str, Tensor]
    constants: Sequence[Tensor]
    kept: Sequence[tuple[Read, Tensor]]


class CompiledStep:
    """A compiled training step. `coalesce.compile_step` makes it, and says what its arguments are.

    Attributes:
        model, optimizer: the user's.
        count: calls so far, by which random numbers are keyed. Set it to go on with the stream of an earlier run.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Loss],
        optimizer: torch.optim.Optimizer,
        seed: int,
        clip_norm: float | None,
        pieces: Literal["auto"] | Sequence[str],
        checkpoint: Literal["auto"] | int | Sequence[str] | None,
        compile: bool,
    ):
        _check_model(model)
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of the model and a batch, not a {type(loss_fn).__name__}")
        if clip_norm is not None and (isinstance(clip_norm, bool) or not clip_norm > 0):
            raise ValueError(f"clip_norm={clip_norm!r}: must be a positive number, or None for no clipping")
        self.model, self.optimizer, self.count = model, optimizer, 0
        self._loss_fn, self._key, self._clip = loss_fn, key_of(seed), clip_norm
        self._patterns, self._checkpoint, self._compile = pieces, checkpoint, compile
        self._instance = Instance(Code(loss_fn), model)
        self._graphs: dict[Any, _Graph] = {}
        self._refresh()

    @property
    def graphs(self) -> int:
        """How many graphs there are: one for each shape of batch, mode, and number in an attribute that was met."""
        return len(self._graphs)

    def __call__(self, batch: Any) -> Any:
        """Take one step.

        Args:
            batch: a tensor, or tuples, lists and dicts of tensors, as ``loss_fn`` takes it.

        Returns:
            The loss before the update, 0-d and detached; where ``loss_fn`` returns a dict beside it, (loss, dict).

        Raises:
            TaskError: at the first call with a batch of new shapes, if the user's code fails or cannot be traced.
            TypeError: the batch holds something else than tensors.
            RuntimeError: the optimiser's state does not fit the model, or there are too many graphs.
            ValueError: the optimiser and the model no longer belong together.
        """
        leaves, spec = _leaves(batch)
        self._follow()
        kind = self._device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        mixed: Mixed = functools.partial(torch.autocast, kind, precision) if precision else nullcontext
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            key = self._signature(leaves, spec, precision)
            graph = self._graphs.get(key)
            if graph is None or not self._fits(graph):
                self._graphs.pop(key, None)
                graph = self._trace(batch, leaves, spec, mixed)
                self._graphs[self._signature(leaves, spec, precision)] = graph
            self._moment.fill_(self.count)
            graph.inputs.mirror()
            shown = graph.tape(*graph.inputs.state.values(), *graph.own.values(), *leaves, *graph.constants)
            graph.inputs.ticked()
        self.count += 1
        # what a scheduler asks before its first step
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        loss, *extras = [value[0] for value in shown]
        return (loss, dict(zip(graph.extras, extras, strict=True))) if graph.extras else loss

    def _refresh(self) -> None:
        """Look at the model and the optimiser as if for the first time."""
        groups.check(self.model, self.optimizer)
        self._graphs.clear()
        self._hold()
        self._device = next(iter(self._parameters.values())).device
        self._groups = [Group(type(self.optimizer), g, self._device) for g in self.optimizer.param_groups]
        self._group_of = {p: i for i, g in enumerate(self.optimizer.param_groups) for p in g["params"]}
        self._stream = self._key.to(self._device)[None]
        self._moment = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._pieces = self._choose_pieces()
        self._again = recomputed(self.model, self._checkpoint)
        if self._checkpoint not in (None, "auto", ()) and not self._again:
            raise ValueError(f"checkpoint={self._checkpoint!r}: the model has no such modules")

    def _choose_pieces(self) -> tuple[str, ...]:
        if isinstance(self._patterns, str):
            if self._patterns != "auto":
                raise ValueError(f"pieces={self._patterns!r}: must be 'auto', or a list of names of modules")
            return choose(self.model, 1)
        found = matching(self.model, self._patterns)
        if self._patterns and not found:
            names = ", ".join(n for n, _ in self.model.named_modules() if n)
            raise ValueError(f"pieces={list(self._patterns)!r}: no module has such a name; valid: {names}")
        return found

    def _hold(self) -> None:
        """Note what the model and the optimiser consist of."""
        self._modules = list(self.model.modules())
        self._listed = [p for g in self.optimizer.param_groups for p in g["params"]]
        self._parameters = dict(self.model.named_parameters())
        self._structure = [(d, [*d.values()]) for m in self._modules for d in (m._modules, m._parameters)]
        self._hold_buffers()
        self._numbers = Numbers(self.model, self._loss_fn)

    def _hold_buffers(self) -> None:
        self._buffers = dict(self.model.named_buffers())
        self._buffered = [(m._buffers, [*m._buffers.values()]) for m in self._modules]

    def _follow(self) -> None:
        """Take up what has changed since the last call."""
        listed = [p for g in self.optimizer.param_groups for p in g["params"]]
        followed = (
            _same(self._structure)
            and len(listed) == len(self._listed)
            and all(map(is_, listed, self._listed))
            and all(map(Group.follow, self._groups, self.optimizer.param_groups))
        )
        if not followed:
            self._refresh()
        elif not _same(self._buffered):
            names = list(self._buffers)
            self._hold_buffers()
            if list(self._buffers) != names:
                self._refresh()

    def _signature(self, leaves: Sequence[Tensor], spec: TreeSpec, precision: torch.dtype | None) -> Any:
        """What picks a graph."""
        return (
            spec,
            tuple([(t.shape, t.stride(), t.dtype, t.device) for t in leaves]),
            tuple([m.training for m in self._modules]),
            tuple([p.requires_grad for p in self._listed]),
            precision,
            self._numbers.values(),
        )

    def _fits(self, graph: _Graph) -> bool:
        """Whether a graph's inputs are still there, or others that it takes as well."""
        if not all(read() is tensor for read, tensor in graph.kept):
            return False
        now, then = self._sources(graph.slots), graph.inputs.sources
        there = len(now) == len(then) and all(map(is_, now.values(), then.values()))
        if there and places(then.values()) == graph.inputs.places:
            return True
        inputs = self._bind(graph.updates, graph.slots)
        if not inputs.alike(graph.inputs):
            self._refresh()
            return False
        graph.inputs = inputs
        return True

    def _sources(self, slots: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        """The user's tensors as they stand now, see `Inputs`; None where the optimiser has none."""
        found: dict[str, Any] = {f"trained/{n}": self._parameters[n] for n in slots}
        found |= {f"fixed/{n}": p for n, p in self._parameters.items() if n not in slots}
        found |= {f"buffer/{n}": b for n, b in self._buffers.items()}
        for name, names in slots.items():
            state = self.optimizer.state.get(self._parameters[name], {})
            found |= {f"slot/{ours}/{name}": state.get(theirs) for ours, theirs in names.items()}
            if "step" in state:
                found[f"step/{name}"] = state["step"]
        return found

    def _bind(self, updates: Mapping[str, Update], slots: Mapping[str, Mapping[str, str]]) -> Inputs:
        before = self._sources(slots)
        fresh = frozenset(n for n in slots if any(before[f"slot/{ours}/{n}"] is None for ours in slots[n]))
        for name in slots:
            parameter = self._parameters[name]
            groups.take_up(self.optimizer, self._groups[self._group_of[parameter]], name, parameter)
        return bind(self._sources(slots), updates, fresh, self._device)

    def _trace(self, batch: Any, leaves: Sequence[Tensor], spec: TreeSpec, mixed: Mixed) -> _Graph:
        """The graph for a batch."""
        if len(self._graphs) >= MOST_GRAPHS:
            raise RuntimeError(self._too_many())
        if self._compile:
            preparing.begin(self._device.type)
        trained, extras = self._rehearse(batch, mixed)
        updates, slots = {}, {}
        for name in (n for n in self._parameters if n in trained):
            number = self._group_of[self._parameters[name]]
            updates[name], slots[name] = self._groups[number].update(number, self._parameters[name])
        inputs = self._bind(updates, slots)
        own = {f"optimizer/{i}/{n}": t for i, group in enumerate(self._groups) for n, t in group.riding.items()}
        if self._clip is not None:
            own["clip/norm"] = torch.full((1,), self._clip, dtype=torch.float64, device=self._device)
        own |= {"lane/key": self._stream, "lane/step": self._moment}
        state = {**inputs.state, **own}

        def unflatten(given: Sequence[Tensor]) -> Any:
            return tree_unflatten(given, spec)

        with attributes_kept(self.model):
            module, constants = build(
                self._instance, state, leaves, unflatten, updates, extras, self._pieces, self._again, mixed
            )
        taken = [*state.values(), *leaves, *constants]
        cheap = [i for i, n in enumerate(state) if n.startswith(_CHEAP)]
        tape = Tape(module, taken, self._compile, [*cheap, *range(len(taken) - len(constants), len(taken))])
        return _Graph(tape, updates, slots, extras, inputs, own, constants, self._numbers.holding(constants))

    def _rehearse(self, batch: Any, mixed: Mixed) -> tuple[frozenset[str], tuple[str, ...]]:
        """Which parameters get a gradient, and the names of the scalars beside the loss."""
        wanted = {n: p for n, p in self._parameters.items() if p in self._group_of and p.requires_grad}
        for attempt in range(2):
            before = Numbers(self.model, self._loss_fn).named()
            found = rehearse(self._instance, batch, wanted, self._key.to(self._device), self._moment[0], mixed)
            different = changed(before, Numbers(self.model, self._loss_fn).named())
            # the first call may set a flag: that it has been
            if not different:
                break
            if attempt:
                raise TaskError(
                    f"a step changes {', '.join(different)}, but its graph is traced once: it would keep the value of "
                    f"the first. Keep what changes from step to step in a buffer of the model (register_buffer)."
                )
        self._hold()
        return found

    def _too_many(self) -> str:
        keys = [*self._graphs]
        # without the lane dimension
        shapes = dict.fromkeys(str([tuple(shape[1:]) for shape, *_ in key[1]]) for key in keys)
        names = self._numbers.names
        numbers = changed(*(dict(zip(names, key[-1], strict=False)) for key in keys[-2:]))
        seen = f"the numbers {', '.join(numbers)}" if numbers else f"batches of {', '.join(shapes)}"
        return (
            f"this would be graph number {MOST_GRAPHS + 1} of one step, each traced and compiled: it has seen {seen}. "
            f"A number that changes belongs into the batch, as a tensor; pad batches to a few shapes, or leave the "
            f"short one out (drop_last=True)."
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not a {type(model).__name__}")
    if isinstance(model, Halting):
        raise TypeError("this model came out of coalesce.BackProp; give compile_step the plain model and optimizer")
    compiled = hasattr(model, "_orig_mod") or any(m._compiled_call_impl is not None for m in model.modules())
    if compiled or isinstance(model, torch.jit.ScriptModule):
        raise TypeError("the model is compiled or scripted already; give compile_step the plain nn.Module")
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise TypeError(
                f"{name} has no shape yet: call the model once, and make the optimizer, before compile_step"
            )
        if parameter.is_complex() or parameter.layout != torch.strided:
            raise TypeError(f"{name} is {parameter.dtype} of layout {parameter.layout}; it must be real and dense")


def _leaves(batch: Any) -> tuple[list[Tensor], TreeSpec]:
    """A batch's tensors (1, …), and its structure."""
    found, spec = tree_flatten_with_path(batch)
    for path, leaf in found:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"batch{keystr(path)} is a {type(leaf).__name__}; a batch consists of tensors, in tuples, lists and "
                f"dicts: torch.as_tensor(...)"
            )
    return [_usual(leaf.detach())[None] for _, leaf in found], spec


def _usual(leaf: Tensor) -> Tensor:
    """In one of the layouts that have a graph."""
    wide = leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last)
    return leaf if wide else leaf.contiguous()


def _same(held: Sequence[tuple[Mapping[str, Any], Sequence[Any]]]) -> bool:
    """Whether mappings still hold the very same things."""
    return all(len(now) == len(then) and all(map(is_, now.values(), then)) for now, then in held)
