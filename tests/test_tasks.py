"""The ready tasks.

Oracles: recorded hashes of their data (what a version of the sources must not change unseen), the sources' own
documentation (sizes, classes), parameter counts by hand, and a plain PyTorch loop that learns them.
"""

from __future__ import annotations

import builtins
import hashlib
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coalesce.configuration import make_experiments
from coalesce.experiment import experiment_id
from coalesce.task import Data, Task, missing_methods
from coalesce.tasks import Digits, Mnist1dCNN, Mnist1dGRU, Mnist1dMLP

#: They show the same task of a user's own.
PAGES = ["README.md", "docs/guide.md"]


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


@pytest.fixture(scope="module")
def mnist1d() -> Data:
    return Mnist1dMLP().data()


def test_digits_split_is_the_recorded_one() -> None:
    data = Digits().data()
    assert data.sizes == {"train": 1297, "val": 250, "test": 250}
    assert {split: digest(*data.leaves(split)) for split in data.sizes} == {
        "train": "8c30fe28ef7d8c12",
        "val": "3036e3af3c414a9b",
        "test": "620bae693c059f4d",
    }


def test_digits_are_all_there_once() -> None:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    data = Digits().data()
    x = torch.cat([data.leaves(split)[0] for split in data.sizes])
    y = torch.cat([data.leaves(split)[1] for split in data.sizes])
    ours = sorted((bytes(row), label) for row, label in zip((x * 16).numpy().astype(np.uint8), y.tolist(), strict=True))
    theirs = sorted((bytes(row), label) for row, label in zip(pixels.astype(np.uint8), labels.tolist(), strict=True))
    assert ours == theirs
    assert x.min() == 0
    assert x.max() == 1


def test_mnist1d_is_the_papers(mnist1d: Data) -> None:
    assert mnist1d.sizes == {"train": 4000, "val": 1000, "test": 1000}
    # rounded, since interpolation and filters of SciPy may change in the last bits
    hashes = {s: digest((mnist1d.leaves(s)[0] * 1000).round().int(), mnist1d.leaves(s)[1]) for s in mnist1d.sizes}
    assert hashes == {"train": "c7f710a224409872", "val": "549fc475f3145be1", "test": "1c7f0d61ae7f4453"}
    # the generator's own: 500 of each class in train and test together
    labels = torch.cat([mnist1d.leaves("train")[1], mnist1d.leaves("test")[1]])
    assert labels.bincount().tolist() == [500] * 10


def test_mnist1d_leaves_the_global_streams_alone() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    Mnist1dMLP().data()
    assert (random.random(), np.random.rand()) == expected


def test_mnist1d_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("mnist1d"):
            raise ModuleNotFoundError("No module named 'mnist1d'", name="mnist1d")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'coalesce\[mnist1d\]'"):
        Mnist1dCNN().data()


def test_the_pages_task_is_one() -> None:
    root = Path(__file__).parent.parent
    blocks = [re.findall(r"```python\n(.*?)```", (root / page).read_text(), re.DOTALL) for page in PAGES]
    source, again = (next(block for block in page if "class Wave" in block) for page in blocks)
    assert source == again
    names: dict[str, Any] = {}
    exec(source, names)
    task = names["Wave"](dropout=0.1)
    assert missing_methods(type(task)) == []
    data = task.data()
    batch = data.batch("val", torch.arange(5))
    assert data.sizes == {"train": 1000, "val": 200}
    assert task.loss(task.model(), batch).shape == task.metrics(task.model(), batch)["error"].shape == ()


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        (Digits(), 64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10),
        (Digits(hidden=32, layers=1), 64 * 32 + 32 + 32 * 10 + 10),
        (Mnist1dMLP(), 40 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10),
        # the paper's CNN has 5,210
        (Mnist1dCNN(), 5210),
        # and its GRU 5,134: three gates of 6 units see 1 + 6 values and have two biases, in two directions
        (Mnist1dGRU(), 5134),
        (Mnist1dGRU(hidden=3), 2 * 3 * 3 * (1 + 3 + 2) + 40 * 2 * 3 * 10 + 10),
        (Mnist1dCNN(channels=10), 1 * 10 * 5 + 10 + 2 * (10 * 10 * 3 + 10) + 50 * 10 + 10),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Task) else str(value),
)
def test_models_have_the_parameters_that_they_should(task: Task, parameters: int) -> None:
    assert sum(p.numel() for p in task.model().parameters()) == parameters


