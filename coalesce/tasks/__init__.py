"""Ready tasks on real data that needs no download: examples to run, and to copy."""

from coalesce.tasks.charlm import CharLM
from coalesce.tasks.digits import Digits
from coalesce.tasks.mnist1d import Mnist1dCNN, Mnist1dGRU, Mnist1dMLP
from coalesce.tasks.resnet import ResNet

__all__ = ["CharLM", "Digits", "Mnist1dCNN", "Mnist1dGRU", "Mnist1dMLP", "ResNet"]
