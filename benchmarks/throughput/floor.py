"""The floor: the matrix products of a step of all lanes alone, each at the best rate that this machine reaches on it.

Which products a step has is read off one eager step of the model: every product and convolution that autograd's
forward and backward pass call. Attention counts as its six products. Each is then timed in several ways, on stacked
operands in each memory order, and the fastest way is the one that counts; convolutions also as the product that they
are once their patches lie as columns, without what laying them out costs. On CUDA a way is timed as a graph of several
calls, so that launching its kernels does not count.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.throughput import recorded, worker
from benchmarks.throughput.place import Place
from benchmarks.throughput.plain import stock
from benchmarks.throughput.workloads import Workload, build

aten = torch.ops.aten
Call = recorded.Call

#: A product: ("product", matrices, rows, inner, columns). A convolution: ("convolution", input shape, weight shape,
#: stride, padding, which gradients of input and weight are asked for), forward and backward together.
Shape = tuple[Any, ...]

#: How often each way is timed.
TRIES = 5

#: A way that takes so many times as long as the fastest one at its first try has no other.
HOPELESS = 10

#: Calls in one CUDA graph.
CALLS = 10

#: On CUDA more matrices or images than this are not computed by a launch for each of them: it is hopeless, and takes
#: long to record.
LAUNCHES = 64


class Record(TorchDispatchMode):
    """Collects the products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Shape] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket
        if name in (aten.mm, aten.bmm, aten.addmm):
            a, b = args[-2:] if name is not aten.addmm else args[1:3]
            count = a.shape[0] if a.dim() == 3 else 1
            self.found["product", count, a.shape[-2], a.shape[-1], b.shape[-1]] += 1
        elif name is aten.convolution:
            # counted with its backward pass, which knows what is asked of it
            pass
        elif name is aten.convolution_backward:
            _, x, w, _, stride, padding, _, _, _, groups, mask = args
            if groups != 1:
                raise NotImplementedError("the floor knows no grouped convolutions")
            self.found[
                "convolution", tuple(x.shape), tuple(w.shape), tuple(stride), tuple(padding), tuple(mask[:2])
            ] += 1
        elif name is aten._scaled_dot_product_flash_attention_for_cpu:
            self._attention(args[0], args[1])
        elif name is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self._attention(args[1], args[2])
            self._attention(args[1], args[2])
        elif "convolution" in str(name) or "scaled_dot_product" in str(name):
            raise NotImplementedError(f"the floor does not know {name}")
        return func(*args, **(kwargs or {}))

    def _attention(self, q: Tensor, k: Tensor) -> None:
        """Two products: (T, D) by (D, T) and (T, T) by (T, D). The backward pass has four of such sizes."""
        count, (time_q, depth), time_k = q.shape[0] * q.shape[1], q.shape[-2:], k.shape[-2]
        self.found["product", count, time_q, depth, time_k] += 1
        self.found["product", count, time_q, time_k, depth] += 1


def shapes(workload: Workload) -> Counter[Shape]:
    """The products of one step of one experiment, and how often each occurs."""
    experiments, _ = workload.experiments()
    task, model = build(experiments[0])
    batch = task.data().batch("train", torch.arange(workload.batch_size))
    with Record() as record:
        loss: Any = task.loss(model, batch)
        loss.backward()
    return record.found


def flops(shape: Shape) -> int:
    """Multiplications and additions."""
    if shape[0] == "product":
        _, count, rows, inner, columns = shape
        return int(2 * count * rows * inner * columns)
    _, x, w, stride, padding, mask = shape
    pixels = x[0] * _pixels(x, w, stride, padding)
    return int(2 * pixels * w[0] * w[1] * w[2] * w[3] * (1 + sum(mask)))


