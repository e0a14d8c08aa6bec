"""A process that looks for cycles seldom still finds them while it runs, and leaves the last ones at its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

CYCLE = """
import gc
{begin}

class Node:
    def __init__(self):
        self.me = self

    def __del__(self):
        print("found")

Node()
{end}
"""


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [
        ("", "", "found\n"),
        ("from memo_sim.contract.cycles import look_seldom; look_seldom(); look_seldom()", "", ""),
        ("from memo_sim.contract.cycles import look_seldom; look_seldom()", "gc.collect()", "found\n"),
    ],
)
def test_cycles_are_looked_for_while_the_process_runs(begin: str, end: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CYCLE.format(begin=begin, end=end)], capture_output=True, text=True, check=True
    )
    assert done.stdout == said
