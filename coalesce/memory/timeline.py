"""Every allocation of some steps, and what it was for.

**What is seen.** The bytes, addresses and times are those of torch's own allocators, as `torch.profiler` records them
with ``profile_memory=True``, on the CPU and on CUDA alike. So the buffers inside a compiled segment are seen like any
eager tensor. Not seen: what libraries take by themselves (oneMKL's packing buffers, cuBLAS's workspaces where they are
not torch's, the scratch arrays on the stack of a compiled kernel), and on CUDA the memory that is reserved and not
allocated. `measure.peak` sees those, and no categories.

**What is known.** The allocator does not know what a block is for; the category comes from elsewhere:

- PARAMETER, OPTIMIZER_STATE and INPUT are there before the recording begins, and are given by their tensors.
- In an eager step: what the forward pass allocates is ACTIVATION if it is still there at its end, else TEMPORARY. What
  the backward pass allocates is GRADIENT or AUTOGRAD_DETAIL (gradients of activations); what an `update` allocates,
  inside a backward pass or behind it, is TEMPORARY.
- In a compiled step (`modes.watch`): what a segment hands on is known by its place in the graph; what it allocates and
  frees itself is GRADIENT or TEMPORARY.
- GRADIENT, in a backward pass and in a segment that updates parameters, is whatever is as large as one of these
  parameters. That may count too much and not too little; `modes.Stack` sees to it that no activation has such a size.

torch has a timeline of its own (`torch_export`). Its bytes are the same. Its categories follow the flow of data between
torch's operators, from layers and optimisers that it sees called: torch 2.13 gives no category to the temporary tensors
of a plain AdamW step, and none to anything in a compiled step, parameters included (docs/log.md).
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

#: As torch's own timeline names them.
CATEGORIES = ("PARAMETER", "OPTIMIZER_STATE", "INPUT", "ACTIVATION", "GRADIENT", "AUTOGRAD_DETAIL", "TEMPORARY")
PARAMETER, OPTIMIZER_STATE, INPUT, ACTIVATION, GRADIENT, AUTOGRAD_DETAIL, TEMPORARY = CATEGORIES

#: Begins the name of a note in the profiler's trace; its number follows.
_NOTE = "coalesce.memory/"

#: The name of an optimiser's update.
_UPDATE = f"{_NOTE}update"


@dataclass(frozen=True)
class Allocation:
    """One event of an allocator.

    Args:
        time_us: on the profiler's clock.
        address: of the block.
        bytes: allocated; negative if freed.
        total_bytes: of what the profiler has seen allocated and not freed, after this event.
    """

    time_us: float
    address: int
    bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Note:
    """What is known of some time in the recording: a span, or of one block at a moment.

    Args:
        inside: category of what is allocated meanwhile.
        kept: of what is still there at the end; ``inside`` by default.
        gradients: bytes of parameters; a block of such a size is a GRADIENT.
        address: the block that is ``inside``, if the note is of one block.
    """

    inside: str
    kept: str = ""
    gradients: frozenset[int] = frozenset()
    address: int | None = None


@dataclass
class Timeline:
    """Bytes by category over time.

    Args:
        time_ms: of the beginning, 0, and of every event of the allocator.
        bytes: category → as many values: what is there from then on.
        allocations, frees: events.
        unknown: frees of blocks that neither were seen allocated nor are known: 0, if ``known`` was complete.
        seen_bytes: the allocator's own total at each moment, less that at the beginning.
    """

    time_ms: list[float] = field(default_factory=list)
    bytes: dict[str, list[int]] = field(default_factory=lambda: {category: [] for category in CATEGORIES})
    allocations: int = 0
    frees: int = 0
    unknown: int = 0
    seen_bytes: list[int] = field(default_factory=list)

    def total(self) -> list[int]:
        """Bytes of all categories over time."""
        return [sum(values) for values in zip(*self.bytes.values(), strict=True)]

    def peak_above_rest(self) -> int:
        """The most that was there, less what was there at the beginning."""
        total = self.total()
        return max(total) - total[0]


@dataclass
class _Block:
    bytes: int
    born: float
    category: str
    span: int | None
    died: float | None = None


def update() -> record_function:
    """A span of all recorders: what is allocated meanwhile is TEMPORARY. Costs some microseconds if none is there."""
    return record_function(_UPDATE)


class Recorder:
    """Records the allocations of some steps on one device.

    Args:
        known: category → tensors that are there before and after.
        device: whose allocator.

    Example:
        >>> weight = torch.ones(256, 4)
        >>> recorder = Recorder({PARAMETER: [weight]}, "cpu")
        >>> with recorder.recording():
        ...     with recorder.span(TEMPORARY, kept=ACTIVATION):
        ...         kept = (weight + 1) * 2
        >>> timeline = recorder.timeline()
        >>> kib = {name: [value // 1024 for value in values] for name, values in timeline.bytes.items()}
        >>> {name: (values[0], max(values), values[-1]) for name, values in kib.items() if any(values)}
        {'PARAMETER': (4, 4, 4), 'ACTIVATION': (0, 4, 4), 'TEMPORARY': (0, 4, 0)}
    """

    def __init__(self, known: Mapping[str, Iterable[Tensor]], device: torch.device | str):
        self.device = torch.device(device)
        self.known: dict[int, tuple[int, str]] = {}
        for category, tensors in known.items():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.device.type == self.device.type and storage.nbytes():
                    self.known.setdefault(storage.data_ptr(), (storage.nbytes(), category))
        self._notes: list[Note] = []
        self._profile: profile | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens meanwhile. Once per recorder."""
        # neither shapes nor stacks: the profiler would hold tensors for them
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as self._profile:
            yield

    @contextmanager
    def span(self, inside: str, kept: str = "", gradients: Iterable[int] = ()) -> Iterator[None]:
        """Say what is allocated meanwhile; the innermost span holds. See `Note`."""
        with self._noted(Note(inside, kept, frozenset(gradients))):
            yield

    def mark(self, category: str, tensor: Tensor) -> None:
        """Say what a tensor's memory is for, from when it was allocated until it is freed."""
        with self._noted(Note(category, address=tensor.untyped_storage().data_ptr())):
            pass

    def category(self, tensor: Tensor) -> str | None:
        """What a tensor is, if it is one of those that were there before."""
        return self.known.get(tensor.untyped_storage().data_ptr(), (0, None))[1]

    @contextmanager
    def _noted(self, note: Note) -> Iterator[None]:
        # in the profiler's own trace, so that notes and allocations are on one clock
        self._notes.append(note)
        with record_function(f"{_NOTE}{len(self._notes) - 1}"):
            yield

    def timeline(self) -> Timeline:
        """What was recorded."""
        assert self._profile is not None, "nothing was recorded"
        allocations, ranges = read_trace(self._profile, self.device)
        return _timeline(self.known, self._notes, allocations, ranges, exact=self.device.type == "cpu")


def _timeline(
    known: Mapping[int, tuple[int, str]],
    notes: Sequence[Note],
    allocations: Sequence[Allocation],
    ranges: Sequence[tuple[str, float, float]],
    exact: bool,
) -> Timeline:
    """Bytes by category from what the trace says and what is known.

    Args:
        exact: whether a block is as large as was asked for.
    """
    notes = list(notes)
    moments: list[tuple[float, str, Any]] = [(a.time_us, "allocation", a) for a in allocations]
    for name, start, end in ranges:
        if name == _UPDATE:
            notes.append(Note(TEMPORARY))
            number = len(notes) - 1
        else:
            number = int(name.removeprefix(_NOTE))
        moments += [(start, "begin", number), (end, "end", number)]
    moments.sort(key=lambda moment: moment[0])

    start = moments[0][0] if moments else 0.0
    blocks = [_Block(size, start, category, None) for size, category in known.values()]
    live = dict(zip(known, blocks, strict=True))
    open_spans: list[int] = []
    timeline = Timeline()
    for time, kind, what in moments:
        if kind == "begin":
            note = notes[what]
            if note.address is None:
                open_spans.append(what)
            elif note.address in live and note.address not in known:
                live[note.address].category, live[note.address].span = note.inside, None
        elif kind == "end" and what in open_spans:
            open_spans.remove(what)
            for block in live.values():
                if block.span == what and block.category == notes[what].inside and notes[what].kept:
                    block.category = notes[what].kept
        elif kind == "allocation" and what.bytes > 0:
            inside = notes[open_spans[-1]] if open_spans else Note(TEMPORARY)
            gradient = any(size <= what.bytes <= size + (0 if exact else _slack(size)) for size in inside.gradients)
            live[what.address] = _Block(
                what.bytes, time, GRADIENT if gradient else inside.inside, open_spans[-1] if open_spans else None
            )
            blocks.append(live[what.address])
            timeline.allocations += 1
        elif kind == "allocation":
            timeline.frees += 1
            freed = live.pop(what.address, None)
            timeline.unknown += freed is None
            if freed is not None:
                freed.died = time

    changes = [(block.born, block.category, block.bytes) for block in blocks[len(known) :]]
    changes += [(block.died, block.category, -block.bytes) for block in blocks if block.died is not None]
    changes.sort(key=lambda change: change[0])
    now = dict.fromkeys(CATEGORIES, 0)
    for size, category in known.values():
        now[category] += size
    seen = {a.time_us: a.total_bytes for a in allocations}
    before = allocations[0].total_bytes - allocations[0].bytes if allocations else 0
    for number, (time, category, size) in enumerate([(start, PARAMETER, 0), *changes]):
        now[category] += size
        timeline.time_ms.append((time - start) / 1000)
        # the first block may come at the very beginning
        timeline.seen_bytes.append(seen.get(time, before) - before if number else 0)
        for name, value in now.items():
            timeline.bytes[name].append(value)
    return timeline


def _slack(size: int) -> int:
    """By how much a block of CUDA's allocator may exceed what was asked for: small ones are rounded up to 512 bytes,
    and of a large one a rest below a MiB is not split off."""
    return 512 if size < 2**20 else 2**20


def read_trace(recorded: profile, device: torch.device) -> tuple[list[Allocation], list[tuple[str, float, float]]]:
    """The events of one device's allocator, and our notes as (name, start, end), in order.

    They are read from the exported Chrome trace, which is public; that it has these fields is not promised. Tried on
    torch 2.13.0 for CPUs; `tests/test_memory_timeline.py` counts them against known tensors.

    Raises:
        RuntimeError: the trace has our notes and no allocation in the form that is known here.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    # c10's numbers of device types
    wanted = {"cpu": 0, "cuda": 1}[device.type]
    allocations, ranges, others = [], [], 0
    for event in events:
        name, arguments = event.get("name", ""), event.get("args", {})
        if name == "[memory]":
            others += 1
            index = max(arguments["Device Id"], 0)
            if arguments["Device Type"] == wanted and index == (device.index or 0):
                fields = arguments["Addr"], arguments["Bytes"], arguments["Total Allocated"]
                allocations.append(Allocation(event["ts"], *fields))
        elif name.startswith(_NOTE) and event.get("ph") == "X" and event.get("cat") == "user_annotation":
            ranges.append((name, event["ts"], event["ts"] + event["dur"]))
    if ranges and not others:
        raise RuntimeError(f"torch {torch.__version__}'s profiler exported no [memory] events")
    return sorted(allocations, key=lambda a: a.time_us), sorted(ranges, key=lambda r: r[1])


def torch_export(step: Callable[[], object], path: Path, device: torch.device) -> str:
    """Record a step once more with torch's own timeline and export its raw events: (µs, action, bytes, category).

    `export_memory_timeline` is deprecated and will be removed; what torch names instead is for CUDA alone and knows no
    categories. Tried on torch 2.13.0. The numbers of actions and categories are those of
    ``torch.profiler._memory_profiler``.

    Args:
        step: to call.
        path: ends in ``.raw.json.gz``.

    Returns:
        Why nothing was written; empty if it was.
    """
    if not hasattr(profile, "export_memory_timeline"):
        return f"torch {torch.__version__} has no export_memory_timeline"
    # its analysis of the flow of data needs shapes and stacks
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True) as found:
        step()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*export_memory_timeline.* is deprecated", category=FutureWarning)
        name = device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"
        try:
            found.export_memory_timeline(str(path), name)
        except Exception as error:
            # torch's analysis is on its way out; what was measured must not go with it
            path.unlink(missing_ok=True)
            return f"torch {torch.__version__}: {type(error).__name__}: {error}"
    return ""
