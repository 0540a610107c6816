"""Hyperparameters that several rules share."""

from coalesce.optim.base import Hyper

CLIP_NORM = Hyper(None, low=0.0, open_low=True, optional=True, text="clip each lane's global gradient norm to this")


def learning_rate(default: float) -> Hyper:
    return Hyper(default, low=0.0, text="learning rate, before the schedule's factor")


def weight_decay(default: float, text: str) -> Hyper:
    return Hyper(default, low=0.0, text=text)
