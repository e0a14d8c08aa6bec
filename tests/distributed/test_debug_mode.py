"""Debug mode finds no fault in sound programs of several ranks: every exchange, alone and with swapping."""

from typing import Any

import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.team import Team
from tests.distributed.training import parity

CHUNKS = {"recompute": "full", "swapped_tokens": 0, "attention_chunk_tokens": 256, "seq_tokens": 1024}
LAYOUTS: dict[str, tuple[str, Layout, float, dict[str, Any]]] = {
    "Ulysses": ("gpt", Layout(ulysses=2), 0.5, {}),
    "Ulysses, full swap": ("llama", Layout(ulysses=2), 1.0, {}),
    "Ulysses in a ring": ("gpt", Layout(ulysses=2, cp=2), 0.5, {"seq_tokens": 1024}),
    "ring": ("llama", Layout(cp=2), 0.5, {}),
    "gathered context": ("llama", Layout(cp=2, cp_exchange="all_gather"), 0.5, {}),
    "chunked attention under Ulysses": ("gpt", Layout(ulysses=2), 0.0, CHUNKS),
    "stages": ("gpt4", Layout(pp=2), 0.5, {"global_batch": 4}),
    "tensor parallelism in chunks": ("llama", Layout(tp=2, sequence_parallel=True, tp_overlap="chunked"), 0.5, {}),
    "tensor parallelism": ("llama", Layout(tp=2, sequence_parallel=True), 0.5, {}),
    "ZeRO-3": ("llama", Layout(dp=2, zero=3), 0.5, {}),
    "ZeRO-2 and Ulysses": ("llama", Layout(ulysses=2, dp=2, zero=2), 0.5, {}),
    "METP": ("llama", Layout(metp=2), 0.5, {"keep_norms": True}),
    "subsequences of stages": (
        "gpt4",
        Layout(pp=2, subsequences=2),
        0.0,
        {"recompute": "none", "swapped_tokens": 0, "subsequence_swapped_tokens": ()},
    ),
}
FAST = ("Ulysses", "ZeRO-3")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in LAYOUTS]
)
def test_no_false_alarm(team: Team, case: str) -> None:
    name, layout, alpha, changes = LAYOUTS[case]
    parity(team, name, layout, alpha, debug=True, **changes)
