"""What is chosen by measuring: how convolutions are lowered.

Which lowering is the fastest cannot be told from the shape (see `rules.convolution`). So each shape is timed once while
a run is planned, forward and backward, and as it will run: the compiler makes the columns in one pass, so that they
gain far more by it than the others do. What was chosen stands in the plan, and decides the last bits of an experiment's
numbers. It is also kept beside what the compiler keeps on disk, so that the next run on this machine asks nothing.

Compiled on the CPU, images of enough channels have them last, and nothing is timed: what it gains is above all what
lies between convolutions, which no convolution alone shows, as long as all of a network agree.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from coalesce.engine.compiling import cache_folder, compile_graph
from coalesce.engine.rules.lowerings import FULL, LOWERINGS, Lowering, Seen
from coalesce.engine.trace import trace
from coalesce.kernels import backends

logger = logging.getLogger(__name__)

#: vmap's own lowering, which needs no rule.
GROUPED = "grouped"

#: The names that `trainer.convolution` takes.
CHOICES = ("auto", GROUPED, *LOWERINGS)

#: What another lowering's time must be below, in that of vmap's own: a choice that noise turns over would change the
#: last bits from run to run for nothing.
CLEARLY = 0.8

#: The most (bytes) that a lowering may make in a step of all lanes.
MOST_BYTES = 2**30

#: The most (bytes) of an input and an output that is timed; of wider ones, fewer lanes.
TIMED_BYTES = 2**28

#: For how long (seconds) the candidates are called in turns, and how often at the most.
BUDGET_S, ROUNDS = 0.5, 25

#: A candidate that takes so many times as long as the fastest one, operation by operation, is not compiled: that gains
#: columns a factor of two or so on the others (`python -m benchmarks.convolution`).
HOPELESS = 2.5

#: What a choice depends on beside the shapes: raised when a lowering or the way to measure changes.
_VERSION = 2


def choose_lowerings(
    convolutions: Mapping[str, Seen],
    width: int,
    device: torch.device | str = "cpu",
    choice: str = "auto",
    compile: bool = True,
    lanes: int | None = None,
) -> dict[str, str]:
    """The fastest lowering of each convolution.

    Args:
        convolutions: those of one lane, by name, as a plain step saw them.
        width: lanes that step at once.
        device: where they will run.
        choice: "auto", or the name of the one that all of them take that it can do.
        compile: whether they will be compiled.
        lanes: how many run with the threads that there are now, in one graph; all by default.

    Returns:
        Name of the convolution → name of its lowering.
    """
    found = {}
    for name, seen in convolutions.items():
        candidates = [n for n, lowering in LOWERINGS.items() if _fits(lowering, seen, width)]
        if choice == "auto" and compile and torch.device(device).type == "cpu" and _channels_last(seen, candidates):
            found[name] = "channels_last"
        elif choice == "auto":
            given = [GROUPED, *candidates], seen, lanes or width, torch.device(device), compile
            kept = _kept(*given)
            found[name] = kept or _fastest(*given)
            if kept is None:
                _keep(found[name], *given)
        else:
            found[name] = choice if choice in candidates else GROUPED
    return found


def _fits(lowering: Lowering, seen: Seen, width: int) -> bool:
    convolution = seen.convolution
    size = getattr(torch, convolution.dtype).itemsize
    return lowering.fits(convolution) and width * seen.batch * lowering.elements(convolution) * size <= MOST_BYTES


def _channels_last(seen: Seen, candidates: Sequence[str]) -> bool:
    """Whether all of a network of such convolutions are taken to have their channels last."""
    c = seen.convolution
    # the first layer's are few, but nobody asks for their gradient
    full = c.output[0] % FULL == 0 and (c.input[0] % FULL == 0 or not seen.needs_gradient)
    return "channels_last" in candidates and full and c.dtype == "float32"


def _kept(candidates: list[str], seen: Seen, width: int, device: torch.device, compile: bool) -> str | None:
    """What was chosen before on this machine, if that is known."""
    try:
        found: object = json.loads(_place(candidates, seen, width, device, compile).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # whatever stands there
    return found if isinstance(found, str) and found in candidates else None


def _keep(chosen: str, candidates: list[str], seen: Seen, width: int, device: torch.device, compile: bool) -> None:
    try:
        place = _place(candidates, seen, width, device, compile)
        place.parent.mkdir(parents=True, exist_ok=True)
        # whoever reads meanwhile finds all of it or nothing
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            whole = Path(folder) / place.name
            whole.write_text(json.dumps(chosen), encoding="utf-8")
            os.replace(whole, place)
    except OSError:
        logger.debug("a choice could not be kept", exc_info=True)


def _place(candidates: list[str], seen: Seen, width: int, device: torch.device, compile: bool) -> Path:
    """The file of one choice, by all that it may depend on."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.node(), torch.get_num_threads()
    facts = _VERSION, torch.__version__, device.type, where, backends(), candidates, seen, width, compile
    return cache_folder() / "coalesce" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.json"


def _fastest(candidates: list[str], seen: Seen, width: int, device: torch.device, compile: bool) -> str:
    inputs = _inputs(seen, width, device)
    lanes = {name: _lanes(name, seen) for name in candidates}
    times = _least({name: partial(lane, *inputs) for name, lane in lanes.items()}, device)
    left = [name for name in candidates if times[name] <= HOPELESS * min(times.values())]
    if compile and len(left) > 1:
        graphs = {name: trace(lanes[name], inputs) for name in left}
        times = _least({name: partial(compile_graph(g, inputs), *inputs) for name, g in graphs.items()}, device)
    best = min(times, key=lambda name: times[name])
    return GROUPED if GROUPED in times and times[best] > CLEARLY * times[GROUPED] else best


def _inputs(seen: Seen, width: int, device: torch.device) -> list[Tensor]:
    """Inputs, weights, and gradients of outputs of some lanes."""
    convolution, dtype = seen.convolution, getattr(torch, seen.convolution.dtype)
    one = seen.batch * (math.prod(convolution.input) + math.prod(convolution.output)) * dtype.itemsize
    lanes = min(width, max(2, TIMED_BYTES // one))
    shapes = (seen.batch, *convolution.input), convolution.weight, (seen.batch, *convolution.output)
    return [torch.ones(lanes, *shape, dtype=dtype, device=device) for shape in shapes]


def _lanes(name: str, seen: Seen) -> Callable[..., list[Tensor]]:
    """A function of `_inputs` that runs a convolution of all lanes forward and backward."""
    convolution = seen.convolution

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return convolution.plain(x, weight) if name == GROUPED else LOWERINGS[name].run(x, weight, convolution)

    def lane(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        # a first layer's input has no gradient
        pair = (x, weight) if seen.needs_gradient else (weight,)
        result, back = vjp(lambda *given: run(*(x, *given)[-2:]), *pair)  # type: ignore[misc]
        return result, *back(gradient)

    return lambda *inputs: list(vmap(lane)(*inputs))


def _least(calls: Mapping[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """The least time (seconds) that each call took; they come in turns. Whatever else the machine does only adds to it.

    On the clock: how well the work is spread over the cores counts.
    """
    for call in calls.values():
        # the first call of a shape prepares the library's kernels
        call()
    least, started_s = dict.fromkeys(calls, math.inf), time.perf_counter()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            least[name] = min(least[name], _timed(call, device))
        if time.perf_counter() - started_s > BUDGET_S:
            break
    return least


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    started_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s
