"""`checkpoint_pieces` for one model in a plain loop.

Oracle: the same model without it, bit for bit in float64: the second forward pass is the first one's operations.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import coalesce
from coalesce.engine.checkpointing import Checkpointed
from coalesce.errors import ConfigError

STEPS = 4


class Double(torch.autograd.Function):
    """A custom Function, whose gradient is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient * ctx.saved_tensors[0].cos()


@torch.library.custom_op("coalesce_tests::opaque", mutates_args=())
def _opaque(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy().copy() * 2)


@_opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Opaque(torch.autograd.Function):
    """A Function around an operator that nobody can look into, as one that launches a kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.coalesce_tests.opaque(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ops.coalesce_tests.opaque(gradient) * ctx.saved_tensors[0].sign()


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], norm: bool = False, spectral: bool = False):
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 6)
        if spectral:
            parametrizations.spectral_norm(self.first)
        self.norm: nn.Module = nn.BatchNorm1d(12) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.second(self.drop(self.function(self.norm(self.first(x)))))


class Net(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"function": F.gelu},
    "BatchNorm": {"function": F.gelu, "norm": True},
    "spectral norm": {"function": F.gelu, "spectral": True},
    "custom Function": {"function": Double.apply},
    "opaque Function": {"function": Opaque.apply},
}


def _train(model: nn.Module) -> dict[str, Tensor]:
    """Weights, buffers and losses after some steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        x, y = torch.randn(10, 6, dtype=torch.float64), torch.randint(3, (10,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {**model.state_dict(), "losses": torch.stack(losses)}


def _made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(**KINDS[kind]).double()


@pytest.mark.parametrize("pieces", ["auto", 1, 3, ["blocks.1", "blocks.2.first"]])
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_that_of_the_model_without_it(kind: str, pieces: Any) -> None:
    right, model = _train(_made(kind)), coalesce.checkpoint_pieces(_made(kind), pieces)
    assert any(isinstance(m.forward, Checkpointed) for m in model.modules())
    found = _train(model)
    assert found.keys() == right.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, right[name]), name


def _saved(model: nn.Module) -> int:
    """Elements that autograd keeps for the backward pass of one batch, parameters excepted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            kept[pointer] = tensor.untyped_storage().nbytes() // tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        model(torch.randn(64, 6, dtype=torch.float64))
    return sum(kept.values())


def test_what_is_kept_are_the_inputs_of_pieces() -> None:
    plain, auto = _saved(_made("plain")), _saved(coalesce.checkpoint_pieces(_made("plain")))
    # per block: input 6, before and behind the GELU 12 each, dropout's result and its mask 12 each
    assert auto < 0.25 * plain


def test_the_pieces() -> None:
    def pieces(model: nn.Module, given: Any) -> list[str]:
        coalesce.checkpoint_pieces(model, given)
        return [name for name, module in model.named_modules() if isinstance(module.forward, Checkpointed)]

    assert pieces(_made("plain"), "auto") == [f"blocks.{i}" for i in range(4)]
    assert pieces(_made("plain"), 1) == [""]
    assert pieces(_made("plain"), ["blocks.*", "blocks.1.first"]) == [f"blocks.{i}" for i in range(4)]
    assert pieces(_made("plain"), "head") == ["head"]
    # no two alike: cut by size
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    assert pieces(model, "auto") == ["0", "2", "4"]
    # twice is once
    assert pieces(coalesce.checkpoint_pieces(model), "auto") == ["0", "2", "4"]
    first: Any = model[0].forward
    assert first.module is model[0]


def test_copies_and_files() -> None:
    model = coalesce.checkpoint_pieces(_made("plain"))
    assert list(model.state_dict()) == list(_made("plain").state_dict())
    twin = copy.deepcopy(model)
    blocks: Any = twin.get_submodule("blocks")
    assert all(block.forward.module is block for block in blocks)
    for mine, theirs in zip(_train(twin).values(), _train(_made("plain")).values(), strict=True):
        assert torch.equal(mine, theirs)
    # the copied one trained alone
    assert torch.equal(next(model.parameters()), next(_made("plain").parameters()))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    _made("plain").load_state_dict(torch.load(file, weights_only=True))


def test_evaluation_keeps_nothing_and_changes_nothing() -> None:
    model = coalesce.checkpoint_pieces(_made("BatchNorm")).eval()
    before = {n: b.clone() for n, b in model.named_buffers()}
    x = torch.randn(5, 6, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(model(x), _made("BatchNorm").eval()(x))
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


class Counting(nn.Module):
    """Counts its calls in a buffer and computes with the count, in evaluation as well."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y: Tensor = self.last(self.first(x).tanh() / self.calls)
        return y


def trained_in_evaluation(block: Callable[[], nn.Module], pieces: Any) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(3)]).eval()
    if pieces is not None:
        coalesce.checkpoint_pieces(model, pieces)
    for _ in range(2):
        model(torch.ones(5, 4)).pow(2).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], [b.clone() for b in model.buffers()]


