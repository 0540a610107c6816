"""Convolutions in lanes, by each lowering.

Oracle: torch's own convolution and its gradients, lane by lane, in float64, to 1e-12 of their largest entry: the
lowerings add up the same products in another order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

from coalesce.engine import measure
from coalesce.engine.rules import Rules
from coalesce.engine.rules.lowerings import LOWERINGS, Convolution, Seen
from coalesce.engine.rules.mode import Notes
from coalesce.engine.trace import trace
from coalesce.kernels import products
from coalesce.random import key_of

KEYS = torch.stack([key_of(seed) for seed in (0, 1, 2)])
STEP = torch.tensor(0)

LAYERS: dict[str, tuple[type[nn.Module], tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = {
    "plain 1d": (nn.Conv1d, (3, 4, 3), {}, (3, 11)),
    "paper 1d": (nn.Conv1d, (1, 5, 5), {"stride": 2, "padding": 1}, (1, 40)),
    "no bias": (nn.Conv1d, (2, 3, 2), {"bias": False}, (2, 7)),
    "same": (nn.Conv1d, (2, 3, 3), {"padding": "same", "dilation": 2}, (2, 9)),
    "same, one side more": (nn.Conv1d, (2, 3, 4), {"padding": "same"}, (2, 9)),
    "valid": (nn.Conv1d, (2, 3, 4), {"padding": "valid"}, (2, 9)),
    "stride beyond the kernel": (nn.Conv1d, (2, 3, 2), {"stride": 3}, (2, 12)),
    "2d": (nn.Conv2d, (3, 4, 3), {"padding": 1}, (3, 6, 5)),
    "2d uneven": (nn.Conv2d, (2, 3, (3, 2)), {"stride": (1, 2), "padding": (2, 0), "dilation": (2, 1)}, (2, 7, 8)),
    "2d one by one": (nn.Conv2d, (4, 2, 1), {"stride": 2}, (4, 5, 5)),
    "depthwise": (nn.Conv2d, (4, 8, 3), {"groups": 4}, (4, 6, 6)),
    "reflected": (nn.Conv2d, (2, 3, 3), {"padding": 1, "padding_mode": "reflect"}, (2, 5, 6)),
    "3d": (nn.Conv3d, (2, 3, (2, 3, 1)), {"stride": (1, 2, 1), "padding": (1, 0, 0)}, (2, 4, 5, 3)),
    "transposed 1d": (nn.ConvTranspose1d, (3, 2, 3), {"stride": 2, "output_padding": 1}, (3, 5)),
    "transposed 2d": (nn.ConvTranspose2d, (2, 4, 3), {"stride": 2, "padding": 1, "groups": 2}, (2, 4, 5)),
    "transposed 3d": (nn.ConvTranspose3d, (2, 2, 2), {"dilation": 2}, (2, 3, 3, 3)),
}

#: What a lowering leaves to torch's own: here it pads one side more than the other.
BEYOND = {name: {"same, one side more"} for name in LOWERINGS}
BEYOND["columns"] |= {"depthwise", "transposed 1d", "transposed 2d", "transposed 3d"}
#: Of images alone; and strided 1 x 1 convolutions in float32 of full channels alone.
BEYOND["channels_last"] = {*LAYERS} - {"2d", "2d uneven", "reflected"}


def _build(name: str) -> tuple[nn.Module, list[Tensor], Tensor]:
    """A layer, and the stacked parameters and inputs of three lanes."""
    kind, arguments, settings, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = kind(*arguments, **settings).double()
    stacked = [torch.randn(3, *p.shape, dtype=torch.float64) for p in layer.parameters()]
    return layer, stacked, torch.randn(3, 5, *shape, dtype=torch.float64)


def _loss(layer: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
    names = [n for n, _ in layer.named_parameters()]
    y = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x)
    return (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).cos().view(y.shape)).sum()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch's word on a slow case
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(name: str, lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, stacked, x = _build(name)
    argnums = tuple(range(1, 2 + len(stacked)))
    notes = Notes()
    with Rules(KEYS[0], STEP, {}, notes):
        _loss(layer, x[0], *(p[0] for p in stacked))
    chosen = measure.choose_lowerings(notes.convolutions, 3, choice=lowering)
    taken: list[int] = []
    run = LOWERINGS[lowering].run

    def counted(*given: Any) -> Tensor:
        taken.append(1)
        return run(*given)

    monkeypatch.setitem(LOWERINGS, lowering, LOWERINGS[lowering]._replace(run=counted))

    def lane(key: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        def loss(*tensors: Tensor) -> Tensor:
            with Rules(key, STEP, {}, lowerings=chosen):
                return _loss(layer, *tensors)

        return loss(*tensors), *grad(loss, argnums=tuple(i - 1 for i in argnums))(*tensors)

    found = vmap(lane)(KEYS, x, *stacked)
    assert bool(taken) == (name not in BEYOND[lowering])
    for i in range(3):
        leaves = [t[i].clone().requires_grad_() for t in (x, *stacked)]
        loss = _loss(layer, *leaves)
        right = loss, *torch.autograd.grad(loss, leaves)
        for mine, theirs in zip(found, right, strict=True):
            theirs = theirs.detach()
            torch.testing.assert_close(mine[i], theirs, rtol=0, atol=1e-12 * float(theirs.abs().max()))


def _example(**changes: Any) -> Convolution:
    usual: dict[str, Any] = {"stride": (2,), "padding": (1,), "dilation": (1,), "output_padding": (0,), "groups": 1}
    shapes: dict[str, Any] = {"input": (2, 6), "weight": (3, 2, 3), "transposed": False, "dtype": "float64"}
    return Convolution(**{**usual, **shapes, **changes})


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_gradients_of_gradients(lowering: str) -> None:
    torch.manual_seed(0)
    pair = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 2, 6), (3, 2, 3))]

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return LOWERINGS[lowering].run(x, weight, _example())

    torch.autograd.gradcheck(convolve, pair)
    torch.autograd.gradgradcheck(convolve, pair)


TRANSFORMED: dict[str, Any] = {
    "gradients of samples": lambda loss, x, w: vmap(grad(loss), (None, 0))(w, x[:, None]),
    "along a direction": lambda loss, x, w: jvp(lambda x: loss(w, x), (x,), (x.cos(),))[1],
    "along a direction of the weight": lambda loss, x, w: jvp(lambda w: grad(loss)(w, x), (w,), (w.cos(),))[1],
    "a gradient's gradient": lambda loss, x, w: grad(lambda w: grad(loss, 1)(w, x).square().sum())(w),
}


# what torch's forward derivatives are made of
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("lowering", ["single", "channels_last", "columns"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_within_transforms_of_the_users_own(name: str, lowering: str) -> None:
    layer, (weight, _), x = _build("2d")
    notes = Notes()
    with Rules(KEYS[0], STEP, {}, notes):
        layer(x[0])
    chosen = dict.fromkeys(notes.convolutions, lowering)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return F.conv2d(x, w, padding=1).sin().sum()

    def lane(key: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        with Rules(key, STEP, {}, lowerings=chosen):
            found: Tensor = TRANSFORMED[name](loss, x, weight)
            return found

    found = vmap(lane)(KEYS, x, weight)
    right = torch.stack([TRANSFORMED[name](loss, *one) for one in zip(x, weight, strict=True)])
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10 * float(right.abs().max()))


def test_a_convolution_without_a_bias_on_one_sample() -> None:
    _, (weight,), x = _build("no bias")
    chosen = {str(_example(input=(2, 7), weight=(3, 2, 2), stride=(1,), padding=(0,))): "single"}

    def lane(key: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        with Rules(key, STEP, {}, lowerings=chosen):
            return F.conv1d(x, weight)

    module = trace(lambda *t: [vmap(lane)(*t)], [KEYS, x[:, 0], weight])
    assert "coalesce.convolutions" in str([n.target for n in module.graph.nodes])
    right = torch.stack([F.conv1d(a, b) for a, b in zip(x[:, 0], weight, strict=True)])
    torch.testing.assert_close(vmap(lane)(KEYS, x[:, 0], weight), right)


@pytest.mark.parametrize(
    ("function", "settings", "name"),
    [
        (F.conv1d, {"stride": 2, "padding": 3, "dilation": 4, "groups": 5}, "conv1d input=10x9 weight=10x2x2 "),
        (
            F.conv_transpose1d,
            {"stride": 3, "padding": 4, "output_padding": 2, "groups": 5, "dilation": 6},
            "conv_transpose1d input=10x9 weight=10x2x2 ",
        ),
    ],
)
def test_settings_by_place_and_by_name(function: Any, settings: dict[str, int], name: str) -> None:
    """In torch's order, which is not the same for both."""
    x, weight, notes = torch.randn(3, 10, 9), torch.randn(10, 2, 2), Notes()
    with Rules(KEYS[0], STEP, {}, notes):
        found = function(x, weight, None, *settings.values()), function(input=x, weight=weight, **settings)
    for one in found:
        assert torch.equal(one, function(x, weight, **settings))
    ((known, _),) = notes.convolutions.items()
    assert known.startswith(name)
    assert all(f"{setting}={value}" in known for setting, value in settings.items())


