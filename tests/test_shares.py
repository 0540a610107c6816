"""Lanes shared out among the threads of a CPU.

Oracle: the same lanes in one share, bit for bit; and what plain threads do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.engine import shares
from coalesce.engine.lanes import Lanes
from coalesce.engine.shares import Shares
from engine_helpers import experiment, lanes_of, template_of


@pytest.mark.parametrize(
    ("width", "threads", "lanes", "count", "each"),
    [
        (64, 2, 32, 2, 1),
        (5, 2, 3, 2, 1),
        # kernels for one lane are others
        (3, 2, 3, 1, 2),
        (1, 2, 1, 1, 2),
        (8, 1, 8, 1, 1),
        # of 17 lanes in 8 shares of 3 two would be empty
        (17, 16, 3, 6, 2),
        (18, 16, 2, 9, 1),
        (8, 16, 2, 4, 4),
        # a third share would have one lane of three, and one of four threads would have nothing to do
        (7, 4, 4, 2, 2),
    ],
)
def test_how_lanes_are_shared_out(width: int, threads: int, lanes: int, count: int, each: int) -> None:
    found = Shares(width, threads, shares.WORTH)
    assert (found.lanes, len(found), found.threads) == (lanes, count, each)


@given(st.integers(1, 300), st.integers(1, 64), st.integers(0, 2 * shares.WORTH) | st.none())
def test_every_lane_has_a_place_and_every_thread_one_share(width: int, threads: int, size: int | None) -> None:
    found = Shares(width, threads, size)
    # no share is all empty
    assert width <= found.width < width + found.lanes
    assert len(found) * found.threads <= threads
    if len(found) > 1:
        assert size is not None
        assert found.lanes >= shares.LEAST
        assert found.lanes * size >= shares.WORTH
    if size is None:
        assert found.lanes == width


def test_little_work_is_not_shared_out() -> None:
    assert len(Shares(16, 2, shares.WORTH // 16)) == 1
    assert len(Shares(32, 2, shares.WORTH // 16)) == 2
    assert len(Shares(16, 2, None)) == 1


def test_shares_run_at_once_with_their_own_threads() -> None:
    torch.set_num_threads(4)
    found = Shares(8, 4, shares.WORTH)
    assert (len(found), found.threads) == (4, 1)
    all_there = threading.Barrier(4)

    def call(share: int) -> tuple[int, int, int]:
        all_there.wait(timeout=60)
        return share, torch.get_num_threads(), threading.get_ident()

    ends = found.run(call)
    assert [share for share, _, _ in ends] == [0, 1, 2, 3]
    assert {count for _, count, _ in ends} == {1}
    assert len({ident for _, _, ident in ends}) == 4
    # and nobody else is told of it
    assert torch.get_num_threads() == 4
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [4]


def test_a_thread_that_cannot_be_started_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    shares._pool.cache_clear()
    original = threading.Thread.start
    started: list[threading.Thread] = []

    def start(self: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        original(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Shares(4, 2, shares.WORTH).run(lambda share: share)
    # else this would wait for the one that was started, which waits for the other one
    for thread in started:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert Shares(4, 2, shares.WORTH).run(lambda share: share) == [0, 1]


def test_an_error_is_raised_when_all_have_ended() -> None:
    ended = []

    def call(share: int) -> None:
        if share == 0:
            raise ValueError("the first one")
        threading.Event().wait(0.2)
        ended.append(share)

    with pytest.raises(ValueError, match="the first one"):
        Shares(4, 2, shares.WORTH).run(call)
    assert ended == [1]


def test_ctrl_c_is_heard_when_nobody_moves_the_lanes() -> None:
    ended = []

    def call(share: int) -> None:
        if share == 0:
            # as the terminal's, which comes to the thread that waits
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.3)
        ended.append(share)

    with pytest.raises(KeyboardInterrupt):
        Shares(4, 2, shares.WORTH).run(call)
    assert sorted(ended) == [0, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    torch.set_num_threads(2)
    found = Shares(4, 2, shares.WORTH)
    assert found.run(lambda share: share) == [0, 1]
    child = os.fork()
    if child == 0:
        # not out of pytest's own ends
        os._exit(found.run(lambda share: share) != [0, 1])
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child waits for threads that are not there")
    assert status == 0


class Told(coalesce.Task):
    """Linear-tanh-Linear on 36 samples, with a metric, outputs, and three folds."""

    def __init__(self, offset: float = 0.0):
        self.offset = offset

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(7)
        x, y = torch.randn(36, 10, generator=generator), torch.randint(3, (36,), generator=generator)
        return coalesce.Data(train=(x, y), test=(x[:12], y[:12]), classes=3)

    def folds(self, data: coalesce.Data) -> Any:
        parts = np.split(np.arange(36), 3)
        return [(np.concatenate([p for p in parts if p is not part]), part) for part in parts]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 3))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x + self.offset), y)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(model(batch[0]), batch[1])}

    def outputs(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores: Tensor = model(batch[0])
        return scores

    def summary(self, outputs: Any, split: Any) -> dict[str, float]:
        return {"spread": float(outputs.std())}


class Dropped(Told):
    """The same with dropout, which keeps its mask."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 33), nn.Dropout(self.dropout), nn.Linear(33, 3))


