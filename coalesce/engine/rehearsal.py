"""One plain eager step of one experiment before anything is traced: errors show the user's own line, and what a
plain backward pass does is seen rather than assumed."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from coalesce.engine.precision import autocast
from coalesce.engine.rules import Rules, user_line
from coalesce.engine.rules.lowerings import Seen
from coalesce.engine.rules.mode import Labels, Notes
from coalesce.errors import ConfigError, Problem, TaskError
from coalesce.experiment import Experiment
from coalesce.random import epoch_order, key_of
from coalesce.task import Data, Task, defines

#: Samples of a batch when a whole split is rehearsed: of no account for the result.
_REHEARSED = 1024


@dataclass(frozen=True)
class Rehearsal:
    """What the plain step showed.

    Args:
        unused: names of parameters that got no gradient.
        extras: names of the scalars beside the loss.
        metrics: names of the evaluation metrics; empty without a validation or test split.
        outputs: names of what `Task.outputs` gives for each sample ("" for a tensor alone); empty if it is not defined.
        summaries: names of the metrics that `Task.summary` makes of it.
        saved_bytes: what autograd kept for the backward pass, parameters and data excepted.
        convolutions: those that the step made, by name.
    """

    unused: frozenset[str]
    extras: tuple[str, ...]
    metrics: tuple[str, ...]
    saved_bytes: int
    outputs: tuple[str, ...] = ()
    summaries: tuple[str, ...] = ()
    convolutions: Mapping[str, Seen] = field(default_factory=dict)


@contextmanager
def own_code(what: str, riding: Collection[str] = ()) -> Iterator[None]:
    """Report an error of the user's code with his own line.

    Args:
        riding: paths of the floats that are tensors meanwhile. With floats in their places the code passed before.

    Raises:
        TaskError: instead of whatever was raised; errors that are ours already pass.
    """
    try:
        yield
    except (TaskError, ConfigError, BdbQuit):
        raise
    except Exception as error:
        hint = (
            f"\nWith Python numbers it passed; in lanes tensors stand at {', '.join(riding)}, since they ride. What "
            f"takes a number alone (round, a key of a dict) needs one that does not: name it in static = (...,)."
            if riding
            else ""
        )
        raise TaskError(f"{what} raised {type(error).__name__}: {error}{hint}\n{user_line(error)}") from error


def rehearse(task: Task, model: nn.Module, data: Data, experiment: Experiment) -> Rehearsal:
    """Take one step's forward and backward pass, and one evaluation.

    Args:
        task, model: of the experiment, for this purpose only: buffers change.
        data: on the CPU.

    Raises:
        TaskError: with the user's file, line and source.
        ConfigError: labels out of range.
    """
    name = type(task).__name__
    key, zero = key_of(experiment.seed), torch.zeros((), dtype=torch.int64)
    size = min(experiment.batch_size // experiment.config["optimizer"]["accumulate"], data.sizes["train"])
    batch = data.batch("train", epoch_order(experiment.seed, 0, data.sizes["train"])[:size])
    known = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers(), *_tensors(batch)]}
    saved: dict[int, int] = {}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    versions = {n: p._version for n, p in model.named_parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def step(*contexts: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with ExitStack() as stack:
            rules = Rules(key, zero, {}, notes, watch=True)
            for context in (*contexts, autocast(experiment), own_code(f"{name}.loss()"), rules):
                stack.enter_context(context)
            return split_loss(task.loss(model, batch), f"{name}.loss()")

    model.train()
    notes = Notes()
    try:
        try:
            loss, extras = step(torch.autograd.graph.saved_tensors_hooks(note, lambda t: t))
        except TaskError as error:
            # functions of torch.func in the user's code refuse such hooks; then nothing is counted
            if "saved tensor hooks" not in str(error):
                raise
            loss, extras = step()
    except TaskError:
        # A label out of range is an IndexError deep inside torch: say what it is, if that is what it was.
        _check_labels(notes.labels, batch, data)
        raise
    _check_labels(notes.labels, batch, data)
    if not loss.requires_grad:
        raise TaskError(f"{name}.loss() returned a loss that no trainable parameter has a part in")
    with own_code(f"the backward pass of {name}.loss()"):
        loss.backward()
    for parameter, weight in model.named_parameters():
        if weight.grad is not None and weight.grad.is_sparse:
            raise TaskError(f"{parameter} has a sparse gradient, which lanes do not support: use sparse=False")
    _check_kept(f"{name}.loss()", "the parameter", weights, dict(model.named_parameters()))
    for parameter, weight in model.named_parameters():
        # what is written may be what stood there: the first step of a target network that starts as a copy
        if weight._version != versions[parameter]:
            raise _writes(f"{name}.loss()", "the parameter", parameter)
    unused = frozenset(n for n, p in model.named_parameters() if p.requires_grad and p.grad is None)
    metrics: tuple[str, ...] = ()
    split = next((s for s in ("val", "test") if s in data.sizes), None)
    if split is not None:
        model.eval()
        batch = data.batch(split, torch.arange(min(data.sizes[split], experiment.batch_size)))
        given = {str(i): t.clone() for i, t in enumerate(_tensors(batch))}
        rules = Rules(key, zero, {}, watch=True)
        with torch.no_grad(), autocast(experiment), own_code(f"{name}.metrics()"), rules:
            found = task.metrics(model, batch)
        metrics = tuple(check_scalars(found, f"{name}.metrics()"))
        _check_kept(f"{name}.metrics()", "the parameter", weights, dict(model.named_parameters()))
        # in loss() a lane has a batch of its own; here all lanes have one
        _check_kept(f"{name}.metrics()", "its batch, leaf", given, {str(i): t for i, t in enumerate(_tensors(batch))})
    outputs, summaries = _rehearse_summary(task, model, data, experiment, split, metrics)
    saved_bytes = sum(saved.values())
    return Rehearsal(unused, tuple(extras), metrics, saved_bytes, outputs, summaries, notes.convolutions)


def _rehearse_summary(
    task: Task, model: nn.Module, data: Data, experiment: Experiment, split: str | None, metrics: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a task's outputs and of what it makes of them. The whole split, since a part may lack a class."""
    name = type(task).__name__
    defined = [method for method in ("outputs", "summary") if defines(type(task), method)]
    if len(defined) == 1:
        lacking = "summary(self, outputs, split)" if defined == ["outputs"] else "outputs(self, model, batch)"
        raise TaskError(f"{name} defines {defined[0]}() without {lacking}: the two belong together")
    if not defined or split is None:
        return (), ()
    key, zero, found = key_of(experiment.seed), torch.zeros((), dtype=torch.int64), []
    with torch.no_grad():
        for index in torch.arange(data.sizes[split]).split(_REHEARSED):
            batch = data.batch(split, index)
            with autocast(experiment), own_code(f"{name}.outputs()"), Rules(key, zero, {}, watch=True):
                returned = task.outputs(model, batch)
            found.append(check_outputs(returned, f"{name}.outputs()", len(index)))
        whole = {n: torch.cat([piece[n] for piece in found]) for n in found[0]}
        samples = data.unflatten(data.leaves(split))
        before = {str(i): t.clone() for i, t in enumerate(_tensors(samples))}
        with own_code(f"{name}.summary()"):
            summary = task.summary(whole[""] if set(whole) == {""} else whole, samples)
    numbers = check_summary(summary, f"{name}.summary()")
    _check_kept(f"{name}.summary()", "the split, leaf", before, {str(i): t for i, t in enumerate(_tensors(samples))})
    twice = sorted(set(numbers) & set(metrics))
    if twice:
        raise TaskError(f"{name}.summary() and {name}.metrics() both return {', '.join(twice)}: give one another name")
    return tuple(whole), tuple(numbers)


