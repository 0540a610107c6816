"""Which experiments next. Nothing here needs torch or pandas."""

from coalesce.search.base import Listed, Search
from coalesce.search.grid import Grid
from coalesce.search.halving import Asha, Halving
from coalesce.search.metric import Metric
from coalesce.search.population import Population
from coalesce.search.space import Interval, Space
from coalesce.search.stopping import Stopping

__all__ = ["Asha", "Grid", "Halving", "Interval", "Listed", "Metric", "Population", "Search", "Space", "Stopping"]
