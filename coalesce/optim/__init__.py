"""Per-lane update rules and schedules. One more is one small file, one row here and one row in the tests."""

from coalesce.optim.adadelta import Adadelta
from coalesce.optim.adafactor import Adafactor
from coalesce.optim.adagrad import Adagrad
from coalesce.optim.adam import Adam, AdamW
from coalesce.optim.adamax import Adamax
from coalesce.optim.base import Hyper, Optimizer, Schedule
from coalesce.optim.lion import Lion
from coalesce.optim.muon import Muon
from coalesce.optim.nadam import NAdam
from coalesce.optim.radam import RAdam
from coalesce.optim.rmsprop import RMSprop
from coalesce.optim.schedules import Constant, Cosine
from coalesce.optim.sgd import SGD

_OPTIMIZERS = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta, Adafactor, Lion, Muon)

OPTIMIZERS: dict[str, type[Optimizer]] = {rule.name: rule for rule in _OPTIMIZERS}
SCHEDULES: dict[str, type[Schedule]] = {rule.name: rule for rule in (Constant, Cosine)}

__all__ = ["OPTIMIZERS", "SCHEDULES", "Hyper", "Optimizer", "Schedule"]
