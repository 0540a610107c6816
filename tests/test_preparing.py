"""What the compiler must know first is found out beside other work, once, and before it compiles.

Oracles: kinds of instructions that answer only if all are asked at once; the compiler's own counts of what it asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import codecache, cpu_vec_isa
from torch.fx.experimental.proxy_tensor import make_fx

from coalesce.engine import compiling, preparing
from runner_helpers import Net, ran

MOST_S = 20.0


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not begun."""
    monkeypatch.setattr(preparing, "_thread", None)
    monkeypatch.setattr(preparing, "_tried", threading.Event())
    yield
    if preparing._thread is not None:
        preparing._thread.join(MOST_S)


def test_it_is_begun_once_and_for_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(preparing, "_prepare", lambda: begun.append(threading.current_thread().name))
    # nothing was begun: nothing is waited for
    preparing.finish()
    preparing.begin("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    preparing.begin("auto")
    assert begun == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("auto", "cpu", "cpu"):
        preparing.begin(device)
    assert preparing._thread is not None
    preparing._thread.join(MOST_S)
    assert begun == ["compiler"]


def test_nothing_is_compiled_before_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    may_end, compiled = threading.Event(), threading.Event()

    def instructions() -> None:
        assert may_end.wait(MOST_S)
        order.append("tried")

    def header() -> None:
        # which is not waited for
        assert compiled.wait(MOST_S)
        order.append("header")

    def compile(module: Any, examples: Any, options: Any) -> Any:
        order.append("compiled")
        return module

    monkeypatch.setattr(preparing, "_try_instructions", instructions)
    monkeypatch.setattr(preparing, "_precompile_header", header)
    monkeypatch.setattr(torch._inductor, "compile", compile)
    monkeypatch.setattr(compiling, "_compiled", {})
    preparing.begin("cpu")
    assert preparing._thread is not None
    later = threading.Timer(0.2, may_end.set)
    later.start()
    compiling.compile_graph(make_fx(lambda x: (x * 2,))(torch.ones(3)), [torch.ones(3)])
    compiled.set()
    preparing._thread.join(MOST_S)
    assert order == ["tried", "compiled", "header"]


def test_where_it_fails_the_compiler_will_say_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(preparing, "_try_instructions", fails)
    with caplog.at_level(logging.DEBUG, "coalesce"):
        preparing.begin("cpu")
        assert preparing._thread is not None
        preparing._thread.join(MOST_S)
    # nobody waits for what will not come
    preparing.finish()
    (record,) = [r for r in caplog.records if r.name == preparing.__name__]
    assert record.levelno == logging.DEBUG
    assert record.exc_info is not None
    assert "no C++ compiler" in str(record.exc_info[1])


def test_all_kinds_of_instructions_are_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the processor has: the fourth one is not asked."""
    together = threading.Barrier(3)
    asked: list[str] = []

    class Kind:
        def __init__(self, flags: str):
            self.flags = flags

        def __str__(self) -> str:
            return self.flags

        def __bool__(self) -> bool:
            asked.append(self.flags)
            together.wait(MOST_S)
            return True

    kinds = ["avx2", "avx512", "avx512 avx512_vnni", "avx512 avx512_vnni amx_tile"]
    monkeypatch.setattr(preparing.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(preparing.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512", "avx512_vnni"])
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Kind(flags) for flags in kinds])
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: asked.append("the compiler's choice"))
    preparing._try_instructions()
    assert sorted(asked[:3]) == kinds[:3]
    assert asked[3:] == ["the compiler's choice"]


@pytest.mark.parametrize("compile", [True, False])
def test_a_step_that_will_be_compiled_begins_it_before_it_is_traced(
    compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):
        pass

    def begin(device: str) -> None:
        raise Begun(device)

    def trace(*_: Any) -> None:
        pytest.fail("traced first")

    monkeypatch.setattr(preparing, "begin", begin)
    settings: dict[str, Any] = {"monitor": "val/loss", "check": False, "compile": compile}
    if not compile:
        assert len(ran(Net, **settings).results) == 1
        return
    monkeypatch.setattr("coalesce.engine.lanes.build_step", trace)
    with pytest.raises(Begun, match="cpu"):
        ran(Net, **settings)


def test_the_compiler_finds_what_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is the very one that kernels ask for, by the flags of the very instructions."""
    for known in (cpu_vec_isa.valid_vec_isa_list, codecache._precompile_header):
        known.cache_clear()
    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "cache", {})
    monkeypatch.setattr(compiling, "_compiled", {})
    preparing.begin("cpu")
    assert preparing._thread is not None
    preparing._thread.join()
    x = torch.linspace(-1, 1, 37)
    (found,) = compiling.compile_graph(make_fx(lambda x: (torch.exp(x) * x.sin(),))(x), [x])(x)
    torch.testing.assert_close(found, x.exp() * x.sin())
    kinds, header = cpu_vec_isa.valid_vec_isa_list.cache_info(), codecache._precompile_header.cache_info()
    assert (kinds.misses, header.misses) == (1, 1)
    # the kernel asked as well
    assert kinds.hits > 1
    assert header.hits > 0
