"""`trainer.matmul_precision`: where it holds, where it changes nothing, and that it is put back.

Oracle: torch's own switches, read while a run trains and evaluates; equal bits where nothing may change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from coalesce import kernels
from coalesce.configuration import check_trainer
from coalesce.configuration.union import unlike
from coalesce.engine import compiling
from coalesce.errors import ConfigError
from coalesce.runner import exactness
from coalesce.runner.listener import Listener, Progress
from coalesce.runner.plan import Trainer
from coalesce.runner.run import run
from runner_helpers import Net, Ran, planned, ran

#: What the switch was set to while the task's code ran.
SEEN: dict[str, set[str]] = {}


class Looks(Net):
    """Notes the precision while its code runs: in a plain loop at every step."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        SEEN.setdefault("loss", set()).add(torch.get_float32_matmul_precision())
        return super().loss(model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        SEEN.setdefault("metrics", set()).add(torch.get_float32_matmul_precision())
        return super().metrics(model, batch)


class Watches(Listener):
    """Notes the precision at every boundary, and fails at one if that is wanted."""

    def __init__(self, fails: bool = False):
        self.fails = fails

    def advanced(self, progress: Progress) -> None:
        SEEN.setdefault("advanced", set()).add(torch.get_float32_matmul_precision())
        if self.fails:
            raise RuntimeError("in the middle of the run")


def state() -> tuple[str | None, tuple[str, ...]]:
    return kernels.precision(), kernels.backends()


def as_torch_begins() -> None:
    torch.set_float32_matmul_precision("highest")
    for backend in kernels._backends():
        backend.fp32_precision = "none"


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    SEEN.clear()
    before = state()
    yield
    after = state()
    as_torch_begins()
    assert after == before


@contextmanager
def around(name: str) -> Iterator[None]:
    """As a user sets it before."""
    torch.set_float32_matmul_precision(name)
    yield
    assert torch.get_float32_matmul_precision() == name
    as_torch_begins()


def bits(done: Ran) -> list[tuple[str, dict[str, float]]]:
    return [(r.experiment.id, dict(r.metrics)) for r in done.in_order()]


LRS = {"optimizer.lr": [0.1, 0.01]}


def test_by_default_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        # as it was when there was no such setting
        patch.setattr(kernels, "products", lambda name: nullcontext())
        before = bits(ran(Net, LRS, monitor="val/loss"))
    calls: list[str] = []
    real = torch.set_float32_matmul_precision

    def spy(name: str) -> None:
        calls.append(name)
        real(name)

    monkeypatch.setattr(torch, "set_float32_matmul_precision", spy)
    first = state()
    plan = planned(Net, LRS, monitor="val/loss")
    assert plan.trainer.matmul_precision == "highest"
    now = bits(ran(Net, LRS, monitor="val/loss"))
    assert now == before
    assert set(calls) <= {"highest"}
    assert state() == first


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("name", ["high", "medium"])
def test_it_holds_while_a_run_trains_and_evaluates(name: str, stack: bool) -> None:
    plan = planned(Looks, LRS, monitor="val/loss", matmul_precision=name, stack=stack, check=stack)
    # planned without it, but for what is timed there
    SEEN.clear()
    before = state()
    run(plan, [Watches()])
    assert {"loss": {name}, "metrics": {name}, "advanced": {name}} == SEEN
    assert state() == before


def test_what_is_measured_for_a_plan_is_measured_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def chosen(*_: Any) -> dict[str, str]:
        seen.append(torch.get_float32_matmul_precision())
        return {}

    monkeypatch.setattr("coalesce.runner.planning.choose_lowerings", chosen)
    planned(Net, LRS, monitor="val/loss", matmul_precision="high")
    assert seen == ["high"]


def test_it_is_put_back_when_a_run_fails() -> None:
    before = state()
    with pytest.raises(RuntimeError, match="in the middle"):
        run(planned(Net, LRS, monitor="val/loss", matmul_precision="medium"), [Watches(fails=True)])
    assert SEEN["advanced"] == {"medium"}
    assert state() == before


def test_what_a_user_has_set_comes_back_and_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with around("high"):
        with caplog.at_level(logging.WARNING, "coalesce"):
            plan = planned(Net, LRS, monitor="val/loss")
        assert "float32 products at high; while the run trains it is trainer.matmul_precision=highest" in caplog.text
        run(plan, [Watches()])
        assert SEEN["advanced"] == {"highest"}


def test_what_is_set_for_one_backend_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """torch then refuses to name the whole."""
    _, products = kernels._backends()
    products.fp32_precision = "bf16"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    before = state()
    assert before[0] is None
    run(planned(Net, LRS, monitor="val/loss", matmul_precision="high"), [Watches()])
    assert "at values of single backends" in caplog.text
    assert SEEN["advanced"] == {"high"}
    assert state() == before
    products.fp32_precision = "none"


@pytest.mark.parametrize("changes", [False, True])
def test_where_it_gains_nothing_a_warning_says_so(
    changes: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "less_exact", lambda name, device: changes)
    with caplog.at_level(logging.WARNING, "coalesce"):
        exactness.tell(Trainer(matmul_precision="medium", device="cpu"))
        exactness.tell(Trainer(matmul_precision="highest", device="cpu"))
    told = "trainer.matmul_precision=medium gains nothing here: on this processor"
    assert [told in record.getMessage() for record in caplog.records] == [] if changes else [True]


@pytest.mark.parametrize("name", kernels.PRECISIONS)
def test_whether_this_processor_multiplies_less_exactly(name: str) -> None:
    """As products of other sizes say."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 96, 96, generator=generator) for _ in range(2))
    exact = a @ b
    with kernels.products(name):
        found = a @ b
    assert kernels.less_exact(name, "cpu") == (float((found - exact).abs().max()) > 1e-3)
    # bfloat16 keeps 8 bits of each factor; sums of 96 products of size one
    torch.testing.assert_close(found, exact, rtol=0, atol=0.5)


@pytest.mark.parametrize(("digits", "found"), [(24, False), (11, True), (8, True)], ids=["float32", "TF32", "bfloat16"])
def test_another_order_of_sums_is_as_exact(digits: int, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that keeps so many binary digits of each factor, and adds up from the other end."""
    multiply = torch.bmm

    def device(left: Tensor, right: Tensor) -> Tensor:
        if torch.get_float32_matmul_precision() == kernels.EXACT:
            return multiply(left, right)
        parts = []
        for factor in (left.flip(2), right.flip(1)):
            mantissa, exponent = factor.frexp()
            parts.append(torch.ldexp((mantissa * 2**digits).round() / 2**digits, exponent))
        return multiply(*parts)

    monkeypatch.setattr(torch, "bmm", device)
    assert kernels.less_exact.__wrapped__("medium", "cpu") == found


def test_compiled_code_belongs_to_one_precision() -> None:
    module = make_fx(lambda x: x @ x)(torch.ones(4, 4))
    keys = []
    for name in (*kernels.PRECISIONS, "highest"):
        with kernels.products(name):
            keys.append(compiling._signature(module, [torch.ones(4, 4)]))
    assert len(set(keys)) == 3
    assert keys[0] == keys[-1]


def test_a_name_that_torch_does_not_have() -> None:
    with pytest.raises(ConfigError) as caught:
        check_trainer({"matmul_precision": "hihg"})
    assert "trainer.matmul_precision='hihg'" in str(caught.value)
    assert "highest, high, medium" in str(caught.value)
    assert check_trainer({"matmul_precision": "medium"}).matmul_precision == "medium"


def test_a_run_that_goes_on_keeps_it() -> None:
    (problem,) = unlike(Trainer(matmul_precision="high", device="cpu"), Trainer(device="cpu"))
    assert (problem.key, problem.value) == ("trainer.matmul_precision", "highest")
    assert "the run began with 'high'" in problem.rule
