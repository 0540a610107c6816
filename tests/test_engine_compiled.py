"""Compiling: new float values compile nothing, and the compiled graph computes what the traced one does.

Oracle: the count of compiled graphs in this process; the same lanes run operation by operation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coalesce.engine.compiling import compilations
from coalesce.engine.lanes import Lanes
from coalesce.experiment import Experiment
from coalesce.tasks import Digits
from engine_helpers import Toy, experiment, lanes_of, template_of


def toy(values: dict[str, Any], seed: int) -> Experiment:
    optimizer = {"name": "adamw", **{k: values[k] for k in ("lr", "betas", "eps", "weight_decay")}}
    schedule = {"name": "cosine", **{k: values[k] for k in ("warmup", "warmup_start", "final")}}
    task = {"dropout": values["dropout"], "smoothing": values["smoothing"], "dtype": "float64"}
    return experiment(Toy, task, optimizer, schedule, values["steps"], batch_size=8, seed=seed)


def value_set(number: int) -> dict[str, Any]:
    return {
        "lr": 0.003 * (1 + number),
        "betas": [0.9 - 0.05 * number, 0.99 + 0.001 * number],
        "eps": 1e-8 * (1 + number),
        # zero in the first lane must not be specialised away
        "weight_decay": 0.02 * number,
        "warmup": 3 * number,
        "warmup_start": 0.1 + 0.05 * number,
        "final": 0.05 * number,
        "dropout": 0.08 * number,
        "smoothing": 0.04 * number,
        "steps": 20 + number,
    }


def test_new_floats_compile_nothing() -> None:
    first = [toy(value_set(i), seed=i) for i in range(3)]
    lanes = lanes_of(first, compile=True)
    lanes.prepare_step()
    lanes.prepare_evaluation("val")
    before = compilations()
    assert before >= 2
    second = [toy(value_set(i + 3), seed=2**33 + i) for i in range(3)]
    again = Lanes(template_of(second), 3)
    for placed, held in ((first, lanes), (second, lanes), (second, again)):
        for lane, one in enumerate(placed):
            held.fill(lane, one)
        held.advance(30)
        held.evaluate("val")
        assert held.read().steps == [one.steps for one in placed]
        assert compilations() == before
    # the values count: the two runs of the second set agree, with each other and with the uncompiled graph
    plain = lanes_of(second)
    plain.advance(30)
    for lane in range(3):
        expected, found = lanes.state_dict(lane), plain.state_dict(lane)
        assert all(torch.equal(value, expected[name]) for name, value in again.state_dict(lane).items())
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0.0, atol=1e-12)
    for name, values in plain.evaluate("val").items():
        assert lanes.evaluate("val")[name] == pytest.approx(values, abs=1e-12)
    assert compilations() == before


def test_digits_does_not_see_its_neighbours() -> None:
    """Law 1 for the task of the main job, at one width."""

    def digits(index: int, lr: float = 0.0) -> Experiment:
        task = {"hidden": 64, "layers": 2, "dropout": 0.05 * index, "label_smoothing": 0.0}
        optimizer = {"name": "adamw", "lr": lr or 0.001 * 2**index}
        return experiment(Digits, task, optimizer, {"name": "cosine", "warmup": 10}, 40, batch_size=64, seed=index // 2)

    sound, broken = [digits(i) for i in range(8)], digits(8, lr=1e30)
    lanes = Lanes(template_of([*sound, broken]), 8)

    def run(placed: list[Experiment]) -> list[dict[str, torch.Tensor]]:
        for lane, one in enumerate(placed):
            lanes.fill(lane, one)
        lanes.advance(40)
        return [lanes.state_dict(lane) for lane in range(8)]

    expected = run(sound)
    assert lanes.read().steps == [40] * 8
    for shift in (1, 3, 6):
        placed = [*sound[shift:], *sound[:shift]]
        placed[shift] = broken
        for lane, state in enumerate(run(placed)):
            if lane != shift:
                like = expected[sound.index(placed[lane])]
                assert all(torch.equal(value, like[name]) for name, value in state.items())
        assert lanes.read().alive == [lane != shift for lane in range(8)]
