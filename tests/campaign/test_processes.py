"""Runs that are killed, share a folder, meet limits or lose a rank end with the weights of an undisturbed run."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whatever_happens_to_a_run_it_resumes_to_the_same_weights() -> None:
    """In a process of its own: a run is a fork, and pytest's open files and captured streams would be part of it."""
    command = [sys.executable, "-m", "tests.campaign", "--seed", "2", "--processes", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
