"""What is free where lanes will lie.

Oracle: control groups and limits made by hand; tensors of known size.
"""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import psutil
import pytest
import torch

from coalesce import kernels
from coalesce.engine.footprint import peak
from coalesce.runner import memory
from coalesce.runner.memory import free_bytes, group_room, limit_room


def write(folder: Path, **values: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("_dot_", ".")).write_text(f"{value}\n")


def test_version_2_of_control_groups(tmp_path: Path) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "mount"
    groups.write_text("0::/batch/job\n")
    usual = "anon 5\ninactive_file "
    write(mount / "batch" / "job", memory_dot_max=1000, memory_dot_current=700, memory_dot_stat=usual + "50")
    write(mount / "batch", memory_dot_max="max", memory_dot_current=900, memory_dot_stat=usual + "0")
    # the root has neither a limit nor a count
    write(mount, memory_dot_stat=usual + "3")
    assert list(group_room(groups, mount)) == [350]
    write(mount / "batch", memory_dot_max=950)
    assert list(group_room(groups, mount)) == [350, 50]


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "mount"
    groups.write_text("9:name=systemd:/\n4:cpu,memory:/a:b\n0::/\n")
    sizes = {"memory_dot_limit_in_bytes": 500, "memory_dot_usage_in_bytes": 400}
    write(mount / "memory" / "a:b", **sizes, memory_dot_stat="inactive_file 1\ntotal_inactive_file 100")
    assert list(group_room(groups, mount)) == [200]


def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "mount"
    groups.write_text("0::/docker/0123\n")
    write(mount, memory_dot_max=1000, memory_dot_current=10, memory_dot_stat="inactive_file 0")
    assert list(group_room(groups, mount)) == [990]
    assert list(group_room(tmp_path / "none", mount)) == []


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps nothing back that is freed")
def test_what_an_earlier_run_has_freed_is_free() -> None:
    kernels.keep_memory()
    process, size = psutil.Process(), 4000
    before = process.memory_info().rss
    held = [torch.ones(size // 4) for _ in range(50_000)]
    del held
    assert process.memory_info().rss > before + 25_000 * size
    assert free_bytes("cpu") > 0
    assert process.memory_info().rss < before + 25_000 * size


def test_the_least_of_all_limits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = free_bytes("cpu")
    assert everything > 0
    monkeypatch.setattr(memory, "group_room", lambda: iter([12345, 2**70]))
    assert free_bytes("cpu") == 12345
    # more is used than the limit, which was lowered meanwhile
    monkeypatch.setattr(memory, "limit_room", lambda: iter([-5]))
    assert free_bytes("cpu") == 0


def test_the_process_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    limits = {resource.RLIMIT_AS: 2**60, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
    (room,) = limit_room()
    # from the system itself: a tensor may lie where memory was freed before, which stays with the process
    with mmap.mmap(-1, 2**27) as held:
        (less,) = limit_room()
        assert 0 < room < 2**60
        assert room - less >= 0.9 * len(held)


@pytest.mark.gpu
def test_what_torch_holds_and_does_not_use_is_free() -> None:
    before = free_bytes("cuda")
    held = torch.ones(2**28, device="cuda")
    assert free_bytes("cuda") <= before - held.nbytes
    del held
    assert free_bytes("cuda") >= before - 2**25
    # and its mark of the peak is what a lane is measured by
    assert peak(lambda: torch.ones(2**20, device="cuda").add(1), "cuda") == 2 * 2**22
