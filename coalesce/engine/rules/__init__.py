"""What replaces some of torch's functions inside a lane: draws keyed by the lane, and floats that ride."""

from coalesce.engine.rules import (
    activations,
    arithmetic,
    attention,
    checkpoint,
    convolution,
    cross_entropy,
    ctc,
    draws,
    dropout,
    embedding,
    factories,
    functions,
    leaves,
    losses,
    normalisation,
    pooling,
    recurrent,
)
from coalesce.engine.rules.lines import user_line
from coalesce.engine.rules.mode import RULES, Rules

__all__ = [
    "RULES",
    "Rules",
    "activations",
    "arithmetic",
    "attention",
    "checkpoint",
    "convolution",
    "cross_entropy",
    "ctc",
    "draws",
    "dropout",
    "embedding",
    "factories",
    "functions",
    "leaves",
    "losses",
    "normalisation",
    "pooling",
    "recurrent",
    "user_line",
]
