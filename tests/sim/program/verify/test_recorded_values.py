"""Values of recorded programs: every lowering that the tests had when they were recorded is accepted."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.plan import Plan
from memo_sim.program.analysis.columns import expand
from memo_sim.program.lower import lower
from memo_sim.program.verify.values import check_values
from tests.replay.test_recorded_programs import recorded

MOST_LAYERS = 8
"""Longer programs repeat their layers."""


@pytest.mark.parametrize("every", [1500, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_recorded_programs_are_accepted(every: int) -> None:
    entries = [e for e in recorded(every) if e["decisions"]["model"]["layers"] <= MOST_LAYERS]
    faulty = []
    for entry in entries:
        document = {"schema": "memo.plan/1", "decisions": entry["decisions"]}
        decisions = codec.decode(msgspec.json.encode(document), Plan, where="recorded").decisions
        for program in lower(decisions, micro_batches=entry.get("micro_batches"), cp_rank=entry.get("cp_rank")):
            faults = check_values(program, expand(program), decisions)
            if faults:
                faulty.append((entry["decisions"], faults[:3]))
    assert len(entries) > 2
    assert faulty == []
