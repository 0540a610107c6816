"""A process of its own for `test_channels_last`: convolutions that may have their channels last, one after the other.

Reads the seed and how many from its arguments; the last line that it prints is "all", if it lives to see it.
"""

from __future__ import annotations

import random
import sys

import torch

from coalesce.engine.rules.lowerings import LOWERINGS, Convolution


def convolution(number: random.Random) -> Convolution:
    """One that fits, among those often chosen whose channels fill no vector."""
    while True:
        channels = [(3, 16), (4, 8), (5, 24), (16, 5), (16, 32), (32, 48), (32, 9), (17, 9), (64, 64)]
        inputs, outputs = number.choice(channels)
        # above all those that are left out in part
        kernel = number.choice([*[(1, 1)] * 8, (2, 2), (3, 3), (3, 1), (5, 5), (7, 7)])
        dilation = number.choice([(1, 1), (1, 1), (2, 1), (2, 2)])
        reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        size = tuple(number.randint(r, 18) for r in reach)
        stride = number.choice([(1, 1), (2, 2), (2, 1), (3, 3)])
        padding = tuple(number.randint(0, k // 2) for k in kernel)
        shapes = (inputs, *size), (outputs, inputs, *kernel)
        dtype = number.choice(["float32", "float32", "bfloat16"])
        found = Convolution(*shapes, stride, padding, dilation, (0, 0), 1, False, dtype)
        if LOWERINGS["channels_last"].fits(found):
            return found


def main(seed: int, count: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    number = random.Random(seed)
    for _ in range(count):
        one, batch = convolution(number), number.randint(1, 9)
        print(one, "batch", batch, flush=True)
        shapes = (2, batch, *one.input), (2, *one.weight), (2, batch, *one.output)
        x, weight, gradient = (torch.randn(shape).to(getattr(torch, one.dtype)) for shape in shapes)
        found = []
        for last in (False, True):
            images = [t.movedim(2, -1).contiguous() if last else t for t in (gradient, x)]
            y = torch.ops.coalesce.convolutions(images[1], weight, *one.arguments, last)
            both = torch.ops.coalesce.convolutions_gradients(*images, weight, *one.arguments, last, [True, True])
            y, to_x = (t.movedim(-1, 2) if last else t for t in (y, both[0]))
            found.append((y, to_x, both[1]))
        for mine, right in zip(found[1], found[0], strict=True):
            digits = 2**-4 if one.dtype == "bfloat16" else 1e-5
            torch.testing.assert_close(mine, right, rtol=0, atol=digits * float(right.abs().max()))
    print("all")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
