"""The tape: a step cut into segments computes what the whole step computes.

Oracle: the uncut graph, run operation by operation: the same operations in the same order, so that every bit of the
lanes' state must be equal wherever it is cut. Compiled tapes are compared with plain PyTorch loops.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coalesce
from coalesce.engine.compiling import compilations
from coalesce.engine.lanes import Lanes
from coalesce.engine.pieces import choose, matching, piece_of
from coalesce.engine.step import write
from coalesce.engine.tape import Segment, Tape
from coalesce.engine.trace import cut_here, trace
from engine_helpers import experiment, lanes_of, train_alone, worst

STEPS = 3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Block(nn.Module):
    """A residual block with what makes cuts hard: dropout, a view of a weight, writes in place, two outputs."""

    def __init__(self, size: int, dropout: float):
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.norm, self.act, self.drop = nn.BatchNorm1d(size), nn.ReLU(inplace=True), nn.Dropout(dropout)

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        # an in-place operation behind a boundary; the skip path must keep the value from before
        h = self.drop(self.act(self.up(self.norm(x))))
        h[:, 0] = 0.5
        # read below the place where its gradient is born
        return x + self.down(h), {"sum": state["sum"] + (self.up.weight.detach() ** 2).sum()}


class Deep(nn.Module):
    def __init__(self, blocks: int, size: int, dropout: float):
        super().__init__()
        self.first = nn.Linear(4, size)
        self.shared = nn.Linear(size, size)
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(blocks))
        self.head = nn.Linear(size, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = {"sum": x.new_zeros(())}
        # a module called twice
        h = self.shared(torch.tanh(self.shared(self.first(x))))
        for block in self.blocks:
            h, state = block(h, state=state)
        return self.head(h) + 1e-3 * state["sum"]


class Cut(coalesce.Task):
    """A deep model on noise."""

    dtype: ClassVar[torch.dtype] = torch.float64

    def __init__(self, blocks: int = 2, dropout: float = 0.2, size: int = 6):
        self.blocks, self.dropout, self.size = blocks, dropout, size

    def data(self) -> coalesce.Data:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(33, 4, generator=generator, dtype=torch.float64).to(self.dtype)
        y = torch.randint(3, (33,), generator=generator)
        return coalesce.Data(train=(x, y), val=(x, y))

    def model(self) -> nn.Module:
        return Deep(self.blocks, self.size, self.dropout).to(self.dtype)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y), {"weight": model.get_parameter("head.weight").mean()}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": F.cross_entropy(model(x), y)}


class Layers(Cut):
    """Layers that draw nothing."""

    def model(self) -> nn.Module:
        deep = [layer for _ in range(self.blocks) for layer in (nn.Linear(4, 4), nn.Tanh())]
        return nn.Sequential(*deep, nn.Linear(4, 3)).to(self.dtype)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class Float32(Cut):
    dtype = torch.float32


def three(task: type[Cut] = Cut, optimizer: dict[str, Any] | None = None, **arguments: Any) -> list[Any]:
    given = optimizer or {"name": "sgd", "momentum": 0.5}
    return [
        experiment(task, {"dropout": 0.1 * i, **arguments}, {**given, "lr": 0.1 * i}, "cosine", steps=STEPS, seed=i)
        for i in (2, 1, 3)
    ]


def segments(lanes: Lanes) -> list[Segment]:
    ((tape, _),) = lanes._steps.values()
    return tape.segments


def every_module(lanes: Lanes) -> tuple[str, ...]:
    return matching(lanes.template.model, ["*"])


def test_an_operation_of_several_results_is_done_again_as_a_whole() -> None:
    """What follows from steps alone is computed again behind a cut; one half needs the operation that halves."""

    def function(step: Tensor, x: Tensor) -> list[Tensor]:
        left, right = (step[:, None] + torch.arange(400)).split(200, dim=1)
        x = x * left
        cut_here()
        return [x * right]

    inputs = [torch.tensor([3, 4]), torch.randn(2, 200)]
    tape = Tape(trace(function, inputs), inputs, compile=False, cheap=[0])
    # in front of them what is a number for each lane
    assert len(tape.segments) == 3
    assert all(isinstance(n.meta["val"], Tensor) for segment in tape.segments for n in segment.inputs)
    (found,) = tape(*inputs)
    assert torch.equal(found, function(*inputs)[0])


def test_what_each_update_needs_of_the_clock_is_computed_once() -> None:
    """Adam's bias corrections and scheduled rates: as many numbers for many parameters as for few."""

    def crossing(blocks: int) -> int:
        experiments = [experiment(Layers, {"blocks": blocks}, "adamw", "cosine", seed=seed) for seed in (1, 2)]
        lanes = lanes_of(experiments)
        lanes.prepare_step()
        front, *_ = segments(lanes)
        return len(front.outputs)

    assert crossing(6) == crossing(2)