class AlwaysTraining(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> AlwaysTraining:
        return super().train(True)


def partly_training() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), AlwaysTraining(4), nn.Linear(4, 4))


def replaced() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    forward = block.forward
    block.forward = lambda x: 2 * forward(x) + x  # type: ignore[method-assign]
    return block


@pytest.mark.parametrize("block", [Counting, partly_training, replaced])
def test_buffers_in_evaluation_and_a_replaced_forward(block: Callable[[], nn.Module]) -> None:
    plain, pieces = trained_in_evaluation(block, None), trained_in_evaluation(block, ["0", "1", "2"])
    assert len(plain[0]) == len(pieces[0]) >= 12
    # bit for bit: the same operations in the same order
    assert all(map(torch.equal, plain[0], pieces[0]))
    assert all(map(torch.equal, plain[1], pieces[1]))


def test_case_18_beside_a_checkpoint_of_ones_own() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.utils.checkpoint.checkpoint(lambda x: self.first(x).tanh(), x, use_reentrant=False)
            return self.second(h)

    x, found = torch.randn(7, 4), []
    for again in (False, True):
        torch.manual_seed(0)
        model = coalesce.checkpoint_pieces(Own(), ["first", "second"]) if again else Own()
        model(x).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_case_19_masks_are_the_forward_passes() -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(-1, 1, 256))

        def forward(self, x: Tensor) -> Tensor:
            h = F.dropout(torch.sigmoid(self.w * x), 0.5)
            return torch.sin(3 * h) + h

    torch.manual_seed(0)
    model = coalesce.checkpoint_pieces(nn.Sequential(Unit()), 1)
    result = model(torch.ones(256))
    result.sum().backward()
    (w,) = model.parameters()
    assert w.grad is not None
    assert torch.equal(w.grad == 0, result == 0)
    assert 90 < int((result == 0).sum()) < 166


def test_under_backprop() -> None:
    right = _train(_made("BatchNorm"))
    model = coalesce.checkpoint_pieces(_made("BatchNorm"))
    torch.manual_seed(1)
    wrapped, optimizer = coalesce.BackProp(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(STEPS):
        x, y = torch.randn(10, 6, dtype=torch.float64), torch.randint(3, (10,))
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    for name, tensor in wrapped.state_dict().items():
        assert torch.equal(tensor, right[name]), name


def test_parameters_that_are_lent() -> None:
    """`functional_call` puts them back before the backward pass."""
    found = []
    for again in (False, True):
        model = coalesce.checkpoint_pieces(_made("plain").eval()) if again else _made("plain").eval()
        lent = {n: (2 * p.detach()).requires_grad_() for n, p in model.named_parameters()}
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
        loss = torch.func.functional_call(model, lent, (x,)).square().sum()
        found.append(torch.autograd.grad(loss, list(lent.values())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_eval_between_the_passes() -> None:
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        made = _made("BatchNorm")
        model = coalesce.checkpoint_pieces(made) if again else made
        loss = model(torch.linspace(-1, 1, 60, dtype=torch.float64).sin().view(10, 6)).square().sum()
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu(x, inplace=True))


def test_a_piece_that_writes_into_its_input_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Writes(), Writes())
    coalesce.checkpoint_pieces(model, ["1", "2"])
    with pytest.raises(RuntimeError, match=r"^1 \(Writes\) writes into its input.* leave it out"):
        model(torch.randn(3, 6))


# torch.compile looks at every tensor's grad while it prepares the call
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["BatchNorm", "spectral norm"])
def test_under_torch_compile(kind: str) -> None:
    """With the backend that runs its graphs operation by operation: what is compiled is what counts here. Dropout off,
    since a compiled graph draws in an order of its own."""
    found = []
    for again in (False, True):
        torch._dynamo.reset()
        model = _made(kind)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model = coalesce.checkpoint_pieces(model) if again else model
        compiled: Any = torch.compile(model, backend="aot_eager") if again else model
        found.append(_train(compiled))
    for (name, mine), theirs in zip(found[1].items(), found[0].values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ("block", "pieces='block': matches no module"),
        (0, "pieces=0: must be at least 1"),
        (["blocks.9"], "blocks.9"),
        (True, "pieces=True: must be auto, a number or names"),
        (2.0, "pieces=2.0: must be auto, a number or names"),
        (None, "pieces=None: must be auto, a number or names"),
        ([1, 2], "pieces=[1, 2]: must be names of modules"),
        ([], "pieces=[]: must be names of modules"),
    ],
)
def test_what_is_no_piece_is_an_error(pieces: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        coalesce.checkpoint_pieces(_made("plain"), pieces)
    assert message in str(caught.value)


def test_a_model_without_pieces_is_an_error() -> None:
    with pytest.raises(ConfigError, match="finds nothing in this model that could be a piece"):
        coalesce.checkpoint_pieces(nn.Tanh())
    with pytest.raises(TypeError, match=r"takes an nn\.Module, not a function"):
        coalesce.checkpoint_pieces(lambda x: x)  # type: ignore[arg-type]
