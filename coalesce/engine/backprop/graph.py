"""An output's graph: where it ends, and where backward() halts in front of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class Pass:
    """One forward pass and, once it is there, the gradient of its output.

    Args:
        output: what the model returned, with the graph behind it.
    """

    __slots__ = ("gradient", "leaves", "output", "task")

    def __init__(self, output: Tensor):
        self.output: Tensor | None = output
        self.gradient: Tensor | None = None
        self.leaves: list[Tensor] = []
        self.task = -1

    def release(self) -> None:
        """Let the graph go, whoever still holds the loss."""
        self.output = self.gradient = None
        self.leaves = []


class Halt(torch.autograd.Function):
    """The identity on the way forward; on the way back it keeps the gradient and passes nothing on.

    The graph of the model hangs on this node, the node on what was computed from it. So a graph lives exactly as long
    as an output or a loss does that needs it: a forward pass whose output is dropped frees everything. (A leaf handed
    out in place of it would refuse in-place operations, and its ``.grad`` would be made contiguous, which can change
    the last bit of what follows.)
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, made: Pass, arrived: Callable[[Pass, Tensor | None], None]) -> Tensor:
        ctx.made, ctx.arrived = made, arrived
        ctx.set_materialize_grads(False)  # no gradient is not a gradient of zeros: nothing must decay
        assert made.output is not None
        return made.output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.arrived(ctx.made, *gradients)
        return None, None, None


def halted(output: Tensor, arrived: Callable[[Pass, Tensor | None], None]) -> Tensor:
    """The output as it is handed to the user: equal, but with a graph of its own that ends here.

    Args:
        arrived: is called with the pass and its output's gradient when backward() comes here.
    """
    anchor = torch.empty(0, requires_grad=True)  # without an input that requires grad there would be no node
    handed: Tensor = Halt.apply(anchor, Pass(output), arrived)
    return handed


def leaves(output: Tensor) -> list[Tensor]:
    """The tensors in which an output's graph ends.

    Raises:
        RuntimeError: for a reentrant checkpoint, whose parameters the graph does not show.
    """
    root = get_gradient_edge(output).node
    found, seen, stack = [], {root}, [root]
    while stack:
        node = stack.pop()
        kind = type(node).__name__
        if kind == "AccumulateGrad":
            found.append(node.variable)  # type: ignore[attr-defined]
        elif kind == "CheckpointFunctionBackward":
            raise RuntimeError(
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=True) in the model: such a checkpoint hides its "
                "parameters from the graph, so that coalesce.BackProp cannot tell when a gradient is complete; give it "
                "use_reentrant=False"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found
