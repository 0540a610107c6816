"""Modules and laws: `module_table` says what a row is and what the laws are; the rows stand in `modules_*.py`."""

from __future__ import annotations

import pytest
import torch

import modules_attention  # noqa: F401
import modules_gradients  # noqa: F401
import modules_layers  # noqa: F401
import modules_losses  # noqa: F401
import modules_parameters  # noqa: F401
import modules_recurrent  # noqa: F401
import modules_state  # noqa: F401
from module_table import COMPILED_LAWS, LAWS, cases, stand

# operations without a rule for lanes of their own are done lane by lane: slow, and right
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    # the plain model's encoder, in evaluation
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The products are tiny: a second thread costs more than it gives, above all where the cores are shared."""
    torch.set_num_threads(1)


@pytest.mark.parametrize(("row", "law"), cases(compile=False))
def test_eager(row: str, law: str) -> None:
    LAWS[law](stand(row, compile=False))


@pytest.mark.parametrize(("row", "law"), cases(compile=True))
def test_compiled(row: str, law: str) -> None:
    COMPILED_LAWS[law](stand(row, compile=True))
