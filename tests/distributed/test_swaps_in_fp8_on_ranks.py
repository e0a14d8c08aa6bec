"""Compares rows that tensor-parallel ranks swap in FP8 with those that they swap as they are, over gloo."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.parity import play, whole_gradients
from tests.distributed.team import Team
from tests.distributed.training import training
from tests.exec_cpu.small import llama

NEAR = 0.0625
"""What a value of E4M3 is off by at most."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, sequence_parallel=True), Layout(cp=2), Layout(ulysses=2), Layout(pp=2)],
    ids=["tp", "cp", "ulysses", "pp"],
)
def test_gradients_differ_by_less_than_a_value_of_the_format(team: Team, layout: Layout) -> None:
    fields: dict[str, Any] = {"seq_tokens": 512, "recompute": "tokenwise", "swapped_tokens": 256, "global_batch": 2}
    decisions = training(llama(layers=6), layout, **fields)
    rounded = msgspec.structs.replace(decisions, swap_dtype="fp8")
    kept, found = (team.play(play, 2, each, 1, {}) for each in (decisions, rounded))
    assert [rank.losses for rank in found] == [rank.losses for rank in kept]
    wanted, gradients = whole_gradients(kept), whole_gradients(found)
    errors = {name: float((gradients[name] - value).norm() / value.norm()) for name, value in wanted.items()}
    assert 0 < max(errors.values()) <= NEAR, errors
