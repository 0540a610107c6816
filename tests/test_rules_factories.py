"""New tensors inside a lane can be written into; what lanes share cannot, and says so.

Oracle: the same code for each lane alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from coalesce.engine.rules import Rules
from coalesce.engine.rules.mode import shared
from coalesce.errors import TaskError
from rules_helpers import KEYS, STEP, Function, hidden, in_lanes, one_by_one


def put(target: Tensor, h: Tensor) -> Tensor:
    """The lane's numbers into a tensor."""
    target[:, 1] = h[:, 0]
    return target + h


DATA = torch.arange(18.0, dtype=torch.float64).view(6, 3)

WRITTEN: dict[str, Function] = {
    "zeros": lambda h, a: put(torch.zeros(6, 3, dtype=torch.float64), h),
    "zeros of a size": lambda h, a: put(torch.zeros((6, 3), dtype=torch.float64), h) + put(torch.zeros(size=(6, 3)), h),
    "ones": lambda h, a: put(torch.ones(6, 3), h),
    "full": lambda h, a: put(torch.full((6, 3), 7.0), h),
    "empty": lambda h, a: put(torch.empty(6, 3).fill_(2.0), h),
    "like data": lambda h, a: put(torch.zeros_like(DATA), h) + put(torch.ones_like(DATA), h) * put(DATA.clone(), h),
    "like data, full": lambda h, a: put(torch.full_like(DATA, 2.0), h) + put(torch.empty_like(DATA).fill_(1), h),
    "new of data": lambda h, a: put(DATA.new_zeros(6, 3), h) + put(DATA.new_full((6, 3), 2.0), h),
    "like the lane's": lambda h, a: put(torch.zeros_like(h), h) + put(h.new_zeros((6, 3)), h) * put(h.clone(), h),
    "one-hot": lambda h, a: h * torch.zeros(6, 3).scatter_(1, h.argmax(1, keepdim=True), 1.0),
    "in time": lambda h, a: torch.stack([put(torch.zeros_like(h), h * i) for i in range(3)]).sum(0),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_new_tensors_are_the_lanes_own(name: str) -> None:
    (values, gradients), (expected, slopes) = in_lanes(WRITTEN[name]), one_by_one(WRITTEN[name])
    assert values.dtype == expected.dtype
    torch.testing.assert_close(values, expected, rtol=0.0, atol=0.0)
    torch.testing.assert_close(gradients, slopes, rtol=0.0, atol=0.0)


def masked(h: Tensor, value: Any, rows: bool = False) -> Tensor:
    result = h * 2
    result[result[:, 0] > 0.3 if rows else result > 0.3] = value
    return result


MASKED: dict[str, Function] = {
    "a number": lambda h, a: masked(h, 7),
    "a float that rides": lambda h, a: masked(h, a),
    "a value": lambda h, a: masked(h, h.sum()),
    "rows": lambda h, a: masked(h, 0.5, rows=True),
    "rows by a row": lambda h, a: masked(h, h[0], rows=True),
    "in zeros": lambda h, a: masked(torch.zeros(6, 3) + h, 1.0),
    "scatter_": lambda h, a: torch.zeros_like(h).scatter_(1, h.argmax(1, keepdim=True), h[:, :1].exp()) * h,
    "an index": lambda h, a: put(h * 3, h),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_are_written_through(name: str) -> None:
    (values, gradients), (expected, slopes) = in_lanes(MASKED[name]), one_by_one(MASKED[name])
    torch.testing.assert_close(values, expected, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(gradients, slopes, rtol=1e-14, atol=0.0)


FACTORIES: dict[str, Function] = {
    "zeros": lambda h, a: torch.zeros(2, 3),
    "zeros of integers": lambda h, a: torch.zeros((2, 3), dtype=torch.int32),
    "ones of booleans": lambda h, a: torch.ones(4, dtype=torch.bool),
    "full of an integer": lambda h, a: torch.full((2,), 3),
    "full of a boolean": lambda h, a: torch.full((2,), True),
    "full of a float": lambda h, a: torch.full((2,), 3.0),
    "zeros_like": lambda h, a: torch.zeros_like(DATA, dtype=torch.float32),
    "ones_like": lambda h, a: torch.ones_like(torch.arange(3)),
    "full_like": lambda h, a: torch.full_like(torch.arange(3), 2),
    "new_ones": lambda h, a: torch.arange(3).new_ones(2, 2),
    "new_empty": lambda h, a: torch.arange(3).new_empty((2, 0)),
    "clone": lambda h, a: DATA.T.clone(),
    "tensor": lambda h, a: torch.tensor([[1, 2], [3, 4]]),
    "tensor of mixed kinds": lambda h, a: torch.tensor([True, 2, 3.0]),
    "tensor of tensors": lambda h, a: torch.tensor([torch.tensor(2), 3]),
    "one_hot": lambda h, a: torch.nn.functional.one_hot(torch.tensor([[0, 2], [1, 2]]), 4),
    "scalar": lambda h, a: torch.zeros(()),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_as_torch_makes_them(name: str) -> None:
    def lane(key: Tensor) -> Tensor:
        with Rules(key, STEP, {}):
            return FACTORIES[name](hidden(), 0.1)

    expected, found = FACTORIES[name](hidden(), 0.1), vmap(lane)(KEYS)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected.expand(3, *expected.shape))


def test_data_of_all_lanes_cannot_be_written_into() -> None:
    def lane(key: Tensor) -> Tensor:
        with Rules(key, STEP, {}):
            return put(DATA.view(6, 3), torch.randn(6, 3))

    for run in (lambda: vmap(lane)(KEYS), lambda: in_lanes(lambda h, a: put(DATA.view(6, 3), h))):
        with pytest.raises(
            TaskError, match="writes what the graph computes into a tensor that is not its own"
        ) as caught:
            run()
        assert f'File "{__file__}"' in str(caught.value)


def test_a_mapped_function_inside_a_lane() -> None:
    """What is new inside the user's own vmap is as torch has it there."""

    def one(row: Tensor) -> Tensor:
        result = torch.zeros_like(row)
        result[0] = row[1]
        return result

    (values, _), (expected, _) = (f(lambda h, a: vmap(one)(h * a)) for f in (in_lanes, one_by_one))
    assert torch.equal(values, expected)


def test_what_is_shared() -> None:
    def lane(key: Tensor) -> Tensor:
        assert not shared(key)
        assert not shared(key * 2)
        assert shared(DATA)
        return key

    assert shared(KEYS)
    vmap(lane)(KEYS)
