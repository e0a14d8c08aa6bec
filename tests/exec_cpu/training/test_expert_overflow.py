"""Counts of rows beyond the capacity: of whole layers, and of row blocks, of which the last may be shorter."""

from __future__ import annotations

from typing import Any

import pytest

from memo_exec.training.expert_overflow import Overflow
from memo_sim.contract.plan import Layout
from tests.exec_cpu.small import EXPERT_MODELS, decide


def counted(*ranks: list[int], **fields: Any) -> Overflow:
    """Return what the ranks' counts say: dropped rows, all rows, and the most for a rank by length of a row block."""
    sizes: dict[str, Any] = {"seq_tokens": 512, "micro_batch": 1, "global_batch": 2, "expert_capacity": 1.0}
    found = Overflow.of(ranks, decide(EXPERT_MODELS["mixtral"], layout=Layout(dp=2, ep=2), **(sizes | fields)))
    assert found is not None
    return found


def test_rows_of_a_layer_are_named() -> None:
    """512 tokens have 1,024 rows, 512 for each of two ranks on the average."""
    found = counted([10, 4096, 600], [0, 4096, 500])
    assert (found.dropped, found.rows, found.most, found.capacity, found.mean) == (10, 8192, 600, 512, 512.0)
    assert "a rank had at most 600 rows of a layer for another, of the 512 that have a place" in found.line()


@pytest.mark.parametrize(
    ("most", "tokens", "capacity", "enough"), [([500, 130], 384, 384, 1.31), ([400, 200], 128, 128, 1.57)]
)
def test_the_length_of_row_blocks_that_needs_the_largest_capacity_is_named(
    most: list[int], tokens: int, capacity: int, enough: float
) -> None:
    """Blocks of 384 and 128 tokens have 768 and 256 rows, half of them for each rank on the average."""
    found = counted([10, 4096, *most], [0, 4096, 0, 0], recompute="rowwise", mlp_chunk_tokens=384)
    assert (found.capacity, found.mean, found.enough) == (capacity, float(tokens), enough)
    assert f"rows of a layer's row block of {tokens} tokens for another, of the {capacity:,} that" in found.line()
    assert f"a plan with --expert-capacity {enough:g}" in str(found.refusal(1, ""))


def test_a_rank_with_all_experts_counts_nothing() -> None:
    assert Overflow.of([[], []], decide(EXPERT_MODELS["mixtral"])) is None
