"""Recurrent layers and cells.

vmap has no rule for torch's: they unroll while they train, which takes minutes to compile, and raise in evaluation.
Dropout between layers draws from the lane's own stream, masks of shape (D, T, B).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coalesce.engine.rules.dropout import drop
from coalesce.engine.rules.mode import Rules, rule, user_line
from coalesce.engine.rules.recurrence import CELLS, Recurrence, States
from coalesce.errors import TaskError


def _layers(kind: str, function: Callable[..., Any], cell: Callable[..., Any]) -> None:
    """Register the rules of one of torch's functions for layers, and of the one for a cell."""

    @rule(function)
    def layers(rules: Rules, input: Tensor, hx: Any, *options: Any) -> Any:
        if isinstance(hx, Tensor) and not hx.is_floating_point():
            # what stands there is the number of sequences at each time step
            raise TaskError(
                f"{function.__name__}() takes a packed sequence, whose shapes depend on the lengths; a graph has fixed "
                f"ones. Pad the sequences, call the layer on the padded tensor, and mask what lies behind an end.\n"
                f"{user_line()}"
            )
        single = isinstance(hx, Tensor)
        output, states = _run(rules, kind, input, (hx,) if single else tuple(hx), *options)
        return (output, *states)

    @rule(cell)
    def one(
        rules: Rules, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        found = CELLS[kind].step(F.linear(input, w_ih, b_ih), states, F.linear(states[0], w_hh, b_hh))
        return found[0] if isinstance(hx, Tensor) else found


for _kind in CELLS:
    _layers(_kind, getattr(torch, _kind), getattr(torch, f"{_kind}_cell"))


def _run(
    rules: Rules,
    kind: str,
    input: Tensor,
    hx: States,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float | Tensor,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, States]:
    """All layers. Arguments as torch's own; (output, the states of all layers and directions at the end)."""
    x = input.permute(2, 1, 0) if batch_first else input.permute(2, 0, 1)
    directions = 2 if bidirectional else 1
    per = len(weights) // (num_layers * directions)
    finals: list[States] = []
    for number in range(num_layers):
        if number and train and not (isinstance(dropout, float | int) and dropout == 0):
            x = drop(rules, x, dropout, x.shape)
        start = number * directions
        parts = [weights[(start + d) * per : (start + d + 1) * per] for d in range(directions)]
        states = tuple(s[start : start + directions] for s in hx)
        x, final = _layer(kind, x, states, parts, has_biases)
        finals.append(final)
    ends = tuple(torch.cat(parts) for parts in zip(*finals, strict=True))
    return x.permute(2, 1, 0) if batch_first else x.permute(1, 2, 0), ends


def _layer(
    kind: str, x: Tensor, states: States, parts: Sequence[Sequence[Tensor]], has_biases: bool
) -> tuple[Tensor, States]:
    """One layer: x (D, T, B), states (directions, B, H), parts the weights of each direction."""
    time = x.shape[1:]
    w_ih, w_hh, *more = (torch.stack(list(same)) for same in zip(*parts, strict=True))
    none = w_hh.new_zeros(*w_hh.shape[:2], 1)
    b_ih, b_hh = (b[..., None] for b in more[:2]) if has_biases else (none, none)
    # the second direction sees time reversed
    both = torch.stack([x, x.flip(1)][: len(parts)])
    # the input's part of the gates of all time steps in one product
    gates = torch.baddbmm(b_ih, w_ih, both.flatten(2)).unflatten(2, time)
    columns = tuple(s.mT for s in states)
    if len(more) % 2:
        found = _projected(kind, gates, columns, w_hh, b_hh, more[-1])
    else:
        found = Recurrence.apply(kind, gates, w_hh, b_hh, *columns)
    outputs = found[0][:, :, 1:]
    output = torch.cat([outputs[0], *(o.flip(1) for o in outputs[1:])])
    return output, tuple(f[:, :, -1].mT for f in found)


def _projected(
    kind: str, gates: Tensor, states: States, weight: Tensor, bias: Tensor, projection: Tensor
) -> tuple[Tensor, ...]:
    """An LSTM whose output is projected before it returns: step by step, by operations that vmap knows."""
    every = [states]
    for given in gates.unbind(2):
        output, *rest = CELLS[kind].step(given, states, torch.baddbmm(bias, weight, states[0]))
        states = (projection @ output, *rest)
        every.append(states)
    return tuple(torch.stack(s, 2) for s in zip(*every, strict=True))
