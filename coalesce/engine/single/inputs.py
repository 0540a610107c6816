"""A graph's inputs: the user's own parameters, buffers and optimiser state, seen with a lane dimension."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coalesce.engine.single.graph import Update

#: Parts of the state whose tensors the graph writes.
_WRITTEN = ("trained/", "slot/")


@dataclass(frozen=True)
class Inputs:
    """What a graph runs on.

    Args:
        sources: name → the user's tensor. The name's first part says what it is: trained, fixed, buffer, slot, step.
        places: where each lies, its shape, and its strides.
        steps: the tensors in which torch counts a parameter's steps.
        clock: (N,) int64, the steps done of each parameter whose count the graph cannot read: the optimiser keeps none,
            or keeps it on another device.
        state: name → (1, …), of which the graph takes the first ones; views of the sources, but for the clock.
    """

    sources: Mapping[str, Tensor]
    places: Sequence[tuple[int, torch.Size, tuple[int, ...]]]
    steps: Sequence[Tensor]
    clock: Tensor
    state: Mapping[str, Tensor]

    def mirror(self) -> None:
        """Bring the clock up to what torch counts elsewhere."""
        if self.steps and len(self.clock):
            self.clock.copy_(torch.stack([t for t in self.steps if t.device != self.clock.device]))

    def ticked(self) -> None:
        """A step has been taken."""
        if self.steps:
            torch._foreach_add_(list(self.steps), 1)
        else:
            self.clock.fill_(1)

    def alike(self, other: Inputs) -> bool:
        """Whether the same graph takes them."""
        return _looks(self.state) == _looks(other.state)


def bind(
    sources: Mapping[str, Tensor], updates: Mapping[str, Update], fresh: frozenset[str], device: torch.device
) -> Inputs:
    """Look at the user's tensors as a graph's inputs.

    Args:
        sources: see `Inputs`.
        updates: trained parameter → how it is updated.
        fresh: those whose next step is the first, as far as torch keeps no count.
        device: of the model.

    Raises:
        RuntimeError: two of them lie in one place.
    """
    _check_apart(sources)
    counts = {n: sources.get(f"step/{n}") for n in updates}
    here = {n: t for n, t in counts.items() if t is not None and t.device == device}
    elsewhere = [n for n in updates if n not in here]
    clock = torch.tensor([0 if n in fresh else 1 for n in elsewhere], dtype=torch.int64, device=device)
    state = {n: t.detach()[None] for n, t in sources.items() if not n.startswith("step/")}
    state |= {f"clock/{n}": t[None] for n, t in here.items()}
    state |= {f"clock/{n}": clock[i : i + 1] for i, n in enumerate(elsewhere)}
    return Inputs(sources, places(sources.values()), [t for t in counts.values() if t is not None], clock, state)


def places(tensors: Iterable[Tensor]) -> list[tuple[int, torch.Size, tuple[int, ...]]]:
    """Where tensors lie, their shapes, and their strides."""
    return [(t.data_ptr(), t.shape, t.stride()) for t in tensors]


def _looks(state: Mapping[str, Tensor]) -> list[object]:
    return [(n, t.shape, t.stride(), t.dtype, t.device) for n, t in state.items()]


def _check_apart(sources: Mapping[str, Tensor]) -> None:
    """What is written may not be another input as well: neither would know of the other."""
    seen: dict[int, str] = {}
    for name, tensor in sources.items():
        if tensor.numel() == 0:
            continue
        other = seen.setdefault(tensor.data_ptr(), name)
        if other != name and (name.startswith(_WRITTEN) or other.startswith(_WRITTEN)):
            one, two = (n.partition("/")[2] for n in (other, name))
            raise RuntimeError(
                f"{one} and {two} are two tensors in one place in memory, so that an update of one would change the "
                f"other unseen. Tie weights by assignment, b.weight = a.weight, so that they are one parameter."
            )
