"""How many lanes a cohort takes: what its device's memory has room for, and no more than the speed gains from.

What a lane takes is estimated from the plain step that the planner took. Where that comes near to what is free, it is
measured: two and four lanes take a step and an evaluation, operation by operation, which costs two traces.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coalesce import kernels
from coalesce.engine.footprint import peak_above_rest
from coalesce.engine.lanes import Lanes
from coalesce.engine.shares import Shares
from coalesce.engine.template import Template
from coalesce.errors import ConfigError, Problem
from coalesce.runner.memory import free_bytes, is_out_of_memory
from coalesce.runner.plan import Trainer

logger = logging.getLogger("coalesce")

#: Most lanes that ``trainer.width=auto`` takes. A bound, not a measurement: to find where the speed stops gaining,
#: steps of several widths would have to be compiled, each of which takes as long as the sweep's own. What a wider graph
#: gains is the cost of a call, spread over more lanes; among so many little of it is left. Where lanes outgrow a CPU's
#: caches, fewer may be faster: that is for whoever runs the sweep to try (``trainer.width=n``).
AUTO_WIDTH = 128

#: Fewest lanes that it takes. The compiler's kernels for one lane differ from those for more in the last bit, so
#: that an experiment alone would not repeat its numbers in a sweep (an idle lane costs a small model next to nothing).
LEAST_WIDTH = 2

#: The part of what is free that is left alone: for what the allocator loses between blocks, for what libraries take by
#: themselves, and for whoever else runs on the machine.
MARGIN = 0.15

#: An estimate so many times below what is free is taken as it is. It leaves out what operations take for themselves
#: and throw away, which is less than what is kept for the backward pass.
NEAR = 4

#: Lanes that are measured. One alone would not do: its kernels are others.
MEASURED = (2, 4)

GIB = 2**30


@dataclass(frozen=True)
class Footprint:
    """What lanes take on their device, in bytes.

    Args:
        state: of one lane: parameters, buffers, optimiser state.
        best: of one lane: the best state that is kept beside it.
        rise: of one lane above both, in a step or an evaluation.
        shared: of all together: the data, and what a step takes at any width.
        snapshots: whether snapshots of the lanes lie where the lanes do. Then the last one is there beside them, and
            while the next one is taken, between two steps, a second one: the new one before the old one is let go, and
            the file's copy after that.
    """

    state: int
    best: int
    rise: int
    shared: int
    snapshots: bool = False

    @property
    def per_lane(self) -> int:
        """Of one lane more."""
        one = self.state + self.best
        return 2 * one + max(self.rise, one) if self.snapshots else one + self.rise

    def fits(self, room: int) -> int:
        """The most lanes that room is enough for, with the margin."""
        return max(0, int(((1 - MARGIN) * room - self.shared) // self.per_lane))


@dataclass(frozen=True)
class Room:
    """The memory of the device when a plan is made.

    Args:
        free: bytes that can be allocated.
        cap: bytes that the user allows, if he does.
        sharing: cohorts whose lanes are there at once.
    """

    free: int
    cap: int | None = None
    sharing: int = 1

    @classmethod
    def of(cls, trainer: Trainer, sharing: int = 1) -> Room:
        """What is free now."""
        cap = None if trainer.memory_gib is None else int(trainer.memory_gib * GIB)
        return cls(free_bytes(trainer.device), cap, max(1, sharing))

    def bytes(self, trainer: Trainer, loaded: int) -> int:
        """What one cohort may take.

        Args:
            loaded: bytes of its data, which on the CPU are there already, and do not count as free.
        """
        free = self.free + (loaded if trainer.device == "cpu" else 0)
        return (free if self.cap is None else min(free, self.cap)) // self.sharing


def widest(count: int, trainer: Trainer) -> int:
    """The width where memory does not matter.

    Args:
        count: experiments of the cohort.
    """
    if not trainer.stack:
        return 1
    return _even(count, AUTO_WIDTH) if trainer.width == "auto" else int(trainer.width)


def _even(count: int, most: int) -> int:
    """As even as possible: 130 experiments are twice 65 lanes, not 128 and 2."""
    return min(most, max(LEAST_WIDTH, math.ceil(count / math.ceil(count / most))))


def fitting(footprint: Footprint, template: Template, count: int, trainer: Trainer, room: int) -> int:
    """The width of a cohort.

    Args:
        footprint: what its lanes take; those too that nobody fills, where they are shared out.
        count: its experiments.
        room: bytes that it may take.

    Raises:
        ConfigError: what the user allows does not suffice for one lane.
    """

    def lanes(width: int) -> int:
        return Shares.of(template, width, trainer.device, trainer.compile, trainer.threads).width

    width, fits = widest(count, trainer), footprint.fits(room)
    if lanes(width) <= fits or not trainer.stack:
        return width
    if trainer.width != "auto":
        logger.warning(
            "trainer.width=%d takes about %s, and %s may be taken: where memory does not suffice, the run halves the "
            "width; trainer.width=auto would take %s",
            width, _gib(footprint.shared + width * footprint.per_lane), _gib(room), max(1, fits),
        )  # fmt: skip
        return width
    if fits >= 1:
        width = _even(count, fits)
        while width > 1 and lanes(width) > fits:
            width -= 1
        return width
    least = math.ceil((footprint.shared + footprint.per_lane) / (1 - MARGIN))
    if trainer.memory_gib is None:
        logger.warning("one lane and its data take about %s, and %s are free: it is tried", _gib(least), _gib(room))
        return 1
    rule = (
        f"too little for one lane, which takes about {_gib(footprint.per_lane)}, beside {_gib(footprint.shared)} that "
        f"all lanes share, the data above all, and {MARGIN:.0%} to spare"
    )
    valid = (
        f"at least {_gib(least).removesuffix(' GiB')}, or null for all that is free; a smaller batch_size or "
        f"trainer.evaluate_batch_size, or trainer.checkpoint=auto, makes a lane smaller"
    )
    raise ConfigError([Problem("trainer.memory_gib", trainer.memory_gib, rule, valid)])


def estimate(template: Template, trainer: Trainer) -> Footprint:
    """What a plain step of one experiment lets expect: parameters, optimiser state and buffers, the best state if it is
    kept, one set of gradients (a second one where they are accumulated), and what autograd kept."""
    named = dict(template.model.named_parameters())
    trained = sum(named[n].nbytes for n in template.trained)
    rest = sum(named[n].nbytes for n in template.fixed) + sum(b.nbytes for b in template.model.buffers())
    # accumulated gradients stand beside those of a micro-batch
    gradients = trained * (2 if template.accumulate > 1 else 1)
    shared = template.data.bytes + (template.folds.bytes if template.folds else 0)
    rise = gradients + template.rehearsal.saved_bytes
    best = trained + rest if trainer.stack and (trainer.weights or "test" in template.evaluated) else 0
    snapshots = trainer.stack and trainer.device == "cpu" and trainer.snapshot_minutes is not None
    return Footprint(template.state_bytes, best, rise, shared, snapshots)


def is_near(footprint: Footprint, template: Template, trainer: Trainer, width: int, room: int) -> bool:
    """Whether so many lanes may not fit, so that they are to be measured."""
    batch = template.batches.size // template.accumulate
    parts = [min(n, trainer.evaluate_batch_size) for split in template.evaluated for n in template.counts(split)]
    # an evaluation keeps less of a sample than a step does
    evaluation = template.rehearsal.saved_bytes * max(parts, default=0) // batch
    most = replace(footprint, rise=max(footprint.rise, evaluation))
    return NEAR * (most.shared + width * most.per_lane) > room


def measure(
    estimated: Footprint,
    template: Template,
    trainer: Trainer,
    pieces: Sequence[str],
    lowerings: Mapping[str, str],
    checkpoint: Sequence[str],
) -> Footprint:
    """What lanes take when they run. Where not even the few that are measured fit, what was estimated.

    Args:
        estimated: of the same cohort.
        pieces, lowerings, checkpoint: as the cohort will run.
    """
    how = trainer.device, False, trainer.evaluate_batch_size, pieces, lowerings, checkpoint
    seen: dict[int, int] = {}
    state = estimated.state
    with kernels.arithmetic(trainer.threads, trainer.matmul_precision):
        for width in MEASURED:
            try:
                # with what rides, and the lanes' counters
                state, seen[width] = _measured(Lanes(template, width, *how))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                logger.warning("%d lanes are too many to be measured: there is not enough memory for them", width)
                break
            finally:
                # a graph refers to itself
                gc.collect()
    if not seen:
        return estimated
    first, *_ = seen
    last = max(seen)
    rise = math.ceil((seen[last] - seen[first]) / (last - first)) if last > first else math.ceil(seen[first] / first)
    fixed = max(0, seen[first] - first * rise)
    if trainer.compile and not pieces and not checkpoint:
        # where the graph is one, the compiler may have all gradients alive at once
        rise = max(rise, estimated.rise)
    return replace(estimated, state=state, rise=rise, shared=estimated.shared + fixed)


def _measured(lanes: Lanes) -> tuple[int, int]:
    """The bytes of one lane's state, and those of all lanes above it."""
    return math.ceil(lanes.bytes / lanes.width), peak_above_rest(lanes, lanes.template.evaluated)


def _gib(size: float) -> str:
    """A number of bytes in GiB, to three digits and rounded up: what is told as enough is enough.

    >>> _gib(2**30), _gib(1), _gib(1234 * 2**30)
    ('1 GiB', '9.32e-10 GiB', '1,240 GiB')
    """
    gib = size / GIB
    if gib <= 0:
        return "0 GiB"
    unit = 10.0 ** (math.floor(math.log10(gib)) - 2)
    up = math.ceil(round(gib / unit, 6)) * unit
    return f"{up:,.0f} GiB" if up >= 100 else f"{up:.3g} GiB"