def test_digits_arguments_reach_the_model_and_the_loss() -> None:
    torch.manual_seed(1)
    plain, smooth = Digits(dropout=0.3), Digits(dropout=0.3, label_smoothing=0.2)
    model = plain.model()
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.3, 0.3]
    model.eval()
    batch = plain.data().batch("val", torch.arange(20))
    logits = model(batch[0]).log_softmax(-1)
    nll = -logits.gather(1, batch[1][:, None]).mean()
    torch.testing.assert_close(plain.loss(model, batch), nll)
    # by hand: 80 % of the label, 20 % spread over all 10 classes
    torch.testing.assert_close(smooth.loss(model, batch), 0.8 * nll - 0.2 * logits.mean())
    torch.testing.assert_close(smooth.metrics(model, batch)["loss"], nll)
    torch.testing.assert_close(
        smooth.metrics(model, batch)["accuracy"], (logits.argmax(1) == batch[1]).sum() / torch.tensor(20.0)
    )


def test_mnist1d_arguments_reach_the_models_and_the_loss(mnist1d: Data) -> None:
    batch = mnist1d.batch("val", torch.arange(20))
    for smooth in (
        Mnist1dMLP(label_smoothing=0.2),
        Mnist1dCNN(label_smoothing=0.2),
        Mnist1dGRU(label_smoothing=0.2),
    ):
        model = smooth.model()
        logits = model(batch[0]).log_softmax(-1)
        assert logits.shape == (20, 10)
        nll = -logits.gather(1, batch[1][:, None]).mean()
        torch.testing.assert_close(smooth.loss(model, batch), 0.8 * nll - 0.2 * logits.mean())
        torch.testing.assert_close(smooth.metrics(model, batch)["loss"], nll)
    dropped = Mnist1dMLP(dropout=0.3).model()
    assert [m.p for m in dropped.modules() if isinstance(m, torch.nn.Dropout)] == [0.3, 0.3]
    # younger arguments have changed no name and no initial weight
    torch.manual_seed(1)
    state = Mnist1dMLP(hidden=5).model().state_dict()
    assert list(state) == [f"{place}.{kind}" for place in ("0.0", "1.0", "2") for kind in ("weight", "bias")]
    torch.manual_seed(1)
    assert torch.equal(torch.nn.Linear(40, 5).weight, state["0.0.weight"])


@pytest.mark.parametrize(
    ("task", "younger"),
    [(Mnist1dMLP, {"dropout": 0.0, "label_smoothing": 0.0}), (Mnist1dCNN, {"label_smoothing": 0.0})],
)
def test_younger_arguments_of_mnist1d_leave_the_ids_alone(task: type[Task], younger: dict[str, float]) -> None:
    kept = {"optimizer": "sgd", "schedule": "constant", "steps": 1, "batch_size": 1, "seed": 0}
    (now, other), _ = make_experiments({"task": task, **kept}, {"task.label_smoothing": [0.0, 0.5]})
    before = {k: v for k, v in now.config["task"].items() if k not in younger}
    # what other sections have that is younger stays so
    others = {key: value for key, value in now.introduced.items() if not key.startswith("task.")}
    assert now.id == experiment_id({**now.config, "task": before}, others)
    assert other.id != now.id


def test_the_gru_reads_the_signal_in_both_directions_and_keeps_every_output(mnist1d: Data) -> None:
    """By hand, one direction after the other, from the cell's equations (the documentation of torch.nn.GRU)."""
    model = Mnist1dGRU(hidden=4).model().double()
    x = mnist1d.leaves("val")[0][:3].double()
    weights = {name.removeprefix("rnn."): value for name, value in model.state_dict().items()}
    rows = torch.zeros(3, 40, 8, dtype=torch.float64)
    for part, order, end in ((0, range(40), ""), (4, range(39, -1, -1), "_reverse")):
        h = torch.zeros(3, 4, dtype=torch.float64)
        for t in order:
            seen = x[:, t : t + 1] @ weights[f"weight_ih_l0{end}"].T + weights[f"bias_ih_l0{end}"]
            kept = h @ weights[f"weight_hh_l0{end}"].T + weights[f"bias_hh_l0{end}"]
            r, z = ((seen[:, i : i + 4] + kept[:, i : i + 4]).sigmoid() for i in (0, 4))
            new = (seen[:, 8:] + r * kept[:, 8:]).tanh()
            h = (1 - z) * new + z * h
            rows[:, t, part : part + 4] = h
    expected = rows.flatten(1) @ weights["linear.weight"].T + weights["linear.bias"]
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("task", "steps", "least"),
    # seen: 0.97 and 0.91 on the validation split; a model that learns nothing has 0.1
    [(Digits(), 600, 0.93), (Mnist1dCNN(), 600, 0.75)],
    ids=["digits", "mnist1d-cnn"],
)
def test_a_plain_loop_learns_it(task: Task, steps: int, least: float) -> None:
    assert missing_methods(type(task)) == []
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, model = task.data(), task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = task.loss(model, data.batch("train", torch.randint(data.sizes["train"], (64,))))
        assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        metrics = task.metrics(model.eval(), data.splits["val"])
    assert set(metrics) == {"loss", "accuracy"}
    assert metrics["accuracy"].item() > least
