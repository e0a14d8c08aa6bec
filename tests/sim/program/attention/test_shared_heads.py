"""Tensor-parallel ranks that share a key/value head: checkers, exchanged bytes, weights, refused degrees."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Layout
from memo_sim.program.ir.work import Attention, Collective, Gemm
from memo_sim.program.layout.heads import Share, are_even, shares
from memo_sim.program.layout.parameters import layer_block
from memo_sim.program.lower import lower
from tests.refusals import refused
from tests.sim.small_programs import LLAMA, POLICIES, decide, faults_of

SP = {"sequence_parallel": True}
LAYOUTS = [
    Layout(tp=8, **SP),
    Layout(tp=8),
    Layout(tp=8, cp=2, zero=1, **SP),
    Layout(tp=8, dp=2, zero=3, **SP),
    Layout(tp=8, pp=2, schedule="zero-bubble", **SP),
    Layout(tp=8, pp=2, subsequences=4, multiplexed=True, **SP),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_program_passes_the_independent_checkers(layout: Layout) -> None:
    whole = [policy for policy in POLICIES if policy[1] in (0.0, 1.0)]
    for policy in whole if layout.subsequences > 1 else POLICIES:
        batch = 1 if layout.multiplexed else 2 * layout.dp
        assert faults_of(decide(LLAMA, layout, policy, seq_tokens=8192, global_batch=batch)) == []


def test_chunks_pass_the_independent_checkers() -> None:
    layout = Layout(tp=8, ulysses=1, **SP)
    assert faults_of(decide(LLAMA, layout, ("full", 0.0), seq_tokens=8192, attention_chunk_tokens=2048)) == []


def test_packed_q_k_v_are_gathered_and_their_gradients_scattered() -> None:
    tokens, layers, micro_batches = 4096, LLAMA.layers, 2
    packed = tokens * (LLAMA.q_width + 2 * LLAMA.kv_width) * 2
    walked = list(lower(decide(LLAMA, Layout(tp=8, **SP), seq_tokens=tokens))[0].walk())
    found = [
        (name.rpartition("/")[2], i.work.kind, i.work.bytes)
        for name, i in walked
        if isinstance(i.work, Collective) and i.op.startswith("heads.")
    ]
    assert sorted(set(found)) == [("d_qkv.scatter", "reduce_scatter", packed), ("qkv.gather", "all_gather", packed)]
    assert len(found) == 2 * layers * micro_batches
    attention = {(i.work.heads, i.work.kv_heads) for _, i in walked if isinstance(i.work, Attention)}
    assert attention == {(1, 1)}


def test_no_weights_and_no_products_are_copied() -> None:
    def flops(layout: Layout) -> float:
        return sum(i.work.flops for _, i in lower(decide(LLAMA, layout))[0].walk() if isinstance(i.work, Gemm))

    eight, four = (
        layer_block(LLAMA, 8, LLAMA.layer(0)).find("qkv.weight"),
        layer_block(LLAMA, 4, LLAMA.layer(0)).find("qkv.weight"),
    )
    assert eight is not None
    assert four is not None
    assert 2 * eight.elements == four.elements
    assert 2 * flops(Layout(tp=8)) == pytest.approx(flops(Layout(tp=4)), rel=0.02)  # the vocabulary is rounded up


@pytest.mark.parametrize(
    ("heads", "kv_heads", "layout", "where"),
    [
        (12, 4, Layout(tp=6), "kv_heads"),
        (16, 4, Layout(tp=6), "heads"),
        (8, 4, Layout(tp=16), "heads"),
    ],
)
def test_degrees_that_share_no_head_evenly_are_refused(heads: int, kv_heads: int, layout: Layout, where: str) -> None:
    model = msgspec.structs.replace(LLAMA, heads=heads, kv_heads=kv_heads, ffn_hidden=960)
    with refused(Infeasible, where=where):
        lower(decide(model, layout))


def test_shares_of_ulysses() -> None:
    assert shares(8, 2, 4) == (Share(0, 2, 0, 1), Share(2, 2, 0, 1), Share(4, 2, 1, 1), Share(6, 2, 1, 1))
    assert shares(7, 7, 4) == (Share(0, 2, 0, 2), Share(2, 2, 2, 2), Share(4, 2, 4, 2), Share(6, 1, 6, 1))
    assert shares(8, 4, 2) == (Share(0, 4, 0, 2), Share(4, 4, 2, 2))
    assert (are_even(8, 2, 4), are_even(8, 2, 8), are_even(7, 7, 4), are_even(12, 4, 6)) == (True, True, False, False)
