"""Data: what it takes, what it makes of it, what it refuses.

Oracle: `torch.tensor`, indexing and `default_collate` of stock PyTorch; the rules of `Data`'s docstring by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from coalesce.data import Data
from coalesce.errors import ConfigError, Problem


class Pair(NamedTuple):
    image: Any
    label: Any


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def problems(**splits: Any) -> list[Problem]:
    """What `Data` finds wrong."""
    with pytest.raises(ConfigError) as caught:
        Data(**splits)
    return list(caught.value.problems)


def one(**splits: Any) -> Problem:
    found = problems(**splits)
    assert len(found) == 1, found
    return found[0]


# ---- structure and batches


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: x,
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: {"image": x, "label": y},
        lambda x, y: Pair(x, y),
        lambda x, y: {"view": (x, {"again": x}), "label": y},
    ],
    ids=["tensor", "tuple", "list", "dict", "named tuple", "nested"],
)
@pytest.mark.parametrize("shape", [(), (5,), (3, 5)], ids=str)
def test_a_batch_has_the_splits_structure(make: Callable[..., Any], shape: tuple[int, ...]) -> None:
    x, y = torch.rand(7, 2, 3), torch.randint(4, (7,))
    data = Data(train=make(x, y), val=make(x[:4], y[:4]))
    index = torch.randint(4, shape)
    torch.testing.assert_close(data.splits["train"], make(x, y), rtol=0, atol=0)
    for split in ("train", "val"):
        batch = data.batch(split, index)
        assert type(batch) is type(make(x, y))
        torch.testing.assert_close(batch, make(x[index], y[index]), rtol=0, atol=0)
    assert data.sizes == {"train": 7, "val": 4}


def test_leaves_and_unflatten_go_together() -> None:
    data = Data(train={"b": torch.zeros(3), "a": (torch.ones(3, 2), torch.ones(3, 1))})
    assert [tuple(leaf.shape) for leaf in data.leaves("train")] == [(3,), (3, 2), (3, 1)]
    assert data.unflatten("pqr") == {"b": "p", "a": ("q", "r")}
    assert data.bytes == 4 * (3 + 6 + 3)


def test_a_split_in_another_order_is_put_in_trains() -> None:
    x, y = torch.rand(4), torch.arange(4)
    data = Data(train={"x": x, "y": y}, test={"y": y[:2], "x": x[:2]})
    assert list(data.splits["test"]) == ["x", "y"]
    assert data.leaves("test")[0].equal(x[:2])


def test_changing_the_leaves_list_changes_nothing() -> None:
    data = Data(train=(torch.zeros(3), torch.zeros(3)))
    data.leaves("train").clear()
    assert len(data.leaves("train")) == 2


def test_batches_can_be_drawn_under_vmap() -> None:
    x = torch.rand(9, 3)
    data, index = Data(train=x), torch.randint(9, (4, 5))
    assert torch.vmap(lambda i: data.batch("train", i))(index).equal(x[index])


def test_to_makes_another_data() -> None:
    data = Data(train=(torch.rand(3, 2), torch.arange(3)), val=(torch.rand(2, 2), torch.arange(2)), classes=3)
    there = data.to("meta")
    assert [leaf.device.type for split in ("train", "val") for leaf in there.leaves(split)] == ["meta"] * 4
    assert data.leaves("train")[0].device.type == "cpu"
    assert (there.sizes, there.classes) == (data.sizes, 3)
    assert data.to("cpu").leaves("train")[0] is data.leaves("train")[0]


# ---- dtypes, copies, arrays


@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [
        ("float64", torch.float32),
        ("float32", torch.float32),
        ("float16", torch.float16),
        (">f4", torch.float32),
        (">f8", torch.float32),
        ("int64", torch.int64),
        ("int32", torch.int32),
        ("uint8", torch.uint8),
        ("uint16", torch.int64),
        ("uint32", torch.int64),
        ("bool", torch.bool),
        ("complex64", torch.complex64),
    ],
)
def test_dtypes_of_arrays(given_dtype: str, dtype: torch.dtype) -> None:
    array = np.array([[1, 0, 3], [0, 1, 200]]).astype(given_dtype)
    leaf = Data(train=array).leaves("train")[0]
    assert leaf.dtype == dtype
    assert leaf.tolist() == array.tolist()


def test_float64_arrays_follow_torchs_default() -> None:
    torch.set_default_dtype(torch.float64)
    assert Data(train=np.array([0.1])).leaves("train")[0].item() == 0.1


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool], ids=str
)
def test_tensors_keep_their_dtype(dtype: torch.dtype) -> None:
    assert Data(train=torch.ones(3).to(dtype)).leaves("train")[0].dtype == dtype


def read_only() -> np.ndarray:
    array = np.arange(6.0).reshape(3, 2)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        read_only(),
        np.arange(6.0).reshape(3, 2)[::-1],
        np.arange(6.0).reshape(3, 2)[:, ::-1],
        np.asfortranarray(np.arange(6.0).reshape(3, 2)),
        np.broadcast_to(np.arange(2.0), (3, 2)),
        np.arange(24.0).reshape(6, 4)[::2, ::3],
        pd.DataFrame({"a": [1.0, 2.0], "b": [3, 4]}),
        pd.Series([1, 2, 3]),
    ],
    ids=["read-only", "reversed", "mirrored", "Fortran", "broadcast", "strided", "frame", "series"],
)
def test_any_layout_of_arrays(array: Any) -> None:
    leaf = Data(train=array).leaves("train")[0]
    assert leaf.is_contiguous()
    assert leaf.tolist() == np.asarray(array).tolist()


@pytest.mark.parametrize("wrap", [np.asarray, torch.tensor, lambda x: TensorDataset(torch.tensor(x))])
def test_later_changes_in_place_do_not_matter(wrap: Callable[..., Any]) -> None:
    given_data = wrap([1.0, 2.0, 3.0])
    data = Data(train=given_data)
    (given_data.tensors[0] if isinstance(given_data, TensorDataset) else given_data)[0] = 9
    assert data.leaves("train")[0].tolist() == [1, 2, 3]


def test_a_tensor_that_needs_gradients_is_data_all_the_same() -> None:
    leaf = Data(train=torch.nn.Parameter(torch.rand(4, 3)).T).leaves("train")[0]
    assert (leaf.requires_grad, leaf.is_contiguous(), type(leaf)) == (False, True, Tensor)


# ---- datasets


@pytest.mark.parametrize(
    "sample",
    [
        lambda i: torch.full((2, 2), i),
        lambda i: (torch.full((2,), float(i)), i),
        lambda i: {"x": np.full((3,), i, dtype=np.int32), "y": [i % 2 == 0, torch.tensor(i)]},
        lambda i: Pair(np.float32(i), np.int64(i)),
    ],
    ids=["tensor", "tuple", "dict", "named tuple"],
)
def test_datasets_are_stacked(sample: Callable[[int], Any]) -> None:
    items = [sample(i) for i in range(6)]
    data = Data(train=Items(items))
    torch.testing.assert_close(data.splits["train"], default_collate(items), rtol=0, atol=0)


def test_numbers_of_a_dataset_get_torchs_dtypes() -> None:
    # default_collate would make float64 of a Python float, and models of float32 would fail
    x, y, z = Data(train=Items([(0.5, 1, True), (1.5, 2, False)])).leaves("train")
    assert (x.dtype, y.dtype, z.dtype) == (torch.float32, torch.int64, torch.bool)
    assert Data(train=Items([(np.float64(0.5), np.zeros(2))] * 3)).leaves("train")[1].dtype == torch.float32


def test_a_dataset_and_tensors_can_be_splits_of_one_data() -> None:
    x, y = torch.rand(5, 2), torch.arange(5)
    data = Data(train=TensorDataset(x, y), val=Items([(x[i], i) for i in range(5)]), test=(x, y))
    for split in data.sizes:
        torch.testing.assert_close(data.batch(split, torch.tensor([3, 1]))[0], x[[3, 1]])


@pytest.mark.parametrize(
    ("dataset", "key", "rule"),
    [
        (Stream(), "task.data.train", "map-style"),
        (Items([]), "task.data.train", "is empty"),
        (Items([(1, 2), (1, 2, 3)]), "task.data.train", "sample 1 must have the structure of sample 0"),
        (
            Items([torch.zeros(2), torch.zeros(2), torch.zeros(3)]),
            "task.data.train",
            "sample 2 is (3,) of torch.float32",
        ),
        (Items([{"x": 1, "y": "cat"}] * 2), "task.data.train.y", "sample 0: cannot be read as a tensor: str"),
        (Items([(), ()]), "task.data.train", "hold no tensor"),
    ],
)
def test_datasets_that_cannot_be_stacked(dataset: Dataset[Any], key: str, rule: str) -> None:
    problem = one(train=dataset)
    assert problem.key == key
    assert rule in problem.rule


# ---- what is refused


X, Y = torch.rand(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])


def with_value(value: float, *index: int) -> Tensor:
    x = X.clone()
    x[index] = value
    return x


@pytest.mark.parametrize(
    ("splits", "key", "value", "rule"),
    [
        ({}, "task.data.train", None, "missing"),
        ({"val": X}, "task.data.train", None, "missing"),
        ({"train": ()}, "task.data.train", (), "holds no tensor"),
        ({"train": X[:0]}, "task.data.train", (0, 3), "is empty"),
        ({"train": (X, Y[:5])}, "task.data.train", (6, 5), "must be equally long"),
        ({"train": torch.tensor(1.0)}, "task.data.train", "Tensor", "is a scalar"),
        ({"train": X.to_sparse()}, "task.data.train", "Tensor", "sparse"),
        ({"train": (X, "labels")}, "task.data.train.1", "str", "cannot be read as a tensor: str"),
        ({"train": {"x": X, "y": None}}, "task.data.train.y", "NoneType", "cannot be read as a tensor: NoneType"),
        ({"train": [1.0, 2.0, 3.0]}, "task.data.train.0", "float", "(and 2 more like it)"),
        ({"train": np.array([1, "a"], dtype=object)}, "task.data.train", "ndarray", "arrays of object"),
        ({"train": np.array(["a", "b"])}, "task.data.train", "ndarray", "arrays of <U1"),
        (
            {"train": np.array(["2026-01-01"], dtype="datetime64[D]")},
            "task.data.train",
            "ndarray",
            "arrays of datetime64",
        ),
        ({"train": np.zeros(3, dtype=np.uint64)}, "task.data.train", "ndarray", "arrays of uint64"),
        ({"train": np.zeros(3, dtype=np.longdouble)}, "task.data.train", "ndarray", "longdouble|float128"),
        ({"train": np.ma.masked_invalid([1.0, np.nan])}, "task.data.train", "MaskedArray", "masked"),
        ({"train": pd.DataFrame({"a": [1], "b": ["x"]})}, "task.data.train", "DataFrame", "arrays of object"),
        ({"train": X, "val": (X,)}, "task.data.val", "0", "must have the structure of train"),
        ({"train": {"x": X}, "test": {"z": X}}, "task.data.test", "z", "must have the structure of train"),
        ({"train": X, "val": X.double()}, "task.data.val", torch.float64, "must have train's dtype"),
        ({"train": (X, Y), "val": (X[:, :2], Y)}, "task.data.val.0", (2,), "must have train's shape"),
        ({"train": X, "classes": 3}, "task.data.train", ["torch.float32"], "has no labels"),
        ({"train": X, "classes": 0}, "task.data.classes", 0, "must be a positive integer"),
        ({"train": X, "classes": 2.0}, "task.data.classes", 2.0, "must be a positive integer"),
    ],
)
def test_what_is_refused(splits: dict[str, Any], key: str, value: Any, rule: str) -> None:
    problem = one(**splits)
    assert problem.key == key
    assert problem.value == value
    assert any(text in problem.rule for text in rule.split("|")), problem.rule


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: x.numpy(), lambda x: x.half(), TensorDataset])
def test_what_is_not_finite_is_counted_and_placed(value: float, wrap: Callable[[Tensor], Any]) -> None:
    x = with_value(value, 2, 1)
    x[4] = value
    problem = one(train=wrap(X), val=wrap(x))
    assert problem.key == ("task.data.val.0" if wrap is TensorDataset else "task.data.val")
    assert str(problem.value) == str(value)
    assert problem.rule == "must be finite; is not in 4 of 18 values, the first at index (2, 1)"


@pytest.mark.parametrize(
    ("labels", "value", "index"),
    [([0, 1, 3, 3], 3, 2), ([0, -1, 2, 0], -1, 1), ([0, 1, -100, -101], -101, 3), ([9, 0, 0, 0], 9, 0)],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_labels_out_of_range(labels: list[int], value: int, index: int, dtype: torch.dtype) -> None:
    problem = one(train=(X[:4], torch.tensor(labels, dtype=dtype)), classes=3)
    assert (problem.key, problem.value, problem.valid) == ("task.data.train.1", value, "0 to 2, or -100 (ignored)")
    assert problem.rule.endswith(f"the first at index {index}")


def test_labels_in_range() -> None:
    weight = torch.rand(6)
    group = torch.full((6, 2), 77)
    for label in (Y, torch.where(Y == 1, -100, Y), Y.to(torch.uint8)):
        # the label is the last leaf of integers in one dimension: neither floats nor two dimensions count
        assert Data(train={"x": X, "y": label, "group": group, "weight": weight}, classes=3).classes == 3


def test_156_is_no_ignored_label() -> None:
    # -100 as an unsigned byte
    assert one(train=(X, torch.full((6,), 156, dtype=torch.uint8)), classes=3).value == 156


def test_all_problems_come_together() -> None:
    found = problems(
        train=(with_value(float("nan"), 0, 0), torch.tensor([0, 1, 2, 3, 4, 5])),
        val=(X[:0], Y[:0]),
        test=(X.double(), Y[:2]),
        classes=5,
    )
    assert [(p.key, p.rule.split(";")[0].split(":")[0]) for p in found] == [
        ("task.data.train.0", "must be finite"),
        ("task.data.train.1", "label out of range"),
        ("task.data.val", "is empty"),
        ("task.data.test", "the leaves of a split must be equally long"),
        ("task.data.test.0", "must have train's dtype"),
    ]


def test_an_unreadable_train_hides_no_problem_of_another_split() -> None:
    found = problems(train=(X, "labels"), val=(with_value(float("inf"), 5, 2), Y))
    assert [p.key for p in found] == ["task.data.train.1", "task.data.val.0"]


# ---- by law


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=1, max_size=3),
    as_array=st.booleans(),
)
def test_every_sample_comes_back(sizes: list[int], shapes: list[list[int]], as_array: bool) -> None:
    names = ("train", "val", "test")[: len(sizes)]
    full = {
        name: [torch.arange(n * int(np.prod(shape))).reshape(n, *shape) for shape in shapes]
        for name, n in zip(names, sizes, strict=True)
    }
    splits: dict[str, Any] = {name: tuple(x.numpy() if as_array else x for x in xs) for name, xs in full.items()}
    data = Data(**splits)
    for name, n in zip(names, sizes, strict=True):
        index = torch.randperm(n)
        for leaf, x in zip(data.batch(name, index), full[name], strict=True):
            assert leaf.equal(x[index])