def test_the_same_operation_with_other_numbers_is_another_one() -> None:
    def function(step: Tensor, x: Tensor) -> list[Tensor]:
        powers = [torch.pow(base, step.double()) for base in (0.9, 0.999, 0.9)]
        rows = [torch.sum(step[:, None] * torch.arange(3), 1, keepdim=kept) for kept in (True, False, True)]
        kinds = [step + torch.full((2,), 3, dtype=kind) for kind in (torch.int64, torch.float32, torch.int64)]
        return [*powers, *rows, *kinds, x * 2]

    inputs = [torch.tensor([3, 4]), torch.ones(2)]
    tape = Tape(trace(function, inputs), inputs, compile=False, cheap=[0])
    expected = function(*inputs)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tape(*inputs), expected, strict=True))


def test_what_is_written_in_between_is_not_computed_once() -> None:
    """The same words for other numbers."""

    def function(step: Tensor, x: Tensor) -> list[Tensor]:
        return [step + 1, x * 2, step + 1, step + 2]

    inputs = [torch.tensor([3, 4]), torch.ones(2)]
    module = trace(function, inputs)
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    first, _, second, _ = output.args[0]
    holder = next(iter(module.graph.nodes))
    last = write(module.graph, holder, first, first)
    # behind the write, as an update that reads it again
    last.append(second)
    tape = Tape(module, inputs, compile=False, cheap=[0])
    before, _, after, other = tape(*inputs)
    assert torch.equal(before, torch.tensor([4, 5]))
    assert torch.equal(after, torch.tensor([5, 6]))
    assert torch.equal(other, torch.tensor([6, 7]))


@pytest.mark.parametrize("optimizer", [None, {"name": "adam", "clip_norm": 0.5}], ids=["sgd", "clipped adam"])
def test_where_it_is_cut_changes_no_bit(optimizer: dict[str, Any] | None) -> None:
    experiments = three(optimizer=optimizer)
    whole = lanes_of(experiments, pieces=())
    for pieces in (("shared", "blocks.1.norm", "head"), every_module(whole)):
        lanes = lanes_of(experiments, pieces=pieces)
        for stack in (lanes, whole):
            for lane, one in enumerate(experiments):
                stack.fill(lane, one)
            stack.advance(STEPS)
        assert len(segments(lanes)) > 3
        assert lanes.evaluate("val") == whole.evaluate("val")
        for name, value in lanes.state.items():
            assert torch.equal(value, whole.state[name]), name
    # the last one was cut at every module
    for lane, one in enumerate(experiments):
        assert worst(lanes, lane, train_alone(one).model) <= 1e-12


@pytest.mark.slow
def test_compiled_lanes_equal_plain_loops_and_a_deeper_model_compiles_next_to_nothing() -> None:
    """Blocks that look alike share their segments, whatever number their dropout's draw has."""
    counts = []
    for blocks in (2, 4):
        before = compilations()
        experiments = three(blocks=blocks)
        lanes = lanes_of(experiments, compile=True)
        assert lanes.pieces == tuple(f"blocks.{i}" for i in range(blocks))
        lanes.advance(STEPS)
        counts.append(compilations() - before)
        assert len(segments(lanes)) == 2 * blocks + 4
        for lane, one in enumerate(experiments):
            assert worst(lanes, lane, train_alone(one).model) <= 1e-10
    # what stands in front, first and last on both ways, the loss, and one block on both ways
    assert counts[0] <= 10
    # the one in front, and the last one, which gathers the flags and the buffers of all
    assert counts[1] <= 3


def test_no_value_that_a_later_segment_needs_not_is_kept() -> None:
    """What crosses a cut of the backward pass are one gradient of the stream and what the forward pass left."""
    lanes = lanes_of(three(blocks=3), pieces=None)
    lanes.prepare_step()
    parts = segments(lanes)
    given = {n: i for i, segment in enumerate(parts) for n in segment.outputs}
    shapes = {tuple(t.shape) for name, t in lanes.state.items() if name.startswith("trained/") and t.dim() == 3}
    for i, segment in enumerate(parts):
        for node in segment.inputs:
            # no gradient of a weight crosses, and no mask
            if node in given:
                assert tuple(node.meta["val"].shape) not in shapes, (given[node], i, node)


def test_a_value_is_gone_once_no_later_segment_needs_it() -> None:
    def function(x: Tensor) -> list[Tensor]:
        a = x + 1
        cut_here()
        b = a * 2
        cut_here()
        return [b - 3]

    x = torch.ones(3)
    tape = Tape(trace(function, [x]), [x], compile=False)
    made: list[Any] = []
    alive = []

    def watched(run: Any) -> Any:
        def call(*inputs: Tensor) -> Any:
            alive.append([one() is not None for one in made])
            results = run(*inputs)
            made.extend(weakref.ref(one) for one in results)
            return results

        return call

    tape._calls = [(watched(run), *rest) for run, *rest in tape._calls]
    assert torch.equal(tape(x)[0], x)
    assert alive == [[], [True], [False, True]]


