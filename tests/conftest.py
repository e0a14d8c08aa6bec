"""What every test may rely on: the same random numbers, one thread for each library, and signals that are heard."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys

import numpy as np
import pytest
from hypothesis import settings

from memo_sim.contract.cycles import look_seldom

# Before torch or numpy starts its threads, and for the processes that tests start: what tests play is small, and
# threads that spin for one another make them slow beside other work.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# The same examples in every run, and no limit on their time: a loaded machine is no failure.
settings.register_profile("same-every-time", derandomize=True, deadline=None)
settings.load_profile("same-every-time")


def pytest_collection_finish() -> None:
    """Leave what collection made to no later garbage collection: modules and thousands of tests, 0.3 s each time."""
    gc.collect()
    gc.freeze()
    look_seldom()


@pytest.fixture(autouse=True, scope="session")
def interrupts() -> None:
    """Let the processes that tests start be interrupted: where a shell runs pytest in the background, they inherit
    that SIGINT is ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed the generators that a test may draw from without a seed of its own."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
