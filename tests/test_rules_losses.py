"""Losses that torch cannot compute for lanes, or only lane by lane: written out.

Oracle: torch's own, called for each lane by itself; values and gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rules_helpers import Function, in_lanes, one_by_one

TIMES, SAMPLES, CLASSES = 7, 4, 5
SCORES = torch.linspace(-9, 9, TIMES * SAMPLES * CLASSES, dtype=torch.float64).sin().view(TIMES, SAMPLES, CLASSES)
LABELS = torch.tensor([[1, 2, 3], [2, 2, 4], [4, 1, 1], [1, 1, 1]])

WEIGHTS = torch.arange(5.0, dtype=torch.float64)
SEVERAL = torch.tensor([[1, 2, -1, 3, 0], [-1, 1, 2, 0, 0], [4, 3, 2, 1, 0], [2, 2, -1, -1, -1]])


def ctc(inputs: Any = (7, 6, 7, 5), lengths: Any = (3, 3, 2, 0), labels: Tensor = LABELS, **options: Any) -> Function:
    return lambda h, a: F.ctc_loss(
        (h * a * 5).log_softmax(-1), labels, torch.tensor(inputs), torch.tensor(lengths), **options
    )


CASES: dict[str, tuple[Function, Tensor]] = {
    "ctc": (ctc(), SCORES),
    "ctc, none": (ctc(reduction="none"), SCORES),
    "ctc, sum, another blank": (ctc(reduction="sum", blank=3, labels=LABELS % 3), SCORES),
    "ctc, labels one after the other": (ctc(labels=LABELS.flatten()[:8], reduction="none"), SCORES),
    "ctc, impossible": (ctc((7, 3, 2, 1), reduction="none", zero_infinity=True), SCORES),
    "ctc, one sample": (lambda h, a: F.ctc_loss((h * a).log_softmax(-1), LABELS[1], (7,), (3,)), SCORES[:, 0]),  # type: ignore[arg-type]
    "multi_margin": (
        lambda h, a: F.multi_margin_loss(h * a, LABELS[:, 0], weight=WEIGHTS),
        SCORES[0],
    ),
    "multilabel_margin": (lambda h, a: F.multilabel_margin_loss(h * a, SEVERAL, reduction="none"), SCORES[0]),
    "multilabel_margin, one sample": (lambda h, a: F.multilabel_margin_loss(h * a, SEVERAL[0]), SCORES[0, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_as_torch_computes_it(name: str) -> None:
    function, x = CASES[name]
    (values, gradients), (expected, slopes) = in_lanes(function, x), one_by_one(function, x)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, slopes, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(values[0], values[2])


def test_an_impossible_alignment_is_infinite() -> None:
    values, _ = in_lanes(ctc((7, 3, 2, 1), reduction="none"), SCORES)
    expected, _ = one_by_one(ctc((7, 3, 2, 1), reduction="none"), SCORES)
    assert torch.equal(values.isinf(), expected.isinf())
    assert values.isinf().any()
