"""One build of a task and its model, into which the tensors of another experiment can be put."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from coalesce.engine.objects import Alias, Path, attributes, installed, lookup
from coalesce.engine.rules.normalisation import CumulativeMomentum
from coalesce.task import Task


class Instance:
    """A task and its model.

    Each trace takes a new one: what the user's code leaves behind in an attribute while it is traced (a mask that is
    made at the first call) belongs to that trace, and would be garbage in another.

    Args:
        lowerings: how its convolutions are lowered, see `engine.measure`.
    """

    def __init__(self, task: Task, model: nn.Module, lowerings: Mapping[str, str] | None = None):
        self.lowerings = lowerings or {}
        self.task = task
        self.model = model

    @property
    def name(self) -> str:
        """Of the task's class."""
        return type(self.task).__name__

    @property
    def roots(self) -> dict[str, object]:
        return {"task": self.task, "model": self.model}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, each once."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    @contextmanager
    def holding(
        self, tensors: MutableMapping[str, Tensor], riding: Mapping[Path, Any], traced: bool = False
    ) -> Iterator[None]:
        """Put tensors in the place of parameters and buffers, and values in the place of attributes, for a while.

        (`torch.func.functional_call` leaves its tensors behind in a module that stands in the model twice, and knows
        nothing of other references to a parameter.)

        Args:
            tensors: name → tensor for each of `tensors`. At the end, a buffer that the code in the block replaced
                is replaced here.
            riding: path → value.
            traced: the code in the block is traced, and what would ask for a tensor's value is replaced.
        """
        # a buffer that an earlier call made, where there was None, belongs to that call
        names = {id(t): n for n, t in self.tensors().items() if n in tensors}
        places: list[tuple[Any, str, Tensor]] = []
        aliases: dict[Path, Any] = {p: tensors[name] for p, name in self._aliases.items() if name in tensors}
        if traced:
            aliases |= self._cumulative
        for module in self.model.modules():
            for kept in (module._parameters, module._buffers):
                places += [(kept, key, t) for key, t in kept.items() if t is not None and id(t) in names]
        try:
            for kept, key, tensor in places:
                kept[key] = tensors[names[id(tensor)]]
                if isinstance(tensor, nn.Parameter):
                    # what isinstance(…, nn.Parameter) looks at, which get_parameter and user's code ask
                    kept[key]._is_param = True
            with installed(self.roots, aliases | dict(riding)):
                yield
            found = {names[id(tensor)]: kept.get(key) for kept, key, tensor in reversed(places)}
            tensors.update({n: t for n, t in found.items() if t is not None})
        finally:
            for kept, key, tensor in places:
                kept[key] = tensor

    @cached_property
    def _cumulative(self) -> dict[Path, CumulativeMomentum]:
        """What stands in the place of each BatchNorm's ``momentum=None``."""
        found = {}
        for path, value in attributes(self.roots):
            if value is None and path[-1] == ("attribute", "momentum"):
                module = lookup(self.roots, path[:-1])
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                    found[path] = CumulativeMomentum(module)
        return found

    @cached_property
    def _aliases(self) -> dict[Path, str]:
        """Other references to parameters and buffers: ``self.weights = list(model.parameters())``."""
        return {path: value.name for path, value in attributes(self.roots) if isinstance(value, Alias)}
