"""Compares layouts with one process for the objective grpo, whose rollout's numbers follow tokens and stages."""

from typing import Any

import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.team import Team
from tests.distributed.training import label, parity

LAYOUTS: list[tuple[Layout, float, dict[str, Any]]] = [
    (Layout(tp=2, sequence_parallel=True), 0.5, {"loss_chunk_tokens": 128}),
    (Layout(tp=2, pp=2), 0.5, {"loss": "vocab-parallel"}),
    (Layout(cp=2, dp=2, zero=3), 0.5, {"loss_chunk_tokens": 96}),
    (Layout(ulysses=2, dp=2, zero=1), 0.5, {"loss": "fused"}),
    (Layout(pp=4, subsequences=4), 0.0, {}),
    # A rank's tokens are one row block of its tp group.
    (Layout(tp=2, sequence_parallel=True, cp=2), 1.0, {"loss": "fused", "loss_chunk_tokens": 64, "debug": True}),
]
"""Layouts with alpha and other decisions."""

NAMES = [label(layout) for layout, *_ in LAYOUTS]


@pytest.mark.parametrize(("layout", "alpha", "changes"), LAYOUTS[:1], ids=NAMES[:1])
def test_gradients_equal_those_of_one_process(
    team: Team, layout: Layout, alpha: float, changes: dict[str, Any]
) -> None:
    parity(team, "llama4", layout, alpha, objective="grpo", **changes)


@pytest.mark.parametrize(("layout", "alpha", "changes"), LAYOUTS[1:], ids=NAMES[1:])
@pytest.mark.slow
def test_gradients_equal_on_more_ranks(team: Team, layout: Layout, alpha: float, changes: dict[str, Any]) -> None:
    parity(team, "llama4", layout, alpha, objective="grpo", **changes)
