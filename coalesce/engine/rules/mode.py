"""The function mode under which a lane's own code runs."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from coalesce.engine import keyed
from coalesce.engine.rules import autocast
from coalesce.engine.rules.lines import user_line
from coalesce.engine.rules.lowerings import Convolution, Seen
from coalesce.errors import TaskError
from coalesce.random import uniform_of

Handler = Callable[..., Any]

#: How torch says that it cannot trace a result whose shape follows from values.
_DYNAMIC = (DynamicOutputShapeException, GuardOnDataDependentSymNode)

#: torch function → rule; the rule gets the mode and the function's own arguments. Filled by the modules beside this.
RULES: dict[Callable[..., Any], Handler] = {}

#: What holds while a lane's code runs, for what no mode sees. Filled by the modules beside this.
AROUND: list[Callable[[], AbstractContextManager[None]]] = []


class Rate(float):
    """A number that rides, for code of torch's that compares it with 0 before it passes it on."""

    tensor: Tensor

    def __new__(cls, tensor: Tensor) -> Rate:
        rate = super().__new__(cls, 0.5)
        rate.tensor = tensor
        return rate


def carried(number: Any) -> Any:
    """The tensor that a `Rate` carries; anything else as it is."""
    return number.tensor if isinstance(number, Rate) else number


def rule(
    *functions: Callable[..., Any],
    numbers: Sequence[str] = (),
    places: Sequence[tuple[int, str]] = (),
    stacked: bool = False,
) -> Callable[[Handler], Handler]:
    """Register a rule for some of torch's functions.

    Args:
        functions: of one signature, the handler's after its first argument.
        numbers: arguments that torch takes only as Python numbers. If given, the rule holds only where one of them is
            a tensor; elsewhere torch's own function is called.
        places: the same as (position, name), for a handler whose signature does not name them.
        stacked: whether the rule holds in lanes whatever its numbers are.
    """

    def register(handler: Handler) -> Handler:
        names = list(inspect.signature(handler).parameters)[1:]
        watched = [*places, *((names.index(name), name) for name in numbers)]
        for function in functions:
            RULES[function] = _where_it_rides(function, handler, watched, stacked) if watched else handler
        return handler

    return register


