"""Compares row-wise recompute under each parallelism with one process that keeps everything."""

from __future__ import annotations

from typing import Any

import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.team import Team
from tests.distributed.training import label, parity

LAYOUTS = [
    Layout(tp=2, sequence_parallel=True),
    Layout(ulysses=2),
    Layout(cp=2),
    Layout(tp=2),
    Layout(cp=2, cp_exchange="all_gather"),
    Layout(pp=2),
    Layout(dp=2, zero=3),
    Layout(tp=2, sequence_parallel=True, tp_overlap="chunked"),
    Layout(tp=2, sequence_parallel=True, ulysses=2),
    Layout(cp=2, ulysses=2),
]
QUICK = LAYOUTS[:3]


def blocks(layout: Layout, swapped: float) -> dict[str, Any]:
    """Return two row blocks on each rank, the second a third of the first; ``swapped``: alpha."""
    granule = 128 * (layout.tp if layout.sequence_parallel else 1)
    local = 4 * granule
    tokens = {"seq_tokens": local * layout.cp * layout.ulysses, "mlp_chunk_tokens": 3 * granule}
    return {"recompute": "rowwise", "swapped_tokens": int(swapped * 4) * granule, **tokens}


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in LAYOUTS], ids=label
)
@pytest.mark.parametrize("name", [pytest.param("gpt4", marks=pytest.mark.slow), "llama4"])
def test_a_layout_has_the_gradients_and_losses_of_one_process(team: Team, layout: Layout, name: str) -> None:
    name = "llama-mha" if layout.tp * layout.ulysses * layout.cp > 2 else name
    played = parity(team, name, layout, **blocks(layout, 0.4))
    assert any(rank.moved.d2h > 0 for rank in played)  # a last stage of two layers swaps none


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, subsequences=2),
        Layout(tp=2, sequence_parallel=True, subsequences=2),
        Layout(ulysses=2, subsequences=2),
        Layout(cp=2, subsequences=2),
    ],
    ids=label,
)
def test_subsequences_have_row_blocks_of_their_own(team: Team, layout: Layout, window: int) -> None:
    rows = 512 * layout.tp
    cut: dict[str, Any] = {
        "seq_tokens": rows * layout.ulysses * layout.cp,
        "mlp_chunk_tokens": rows // 4,
        "swapped_tokens": rows,
        "offload_window": window,
    }
    parity(team, "llama4", layout, recompute="rowwise", **cut)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(ulysses=2), Layout(tp=2, sequence_parallel=True)], ids=label)
def test_norms_of_heads_are_rebuilt_too(team: Team, layout: Layout) -> None:
    parity(team, "llama-normed", layout, **blocks(layout, 1.0))


CHUNKED = [
    Layout(ulysses=2),
    Layout(cp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2, cp=2),
    Layout(cp=2, ulysses=2, zero=3),
    Layout(tp=2, sequence_parallel=True, ulysses=2),
    Layout(pp=2),
]


@pytest.mark.parametrize(
    "layout", [CHUNKED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in CHUNKED[1:])], ids=label
)
def test_attention_in_chunks_beside_it(team: Team, layout: Layout) -> None:
    """Three chunks of one row block each, or two longer ones for more ranks; the last one is shorter."""
    ranks = layout.tp * layout.ulysses * layout.cp
    chunk, tokens = (512, 896) if ranks > 2 else (256, 640)
    cut = {"attention_chunk_tokens": chunk, "mlp_chunk_tokens": chunk // layout.ulysses // layout.cp}
    name = "llama-mha" if ranks > 2 else "llama4"
    local = tokens // layout.ulysses // layout.cp
    parity(team, name, layout, recompute="rowwise", seq_tokens=tokens, swapped_tokens=local, **cut)
