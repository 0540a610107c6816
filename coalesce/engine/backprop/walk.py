"""From the gradient of an output to updated parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from coalesce.engine.backprop.graph import Pass, halted, leaves
from coalesce.engine.backprop.unborn import PAST_THE_OUTPUT, mark, unmark
from coalesce.engine.backprop.update import UpdateOfOne
from coalesce.engine.backprop.words import warn

HALFWAY = (
    "This came in optimizer.step() of coalesce.BackProp, and some parameters may be updated, others not: it cannot be "
    "repeated, as a plain loop's backward() can. Load the last saved state to go on."
)
CHANGED_TOO_EARLY = (
    "Either weights, buffers or inputs were changed between backward() and step(), or the model reads a parameter in a "
    "second way that brings it no gradient (parameter.detach()), and needed its old value after its update. For the "
    "latter BackProp(..., clip_norm=math.inf) computes every gradient before the first update."
)


class Walk:
    """What a model and its optimiser share: the passes that wait for a step, and the step.

    Args:
        model: the plain model.
        optimizer: the plain optimiser; it keeps parameter groups and state.
        accumulate: backward passes per step.
        clip_norm: bound of the gradients' norm, or None.
        clip_value: bound of every entry of a gradient, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.accumulate = accumulate
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        #: the norm before it was clipped at the last step
        self.gradient_norm: Tensor | None = None
        #: idle: no gradient of a parameter may be born; adding: they are kept; updating: they are used and freed
        self.stage: Literal["idle", "adding", "updating"] = "idle"
        self.in_forward = False
        self.update = UpdateOfOne(optimizer)
        self.groups: dict[Tensor, dict[str, Any]] = {}
        #: the model's parameters and their names
        self.inside: dict[Tensor, str] = {}
        #: passes whose output has a gradient; how many more have been added up; and into what
        self.pending: list[Pass] = []
        self.added = 0
        self.sums: dict[Tensor, Tensor] = {}
        self._marked: list[Tensor] = []
        self._hooked: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []
        self.follow()
        self._hook()
        # the parameters outlive this object; then they are plain parameters again
        weakref.finalize(self, _let_go, self._handles, self._marked).atexit = False

    def follow(self) -> None:
        """Look again at which parameters there are."""
        self.inside = {parameter: name for name, parameter in self.model.named_parameters()}
        self._follow_groups()

    def _follow_groups(self) -> None:
        self.groups = {parameter: group for group in self.optimizer.param_groups for parameter in group["params"]}

    def _hook(self) -> None:
        """Have every parameter say when its gradient is complete. One that is frozen or lazy cannot yet."""
        this = weakref.ref(self)

        def born(parameter: Tensor) -> None:
            if (walk := this()) is not None:
                walk.born(parameter)

        for parameter in self.groups:
            if parameter not in self._hooked and parameter.requires_grad and not is_lazy(parameter):
                self._hooked.add(parameter)
                self._handles.append(parameter.register_post_accumulate_grad_hook(born))

    def _be_last(self) -> None:
        """Let hooks of the user's that came after ours see the gradients, which ours uses and frees."""
        for handle in self._handles:
            hooks = handle.hooks_dict_ref()
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                # torch calls them in the order in which they were put in
                hooks[handle.id] = hooks.pop(handle.id)

    # on the way forward

    @torch.compiler.disable
    def begin(self) -> None:
        """A forward pass begins that may be trained on."""
        self._unmark()
        # one micro-batch's activations go before the next one's come
        if self.added + len(self.pending) < self.accumulate:
            self._add_up(self.pending)

    @torch.compiler.disable
    def end(self) -> None:
        """A forward pass has ended."""
        self._hook()
        for made in self.pending:
            self._mark(made.leaves)

    @torch.compiler.disable
    def halt(self, output: Any) -> Any:
        """What a forward pass hands out.

        Raises:
            TypeError: for anything but a tensor.
        """
        if not isinstance(output, Tensor):
            raise TypeError(
                f"the model returned {_described(output)}; under coalesce.BackProp, which halts backward() at the "
                "output, forward must return one tensor where gradients are on. Wrap the model in a small nn.Module "
                "whose forward picks the tensor that the loss needs, or computes the loss itself; under "
                "torch.no_grad() anything may be returned"
            )
        return halted(output, self.arrived) if output.requires_grad else output

    # on the way back

    def arrived(self, made: Pass, gradient: Tensor | None) -> None:
        """backward() has come to the output of a forward pass."""
        task = torch._C._current_graph_task_id()
        try:
            self._check(made, task)
            assert made.output is not None
            made.leaves = leaves(made.output)
        except RuntimeError:
            self.drop()
            raise
        if self.accumulate == 1 and self.pending:
            warn(
                "two backward() without a step() or zero_grad() between them: coalesce.BackProp forgets the earlier "
                "one; to add gradients up give it accumulate=n"
            )
            self.drop()
        made.gradient, made.task = gradient, task
        self.pending.append(made)
        self._mark([*made.leaves, *self.sums])

    def _check(self, made: Pass, task: int) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): coalesce.BackProp has no second derivatives, since no gradient outlives "
                "its parameter's update; train such a loss with the plain model and optimizer"
            )
        if made.output is None:
            raise RuntimeError(
                "backward() through an output whose graph is gone: a step(), a zero_grad() or a newer backward() has "
                "freed it; call the model again"
            )
        if made in self.pending:
            raise RuntimeError(
                "backward() came twice to the same output of the model; add the losses and call backward() once: "
                "(first + second).backward()"
            )
        if any(other.task == task for other in self.pending):
            raise RuntimeError(
                "two calls of the model meet in one loss; under coalesce.BackProp a loss belongs to one forward pass. "
                "Call the model once on both inputs (torch.cat along the batch), put both calls into the forward of "
                "one nn.Module that is given to BackProp, or, where the loss is a sum, call backward() for each part, "
                "with accumulate=2"
            )
        if self.added + len(self.pending) == self.accumulate > 1:
            raise RuntimeError(
                f"backward() number {self.accumulate + 1} without a step(), with accumulate={self.accumulate}: call "
                f"step() after {self.accumulate}, or raise accumulate"
            )

    def born(self, parameter: Tensor) -> None:
        """A parameter's gradient is complete."""
        if self.stage == "updating":
            self._use(parameter)
        # what the optimiser has beside the model's parameters gets its gradient from backward() itself
        elif self.stage == "idle" and parameter in self.inside:
            self.drop()
            raise RuntimeError(PAST_THE_OUTPUT.format(name=f" ({self.inside[parameter]})"))

    # the step

    def step(self) -> None:
        """Walk back from the pending outputs; update parameters as their gradients are complete."""
        passes = self.added + len(self.pending)
        if passes == 0:
            raise RuntimeError(
                "step() without a gradient: since the last step() or zero_grad() no backward() came to an output of "
                "the model that coalesce.BackProp returned. Was it the plain model that was called?"
            )
        if passes < self.accumulate:
            raise RuntimeError(
                f"step() after {passes} backward(), with accumulate={self.accumulate}: call step() once in "
                f"{self.accumulate} backward(); for a shorter last group set optimizer.accumulate = {passes} before it"
            )
        self._follow_groups()  # a loaded state brings new ones
        last = self.pending[-1:]
        others = {leaf for made in last for leaf in made.leaves if leaf in self.inside and leaf not in self.groups}
        try:
            self._unmark()
            self._be_last()
            self._add_up(self.pending[:-1])
            self._restore()
            if self.clip_norm is None:
                with _halfway():
                    self._go(last, "updating")
            else:
                self._go(last, "adding")
                self._clip(self._with_gradients())
            # used in an earlier micro-batch only, clipped, or no part of the model
            with _halfway():
                for parameter in self._with_gradients():
                    self._use(parameter)
        finally:
            self.drop()
            # the step of a second optimiser must not pass over them in silence
            self._mark(others)

    def drop(self) -> None:
        """Forget every gradient, and free the graphs that would bring more."""
        for made in self.pending:
            made.release()
        self.pending.clear()
        self.sums.clear()
        self.added = 0
        self._unmark()
        for parameter in self.groups:
            parameter.grad = None

    def _go(self, passes: Iterable[Pass], stage: Literal["adding", "updating"]) -> None:
        """Walk back through some passes and free them."""
        self.stage = stage
        try:
            for made in passes:
                output, gradient = made.output, made.gradient
                wanted = [leaf for leaf in made.leaves if leaf in self.groups]
                made.release()
                frozen = [self.inside.get(leaf, "a parameter") for leaf in wanted if not leaf.requires_grad]
                if frozen:
                    raise RuntimeError(
                        f"{', '.join(frozen)}: frozen between backward() and step(), where coalesce.BackProp has yet "
                        "to compute gradients; freeze before the model is called, or after the step"
                    )
                if output is not None and gradient is not None and wanted:
                    torch.autograd.backward(output, gradient, inputs=wanted)
        finally:
            self.stage = "idle"

    def _add_up(self, passes: list[Pass]) -> None:
        """Turn passes into sums of gradients, out of the user's sight."""
        if not passes:
            return
        self._restore()
        self.added += len(passes)
        self._go(passes, "adding")
        self.pending = [made for made in self.pending if made.output is not None]
        for parameter in self._with_gradients():
            if parameter in self.inside:
                self.sums[parameter], parameter.grad = parameter.grad, None  # type: ignore[assignment]

    def _restore(self) -> None:
        for parameter, gradient in self.sums.items():
            parameter.grad = gradient
        self.sums.clear()

    def _with_gradients(self) -> list[Tensor]:
        """The optimiser's parameters that have a gradient, in the model's order, by which norms are summed."""
        ordered = [*(p for p in self.inside if p in self.groups), *(p for p in self.groups if p not in self.inside)]
        return [parameter for parameter in ordered if parameter.grad is not None]

    def _clip(self, parameters: list[Tensor]) -> None:
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip_value)
        if self.clip_norm is not None:
            self.gradient_norm = nn.utils.clip_grad_norm_(parameters, self.clip_norm)

    def _use(self, parameter: Tensor) -> None:
        """Update a parameter and free its gradient."""
        if self.clip_norm is None and self.clip_value is not None:
            self._clip([parameter])
        self.update(parameter, self.groups[parameter])
        parameter.grad = None

    def _mark(self, leaves: Iterable[Tensor]) -> None:
        self._marked.extend(leaves)
        mark(self._marked)

    def _unmark(self) -> None:
        unmark(self._marked)
        self._marked.clear()


@contextmanager
def _halfway() -> Iterator[None]:
    """What fails in the block tells that the step stands in its middle."""
    try:
        yield
    except BaseException as error:
        error.add_note(HALFWAY)
        if "modified by an inplace operation" in str(error):
            error.add_note(CHANGED_TOO_EARLY)
        raise


def _let_go(handles: list[RemovableHandle], marked: list[Tensor]) -> None:
    for handle in handles:
        handle.remove()
    unmark(marked)


def _described(output: Any) -> str:
    """A tuple of 2 (Tensor, Tensor); a dict with the keys 'a', 'b'; an object of class X."""
    kind = type(output).__name__
    if isinstance(output, dict):
        return f"a {kind} with the keys {', '.join(repr(key) for key in output)}"
    if isinstance(output, (tuple, list)):
        return f"a {kind} of {len(output)} ({', '.join(type(entry).__name__ for entry in output)})"
    return f"{output!r}" if output is None else f"an object of class {kind}"
