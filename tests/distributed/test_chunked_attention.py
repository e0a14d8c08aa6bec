"""Compares chunked attention under Ulysses, tensor parallelism, a ring and pipeline stages with one process."""

from typing import Any

import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.team import Team
from tests.distributed.training import label, parity

LAYOUTS = [
    Layout(ulysses=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(ulysses=2, pp=2),
    Layout(ulysses=2, dp=2, zero=3),
    Layout(tp=2, sequence_parallel=True, ulysses=2),
    Layout(cp=2),
    Layout(cp=4),
    Layout(cp=2, pp=2),
    Layout(cp=2, ulysses=2, zero=3),
    Layout(tp=2, sequence_parallel=True, cp=2),
]
RINGS = [each for each in LAYOUTS if each.cp > 1]
QUICK = [*LAYOUTS[:2], RINGS[0]]


def chunks(layout: Layout) -> dict[str, Any]:
    """Return the options of chunked attention: three chunks, or two longer ones for more ranks; the last is shorter."""
    chunk, tokens = (512, 896) if layout.tp * layout.ulysses * layout.cp > 2 else (256, 640)
    return {"recompute": "full", "attention_chunk_tokens": chunk, "seq_tokens": tokens}


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in LAYOUTS], ids=label
)
@pytest.mark.parametrize("name", [pytest.param("gpt4", marks=pytest.mark.slow), "llama4"])
def test_a_layout_has_the_gradients_and_losses_of_one_process(team: Team, layout: Layout, name: str) -> None:
    name = "llama-mha" if name == "llama4" and layout.tp * layout.ulysses > 2 else name
    played = parity(team, name, layout, swapped_tokens=0, **chunks(layout))
    assert all(rank.moved.d2h > 0 for rank in played)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=() if each in (LAYOUTS[0], RINGS[0]) else pytest.mark.slow) for each in LAYOUTS],
    ids=label,
)
def test_several_sequences_a_micro_batch(team: Team, layout: Layout) -> None:
    """Ranks of Ulysses hold different sequences of a chunk's rows; the exchange brings each one together."""
    batch = {"micro_batch": 2, "global_batch": 4 * layout.dp}
    parity(team, "llama-mha", layout, swapped_tokens=0, **chunks(layout), **batch)


def test_beside_all_else_that_full_recompute_has(team: Team) -> None:
    """Together with inputs on the host, the MLP in row blocks and norms of heads."""
    more = {"swapped_tokens": 320, "mlp_chunk_tokens": 128}
    parity(team, "llama-normed", Layout(ulysses=2), **chunks(Layout(ulysses=2)), **more)