def test_a_mask_is_drawn_where_it_is_used() -> None:
    """Dropout's mask depends on keys, step and rate alone: it is computed on both ways rather than kept."""
    lanes = lanes_of(three(Float32, size=40), pieces=None)
    lanes.prepare_step()
    draws = [sum(n.target is torch.ops.aten.bitwise_xor.Tensor for n in s.module.graph.nodes) for s in segments(lanes)]
    forward, backward = draws[: len(draws) // 2], draws[len(draws) // 2 + 1 :]
    assert sum(count > 0 for count in forward[1:]) == 2
    assert sum(count > 0 for count in backward) == 2


def test_the_pieces_of_a_model() -> None:
    small = Deep(3, 6, 0.1)
    # blocks repeat: they compile once
    assert choose(small, 2) == ("blocks.0", "blocks.1", "blocks.2")
    # layers that repeat are too small to cut at
    mlp = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])
    assert choose(mlp, 64) == ()
    with torch.device("meta"):
        # of a large model no piece holds more than an eighth
        stack = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)])
        assert choose(stack, 1) == tuple(str(i) for i in range(12))
        large = Deep(3, 2048, 0.1)
    assert "blocks.1.up" in choose(large, 1)
    assert "blocks.1" not in choose(large, 1)
    assert choose(nn.Linear(3, 3), 64) == ()
    assert piece_of("blocks.1.up.weight", ("blocks.1", "blocks.1.up", "blocks.10")) == "blocks.1.up"
    assert piece_of("head.weight", ("blocks.1",)) == ""
    assert matching(small, ["blocks.*.norm"]) == ("blocks.0.norm", "blocks.1.norm", "blocks.2.norm")


def test_a_cut_survives_the_pass_that_takes_mutations_out() -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = x.clone()
        y.add_(1)
        cut_here()
        z = y * 2
        cut_here()
        cut_here()
        z.mul_(3)
        return [z + x]

    module = trace(function, [torch.ones(3)])
    numbers = [n.meta["segment"] for n in module.graph.nodes if n.op == "call_function"]
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 1, 2}
    # outside of a trace nothing happens
    cut_here()


class Forked(Cut):
    """Branches a lane's parts in ways that leave a boundary without a gradient or without an operation."""

    def model(self) -> nn.Module:
        class Net(nn.Module):
            def __init__(self, size: int):
                super().__init__()
                self.first, self.aside, self.none = nn.Linear(4, size), nn.Linear(4, size), nn.Identity()
                self.frozen = nn.Linear(size, size).requires_grad_(False)
                self.head = nn.Linear(size, 3)

            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    extra = self.aside(x)
                return self.head(self.none(self.frozen(self.none(self.first(x)))) + extra)

        return Net(self.size).to(self.dtype)


def test_boundaries_without_a_gradient() -> None:
    experiments = [experiment(Forked, {"dropout": 0.0}, {"name": "sgd", "lr": 0.1 * i}, seed=i) for i in (1, 2)]
    lanes = lanes_of(experiments, pieces=("first", "aside", "none", "frozen", "head"))
    lanes.advance(STEPS)
    for lane, one in enumerate(experiments):
        assert worst(lanes, lane, train_alone(one, STEPS).model) <= 1e-12


def test_numbers_of_lanes_are_computed_in_front_of_all_else() -> None:
    """But not what reads a number behind its being written, nor what follows from anything else."""

    def function(step: Tensor, x: Tensor) -> list[Tensor]:
        rate = 0.1 / (1 + step.double()).sqrt()
        half = torch.full((2,), 0.5, dtype=torch.float64)
        x = x * (rate * half)[:, None]
        cut_here()
        return [x.sum(1) * rate, step + 1, (step * 3).double(), x]

    inputs = [torch.tensor([3, 8]), torch.randn(2, 200, dtype=torch.float64)]
    expected = function(*inputs)
    module = trace(function, inputs)
    holder = next(n for n in module.graph.nodes if n.op == "placeholder")
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    after = output.args[0][1]
    write(module.graph, holder, after, after)
    module.recompile()

    tape = Tape(module, inputs, compile=False, cheap=[0])
    front, *others = tape.segments
    assert len(others) == 2
    assert {n.meta["val"].numel() for n in front.outputs} == {2}
    assert any(n.target is torch.ops.aten.sqrt.default for n in front.module.graph.nodes)
    assert not any(n.target is torch.ops.aten.sqrt.default for s in others for n in s.module.graph.nodes)
    loss, _, thrice, x = tape(*inputs)
    assert torch.equal(loss, expected[0])
    assert torch.equal(x, expected[3])
    assert inputs[0].tolist() == [4, 9]
    assert thrice.tolist() == [12.0, 27.0]