def split_loss(returned: Any, what: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the scalars beside it, checked.

    Args:
        what: the function that returned them, for messages.
    """
    loss, extras = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        seen = f"a {tuple(loss.shape)} tensor of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TaskError(f"{what} must return a scalar floating-point tensor, or (scalar, dict of scalars), not {seen}")
    if "loss" in extras:
        raise TaskError(f"{what} returns a scalar named 'loss' beside the loss: give it another name")
    return loss, check_scalars(extras, f"the dict of {what}")


def check_scalars(found: Any, what: str) -> dict[str, Tensor]:
    """A dict of name → 0-d tensor.

    Raises:
        TaskError: it is something else.
    """
    if not isinstance(found, Mapping):
        raise TaskError(f"{what} must be a dict of name → scalar tensor, not {type(found).__name__}")
    for name, value in found.items():
        if not isinstance(name, str):
            raise TaskError(f"{what}: a metric's name must be text, not {name!r}")
        if not isinstance(value, Tensor) or value.dim() != 0 or value.is_complex():
            seen = f"a {tuple(value.shape)} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TaskError(f"{what}: {name!r} must be a real scalar tensor, not {seen}")
    return dict(found)


def check_outputs(found: Any, what: str, size: int) -> dict[str, Tensor]:
    """A tensor of (size, …), under an empty name, or a dict of such.

    Raises:
        TaskError: it is something else.
    """
    named = found if isinstance(found, Mapping) else {"": found}
    for name, value in named.items():
        if not isinstance(name, str):
            raise TaskError(f"{what}: an output's name must be text, not {name!r}")
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != size:
            seen = f"a {tuple(value.shape)} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            rule = f"must be a tensor with a row for each of the batch's {size} samples, or a dict of such"
            raise TaskError(f"{what}{f': {name!r}' if name else ''} {rule}, not {seen}")
    if not named:
        raise TaskError(f"{what} returned an empty dict")
    return dict(named)


def check_summary(found: Any, what: str) -> dict[str, float]:
    """A dict of name → number.

    Raises:
        TaskError: it is something else.
    """
    if not isinstance(found, Mapping):
        raise TaskError(f"{what} must return a dict of name → number, not {type(found).__name__}")
    numbers = {}
    for name, value in found.items():
        if not isinstance(name, str):
            raise TaskError(f"{what}: a metric's name must be text, not {name!r}")
        try:
            # numbers of Python and NumPy, and tensors and arrays of one number
            if isinstance(value, str | bytes):
                raise TypeError
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TaskError(f"{what}: {name!r} must be a number, not {_kind(value)}") from None
    return numbers


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def _check_kept(what: str, kind: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    for name, value in before.items():
        # NaN in neither: data are checked, and weights that are NaN would not train
        if not torch.equal(value, after[name]):
            raise _writes(what, kind, name)


def _writes(what: str, kind: str, name: str) -> TaskError:
    return TaskError(
        f"{what} writes into {kind} {name}, which is not its own: parameters are the optimiser's, and all lanes have "
        f"one batch in an evaluation. Work on a copy: x = x.clamp(...) instead of x.clamp_(...). Weights that follow "
        f"others, as a target network's do, are buffers: register_buffer(...), and torch.func.functional_call."
    )


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [t for value in tree.values() for t in _tensors(value)]
    if isinstance(tree, list | tuple):
        return [t for value in tree for t in _tensors(value)]
    return []


def _check_labels(seen: list[Labels], batch: Any, data: Data) -> None:
    """Labels are told by what the loss did with them; then the whole of every split is looked at."""
    leaves = [leaf.untyped_storage().data_ptr() for leaf in _tensors(batch)]
    problems = []
    for target, classes, ignored in seen:
        pointer = target.untyped_storage().data_ptr()
        if pointer not in leaves:
            continue
        for split in data.sizes:
            leaf = data.leaves(split)[leaves.index(pointer)]
            wrong = ((leaf < 0) | (leaf >= classes)) & (leaf != ignored)
            if wrong.any():
                where = tuple(wrong.nonzero()[0].tolist())
                problems.append(
                    Problem(
                        f"task.data.{split}",
                        leaf[where].item(),
                        f"label out of range: {int(wrong.sum())} of {wrong.numel()}, the first at sample {where[0]}",
                        f"0 to {classes - 1}: the model gives {classes} scores",
                    )
                )
    if problems:
        raise ConfigError(dict.fromkeys(problems))