def test_what_lanes_have_in_common_stays_one_convolution() -> None:
    """Data of an evaluation: folding the lanes into the output channels is one dense convolution."""
    _, (weight,), x = _build("no bias")
    chosen = {str(_example(input=(2, 7), weight=(3, 2, 2), stride=(1,), padding=(0,))): "single"}

    def lane(key: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        with Rules(key, STEP, {}, lowerings=chosen):
            return F.conv1d(x, weight)

    module = trace(lambda *t: [vmap(lane, in_dims=(0, 0, None))(*t)], [KEYS, weight, x[0]])
    assert [str(n.target) for n in module.graph.nodes if "conv" in str(n.target)] == ["aten.convolution.default"]


def test_names_tell_shapes_and_settings_apart() -> None:
    assert str(_example()) == "conv1d input=2x6 weight=3x2x3 stride=2 padding=1 float64"
    others: list[dict[str, Any]] = [
        {"input": (2, 7)},
        {"weight": (3, 2, 1)},
        {"stride": (1,)},
        {"padding": (0,)},
        {"dilation": (2,)},
        {"groups": 2},
        {"transposed": True},
        {"output_padding": (1,)},
        {"dtype": "float32"},
    ]
    assert len({str(_example(**change)) for change in ({}, *others)}) == 1 + len(others)


@pytest.fixture
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which choices are kept, an empty one."""
    monkeypatch.setattr(measure, "cache_folder", lambda: tmp_path)
    return tmp_path / "coalesce"


def test_the_fastest_is_taken_if_it_clearly_is(nothing_kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"a": Seen(_example(), 4, True)}
    seconds: dict[str, float] = {}
    monkeypatch.setattr(measure, "_lanes", lambda name, _: lambda *inputs: name)
    monkeypatch.setattr(measure, "_timed", lambda call, _: seconds[call()])
    for times, right in [
        ((1.0, 0.5, 0.6), "single"),
        ((1.0, 0.6, 0.5), "columns"),
        ((1.0, 0.9, 0.9), "grouped"),
        ((9.0, 2.0, 1.0), "columns"),
    ]:
        seconds |= dict(zip(("grouped", "single", "columns"), times, strict=True))
        for file in nothing_kept.glob("*"):
            file.unlink()
        assert measure.choose_lowerings(seen, 8, compile=False) == {"a": right}, times


def test_a_choice_is_kept_for_the_next_run(nothing_kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same shape, lanes and threads; and what stands in the file is not trusted."""
    seen, asked = {"a": Seen(_example(), 4, True)}, []

    def fastest(candidates: list[str], *how: object) -> str:
        asked.append(how)
        return "single"

    monkeypatch.setattr(measure, "_fastest", fastest)
    for _ in range(2):
        assert measure.choose_lowerings(seen, 8) == {"a": "single"}
    assert len(asked) == 1
    torch.set_num_threads(torch.get_num_threads() + 1)
    measure.choose_lowerings(seen, 8)
    measure.choose_lowerings(seen, 4)
    measure.choose_lowerings(seen, 8, compile=False)
    measure.choose_lowerings({"a": Seen(_example(), 4, False)}, 8)
    assert len(asked) == 5
    (*files,) = nothing_kept.glob("*.json")
    assert len(files) == 5
    for wrong in ('"no such lowering"', '["single"]', '{"single": 1}', "", "\x00"):
        for file in files:
            file.write_text(wrong)
        asked.clear()
        assert measure.choose_lowerings(seen, 8) == {"a": "single"}
        assert len(asked) == 1
    with products("medium"):
        asked.clear()
        measure.choose_lowerings(seen, 8)
    assert len(asked) == 1
    assert not [path for path in nothing_kept.iterdir() if path.suffix != ".json"]


def test_a_choice_need_not_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be made."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(measure, "_fastest", lambda *_: "single")
    assert measure.choose_lowerings({"a": Seen(_example(), 4, True)}, 8) == {"a": "single"}


def test_a_choice_that_cannot_be_done_is_vmaps_own() -> None:
    seen = {"a": Seen(_example(groups=2, weight=(2, 1, 3)), 4, True)}
    assert measure.choose_lowerings(seen, 8, choice="columns") == {"a": "grouped"}
    assert measure.choose_lowerings(seen, 8, choice="single") == {"a": "single"}
    # columns of 9 times 2**30 bytes
    large = _example(input=(8, 2**25), weight=(8, 8, 9), stride=(1,), padding=(4,))
    assert measure.choose_lowerings({"a": Seen(large, 4, True)}, 8, choice="columns") == {"a": "grouped"}


def test_every_candidate_is_timed_forward_and_backward() -> None:
    """Nothing replaced: what is timed really runs, with and without a gradient of the input."""
    for needs in (True, False):
        for name in ("grouped", *LOWERINGS):
            seen = Seen(_example(dtype="float32"), 4, needs)
            found = measure._lanes(name, seen)(*measure._inputs(seen, 3, torch.device("cpu")))
            assert [t.shape for t in found] == [(3, 4, 3, 3), *[(3, 4, 2, 6), (3, 3, 2, 3)][not needs :]]


@pytest.mark.parametrize(
    ("inputs", "outputs", "changes", "needs", "last"),
    [
        (16, 32, {}, True, True),
        # images of three colours, which have no gradient
        (3, 16, {}, False, True),
        (3, 16, {}, True, False),
        (16, 10, {}, True, False),
        (16, 32, {"dtype": "float64"}, True, False),
        (16, 32, {"groups": 2, "weight": (32, 8, 3, 3)}, True, False),
        (3, 16, {"weight": (16, 3, 1, 1), "stride": (2, 2)}, False, False),
        (16, 16, {"weight": (16, 16, 1, 1), "stride": (2, 2)}, True, True),
    ],
)
def test_images_of_enough_channels_have_them_last(
    inputs: int, outputs: int, changes: dict[str, Any], needs: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"input": (inputs, 8, 8), "weight": (outputs, inputs, 3, 3), "dtype": "float32"}
    usual |= {n: (v, v) for n, v in {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}.items()}
    seen = {"a": Seen(_example(**{**usual, **changes}), 4, needs)}
    monkeypatch.setattr(measure, "_kept", lambda *_: "timed")
    assert measure.choose_lowerings(seen, 8) == {"a": "channels_last" if last else "timed"}
    assert measure.choose_lowerings(seen, 8, compile=False) == {"a": "timed"}
    assert measure.choose_lowerings(seen, 8, "cuda") == {"a": "timed"}
    assert measure.choose_lowerings(seen, 8, choice="grouped") == {"a": "grouped"}


def test_channels_that_come_last_are_nobodys_business() -> None:
    """A model's own code sees images as they always lie: `view` demands it."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 16, 6, 6), torch.randn(3, 16, 16, 3, 3)
    name = str(_example(**{
        "input": (16, 6, 6), "weight": (16, 16, 3, 3), "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1),
        "output_padding": (0, 0), "dtype": "float32",
    }))  # fmt: skip

    def lane(key: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        with Rules(key, STEP, {}, lowerings={name: "channels_last"}):
            return F.conv2d(x, weight).view(5, -1)

    module = trace(lambda *t: [vmap(lane)(*t)], [KEYS, x, weight])
    (call,) = (n for n in module.graph.nodes if "coalesce.convolutions" in str(n.target))
    assert call.args[-1] is True
    right = torch.stack([F.conv2d(a, b).view(5, -1) for a, b in zip(x, weight, strict=True)])
    torch.testing.assert_close(module(KEYS, x, weight)[0], right)


def test_what_is_compiled_is_timed_compiled(nothing_kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operation by operation one takes too long to be compiled; compiled, the last is the fastest."""
    eager = dict(zip(("grouped", "single", "columns"), (1.0, measure.HOPELESS + 0.1, 2.2), strict=True))
    compiled = {"grouped": 1.0, "columns": 0.5}
    monkeypatch.setattr(measure, "_lanes", lambda name, _: lambda *inputs: ("eager", name))
    monkeypatch.setattr(measure, "trace", lambda lane, _: lane()[1])
    monkeypatch.setattr(measure, "compile_graph", lambda name, _: lambda *inputs: ("compiled", name))
    monkeypatch.setattr(measure, "_timed", lambda call, _: {"eager": eager, "compiled": compiled}[call()[0]][call()[1]])
    seen = {"a": Seen(_example(), 4, True)}
    assert measure.choose_lowerings(seen, 8) == {"a": "columns"}
    assert measure.choose_lowerings(seen, 8, compile=False) == {"a": "grouped"}
