"""Per-lane update rules and schedules. One more is one small file, one row here and one row in the tests."""

from coalesce.optim.adam import Adam, AdamW
from coalesce.optim.base import Hyper, Optimizer, Schedule
from coalesce.optim.schedules import Constant, Cosine
from coalesce.optim.sgd import SGD

OPTIMIZERS: dict[str, type[Optimizer]] = {rule.name: rule for rule in (SGD, Adam, AdamW)}
SCHEDULES: dict[str, type[Schedule]] = {rule.name: rule for rule in (Constant, Cosine)}

__all__ = ["OPTIMIZERS", "SCHEDULES", "SGD", "Adam", "AdamW", "Constant", "Cosine", "Hyper", "Optimizer", "Schedule"]
