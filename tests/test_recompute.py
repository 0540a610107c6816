"""Pieces that the backward pass computes again.

Oracle: the same lanes without it, run operation by operation: a copy gives the same bits, so that every bit of the
lanes' state must be equal. What is kept is read off the segments.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.engine.lanes import Lanes
from coalesce.engine.pieces import recomputed
from coalesce.engine.tape import Segment
from coalesce.engine.trace import is_view
from engine_helpers import experiment, lanes_of, train_alone, worst
from test_tape import Cut, three
from thorough import kept

STEPS = 3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Tall(coalesce.Task):
    """Blocks of two layers in float64, without anything random; ``aux`` weighs a loss on every block's output."""

    def __init__(self, blocks: int = 6, size: int = 8, aux: float = 0.0, twice: bool = False, batch: int = 32):
        self.blocks, self.size, self.aux, self.twice, self.batch = blocks, size, aux, twice, batch

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(7)
        return coalesce.Data(train=torch.randn(self.batch, self.size, generator=generator, dtype=torch.float64))

    def model(self) -> nn.Module:
        return nn.Sequential(*[self.block() for _ in range(self.blocks)]).double()

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.size, self.size), nn.GELU(), nn.Linear(self.size, self.size), nn.Tanh())

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        h, aux = batch, batch.new_zeros(())
        assert isinstance(model, nn.Sequential)
        for block in model:
            h = block(h)
            h = block(h) if self.twice else h
            aux = aux + h.square().mean()
        return h.mean() + self.aux * aux

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {}


def segments(lanes: Lanes) -> list[Segment]:
    lanes.prepare_step()
    ((tape, _),) = lanes._steps.values()
    return tape.segments


def peak(lanes: Lanes) -> int:
    """The most elements that are alive at once, run operation by operation, beside the inputs of the step. A view
    counts as nothing, and keeps nothing alive: none of these models returns one that outlives its base."""
    parts = segments(lanes)
    last = {n: i for i, segment in enumerate(parts) for n in segment.inputs}
    crossing: dict[Any, int] = {}
    most = 0
    for i, segment in enumerate(parts):
        nodes = list(segment.module.graph.nodes)
        end = {a: place for place, n in enumerate(nodes) for a in n.all_input_nodes}
        alive: dict[Any, int] = {}
        for place, node in enumerate(nodes):
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, Tensor) and not is_view(node):
                alive[node] = math.prod(value.shape)
            most = max(most, sum(crossing.values()) + sum(alive.values()))
            alive = {n: size for n, size in alive.items() if end.get(n, -1) > place}
        given = {n: math.prod(n.meta["val"].shape) for n in segment.outputs if not is_view(n)}
        crossing = {n: size for n, size in (crossing | given).items() if last.get(n, -1) > i}
    return most


def compared(experiments: Any, again: Any, **options: Any) -> tuple[Lanes, Lanes]:
    """Both kinds of lanes after some steps, with every bit equal."""
    plain = lanes_of(experiments, **options)
    mine = lanes_of(experiments, checkpoint=recomputed(plain.template.model, again), **options)
    for lanes in (plain, mine):
        lanes.advance(STEPS)
    for name, value in mine.state.items():
        assert torch.equal(value, plain.state[name]), name
    return plain, mine


def tall(**arguments: Any) -> list[Any]:
    return [
        experiment(Tall, arguments, {"name": "adamw", "lr": 0.01 * i, "weight_decay": 0.1 * i}, steps=STEPS, seed=i)
        for i in (1, 2)
    ]


CLIPPED = {"name": "adam", "clip_norm": 0.5}


@pytest.mark.parametrize(
    ("again", "optimizer"),
    kept(
        [("auto", CLIPPED), (1, None), (3, None), (("blocks.1", "shared", "blocks.1.up"), None)],
        of=[("auto", CLIPPED), (("blocks.1", "shared", "blocks.1.up"), None)],
    ),
)
def test_computing_again_changes_no_bit(again: Any, optimizer: dict[str, Any] | None) -> None:
    """Dropout, BatchNorm, a module called twice, nested pieces, several outputs, writes in place."""
    experiments = three(optimizer=optimizer)
    _, mine = compared(experiments, again)
    for lane, one in enumerate(experiments):
        assert worst(mine, lane, train_alone(one).model) <= 1e-12


@pytest.mark.parametrize("arguments", [{}, {"aux": 0.3, "twice": True}])
def test_less_is_kept(arguments: dict[str, Any]) -> None:
    """Of a block four tensors are kept: the inputs of its two layers and of the GELU, and the tanh; of a block that is
    computed again, its input. 6 blocks: 24 against 6 and the 4 of one block, and on both sides a gradient or two."""
    plain, mine = compared(tall(**arguments), "auto")
    assert mine.checkpoint == tuple(str(i) for i in range(6))
    assert peak(mine) <= 0.6 * peak(plain)


def test_the_whole_model_as_one_piece_saves_nothing() -> None:
    """The backward pass brings all of it back at once."""
    plain, mine = compared(tall(), 1)
    assert mine.checkpoint == ("",)
    assert peak(mine) >= 0.98 * peak(plain)


def test_accumulated_micro_batches_are_computed_again_each() -> None:
    optimizer = {"name": "sgd", "lr": 0.1, "accumulate": 2}
    experiments = [experiment(Tall, {"blocks": 3}, optimizer, steps=STEPS, seed=i, batch_size=32) for i in (1, 2)]
    plain, mine = compared(experiments, "auto")
    assert peak(mine) < peak(plain)