def _pixels(x: Any, w: Any, stride: Any, padding: Any) -> int:
    sides = [(x[2 + i] + 2 * padding[i] - w[2 + i]) // stride[i] + 1 for i in range(2)]
    return int(sides[0] * sides[1])


def ways(shape: Shape, lanes: int, like: Tensor | None = None) -> Iterator[tuple[str, Call]]:
    """Each way to compute one kind of product for all lanes.

    Args:
        shape: which.
        lanes: K.
        like: a tensor of the operands' device and dtype; by default float32 on the CPU.
    """
    like = torch.empty(0) if like is None else like
    if shape[0] == "product":
        _, count, *sizes = shape
        yield from _products(like, count * lanes, *sizes)
    else:
        yield from _convolutions(like, lanes, *shape[1:])


def _normal(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=like.dtype, device=like.device)


def _one_by_one(like: Tensor, count: int) -> bool:
    """Whether a call for each is worth a try."""
    return like.device.type == "cpu" or count <= LAUNCHES


def _has_mkldnn(like: Tensor) -> bool:
    """Whether oneDNN's linear layer takes such operands here."""
    there = like.device.type == "cpu" and torch.backends.mkldnn.is_available()
    return there and (like.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _products(like: Tensor, count: int, rows: int, inner: int, columns: int) -> Iterator[tuple[str, Call]]:
    out = like.new_empty(count, rows, columns)
    for order in ("NN", "NT", "TN", "TT"):
        a = _normal(like, count, rows, inner) if order[0] == "N" else _normal(like, count, inner, rows).mT
        b = _normal(like, count, inner, columns) if order[1] == "N" else _normal(like, count, columns, inner).mT
        yield f"bmm {order}", partial(torch.bmm, a, b, out=out)
        if _one_by_one(like, count):
            yield f"mm {order}", partial(_each, a, b, out)
        if order == "NT" and _has_mkldnn(like):
            yield "mkldnn", partial(_each_mkldnn, a, b.mT)


def _each(a: Tensor, b: Tensor, out: Tensor) -> None:
    for one in zip(a, b, out, strict=True):
        torch.mm(one[0], one[1], out=one[2])


def _each_mkldnn(a: Tensor, b: Tensor) -> None:
    for one, weight in zip(a, b, strict=True):
        torch.ops.mkldnn._linear_pointwise(one, weight, None, "none", [], "")


def _convolutions(
    like: Tensor, lanes: int, x: Any, w: Any, stride: Any, padding: Any, mask: Any
) -> Iterator[tuple[str, Call]]:
    for last in (False, True):
        form = torch.channels_last if last else torch.contiguous_format
        if _one_by_one(like, lanes):
            inputs = [_normal(like, *x).contiguous(memory_format=form) for _ in range(lanes)]
            weights = [_normal(like, *w).contiguous(memory_format=form) for _ in range(lanes)]
            each = [_convolution(i, k, stride, padding, mask, 1) for i, k in zip(inputs, weights, strict=True)]
            yield f"single{' channels last' * last}", partial(_all, each)
        whole = _normal(like, x[0], lanes * x[1], *x[2:]).contiguous(memory_format=form)
        kernel = _normal(like, lanes * w[0], *w[1:]).contiguous(memory_format=form)
        yield f"grouped{' channels last' * last}", _convolution(whole, kernel, stride, padding, mask, lanes)
    patch, pixels = w[1] * w[2] * w[3], x[0] * _pixels(x, w, stride, padding)
    sizes = [(w[0], patch, pixels)] + [(patch, w[0], pixels)] * mask[0] + [(w[0], pixels, patch)] * mask[1]
    yield "columns", partial(_all, [fastest(_products(like, lanes, *size), like.device.type)[1] for size in sizes])


def _convolution(x: Tensor, w: Tensor, stride: Any, padding: Any, mask: Any, groups: int) -> Call:
    ones = [1, 1]
    grad = aten.convolution(x, w, None, stride, padding, ones, False, [0, 0], groups)

    def call() -> None:
        aten.convolution(x, w, None, stride, padding, ones, False, [0, 0], groups)
        whole = [*mask, False]
        aten.convolution_backward(grad, x, w, None, stride, padding, ones, False, [0, 0], groups, whole)

    return call


def _all(calls: list[Call]) -> None:
    for call in calls:
        call()


def fastest(candidates: Iterator[tuple[str, Call]], device: str = "cpu") -> tuple[str, Call, float]:
    """The fastest of some ways, by its best time in seconds."""
    best: tuple[str, Call, float] | None = None
    for name, call in candidates:
        run, calls = several(call, device)
        run()
        times: list[float] = []
        while len(times) < TRIES and not (best and times and times[0] > HOPELESS * best[2]):
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) / calls)
        if best is None or min(times) < best[2]:
            best = name, call, min(times)
    assert best is not None
    return best


def several(call: Call, device: str) -> tuple[Call, int]:
    """What is to be called to see how long a call takes, and how many of it that are."""
    if device == "cpu":
        return call, 1
    recorded.warm(call)
    replay = recorded.record(call, CALLS)

    def run() -> None:
        replay()
        torch.cuda.synchronize()

    return run, CALLS


class Floor:
    """The process of this side.

    Args:
        workload: what is trained.
        place: where.
        threads: of torch.
    """

    def __init__(self, workload: dict[str, Any], place: dict[str, Any], threads: int):
        torch.set_num_threads(threads)
        self.place = Place(**place)
        self.place.settle()
        self.workload = Workload(**workload)

    def prepare(self) -> dict[str, Any]:
        """Choose the ways; what was chosen, and the rates."""
        # each recording collects garbage: not what has been there before
        gc.freeze()
        device, dtype = self.place.device, getattr(torch, self.workload.precision)
        like = torch.empty(0, dtype=dtype, device=device)
        rows, calls = [], []
        found = shapes(self.workload)
        with torch.no_grad():
            for shape, times in found.items():
                name, call, seconds = fastest(ways(shape, self.workload.lanes, like), device)
                calls += [call] * times
                rate = flops(shape) * self.workload.lanes / seconds / 1e9
                rows.append({"shape": shape, "times": times, "way": name, "gflops_per_s": round(rate, 1)})
            self.run, steps = several(partial(_all, calls), device)
        self.steps = steps * self.workload.lanes
        total = sum(flops(shape) * times for shape, times in found.items())
        return {"flops": total, "products": rows}

    @torch.no_grad()
    def work(self, start: float, end: float) -> dict[str, float]:
        return worker.work(self.run, self.steps, start, end)


if __name__ == "__main__":
    channel = worker.Channel()
    stock()
    channel.serve(Floor(**json.loads(sys.argv[1])))
