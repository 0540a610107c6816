"""Law 1 for the task of the main job. `test_law_invisible.py` has the law for a small task, at every width.

Oracle: the same experiments in other lanes of the same compiled graph.
"""

from __future__ import annotations

import pytest
import torch

from coalesce.engine.lanes import Lanes
from coalesce.experiment import Experiment
from coalesce.tasks import Digits
from engine_helpers import experiment, template_of


@pytest.mark.thorough
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
