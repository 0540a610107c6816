"""`python -m benchmarks.precision`.

Oracles: differences worked out by hand; the rounding of float32 and of bfloat16.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from rich.console import Console

from benchmarks import precision as command


def frame(*losses: float, status: str = "finished") -> pd.DataFrame:
    return pd.DataFrame({"status": [status] * len(losses), "seed": range(len(losses)), "val/loss": losses})


def test_differences_are_those_of_one_experiment() -> None:
    told = command.differences({"highest": frame(1.0, 2.0, 4.0), "medium": frame(1.5, 2.0, 3.0)})
    row = told["medium"]["val/loss"]
    # by experiment 0.5, 0, 1
    assert (row["median"], row["most"], row["mean"]) == pytest.approx((0.5, 1.0, 6.5 / 3))
    # around 7/3: squares (16 + 1 + 25) / 9 over two
    assert row["seeds"] == pytest.approx((42 / 9 / 2) ** 0.5)
    assert told["highest"]["val/loss"]["most"] == 0


def test_what_did_not_finish_is_not_compared() -> None:
    with pytest.raises(ValueError, match="not all experiments finished at medium: diverged"):
        command.differences({"highest": frame(1.0), "medium": frame(1.0, status="diverged")})


def test_a_product_in_float32_is_as_exact_as_float32() -> None:
    error = command.product_error(64, "highest", "cpu")
    assert 0 < error < 64**0.5 * torch.finfo(torch.float32).eps


def test_the_command_operation_by_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    small = ["--task", "digits", "--steps", "3", "--lanes", "2", "--no-compile", "--settings", "highest", "medium"]
    command.main([*small, "--json", str(out)])
    figures = json.loads(out.read_text())
    assert figures["products"].keys() == figures["experiments"].keys() == {"highest", "medium"}
    losses = figures["experiments"]["medium"]["train/loss"]
    if figures["unchanged"]:
        # sums in another order
        assert losses["most"] < 1e-5
        assert "medium gains nothing on this device" in capsys.readouterr().out
    else:
        # bfloat16's rounding of one step's products, three times
        assert 1e-5 < losses["most"] < 0.1
    text = io.StringIO()
    command.report(figures, Console(file=text, width=160))
    assert "digits: what 3 steps end with" in text.getvalue()
