"""Products of lanes do not depend on where the lanes lie in memory.

Oracle: equal lanes must be equal. In processes of their own, since oneMKL reads its setting at the first product.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from coalesce import kernels


def probe(code: str, setting: str | None = None) -> str:
    asked = (kernels.VARIABLE, kernels.WAIT, kernels.SPIN)
    environment = {name: value for name, value in os.environ.items() if name not in asked}
    if setting is not None:
        environment[kernels.VARIABLE] = setting
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_lanes_agree_after_the_import() -> None:
    assert probe("import coalesce; from coalesce.kernels import lanes_agree; print(lanes_agree())") == "True"


def test_the_users_own_setting_stands() -> None:
    code = "import coalesce, os; print(os.environ['MKL_CBWR'])"
    assert probe(code, "COMPATIBLE") == "COMPATIBLE"
    assert probe(code) == kernels.STRICT


def test_threads_wait_asleep_unless_the_user_says_otherwise() -> None:
    code = "import coalesce, os; print(os.environ['OMP_WAIT_POLICY'])"
    assert probe(code) == kernels.PASSIVE
    assert probe("import os; os.environ['OMP_WAIT_POLICY'] = 'ACTIVE'\n" + code) == "ACTIVE"


def test_they_look_for_a_while_before_they_sleep() -> None:
    code = "import coalesce, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    assert probe(code) == kernels.LOOKS
    assert probe("import os; os.environ['GOMP_SPINCOUNT'] = '7'\n" + code) == "7"
    assert probe("import os; os.environ['OMP_WAIT_POLICY'] = 'ACTIVE'\n" + code) in (
        "None",
        os.environ.get(kernels.SPIN),
    )


FAULTS = """
import os, resource
{before}
from coalesce import kernels
kept = kernels.keep_memory()
import torch
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
counts = []
for _ in range(20):
    start = pages()
    torch.empty(12_000_000).fill_(1.0)
    counts.append(pages() - start)
print(kept, min(counts))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is asked")
def test_memory_that_is_freed_stays() -> None:
    """48 MB are 11,719 pages of 4 KiB, or fewer huge ones. The first blocks may not lie where the next ones can."""
    kept, pages = probe(FAULTS.format(before="")).split()
    assert (kept, int(pages)) == ("True", 0)


@pytest.mark.parametrize("setting", ["MALLOC_TRIM_THRESHOLD_=1000", "GLIBC_TUNABLES=glibc.malloc.trim_threshold=1000"])
def test_memory_is_left_to_a_user_who_says_how(setting: str) -> None:
    name, _, value = setting.partition("=")
    kept, pages = probe(FAULTS.format(before=f"os.environ[{name!r}] = {value!r}")).split()
    assert kept == "False"
    assert int(pages) > 0 or platform.libc_ver()[0] != "glibc"


def test_it_is_said_before_torch_is_loaded() -> None:
    code = "import sys; import coalesce.kernels as k; print(list(sys.modules).index('coalesce.kernels') "
    assert probe(code + "< list(sys.modules).index('torch'))") == "True"


def test_this_process_has_it() -> None:
    """Every bit-for-bit test of this suite stands on it."""
    assert kernels.lanes_agree()


def test_a_process_without_it_is_told() -> None:
    code = """
import warnings
from coalesce import kernels
kernels.lanes_agree = lambda: False
from engine_helpers import experiment, lanes_of
from coalesce.tasks import Digits
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    lanes_of([experiment(Digits, {"hidden": 4, "layers": 1, "dropout": 0.0, "label_smoothing": 0.0})])
print(*(w.message for w in caught))
"""
    found = probe(f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n" + code)
    assert "MKL_CBWR=AUTO,STRICT" in found


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_probe_sees_a_difference(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe must be able to fail: with products whose last bit depends on the lane, it does."""
    import torch

    exact = torch.bmm

    def by_lane(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = exact(a, b)
        product[width % 8] *= 1 + torch.finfo(product.dtype).eps
        return product

    monkeypatch.setattr(torch, "bmm", by_lane)
    kernels.lanes_agree.cache_clear()
    try:
        assert not kernels.lanes_agree()
    finally:
        kernels.lanes_agree.cache_clear()
