"""The task `CharLM`: its text, its windows, its network, its errors.

Oracles: Python's own topics of `help`, slices of the text, a recorded hash, the network written out in functions of
its weights, the entropy of single characters, and the plain loop in float64.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.tasks import CharLM
from coalesce.tasks.charlm import encoded, reference
from engine_helpers import experiment, lanes_of, train_alone, worst

#: Hash of Python's topics → hash of the text that is made of them. Another Python has others.
RECORDED = {"2a95af4ac93f5b71": "f784d6fb39bdb407"}  # CPython 3.11.2


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Tiny(CharLM):
    """In float64, on a few windows."""

    def data(self) -> coalesce.Data:
        data = super().data()
        return coalesce.Data(train=data.leaves("train")[0][:30], val=data.leaves("val")[0][:11])

    def model(self) -> nn.Module:
        return super().model().double()


SMALL: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2, "context": 6, "stride": 3}


def words(text: str) -> str:
    return " ".join(text.split())


def parts() -> dict[str, str]:
    text = reference()
    ends = [0, len(text) * 8 // 10, len(text) * 9 // 10, len(text)]
    return {split: text[ends[i] : ends[i + 1]] for i, split in enumerate(("train", "val", "test"))}


def test_the_text_is_the_recorded_one() -> None:
    before = hashlib.sha256("\n".join(topics[name] for name in sorted(topics)).encode()).hexdigest()[:16]
    if before not in RECORDED:
        pytest.skip(f"the topics of this Python, {before}, are not recorded")
    assert hashlib.sha256(reference().encode()).hexdigest()[:16] == RECORDED[before]
    assert len(reference()) == 373_102


def test_every_paragraph_is_there_once() -> None:
    found = Counter(words(paragraph) for paragraph in reference().split("\n\n"))
    theirs = {words(paragraph) for topic in topics.values() for paragraph in topic.split("\n\n")}
    assert set(found) == theirs - {""}
    assert set(found.values()) == {1}


def test_what_is_evaluated_was_not_learnt_by_heart() -> None:
    """Of the topics as they come 8 % of the test's windows stand in the training text, word for word."""
    train = parts()["train"]
    for split in ("val", "test"):
        part = parts()[split]
        windows = [part[i : i + 65] for i in range(0, len(part) - 65, 64)]
        assert sum(window in train for window in windows) / len(windows) < 0.005


def test_windows_are_slices_of_their_part() -> None:
    kinds = sorted(set(reference()))
    data = CharLM(context=10, stride=4).data()
    for split, part in parts().items():
        (windows,) = data.leaves(split)
        assert windows.dtype == torch.uint8
        stride = 4 if split == "train" else 10
        starts = range(0, len(part) - 10, stride)
        assert data.sizes[split] == len(starts)
        for number in (0, 1, 2, len(starts) // 2, len(starts) - 1):
            start = starts[number]
            assert "".join(kinds[i] for i in windows[number].tolist()) == part[start : start + 11]


@pytest.mark.parametrize("text", ["hello", "ab" * 3, "\n", "".join(map(chr, range(300)))])
def test_characters_as_numbers_and_back(text: str) -> None:
    tokens, kinds = encoded(text)
    assert "".join(kinds[i] for i in tokens) == text
    assert kinds == "".join(sorted(set(text)))
    assert tokens.dtype == (np.uint16 if len(kinds) > 256 else np.uint8)


def test_the_network_is_gpt_2_without_biases_in_its_last_layer() -> None:
    """Written out, head by head and place by place; D = 8."""
    torch.manual_seed(0)
    model = Tiny(**SMALL).model().eval()
    weights = dict(model.state_dict())
    for weight in weights.values():
        weight.normal_()
    used = {"tokens.weight", "positions.weight", "head.weight"}

    def linear(x: Tensor, name: str) -> Tensor:
        used.update((f"{name}.weight", f"{name}.bias"))
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def normalise(x: Tensor, name: str) -> Tensor:
        used.update((f"{name}.weight", f"{name}.bias"))
        scaled = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    tokens = torch.randint(len(weights["tokens.weight"]), (6,))
    x = weights["tokens.weight"][tokens] + weights["positions.weight"]
    for block in ("blocks.0", "blocks.1"):
        qkv = linear(normalise(x, f"{block}.norm1"), f"{block}.attention.qkv")
        rows = []
        for place in range(6):
            heads = []
            for head in range(2):
                own = slice(4 * head, 4 * head + 4)
                q, k, v = (qkv[: place + 1, 8 * i : 8 * i + 8][:, own] for i in range(3))
                heads.append((k @ q[place] / 2).softmax(0) @ v)
            rows.append(torch.cat(heads))
        x = x + linear(torch.stack(rows), f"{block}.attention.out")
        hidden = linear(normalise(x, f"{block}.norm2"), f"{block}.mlp.hidden")
        x = x + linear(hidden * (1 + (hidden / math.sqrt(2)).erf()) / 2, f"{block}.mlp.out")
    expected = normalise(x, "norm") @ weights["head.weight"].T
    torch.testing.assert_close(model(tokens[None])[0], expected, rtol=1e-9, atol=1e-9)
    assert used == set(weights)


def test_initial_weights_are_small_and_the_blocks_outputs_smaller() -> None:
    torch.manual_seed(0)
    for name, parameter in CharLM(layers=8).model().named_parameters():
        if parameter.dim() == 2:
            # by its number of entries, a sample's deviation is off by a few per cent at most
            assert parameter.std().item() == pytest.approx(0.005 if "out." in name else 0.02, rel=0.06), name
        else:
            assert torch.equal(parameter, torch.ones_like(parameter) * float(name.endswith("weight"))), name


def test_tied_weights_are_one() -> None:
    model, apart = CharLM(tied=True).model(), CharLM().model()
    assert model.get_parameter("head.weight") is model.get_parameter("tokens.weight")
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, apart)]
    kinds = len(set(reference()))
    # per block: two norms, 64 -> 192, 64 -> 64, 64 -> 256 -> 64
    block = 4 * 64 + 64 * 192 + 192 + 64 * 64 + 64 + 64 * 256 + 256 + 256 * 64 + 64
    assert sizes == [(kinds + 64) * 64 + 4 * block + 2 * 64, (2 * kinds + 64) * 64 + 4 * block + 2 * 64]