@pytest.fixture
def small_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "WORTH", 0)
    torch.set_num_threads(2)


def history(lanes: Lanes, experiments: list[Any]) -> list[Any]:
    """What may be asked of lanes in their life, asked."""
    told: list[Any] = []
    for lane, one in enumerate(experiments):
        lanes.fill(lane, one)
    lanes.advance(3)
    told += [lanes.evaluate("val"), lanes.evaluate("test")]
    lanes.keep([1, 4])
    lanes.advance(4)
    told.append(lanes.read())
    evaluation = lanes.measure("val", best=True)
    told += [[evaluation.metrics["loss"][lane] for lane in (1, 4)], lanes.summary(4, "val", evaluation)]
    saved = lanes.save([0, 4])
    lanes.clear(2)
    lanes.put(0, experiments[4], saved[1])
    lanes.go_on(4, experiments[0], saved[0])
    lanes.advance(5)
    told += [lanes.read(), lanes.evaluate("val"), lanes.evaluate("test")]
    told += [{n: t.tolist() for n, t in lanes.state_dict(lane).items()} for lane in range(5)]
    told += [{n: t.tolist() for n, t in lanes.state.items()}]
    return told


def test_shared_out_or_not_changes_no_bit(small_is_worth_it: None) -> None:
    """Five lanes in two shares of three, of which one lane is nobody's."""
    experiments = [
        experiment(
            Told,
            {"offset": 0.01 * i},
            {"name": "adamw", "lr": 0.01 * (i + 1)},
            "cosine",
            steps=9 + i,
            seed=i,
            batch_size=10,
            data={"fold": i % 3},
        )
        for i in range(5)
    ]
    found = []
    for shared in (True, False):
        lanes = lanes_of(experiments, compile=True, shared=shared)
        assert len(lanes.shares) == (2 if shared else 1)
        found.append(history(lanes, experiments))
    # NaN is not equal to itself, but is written alike
    assert repr(found[0]) == repr(found[1])


def test_who_comes_first_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that drops nothing keeps less for the backward pass."""
    torch.set_num_threads(2)
    found: list[int] = []
    for rates in ((0.0, 0.5), (0.5, 0.0)):
        experiments = [experiment(Dropped, {"dropout": rate}, seed=seed) for rate in rates for seed in range(4)]
        template = template_of(experiments)
        if not found:
            # between what the two hold and keep
            one = lanes_of(experiments)
            kept = template.rehearsal.saved_bytes
            monkeypatch.setattr(shares, "WORTH", 4 * (one.bytes // 8 + kept) + 1)
        found.append(len(Lanes(template, 8).shares))
        assert template.rehearsal.saved_bytes >= kept
    assert found[0] == found[1]


def test_neighbours_on_other_shares_are_not_felt(small_is_worth_it: None) -> None:
    """Law 1: a lane's bits are the same, whoever is in the other lanes, of its share and of others."""
    subject, *others = [experiment(Told, {"offset": 0.1 * i}, "adamw", seed=i) for i in range(5)]
    # one that diverges is the worst of neighbours
    others.append(experiment(Told, {"offset": 1e38}, {"name": "adamw", "lr": 1e38}, seed=9))
    lanes = Lanes(template_of([subject, *others]), 4, compile=True)
    assert len(lanes.shares) == 2
    found = []
    for beside in ([], others[:3], [others[4], others[1], others[4]]):
        for lane, one in enumerate([subject, *beside]):
            lanes.fill(lane, one)
        lanes.advance(6)
        found.append(({n: t.tolist() for n, t in lanes.state_dict(0).items()}, lanes.evaluate("test")["loss"][0]))
        for lane in range(4):
            lanes.clear(lane)
    assert found[0] == found[1] == found[2]


def test_lanes_that_are_not_compiled_are_in_one_share(small_is_worth_it: None) -> None:
    """Operation by operation the interpreter's lock is wanted all the time."""
    experiments = [experiment(Told, seed=i) for i in range(4)]
    assert len(lanes_of(experiments).shares) == 1
    assert len(lanes_of(experiments, compile=True).shares) == 2
