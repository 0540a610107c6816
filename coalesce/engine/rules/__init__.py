"""What replaces some of torch's functions inside a lane: draws keyed by the lane, and floats that ride."""

from coalesce.engine.rules import attention, cross_entropy, dropout
from coalesce.engine.rules.mode import RULES, Rules, user_line

__all__ = ["RULES", "Rules", "attention", "cross_entropy", "dropout", "user_line"]
