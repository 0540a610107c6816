"""The edge: plain dictionaries in, experiments out, all problems collected.

Nothing here imports Hydra or OmegaConf; `coalesce.configuration.hydra`, which does, is imported by the command line
alone.
"""

from coalesce.configuration.resolve import rides
from coalesce.configuration.search import check_search
from coalesce.configuration.sweep import DuplicateExperimentWarning, make_experiments, make_search
from coalesce.configuration.trainer import check_trainer

__all__ = [
    "DuplicateExperimentWarning",
    "check_search",
    "check_trainer",
    "make_experiments",
    "make_search",
    "rides",
]
