"""Measures how long commands take (best of five); run with ``pytest -m benchmark -s tests/benchmarks``."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.benchmark, pytest.mark.slow]  # slow, because parallel tests would disturb the times


def best_s(*command: str) -> float:
    """Return the shortest of five runs of a whole process, in seconds."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return min(times)


@pytest.mark.parametrize("package", ["memo_sim", "memo_exec"])
def test_help_in_bare_interpreters(package: str) -> None:
    bare = best_s(sys.executable, "-c", "pass")
    shown = best_s(sys.executable, "-m", package, "--help")
    print(f"\n{package} --help: {shown * 1e3:.0f} ms, {shown / bare:.1f} bare interpreters")


def test_what_if_for_gpt_7b_on_eight_gpus() -> None:
    taken = best_s(sys.executable, "-m", "memo_sim", "what-if", "gpt-7b", "--cluster", "a800-1x8", "--seq-len", "1m")
    print(f"\nwhat-if gpt-7b on a800-1x8 at 1m: {taken:.2f} s")
