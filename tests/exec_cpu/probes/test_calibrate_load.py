"""Calibration detects a busy machine by its load or by the spread of repeats."""

from dataclasses import replace

from memo_exec.machine.machine import this_machine
from memo_exec.probes.load import Load, disturbances
from memo_exec.probes.timing import Sample


def test_load_and_spread_are_each_reported() -> None:
    machine = replace(this_machine(), compute_threads=3)
    quiet, noisy = [Sample(1.0, s) for s in (0.0, 0.04, 0.9)], [Sample(1.0, s) for s in (0.0, 0.3, 0.4)]
    idle, busy, large = Load(0.2, 4), Load(1.2, 4), Load(12.0, 64)
    assert disturbances(idle, machine, quiet) == disturbances(large, machine, quiet) == []
    (load,) = disturbances(busy, machine, quiet)
    assert load.startswith("the load was 1.2 on 4 cores")
    (spread,) = disturbances(idle, machine, noisy)
    assert "median spread of repeats is 30 %" in spread
