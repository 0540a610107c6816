"""What holds for every test: seeded streams, hypothesis without a database, torch's and logging's settings put back."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

SEED = 0

# A shell that starts something in the background has it ignore Ctrl-C, and so has every process that it starts. Tests
# send it, to this process and to others.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that test side by side share the cores: more threads than cores wait for each other.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))

# derandomized: what fails here fails everywhere; no deadline: the cores are shared
hypothesis.settings.register_profile("coalesce", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("coalesce")


def pytest_report_header() -> str:
    return f"seed {SEED} before every test; {torch.get_num_threads()} threads of torch {torch.__version__}"


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same streams and leaves torch's settings as they were."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    handlers, level = list(logging.root.handlers), logging.root.level
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    # `--info` lets Hydra log to the stream of that moment, which a test's end closes
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
