"""Which experiments next."""

from coalesce.search.grid import Grid

__all__ = ["Grid"]
