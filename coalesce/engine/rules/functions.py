"""Custom `torch.autograd.Function` of any style, with its own gradient.

vmap takes a Function only in the new style (forward without ctx, and setup_context) and with a rule for itself. One
without a rule gets torch's generated one, which runs forward and backward under vmap. One in the old style
(forward with ctx) is rewritten: its forward runs with a recorder as ctx, and what it saves becomes further outputs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from coalesce.engine.rules.lines import user_line
from coalesce.engine.rules.mode import AROUND
from coalesce.errors import TaskError

Function = type[torch.autograd.Function]


def _apply(cls: Function, *args: Any, **kwargs: Any) -> Any:
    """What `Function.apply` does while a lane's code runs."""
    if not torch._C._are_functorch_transforms_active():
        return _original(cls, *args, **kwargs)
    if cls.__module__.startswith(("torch.", "coalesce.")) or cls in _LANED:
        return _original(cls, *args, **kwargs)
    if cls.setup_context is torch.autograd.Function.setup_context:
        return _Old(cls).apply(*args, **kwargs)
    with _named(cls):
        return _original(_laned(cls), *args, **kwargs)


@contextmanager
def _named(cls: Function) -> Iterator[None]:
    """Let an error name the class, and say what to add to it."""
    try:
        yield
    except TaskError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise TaskError(
            f"{cls.__qualname__}, a torch.autograd.Function, cannot run under torch.vmap ({reason}). Write its "
            f"forward and backward in torch's own operations, without asking for values; or write forward without ctx, "
            f"setup_context, and the static method vmap: "
            f"docs.pytorch.org/docs/stable/notes/extending.func.html\n{user_line()}"
        ) from error


def _unguarded(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward without `once_differentiable`, whose way to raise at a second derivative functional gradients refuse.
    The rehearsal has taken a plain step, and raised there, if the loss has a second derivative."""
    wrapped = getattr(backward, "__wrapped__", None)
    return wrapped if wrapped is not None and "once_differentiable" in backward.__qualname__ else backward


@functools.cache
def _laned(cls: Function) -> Function:
    """A new-style class with a rule for vmap, and errors that name it."""
    backward = _unguarded(cls.backward)

    def named(ctx: Any, *gradients: Any) -> Any:
        with _named(cls):
            return backward(ctx, *gradients)

    body: dict[str, Any] = {"backward": staticmethod(named), "__module__": cls.__module__}
    if not cls.generate_vmap_rule and cls.vmap is torch.autograd.Function.vmap:
        body["generate_vmap_rule"] = True
    made = type(cls.__name__, (cls,), body)
    _LANED.add(made)
    return made


_LANED: set[Function] = set()


class _Recorder:
    """Stands for ctx in an old-style forward."""

    def __init__(self, args: Sequence[Any]):
        floats = (isinstance(a, Tensor) and a.is_floating_point() for a in args)
        self.needs_input_grad = tuple(floats)
        self._kept: tuple[Tensor | None, ...] = ()
        self._not_differentiable: tuple[Tensor, ...] = ()
        self._materialize = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self._kept = tensors

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        return self._kept

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._not_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._materialize = value

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise NotImplementedError("it writes into its input (mark_dirty).")


_OWN = frozenset(vars(_Recorder(())))


class _Old:
    """One call of an old-style Function, as a new-style one of this call's own."""

    def __init__(self, cls: Function):
        self.cls = cls
        self.single = True
        self.outputs = 0
        #: where each saved thing comes from: ("input", i), ("output", i), or ("value", itself)
        self.places: list[tuple[str, Any]] = []
        self.not_differentiable: list[int] = []
        self.materialize = True
        self.attributes: Any = None

    def apply(self, *args: Any) -> Any:
        made = type(
            self.cls.__name__,
            (torch.autograd.Function,),
            {
                "generate_vmap_rule": True,
                "forward": staticmethod(self.forward),
                "setup_context": staticmethod(self.setup_context),
                "backward": staticmethod(self.backward),
            },
        )
        with _named(self.cls):
            found = _original(made, *args)
        return found[0] if self.single else found[: self.outputs]

    def forward(self, *args: Any) -> tuple[Any, ...]:
        record = _Recorder(args)
        returned = self.cls.forward(record, *args)
        self.single = not isinstance(returned, tuple)
        outputs: list[Any] = [returned] if self.single else list(returned)
        self.outputs, self.materialize = len(outputs), record._materialize
        self.not_differentiable = [i for i, o in enumerate(outputs) if any(o is t for t in record._not_differentiable)]
        # tensors kept as plain attributes of ctx are saved like the others
        attributes = {k: v for k, v in vars(record).items() if k not in _OWN}
        leaves, self.attributes = pytree.tree_flatten((list(record._kept), attributes))
        self.places = []
        for leaf in leaves:
            known = [("input", i) for i, a in enumerate(args) if a is leaf]
            known += [("output", i) for i, o in enumerate(outputs) if o is leaf]
            if not isinstance(leaf, Tensor):
                known = [("value", leaf)]
            elif not known:
                known = [("output", len(outputs))]
                outputs.append(leaf)
            self.places.append(known[0])
        return tuple(outputs)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        ctx.set_materialize_grads(self.materialize)
        constant = [*(outputs[i] for i in self.not_differentiable), *outputs[self.outputs :]]
        ctx.mark_non_differentiable(*constant)
        groups = {"input": inputs, "output": outputs}
        ctx.save_for_backward(*(groups[kind][index] for kind, index in self.places if kind in groups))

    def backward(self, ctx: Any, *gradients: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        leaves = [what if kind == "value" else next(saved) for kind, what in self.places]
        kept, attributes = pytree.tree_unflatten(leaves, self.attributes)
        given = types.SimpleNamespace(
            **attributes, saved_tensors=tuple(kept), needs_input_grad=tuple(ctx.needs_input_grad)
        )
        with _named(self.cls):
            return _unguarded(self.cls.backward)(given, *gradients[: self.outputs])


class _Stub:
    """Holds the code that stands in `Function.apply` while lanes run. It must have the free variable of torch's."""

    @classmethod
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from coalesce.engine.rules.functions import _apply

        __class__  # type: ignore[name-defined]  # noqa: B018
        return _apply(cls, *args, **kwargs)  # type: ignore[arg-type]


def _function(method: Any) -> types.FunctionType:
    found: types.FunctionType = method.__func__
    return found


_torchs = _function(torch.autograd.Function.apply)
_original = types.FunctionType(
    _torchs.__code__, _torchs.__globals__, _torchs.__name__, _torchs.__defaults__, _torchs.__closure__
)


@contextmanager
def _hooked() -> Iterator[None]:
    """`apply` is no function that a mode sees, and users hold it by names of their own (``ste = Ste.apply``), which are
    bound to one function object: so its code is changed for the while. Tried on torch 2.13.0;
    `tests/test_rules_functions.py` sees whether it still works.
    """
    before = _torchs.__code__
    _torchs.__code__ = _function(_Stub.apply).__code__
    try:
        yield
    finally:
        _torchs.__code__ = before


AROUND.append(_hooked)