def _where_it_rides(
    function: Callable[..., Any], handler: Handler, places: Sequence[tuple[int, str]], stacked: bool
) -> Handler:
    def chosen(rules: Rules, *args: Any, **kwargs: Any) -> Any:
        given = [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
        if (stacked and rules.stacked) or any(isinstance(number, Tensor | Rate) for number in given):
            return handler(rules, *map(carried, args), **{k: carried(v) for k, v in kwargs.items()})
        return rules.open(function, *args, **kwargs)

    return chosen


class Labels(NamedTuple):
    """Labels that a loss was given: the tensor, the number of classes, and the label that it leaves out."""

    target: Tensor
    classes: int
    ignore_index: int


@dataclass
class Notes:
    """What a plain step showed of the functions that it called.

    Args:
        labels: what losses were given.
        convolutions: those that were made, by name.
    """

    labels: list[Labels] = field(default_factory=list)
    convolutions: dict[str, Seen] = field(default_factory=dict)


class Rules(TorchFunctionMode):
    """Runs one lane's code: replaces what has a rule, explains what fails because a value rides.

    Args:
        key: (2,) int64, the lane's stream.
        step: 0-d int64, updates done.
        riding: path as the user writes it → the 0-d tensor that stands there. For messages.
        notes: where to note what is seen, if anybody wants to know.
        origins: path as in ``riding`` → the swept key that it follows from.
        watch: raise if a function draws from torch's global generator, which outside a trace it can.
        lowerings: name of a convolution → name of the lowering that it takes.

    Attributes:
        stacked: whether the code runs for many lanes at once.
    """

    def __init__(
        self,
        key: Tensor,
        step: Tensor,
        riding: Mapping[str, Any],
        notes: Notes | None = None,
        origins: Mapping[str, str] | None = None,
        watch: bool = False,
        lowerings: Mapping[str, str] | None = None,
    ):
        super().__init__()
        self.lowerings = lowerings or {}
        self.origins = origins or {}
        self.watch = watch
        self.key = key
        self.step = step
        self.riding = riding
        self.notes = notes
        self.calls = 0
        self.stacked = not shared(key)
        # inside a call, where torch's own autocast is off
        self._precision: torch.dtype | None = None
        self._depth, self._around = 0, ExitStack()

    def __enter__(self) -> Self:
        # entered again for what a handler opens
        self._depth += 1
        if self._depth == 1:
            for context in AROUND:
                self._around.enter_context(context())
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._depth -= 1
        if self._depth == 0:
            self._around.close()

    def saw_labels(self, scores: Tensor, target: Tensor, ignore_index: int) -> None:
        """Note integer labels that a loss was given beside scores of (B, C, …) or (C,)."""
        if self.notes is not None and not target.is_floating_point():
            self.notes.labels.append(Labels(target, scores.shape[min(1, scores.dim() - 1)], ignore_index))

    def saw_convolution(self, convolution: Convolution, batch: int, needs_gradient: bool) -> None:
        """Note a convolution of (batch, C, …), and whether its input has a gradient."""
        if self.notes is not None:
            before = self.notes.convolutions.get(str(convolution), Seen(convolution, batch, needs_gradient))
            self.notes.convolutions[str(convolution)] = Seen(
                convolution, max(batch, before.batch), needs_gradient or before.needs_gradient
            )

    def bits(self, count: int) -> Tensor:
        """The lane's next draw, of a call number of its own: (count,) int64 in [0, 2**32)."""
        return keyed.bits(self.key, self.step, self._call(), count)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The lane's next draw: uniform in [0, 1), multiples of 2**-24; see `random.uniform`."""
        return uniform_of(self.bits(math.prod(shape)), shape, dtype)

    def pass_by(self, x: Tensor) -> Tensor:
        """x, where a draw decides nothing: it is not made, and the ones behind it keep their numbers."""
        self.calls += 1
        return x

    def _call(self) -> Tensor:
        self.calls += 1
        # as a tensor, so that the graph's code is the same for every call and parts that look alike share it
        return torch.tensor(self.calls)

    def open(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of torch's. What is written in Python runs under the mode, so that rules see what it calls:
        a mode is off inside its own handler, and the draws within `F.gumbel_softmax` would escape it."""
        if not _dispatches(function):
            if self.stacked and kwargs.get("out") is not None:
                return _into(kwargs.pop("out"), function(*args, **kwargs))
            return function(*args, **kwargs)
        with self:
            return _body(function)(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = RULES.get(func)
        before = torch.random.get_rng_state() if self.watch else None
        try:
            precision = (self._precision or autocast.precision_of(self.key.device)) if self.stacked else None
            if precision is None:
                returned = self.open(func, *args, **kwargs) if handler is None else handler(self, *args, **kwargs)
            else:
                returned = self._cast(func, handler, precision, args, kwargs)
        except TaskError:
            raise
        except (RuntimeError, TypeError) as error:
            explained = self._explain(func, error, [*args, *kwargs.values()])
            if explained is None:
                raise
            raise explained from error
        if before is not None and not torch.equal(before, torch.random.get_rng_state()):
            raise _draws(func)
        if self.stacked and isinstance(returned, Tensor) and not all(type(n) is int for n in returned.shape):
            raise _shapes(getattr(func, "__name__", str(func)))
        return returned

    def _cast(
        self, func: Callable[..., Any], handler: Handler | None, precision: torch.dtype, args: Any, kwargs: Any
    ) -> Any:
        """Call a function as `torch.autocast` has it; see `autocast`."""
        args, kwargs, narrow = autocast.cast(func, args, kwargs, precision)
        before, self._precision = self._precision, precision
        try:
            with torch.autocast(self.key.device.type, enabled=False):
                returned = self.open(func, *args, **kwargs) if handler is None else handler(self, *args, **kwargs)
        finally:
            self._precision = before
        return returned if narrow is None else tree_map(lambda t: t.to(narrow), returned)

    def _explain(self, func: Callable[..., Any], error: Exception, given: Sequence[Any]) -> TaskError | None:
        name = getattr(func, "__name__", str(func))
        if name == "custom_function_call":
            # a user's own Function: `functions` explains it, by its class
            return None
        text = str(error)
        given = [carried(g) for g in given]
        hit = [path for path, value in self.riding.items() if any(value is g for g in given)]
        asks_value = ".item()" in text or "data-dependent control flow" in text or "Cannot access data pointer" in text
        if hit and (asks_value or "must be Number" in text or isinstance(error, TypeError)):
            return TaskError(
                f"{name}() takes only a Python number where {hit[0]} stands, and {hit[0]} differs between the lanes "
                f"of this graph{self._follows(hit[0])}, or write the operation with tensor arithmetic.\n{user_line()}"
            )
        if func is Tensor.__deepcopy__:
            return TaskError(
                f"copy.deepcopy() of a tensor of the graph, such as a parameter of the model, cannot be traced. For "
                f"values without a gradient call the model under torch.no_grad(), or detach what it returns; a tensor "
                f"is copied by x.detach().clone(). A second set of weights is a module of the model from the start, "
                f"and weights that follow others are buffers: register_buffer(...).\n{user_line()}"
            )
        if asks_value:
            static = (
                f", or, if it comes from a float of the task that steers control flow, name that float in "
                f"static = (...,). Floats that ride here: {', '.join(self.riding)}"
                if self.riding
                else ""
            )
            return TaskError(
                f"{name}() asks for the value of a tensor while the graph is traced, where it has none yet: a Python "
                f"branch, item() or float() on a tensor. Return the value beside the loss or as a metric, choose with "
                f"torch.where{static}.\n{user_line()}"
            )
        if "random operation" in text:
            return _draws(func)
        if "dynamic shape" in text or "differently shaped Tensor" in text or isinstance(error, _DYNAMIC):
            return _shapes(name)
        if "is not possible because there exists a Tensor" in text or "would mutate a captured Tensor" in text:
            return TaskError(
                f"{name}() writes what the graph computes into a tensor that is not its own: data of an evaluation, a "
                f"view of it, or a tensor from outside. Make a new one: torch.where(...), x = x + ... instead of "
                f"x += ....\n{user_line()}"
            )
        return None

    def _follows(self, path: str) -> str:
        """Where a value that rides comes from, and how to keep it from riding."""
        origin = self.origins.get(path, "")
        if not origin.startswith("task."):
            return ", since it follows from the seed. Compute it from an argument of the task"
        argument = origin.removeprefix("task.").split(".")[0]
        source = "" if origin == path else f", since it follows from {origin}"
        return f'{source}. Name it in the task, static = ("{argument}",), so that each value picks another graph'


def _shapes(name: str) -> TaskError:
    return TaskError(
        f"{name}() gives a result whose shape depends on the values of a tensor: x[mask], nonzero, unique. "
        f"A graph needs one shape: keep every entry, and weigh it by the mask: torch.where(mask, x, 0), "
        f"(x * mask).sum() / mask.sum(). repeat_interleave takes output_size; for bincount, add up one_hot(x, n).\n"
        f"{user_line()}"
    )


def _draws(func: Callable[..., Any]) -> TaskError:
    name = getattr(func, "__name__", str(func))
    return TaskError(
        f"{name}() draws from torch's global generator, whose state a graph cannot move on. These draw from a stream "
        f"that is keyed by the seed and the step: dropout layers, rand, randn, randint, randperm, bernoulli, "
        f"multinomial, normal, their _like and in-place forms. Or draw outside the graph, where the data or the model "
        f"are made.\n{user_line()}"
    )


def shared(tensor: Tensor) -> bool:
    """Whether a tensor inside a lane is the same one for all lanes: data of an evaluation, a constant.

    torch has no public way to ask; tried on torch 2.13.0, and by `tests/test_rules_factories.py`.
    """
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        # `torch.func.grad` wraps whatever it is given
        tensor = functorch.get_unwrapped(tensor)
    return not functorch.is_functorch_wrapped_tensor(tensor)


def transformed() -> bool:
    """Whether a lane's code stands in another `torch.func` transform than vmap over the lanes and grad: of its own.

    torch has no public way to ask; tried on torch 2.13.0, and by `tests/test_rules_convolution.py`.
    """
    stack = torch._C._functorch.get_interpreter_stack() or []
    kinds = [level.key() for level in stack]
    transforms = torch._C._functorch.TransformType
    return transforms.Jvp in kinds or kinds.count(transforms.Vmap) > 1


def _into(out: Any, found: Any) -> Any:
    """Write what a function found into its ``out=``, which vmap does not know (`spectral_norm` normalises so)."""
    if not isinstance(out, Tensor):
        return type(found)([_into(o, f) for o, f in zip(out, found, strict=True)])
    return (out if out.shape == found.shape else out.resize_(found.shape)).copy_(found)


@functools.cache
def _dispatches(function: Callable[..., Any]) -> bool:
    """Whether a function is Python code of `torch.nn.functional` that asks for a mode before it does its work."""
    return (
        isinstance(function, types.FunctionType)
        and function.__module__ == "torch.nn.functional"
        and any("has_torch_function" in name for name in function.__code__.co_names)
    )


def _never(*args: Any) -> bool:
    return False


def _body(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function without asking: under the mode it would come back to the handler for ever."""
    assert isinstance(function, types.FunctionType)
    silent = {f"has_torch_function{kind}": _never for kind in ("", "_unary", "_variadic")}
    body = types.FunctionType(
        function.__code__,
        function.__globals__ | silent,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body
