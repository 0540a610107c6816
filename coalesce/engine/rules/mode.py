"""The function mode under which a lane's own code runs."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from coalesce.errors import TaskError
from coalesce.random import uniform

#: torch function → rule; the rule gets the mode and the function's own arguments. Filled by the modules beside this.
RULES: dict[Callable[..., Any], Callable[..., Any]] = {}


def rule(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for some of torch's functions."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            RULES[function] = handler
        return handler

    return register


class Labels(NamedTuple):
    """Labels that a loss was given: the tensor, the number of classes, and the label that it leaves out."""

    target: Tensor
    classes: int
    ignore_index: int


class Rules(TorchFunctionMode):
    """Runs one lane's code: replaces what has a rule, explains what fails because a value rides.

    Args:
        key: (2,) int64, the lane's stream.
        step: 0-d int64, updates done.
        riding: path as the user writes it → the 0-d tensor that stands there. For messages.
        labels: where to note which tensors were labels of how many classes, if anybody wants to know.
        origins: path as in ``riding`` → the swept key that it follows from.
        watch: raise if a function draws from torch's global generator, which outside a trace it can.
    """

    def __init__(
        self,
        key: Tensor,
        step: Tensor,
        riding: Mapping[str, Any],
        labels: list[Labels] | None = None,
        origins: Mapping[str, str] | None = None,
        watch: bool = False,
    ):
        super().__init__()
        self.origins = origins or {}
        self.watch = watch
        self.key = key
        self.step = step
        self.riding = riding
        self.labels = labels
        self.calls = 0

    def saw_labels(self, scores: Tensor, target: Tensor, ignore_index: int) -> None:
        """Note integer labels that a loss was given beside scores of (B, C, …) or (C,)."""
        if self.labels is not None and not target.is_floating_point():
            self.labels.append(Labels(target, scores.shape[min(1, scores.dim() - 1)], ignore_index))

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The lane's next draw: uniform in [0, 1), of a call number of its own."""
        self.calls += 1
        return uniform(self.key, self.step, self.calls, shape, dtype)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = RULES.get(func)
        before = torch.random.get_rng_state() if self.watch else None
        try:
            returned = func(*args, **kwargs) if handler is None else handler(self, *args, **kwargs)
        except TaskError:
            raise
        except (RuntimeError, TypeError) as error:
            explained = self._explain(func, error, [*args, *kwargs.values()])
            if explained is None:
                raise
            raise explained from error
        if before is not None and not torch.equal(before, torch.random.get_rng_state()):
            raise _draws(func)
        return returned

    def _explain(self, func: Callable[..., Any], error: Exception, given: Sequence[Any]) -> TaskError | None:
        name = getattr(func, "__name__", str(func))
        text = str(error)
        hit = [path for path, value in self.riding.items() if any(value is g for g in given)]
        asks_value = ".item()" in text or "data-dependent control flow" in text or "Cannot access data pointer" in text
        if hit and (asks_value or "must be Number" in text or isinstance(error, TypeError)):
            return TaskError(
                f"{name}() takes only a Python number where {hit[0]} stands, and {hit[0]} differs between the lanes "
                f"of this graph{self._follows(hit[0])}, or write the operation with tensor arithmetic.\n{user_line()}"
            )
        if asks_value:
            rides = ", ".join(self.riding) or "none"
            return TaskError(
                f"{name}() asks for the value of a tensor while the graph is traced, where it has none yet: a Python "
                f"branch, item() or float() on a tensor. Return the value as a metric, choose with torch.where, or, "
                f"if it comes from a float of the task that steers control flow, name that float in "
                f"static = (...,). Floats that ride here: {rides}.\n{user_line()}"
            )
        if "random operation" in text:
            return _draws(func)
        return None

    def _follows(self, path: str) -> str:
        """Where a value that rides comes from, and how to keep it from riding."""
        origin = self.origins.get(path, "")
        if not origin.startswith("task."):
            return ", since it follows from the seed. Compute it from an argument of the task"
        argument = origin.removeprefix("task.").split(".")[0]
        source = "" if origin == path else f", since it follows from {origin}"
        return f'{source}. Name it in the task, static = ("{argument}",), so that each value picks another graph'


def _draws(func: Callable[..., Any]) -> TaskError:
    name = getattr(func, "__name__", str(func))
    return TaskError(
        f"{name}() draws from torch's global generator, which all lanes would share. Draw in the model's dropout "
        f"layers, or outside the graph in data() or model().\n{user_line()}"
    )


def user_line(error: BaseException | None = None) -> str:
    """The innermost line of a stack that is neither torch's, Python's nor ours, as a traceback shows it.

    Args:
        error: whose traceback to look at; without one, the stack that stands.
    """
    frames = traceback.extract_tb(error.__traceback__) if error is not None else traceback.extract_stack()
    kinds = [_kind(frame.filename) for frame in frames]
    known = list(zip(frames, kinds, strict=True))
    # what called us is no part of the task
    inside = known[kinds.index("ours") :] if "ours" in kinds else known
    # a task may be installed beside other packages: their lines count if there is none outside
    places = [(inside, "user"), (inside, "package"), (known, "user")]
    theirs = next((found for part, kind in places if (found := [f for f, k in part if k == kind])), [])
    if not theirs:
        return "  (at no line of the task's own)"
    chosen = theirs[-1]
    source = linecache.getline(chosen.filename, chosen.lineno or 0).strip()
    return f'  File "{chosen.filename}", line {chosen.lineno}, in {chosen.name}\n    {source}'


_OURS = Path(__file__).parents[2]
_HOMES = {
    "torch": Path(torch.__file__).parent,
    "package": Path(sysconfig.get_path("purelib")),
    "python": Path(sysconfig.get_path("stdlib")),
}


def _kind(filename: str) -> str:
    path = Path(filename)
    if path.is_relative_to(_OURS):
        # the tasks that ship are read as a user's own would be
        return "user" if path.is_relative_to(_OURS / "tasks") else "ours"
    if filename.startswith("<"):
        return "python"
    return next((kind for kind, home in _HOMES.items() if path.is_relative_to(home)), "user")
