"""Compares layouts whose tensor-parallel ranks share key/value heads with one process: gradients and losses."""

from typing import Any

import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.team import Team
from tests.distributed.training import parity

SP = {"sequence_parallel": True}
CHUNKS = {"recompute": "full", "swapped_tokens": 0, "attention_chunk_tokens": 512}
CASES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "two heads on four ranks": ("llama", Layout(tp=4, **SP), {}),
    "one head on four ranks": ("llama-one-kv4", Layout(tp=4), {}),
    "zero 3": ("llama-one-kv4", Layout(tp=2, dp=2, zero=3, **SP), {}),
    "ulysses": ("llama-one-kv4", Layout(tp=2, ulysses=2, **SP), {}),
    "ring": ("llama-one-kv4", Layout(tp=2, cp=2, **SP), {}),
    "ring self-attention": ("llama-one-kv4", Layout(tp=2, cp=2, cp_exchange="rsa"), {"recompute": "full"}),
    "deferred weight gradients": ("llama-one-kv4", Layout(tp=2, pp=2, schedule="zero-bubble", **SP), {}),
    "subsequences": ("llama-one-kv4", Layout(tp=2, pp=2, subsequences=2, **SP), {"swapped_tokens": 0}),
    "chunks": ("llama-one-kv4", Layout(tp=2, ulysses=2), CHUNKS),
}


QUICK = ("two heads on four ranks", "zero 3", "ring")
"""The default run plays these; the slow run plays all."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, c in CASES.items()]
)
def test_ranks_share_key_value_heads(team: Team, case: tuple[str, Layout, dict[str, Any]]) -> None:
    name, layout, changes = case
    policy = {"memory_policy": "caching"} if layout.cp_exchange == "rsa" else {}
    alpha = 0.0 if layout.cp_exchange == "rsa" else 0.5
    parity(team, name, layout, alpha, seq_tokens=1024, global_batch=2 * layout.dp, **policy, **changes)