def test_loss_and_metrics() -> None:
    task = Tiny(**SMALL)
    torch.manual_seed(3)
    model, batch = task.model().eval(), task.data().splits["val"]
    logs = model(batch[:, :-1].long()).log_softmax(-1)
    told = torch.stack([logs[:, t].gather(1, batch[:, t + 1 : t + 2].long())[:, 0] for t in range(6)])
    torch.testing.assert_close(task.loss(model, batch), -told.mean())
    metrics = task.metrics(model, batch)
    assert metrics["loss"].item() == pytest.approx(-told.mean().item())
    assert metrics["bits_per_character"].item() == pytest.approx(-(told / math.log(2)).mean().item())
    hits = [int(logs[i, t].argmax()) == int(batch[i, t + 1]) for i in range(11) for t in range(6)]
    assert metrics["accuracy"].item() == pytest.approx(sum(hits) / len(hits))


def test_dropout_reaches_embedding_attention_and_both_branches() -> None:
    model = CharLM(**SMALL, dropout=0.25).model()
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25] * 5
    seen = []
    stock: Any = F.scaled_dot_product_attention

    def listen(*args: Tensor, dropout_p: float, is_causal: bool) -> Tensor:
        seen.append((dropout_p, is_causal))
        attended: Tensor = stock(*args, dropout_p=dropout_p, is_causal=is_causal)
        return attended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", listen)
        model.train()(torch.zeros(1, 6, dtype=torch.long))
        model.eval()(torch.zeros(1, 6, dtype=torch.long))
    assert seen == [(0.25, True)] * 2 + [(0.0, True)] * 2


@pytest.mark.parametrize(("tied", "rates"), [(False, (0.0, 0.0)), (True, (0.2, 0.5))], ids=["plain", "tied-dropped"])
def test_lanes_are_plain_loops(tied: bool, rates: tuple[float, float]) -> None:
    """With no dropout attention takes the flash kernel; with rates that ride it is written out."""
    experiments = [
        experiment(
            Tiny,
            {**SMALL, "layers": 1, "tied": tied, "dropout": rate},
            {"name": "adamw", "lr": 0.01 * (i + 1), "weight_decay": 0.1 * i, "no_decay": ["*.bias", "*norm*.weight"]},
            steps=3,
            batch_size=4,
            seed=i,
        )
        for i, rate in enumerate(rates)
    ]
    lanes = lanes_of(experiments)
    lanes.advance(3)
    measured = lanes.evaluate("val")
    for lane, one in enumerate(experiments):
        alone = train_alone(one)
        # float64, three steps of AdamW, which divides a gradient by its own size
        assert worst(lanes, lane, alone.model) < 1e-9
        with torch.no_grad():
            expected = alone.task.metrics(alone.model.eval(), alone.task.data().splits["val"])
        found = {name: values[lane] for name, values in measured.items()}
        assert found == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-8)


def test_it_learns() -> None:
    torch.manual_seed(0)
    task = CharLM(layers=1, width=32, heads=2, context=32)
    data, model = task.data(), task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss = task.loss(model, data.batch("train", torch.randint(data.sizes["train"], (16,))))
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        bits = task.metrics(model.eval(), data.splits["val"])["bits_per_character"]
    # what knows how often each character comes needs its entropy, 4.6 bits
    part = parts()["val"]
    entropy = -sum(n / len(part) * math.log2(n / len(part)) for n in Counter(part).values())
    assert bits < entropy - 0.7


def test_what_is_out_of_range_is_told_together() -> None:
    with pytest.raises(coalesce.ConfigError) as caught:
        CharLM(layers=0, width=0, heads=-2, context=0, stride=0, dropout=-0.1)
    said = str(caught.value)
    assert "6 problems" in said
    for key, value in {"layers": 0, "width": 0, "heads": -2, "context": 0, "stride": 0}.items():
        assert f"task.{key}={value}: must be at least 1" in said
    assert "task.dropout=-0.1: must lie in 0 to 1" in said


def test_sizes_that_do_not_fit_each_other() -> None:
    with pytest.raises(coalesce.ConfigError) as caught:
        CharLM(width=12, heads=5)
    assert "task.heads=5: must divide task.width=12; valid: 1, 2, 3, 4, 6, 12" in str(caught.value)
    least = min(len(part) for part in parts().values())
    CharLM(context=least - 1).data()
    # as a sweep tells it, before anything is trained
    rule = f"must be less than the {least} characters of the smallest split; valid: 1 to {least - 1}"
    task = {"_target_": "coalesce.tasks.CharLM", "context": least, "layers": 1, "width": 2, "heads": 1}
    with pytest.raises(coalesce.ConfigError, match=rf"task\.context={least}: {rule}"):
        coalesce.sweep(task, {"seed": [0, 1]}, steps=1, batch_size=1)
