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
from coalesce.optim.schedules.constant import Constant
from coalesce.optim.schedules.cosine import Cosine
from coalesce.optim.schedules.exponential import Exponential
from coalesce.optim.schedules.linear import Linear
from coalesce.optim.schedules.multi_step import MultiStep
from coalesce.optim.schedules.one_cycle import OneCycle
from coalesce.optim.schedules.plateau import Plateau
from coalesce.optim.schedules.polynomial import Polynomial
from coalesce.optim.schedules.restarts import CosineRestarts
from coalesce.optim.schedules.step import Step
from coalesce.optim.schedules.wsd import WarmupStableDecay
from coalesce.optim.sgd import SGD

_OPTIMIZERS = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta, Adafactor, Lion, Muon)
_SCHEDULES = (
    *(Constant, Linear, Polynomial, Exponential, Step, MultiStep, Cosine, CosineRestarts),
    *(OneCycle, WarmupStableDecay, Plateau),
)

OPTIMIZERS: dict[str, type[Optimizer]] = {rule.name: rule for rule in _OPTIMIZERS}
SCHEDULES: dict[str, type[Schedule]] = {rule.name: rule for rule in _SCHEDULES}

__all__ = ["OPTIMIZERS", "SCHEDULES", "Hyper", "Optimizer", "Schedule"]
