"""What listeners are told, in which order, and that all of them are closed whatever happens.

Oracle: by hand.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from coalesce.engine.lanes import Lanes
from coalesce.runner.run import run
from runner_helpers import Net, Recorder, ToyW, planned

# toy-w is one sample; its only loss metrics are these
TOY: dict[str, Any] = {"batch_size": 1, "monitor": "val/w"}


class Breaks(Recorder):
    """Raises at the n-th call of a method."""

    def __init__(self, method: str, error: BaseException, number: int = 1):
        super().__init__()
        inner, count = getattr(self, method), itertools.count(1)

        def outer(*given: Any) -> None:
            inner(*given)
            if next(count) == number:
                raise error

        setattr(self, method, outer)


def test_the_order_of_what_listeners_are_told() -> None:
    log: list[tuple[int, str]] = []

    class Logs(list[str]):
        def __init__(self, number: int):
            super().__init__()
            self.number = number

        def append(self, name: str) -> None:
            super().append(name)
            log.append((self.number, name))

    first, second = Recorder(), Recorder()
    first.calls, second.calls = Logs(1), Logs(2)
    run(planned(Net, {"seed": [0, 1, 2]}, width=2), [first, second])
    # in turn, each call to both
    assert log == [(number, name) for name in first.calls for number in (1, 2)]
    assert first.calls[:2] == ["started", "compiling"]
    assert first.calls[-2:] == ["advanced", "closed"]
    assert first.calls.count("started") == first.calls.count("closed") == 1
    assert first.calls.count("ended") == 3
    # nothing is told of an experiment once it has ended
    for result, at in zip(first.results, [i for i, name in enumerate(first.calls) if name == "ended"], strict=True):
        told = first.calls[:at].count("metrics")
        assert all(name != result.experiment.id for name, _, _ in first.rows[told:])


@pytest.mark.parametrize("method", ["started", "compiling", "checking", "metrics", "ended", "advanced"])
@pytest.mark.parametrize("error", [RuntimeError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_all_are_closed_whatever_happens(method: str, error: BaseException) -> None:
    # without stacking nothing is compiled, nor told to be
    plan = planned(ToyW, {"optimizer.lr": [0.1, 0.2]}, stack=method in ("compiling", "checking"), **TOY)
    listeners = [Recorder(), Breaks(method, error), Recorder()]
    with pytest.raises(type(error)) as caught:
        run(plan, listeners)
    assert caught.value is error
    for listener in listeners:
        assert listener.calls[-1] == "closed"
        assert listener.errors == [error]


def test_all_are_closed_though_one_cannot_close() -> None:
    plan = planned(ToyW, stack=False, **TOY)
    fails = OSError("no space left")
    listeners = [Breaks("closed", fails), Recorder(), Breaks("closed", ValueError("second"))]
    with pytest.raises((OSError, ValueError)) as caught:
        run(plan, listeners)
    assert [listener.errors for listener in listeners] == [[None]] * 3
    # neither is hidden
    assert {str(caught.value), str(caught.value.__context__)} == {"no space left", "second"}
    # nor is what broke the run by what broke the closing
    first = RuntimeError("first")
    with pytest.raises(OSError, match="no space left") as caught_again:
        run(plan, [Breaks("metrics", first), Breaks("closed", OSError("no space left"))])
    assert caught_again.value.__context__ is first


def test_an_error_in_a_task_reaches_the_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(Net, {"seed": [0, 1]})
    recorder = Recorder()

    def broken(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Lanes, "prepare_step", broken)
    with pytest.raises(OSError, match="full"):
        run(plan, [recorder])
    assert recorder.calls == ["started", "compiling", "closed"]
    assert isinstance(recorder.errors[0], OSError)


def test_a_run_without_listeners() -> None:
    assert [r.status for r in run(planned(ToyW, stack=False, **TOY))] == ["finished"]
