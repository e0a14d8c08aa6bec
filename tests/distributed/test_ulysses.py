"""Compares Ulysses, alone and with other axes, with one process: gradients and losses for several alphas."""

from typing import Any

import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.team import Team
from tests.distributed.training import label, parity


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_two_ranks(team: Team, name: str, alpha: float) -> None:
    parity(team, name, Layout(ulysses=2), alpha)


@pytest.mark.slow
def test_four_ranks_and_sequences_that_cross_them(team: Team) -> None:
    parity(team, "gpt", Layout(ulysses=4), 0.5, micro_batch=3, global_batch=3, seq_tokens=1024)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(ulysses=4), {}),
        pytest.param(
            Layout(ulysses=4),
            {"recompute": "full", "swapped_tokens": 0, "attention_chunk_tokens": 512},
            marks=pytest.mark.slow,
        ),
        (Layout(tp=2, ulysses=2), {}),
    ],
    ids=["tokenwise", "chunks", "tp"],
)
def test_ranks_have_copies_of_key_value_heads(team: Team, layout: Layout, changes: dict[str, Any]) -> None:
    parity(team, "llama-normed", layout, 0.5, seq_tokens=2048, **changes)


UNEVEN = [
    ("gpt-uneven", Layout(ulysses=2, uneven_heads=True), {}),
    ("llama-uneven", Layout(ulysses=2, uneven_heads=True), {}),
    ("llama-uneven", Layout(ulysses=2, uneven_heads=True, cp=2), {}),
    (
        "llama-uneven",
        Layout(ulysses=2, uneven_heads=True, dp=2, zero=3),
        {"recompute": "full", "swapped_tokens": 0, "attention_chunk_tokens": 512},
    ),
]


@pytest.mark.parametrize(("name", "layout", "changes"), UNEVEN, ids=["gpt", "llama", "cp", "chunks"])
def test_ranks_have_uneven_heads(team: Team, name: str, layout: Layout, changes: dict[str, Any]) -> None:
    parity(team, name, layout, 0.5, seq_tokens=1024, **changes)


COMBINED = [
    Layout(ulysses=2, dp=2),
    Layout(ulysses=2, cp=2),
    Layout(ulysses=2, cp=2, cp_exchange="all_gather"),
    Layout(tp=2, cp=2),
    Layout(tp=2, sequence_parallel=True, cp=2),
    Layout(tp=2, sequence_parallel=True, cp=2, cp_exchange="all_gather"),
    Layout(cp=2, dp=2, zero=1),
    Layout(cp=2, dp=2, zero=3),
]


@pytest.mark.parametrize("zero", [2, 3])
def test_gathers_and_reductions_beside_the_all_to_alls(team: Team, zero: int) -> None:
    parity(team, "llama", Layout(ulysses=2, dp=2, zero=zero), 0.5)


@pytest.mark.parametrize("layout", [COMBINED[1], COMBINED[4]], ids=label)
def test_with_context_and_tensor_parallelism(team: Team, layout: Layout) -> None:
    parity(team, "llama" if layout.tp > 1 else "gpt", layout, 0.5, seq_tokens=1024)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("layout", COMBINED, ids=label)
@pytest.mark.slow
def test_every_combination(team: Team, layout: Layout, name: str, alpha: float) -> None:
    parity(team, name, layout, alpha, seq_tokens=1024, steps=5)
