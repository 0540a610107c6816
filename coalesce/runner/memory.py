"""How much memory is free where lanes will lie, and whether an error says that it does not suffice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from coalesce import kernels

with suppress(ImportError):
    # not on Windows, which has no such limits
    import resource

#: Where Linux tells the control groups of this process, and where they are mounted.
GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's allocator has an error of its own; the CPU's raises a RuntimeError that only its text tells apart.

    Its text, seen with torch 2.13: "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate
    memory: you tried to allocate 4 bytes. Error code 12 (Cannot allocate memory)".
    """
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def free_bytes(device: torch.device | str) -> int:
    """What this process may still allocate.

    On CUDA: what the device has free, and what torch's allocator holds and does not use. On the CPU the least of three:
    what the system says is available, what the control groups of this process leave (containers and batch systems limit
    memory by them, and the system's own figure does not know it), and what its own limits leave (``ulimit -v``,
    ``ulimit -d``). What this process has freed and kept (`kernels.keep_memory`) is given back before.

    >>> 0 < free_bytes("cpu") <= psutil.virtual_memory().total
    True
    """
    device = torch.device(device)
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    kernels.give_back()
    return max(0, min(psutil.virtual_memory().available, *group_room(), *limit_room()))


def group_room(groups: Path = GROUPS, mount: Path = MOUNT) -> Iterator[int]:
    """What each control group that this process is in leaves of its memory: its limit less what is used.

    Files that were read and may be forgotten again (``inactive_file``) count as used there, and are not.

    Args:
        groups: lines of ``number:controllers:path``; version 2 has one line, without a number and controllers.
        mount: where the groups are mounted, version 1's memory controller below it.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _rooms(mount, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _rooms(mount / "memory", path, names)


def _rooms(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """A group's and its ancestors'. Inside a container the path may be the host's; its mount is the group itself."""
    folder = mount / path.lstrip("/")
    for place in (folder, *folder.parents):
        try:
            limit, used = ((place / name).read_text().strip() for name in names[:2])
            statistics = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
        except OSError:
            limit = used = "max"
        if limit != "max":
            yield int(limit) - int(used) + int(statistics.get(names[2], 0))
        if place == mount:
            return


def limit_room() -> Iterator[int]:
    """What the limits that were set for this process leave."""
    if "resource" not in globals():
        return
    used = psutil.Process().memory_info()
    # of the data segment only Linux tells how large it is
    for limit, size in (("RLIMIT_AS", used.vms), ("RLIMIT_DATA", getattr(used, "data", None))):
        soft = resource.getrlimit(getattr(resource, limit))[0]
        if soft != resource.RLIM_INFINITY and size is not None:
            yield soft - size
