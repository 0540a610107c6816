"""One parameter's update by an optimiser that was made for many."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class UpdateOfOne:
    """The optimiser's own step, narrowed to one parameter.

    The plain optimiser keeps groups and state, so its `state_dict` stays what it is. For an update its attributes are
    lent to an object of its class whose one group has the one parameter: whatever class it is, its own code runs.

    Args:
        optimizer: the plain optimiser.
    """

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        step: Any = type(optimizer).step
        # torch wraps a class's step into the calls of its hooks; those belong to the step as a whole
        self.rule = step.__wrapped__ if getattr(step, "hooked", False) else step

    def __call__(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter by its ``.grad``.

        Args:
            group: the parameter group that it belongs to, as it stands now.

        Raises:
            RuntimeError: if the step writes anything but parameters and their state: what it keeps for all parameters
                together would be lost.
        """
        narrow = {**group, "params": [parameter]}
        lent = {
            **vars(self.optimizer),
            "param_groups": [narrow],
            # a step that calls its parent's would run the hooks after all
            "_optimizer_step_pre_hooks": OrderedDict(),
            "_optimizer_step_post_hooks": OrderedDict(),
        }
        one = object.__new__(type(self.optimizer))
        vars(one).update(lent)
        before = dict(narrow)
        self.rule(one)
        written = [name for name, value in vars(one).items() if lent.get(name, lent) is not value]
        written += [name for name, value in narrow.items() if before.get(name, before) is not value]
        if written:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step() writes {', '.join(written)}, which belongs to no single "
                "parameter; coalesce.BackProp updates one parameter at a time and takes optimizers that keep "
                "everything in state[parameter], as those of torch.optim do"
            )
