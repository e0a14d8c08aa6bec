"""Compares FP8 on tensor-parallel ranks with one process, over gloo: gathered rows have a scale of each rank."""

from __future__ import annotations

from typing import Any

import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.parity import one_process, play, whole_gradients
from tests.distributed.team import Member, Team
from tests.distributed.training import training
from tests.exec_cpu.small import llama

IN_FP8: dict[str, Any] = {"dtype": "bf16", "fp8": "tensor", "fp8_layouts": "tn", "recompute": "none"}
NEAR = 0.25
"""Relative difference of a gradient: other scales round otherwise, as in ``test_gradients_in_fp8.py``."""


@pytest.mark.parametrize(
    "policy",
    [
        {"seq_tokens": 256, "swapped_tokens": 0},
        pytest.param({"recompute": "tokenwise", "swapped_tokens": 256}, marks=pytest.mark.slow),
    ],
    ids=["kept", "tokenwise"],
)
def test_gathered_rows_are_multiplied_with_the_scale_of_each_rank(team: Team, policy: dict[str, Any]) -> None:
    decisions = training(llama(layers=1), Layout(tp=2, sequence_parallel=True), **(IN_FP8 | policy), global_batch=1)
    ranks = team.play(play, 2, decisions, 1, {})
    alone = play(Member(0, 1), one_process(decisions), 1, {})
    assert ranks[0].losses == ranks[1].losses
    assert ranks[0].losses[0] == pytest.approx(alone.losses[0], rel=1e-2)
    found, wanted = whole_gradients(ranks), whole_gradients([alone])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert float((found[name] - value).norm() / value.norm()) <= NEAR, name
