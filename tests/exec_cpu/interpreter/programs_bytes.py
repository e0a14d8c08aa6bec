"""Compares the memory and the copies of a played step with those of its program."""

from __future__ import annotations

from memo_exec.interpreter.record import StepRecord
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.work import Copy
from memo_sim.program.lower import lower


def assert_peak_is_the_programs(record: StepRecord, decisions: Decisions) -> None:
    """Assert that the device's peak in a step of one rank is that of the program's live buffers."""
    program = lower(decisions)[0]
    assert record.peak_device_bytes == peak(live_bytes(liveness(program, expand(program)), device=True)).bytes


def assert_copies_are_the_programs(record: StepRecord, decisions: Decisions) -> None:
    """Assert that a step of one rank moves the program's bytes in both directions, and that there are some."""
    copies = [i.work for _, i in lower(decisions)[0].walk() if isinstance(i.work, Copy)]
    for direction in ("d2h", "h2d"):
        assert getattr(record.moved, direction) == sum(c.bytes for c in copies if c.direction == direction) > 0
