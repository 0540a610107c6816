"""The tables that sum up a run: made of its parts when it is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coalesce.store.files import write_csv, write_parquet
from coalesce.store.paths import RunPaths
from coalesce.store.read import assemble_history, assemble_results


def write_tables(paths: RunPaths, plan: Mapping[str, Any]) -> int:
    """Sum up a run.

    Args:
        paths: the run folder.
        plan: as `open_run` gives it.

    Returns:
        How many experiments have ended.

    Raises:
        OSError: the disk is full, or the folder is gone.
    """
    results = assemble_results(paths, plan)
    write_parquet(paths.history, assemble_history(paths, plan))
    write_csv(paths.results_csv, results)
    # last: it stands for all of them
    write_parquet(paths.results, results)
    return len(results)


def remove_tables(paths: RunPaths) -> None:
    """What was summed up is out of date: `load` assembles the parts meanwhile."""
    for table in (paths.results, paths.results_csv, paths.history):
        table.unlink(missing_ok=True)
