"""Numbers of 32 bits: a program that has more of something than they can number is refused, and never wraps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.program.analysis import columns
from memo_sim.program.analysis.columns import Columns, FoldedColumns, check_numbered, expand, fold
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower
from tests.sim.toy_machine import decide


@pytest.mark.parametrize("form", [fold, expand])
@pytest.mark.parametrize(("number", "micro_batches"), [(np.int8, 8), (np.int16, 512)])
def test_programs_that_cannot_be_numbered_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    form: Callable[[Program], Columns | FoldedColumns],
    number: type[np.signedinteger],
    micro_batches: int,
) -> None:
    (program,) = lower(decide(("full", 0.0), layers=2, global_batch=micro_batches))
    assert program.instruction_count > np.iinfo(number).max
    monkeypatch.setattr(columns, "NUMBER", number)
    with pytest.raises(Infeasible, match="the plan's program has too many instructions"):
        form(program)


def test_operands_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = lower(decide(("full", 0.0), layers=2, global_batch=220))
    known = expand(program)
    assert len(known.lane) < np.iinfo(np.int16).max < len(known.operand_buffer)
    monkeypatch.setattr(columns, "NUMBER", np.int16)
    with pytest.raises(Infeasible, match="the plan's program has too many operands"):
        expand(program)


def test_the_largest_number_is_allowed() -> None:
    check_numbered((1 << 31) - 1, "instructions")
    with pytest.raises(
        Infeasible, match=r"too many instructions\n(.*\n)*  got: 2,147,483,648\n  wanted: at most 2,147"
    ):
        check_numbered(1 << 31, "instructions")
