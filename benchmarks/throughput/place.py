"""Where all sides compute, and how exactly they multiply."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """A device and torch's switches.

    Args:
        device: "cpu" or "cuda".
        matmul: as `torch.set_float32_matmul_precision` takes it: "highest", "high" (on CUDA TF32). None: as torch has
            it by itself.
    """

    device: str = "cpu"
    matmul: str | None = None

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def settle(self) -> None:
        """Set torch's switches for this process, before it computes anything.

        On CUDA convolutions follow the precision of products: torch by itself allows them TF32, and losses of two sides
        would then agree to three digits.
        """
        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
        if self.on_cuda:
            torch.backends.cudnn.allow_tf32 = self.matmul not in (None, "highest")

    def synchronize(self) -> None:
        """Wait until the device has done what it was asked for."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def clock(self) -> float:
        """Seconds that this process has worked: of its processors; on CUDA of the clock, when the device is done."""
        if not self.on_cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def turn(self, step: Callable[[], None], steps: int) -> tuple[Callable[[], None], int]:
        """What is to be called between two looks at the clock, and how many steps that are.

        On the CPU one step. On CUDA, where the host runs ahead, so many that waiting for the device costs nothing.
        """
        if not self.on_cuda:
            return step, 1

        def several() -> None:
            for _ in range(steps):
                step()
            torch.cuda.synchronize()

        return several, steps
