"""What there is to say of `trainer.matmul_precision` before a run begins."""

from __future__ import annotations

import logging

from coalesce import kernels
from coalesce.runner.plan import Trainer

logger = logging.getLogger(__name__)


def tell(trainer: Trainer) -> None:
    """Warn where the setting gains nothing, and where it overrules what the process has.

    Args:
        trainer: with ``device`` resolved.
    """
    name, before = trainer.matmul_precision, kernels.precision()
    if before not in (name, kernels.EXACT):
        logger.warning(
            "This process has torch's precision of float32 products at %s; while the run trains it is "
            "trainer.matmul_precision=%s, and afterwards as before",
            before or "values of single backends",
            name,
        )
    if name != kernels.EXACT and not kernels.less_exact(name, trainer.device):
        logger.warning(
            "trainer.matmul_precision=%s gains nothing here: on this %s products of float32 are as exact as at "
            "%s. It takes a GPU with TF32 (compute capability 8.0 or more), or a processor with instructions for "
            "bfloat16 that torch's oneDNN uses for this setting",
            name,
            "GPU" if trainer.device.startswith("cuda") else "processor",
            kernels.EXACT,
        )