def test_an_update_comes_after_the_copy_that_reads_its_parameter() -> None:
    """Trap C in another dress: a bias gets its gradient before anything of its block is computed again."""
    experiments = [experiment(Tall, {"blocks": 3}, {"name": "sgd", "lr": 5.0 * i}, steps=STEPS, seed=i) for i in (1, 2)]
    _, mine = compared(experiments, "auto")
    for segment in segments(mine):
        written: set[Any] = set()
        for node in segment.module.graph.nodes:
            assert not written & set(node.all_input_nodes), node
            if node.target is torch.ops.aten.copy_.default:
                written.add(node.args[0])


class Borrowing(Tall):
    """Blocks that read parameters of the next one, which would be updated, if nothing waited, before the block is
    computed again.

    Args:
        detached: whether this read brings no gradient, or is a tied use.
    """

    def __init__(self, detached: bool = True, blocks: int = 3):
        super().__init__(blocks)
        self.detached = detached

    def block(self) -> nn.Module:
        return Borrower(self.size, self.detached)

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        for block, lender in itertools.pairwise(model):
            assert isinstance(block, Borrower)
            assert isinstance(lender, Borrower)
            # in a list, so that the layer stays the lender's
            block.lenders = [lender.last]
        return model


class Borrower(nn.Module):
    """What is borrowed is added: the backward pass of an addition reads nothing, so that the copy alone reads it."""

    def __init__(self, size: int, detached: bool):
        super().__init__()
        self.first, self.last = nn.Linear(size, size), nn.Linear(size, size)
        self.detached = detached
        self.lenders: list[nn.Linear] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for lender in self.lenders:
            for tensor in (lender.bias, lender.weight[0]):
                h = h + (tensor.detach() if self.detached else tensor)
        return torch.tanh(self.last(F.gelu(h)))


@pytest.mark.parametrize(
    ("detached", "again"), kept([(True, "auto"), (True, ("0",)), (False, "auto")], of=[(True, ("0",)), (False, "auto")])
)
def test_a_borrowed_parameter_is_read_as_it_was(detached: bool, again: Any) -> None:
    """Trap C in a third dress: a piece that is computed again reads a parameter whose gradient was born long before.
    Rates at which one step moves the weights by as much as they are."""
    given = {"detached": detached}
    experiments = [experiment(Borrowing, given, {"name": "sgd", "lr": 5.0 * i}, steps=STEPS, seed=i) for i in (1, 2)]
    _, mine = compared(experiments, again)
    for lane, one in enumerate(experiments):
        assert worst(mine, lane, train_alone(one).model) <= 1e-12


def test_a_borrowed_parameter_in_compile_step() -> None:
    """The same beside a plain loop in the one lane of `compile_step`, which places its updates itself."""
    task = Borrowing()
    model, twin = task.model(), task.model()
    twin.load_state_dict(model.state_dict())
    optimizer, ours = (torch.optim.SGD(m.parameters(), lr=5.0) for m in (model, twin))
    step = coalesce.compile_step(twin, task.loss, ours, checkpoint="auto", compile=False)
    for _ in range(STEPS):
        batch = torch.randn(32, 8, dtype=torch.float64)
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        step(batch)
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_what_auto_and_a_number_mean() -> None:
    model = Cut(blocks=3).model()
    assert recomputed(model, None) == ()
    assert recomputed(model, "auto") == ("blocks.0", "blocks.1", "blocks.2")
    assert recomputed(model, 1) == ("",)
    assert recomputed(model, ("blocks.1*",))[0] == "blocks.1"
    # no two alike: by size
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 3))
    assert recomputed(model, "auto") == ("0", "2", "4")
    assert recomputed(model, 2) == ("0", "2", "4")


class Checkpointed(Tall):
    """The user's own calls."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        h = batch
        assert isinstance(model, nn.Sequential)
        for block in model:
            h = checkpoint(block, h, use_reentrant=False)
        return h.mean()


def test_a_users_own_checkpoints_are_pieces() -> None:
    given = {"name": "adamw", "lr": 0.01}
    mine, plain = ([experiment(task, {}, given, steps=STEPS, seed=i) for i in (1, 2)] for task in (Checkpointed, Tall))
    lanes, others = lanes_of(mine), lanes_of(plain)
    for stack in (lanes, others):
        stack.advance(STEPS)
    for name, value in lanes.state.items():
        assert torch.equal(value, others.state[name]), name
    assert peak(lanes) <= 0.6 * peak(others)


class Masked(coalesce.Task):
    """Case 19: the gradient of a dropped unit is zero, and that of a kept one is not."""

    def data(self) -> coalesce.Data:
        x = torch.linspace(0.5, 1.5, 256)
        return coalesce.Data(train=x.expand(2, -1).contiguous())

    def model(self) -> nn.Module:
        return nn.Sequential(Unit())

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch[0])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {}


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 256))
        self.register_buffer("dropped", torch.zeros(256, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.sigmoid(self.w * x), 0.5, self.training)
        self.dropped = h == 0
        return (torch.sin(3 * h) + h).sum()


@pytest.mark.parametrize(
    ("again", "compile"), [(None, False), (1, False), (("0",), False), pytest.param(1, True, marks=pytest.mark.slow)]
)
def test_case_19_masks_are_the_forward_passes(again: Any, compile: bool) -> None:
    experiments = [experiment(Masked, {}, {"name": "sgd", "lr": 1.0}, steps=1, seed=i, batch_size=2) for i in (1, 2)]
    lanes = lanes_of(experiments, compile=compile, checkpoint=recomputed(Masked().model(), again))
    before = lanes.state["trained/0.w"].clone()
    lanes.advance(1)
    still, dropped = lanes.state["trained/0.w"] == before, lanes.state["buffer/0.dropped"]
    assert 90 < int(dropped[0].sum()) < 166
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(still, dropped)
