"""The optimiser that is handed back: the plain one's groups and state, and a step that walks."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from coalesce.engine.backprop.model import _refuse_zeros
from coalesce.engine.backprop.walk import Walk
from coalesce.engine.backprop.words import warn

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class BackPropOptimizer(Optimizer):
    """An optimiser whose step computes the gradients that it needs, and frees each one after its use.

    Groups, state and defaults are those of the plain optimiser, which both names lead to: schedulers may be built on
    either. Hooks registered on either run once per step.
    """

    def __init__(self, walk: Walk):
        # not Optimizer.__init__, which would register every parameter again
        self._walk = walk
        plain = walk.optimizer
        for name in _HOOKS:
            setattr(self, name, getattr(plain, name))
        self._patch_step_function()
        switch_off_batching(plain)
        # its own step would find no gradient and do nothing, in silence
        plain._optimizer_step_pre_hooks = OrderedDict({0: _refuse_plain_step})
        ending = weakref.finalize(walk, setattr, plain, _HOOKS[0], self._optimizer_step_pre_hooks)
        ending.atexit = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._walk.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._walk.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._walk.optimizer.defaults

    @property
    def accumulate(self) -> int:
        """Backward passes per step; may be set between steps."""
        return self._walk.accumulate

    @accumulate.setter
    def accumulate(self, passes: int) -> None:
        self._walk.accumulate = check_accumulate(passes)

    @property
    def gradient_norm(self) -> Tensor | None:
        """The global norm of the last step's gradients before it was clipped; None without ``clip_norm``."""
        return self._walk.gradient_norm

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Walk back from the output's gradient, updating each parameter as soon as its gradient is complete.

        Raises:
            RuntimeError: without a backward() before it, or after another number of them than ``accumulate``.
            TypeError: for a closure.
        """
        if closure is not None:
            raise TypeError(
                "step(closure): coalesce.BackProp computes every gradient once and frees it; call the model, "
                "backward() and step()"
            )
        self._walk.step()
        # a scheduler that was built on the plain optimiser asks it whether a step came first
        self._walk.optimizer._opt_called = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that a step() has not used. After a step there are none."""
        _refuse_zeros(set_to_none)
        self._walk.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As that of the plain optimiser."""
        self._walk.optimizer.add_param_group(param_group)
        switch_off_batching(self._walk.optimizer)
        self._walk.follow()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict ends here
        self._walk.optimizer.__setstate__(state)
        switch_off_batching(self._walk.optimizer)
        self._walk.follow()

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        # GradScaler.step asks for it before anything else
        raise RuntimeError(
            "GradScaler.step(optimizer): whether a step must be skipped is known only when every gradient is, and "
            "under coalesce.BackProp the first parameters are updated before the last gradients exist. Use "
            "torch.autocast with bfloat16, which needs no GradScaler, or the plain model and optimizer"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(0)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an optimizer under coalesce.BackProp cannot be copied or pickled: it is tied to its model. Save "
            "optimizer.state_dict(), which is that of the plain optimizer"
        )


def check_accumulate(passes: Any) -> int:
    """A valid ``accumulate``."""
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise ValueError(
            f"accumulate={passes!r}: must be an integer, the number of backward() per step(); valid: 1, 2, …"
        )
    return passes


def switch_off_batching(optimizer: Optimizer) -> None:
    """Let every group's update be the plain one, which takes one parameter at a time."""
    groups = [optimizer.defaults, *optimizer.param_groups]
    found = [name for name in ("foreach", "fused") if any(group.get(name) for group in groups)]
    for group in groups:
        group.update(dict.fromkeys((name for name in found if name in group), False))
    if found:
        warn(
            f"{' and '.join(f'{name}=True' for name in found)} is switched off: it updates many parameters in one "
            "call, for which all their gradients would have to be alive; coalesce.BackProp updates one at a time. The "
            f"numbers are those of {' and '.join(f'{name}=False' for name in found)}"
        )


def _refuse_plain_step(*_: Any) -> NoReturn:
    raise RuntimeError(
        "step() of the optimizer that was given to coalesce.BackProp: it would find no gradients; call step() of the "
        "one that it returned"
    )
