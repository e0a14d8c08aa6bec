"""Token order: ranks hold every token once, in the order of the row blocks that they exchange and gather."""

from __future__ import annotations

import pytest

from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.layout.attention_chunks import attention_chunks
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.token_order import Run, clipped, clipped_runs, row_blocks, token_runs
from memo_sim.program.lower import lower
from tests.sim.small_programs import GPT, decide


def tokens(decisions: Decisions, rank: int) -> list[int]:
    """Return the token of every row of a rank."""
    runs = token_runs(decisions, rank)
    assert [run.row for run in runs] == [sum(r.tokens for r in runs[:i]) for i in range(len(runs))]
    return [run.token + i for run in runs for i in range(run.tokens)]


LAYOUTS = [Layout(cp=2), Layout(cp=4), Layout(ulysses=2), Layout(ulysses=4, cp=2), Layout(tp=2, ulysses=2, cp=2, dp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"tp{x.tp}-cp{x.cp}-u{x.ulysses}-dp{x.dp}")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_ranks_hold_every_token_once(layout: Layout, batch: int, alpha: float) -> None:
    decisions = decide(GPT, layout, ("tokenwise", alpha), micro_batch=batch, global_batch=batch * layout.dp)
    copies = layout.tp * layout.dp
    held = [token for rank in range(layout.devices) for token in tokens(decisions, rank)]
    assert len(tokens(decisions, 0)) == decisions.local_tokens
    assert sorted(held) == sorted(list(range(batch * decisions.seq_tokens)) * copies)


def test_one_rank_has_its_sequences_in_order() -> None:
    assert token_runs(decide(GPT, seq_tokens=256, micro_batch=2)) == (Run(0, 0, 256), Run(256, 256, 256))


@pytest.mark.parametrize("chunk", [0, 512])
def test_several_sequences_in_parts_lie_part_by_part(chunk: int) -> None:
    layout, fields = (Layout(), {"attention_chunk_tokens": chunk}) if chunk else (Layout(subsequences=2), {})
    policy = ("full", 0.0)
    chosen = decide(GPT, layout, policy, seq_tokens=1024, micro_batch=2, global_batch=2, **fields)
    first = attention_chunks(chosen)[0][1] if chunk else partition(chosen)[0]
    each, last = first // 2, 1024 - first // 2
    wanted = (Run(0, 0, each), Run(each, 1024, each), Run(first, each, last), Run(first + last, 1024 + each, last))
    assert token_runs(chosen) == wanted


@pytest.mark.parametrize(("batch", "ulysses"), [(2, 2), (3, 2), (3, 4)])
def test_ranks_of_ulysses_share_chunks_of_several_sequences(batch: int, ulysses: int) -> None:
    """The ranks' rows of a chunk, one rank after the other, are the chunk's tokens of every sequence."""
    fields = {"attention_chunk_tokens": 512, "seq_tokens": 1536, "micro_batch": batch, "global_batch": batch}
    chosen = decide(GPT, Layout(ulysses=ulysses), ("full", 0.0), **fields)
    held = [tokens(chosen, rank) for rank in range(ulysses)]
    for number, (first, rows) in enumerate(attention_chunks(chosen)):
        found = [token for rank in held for token in rank[first : first + rows]]
        starts = [sequence * 1536 + number * 512 for sequence in range(batch)]
        assert found == [start + i for start in starts for i in range(512)]


def test_ranks_of_a_ring_divide_every_subsequence() -> None:
    chosen = decide(GPT, Layout(cp=2, subsequences=2, partition="length"), seq_tokens=1024)
    assert token_runs(chosen, 0) == (Run(0, 0, 128), Run(128, 384, 128), Run(256, 512, 128), Run(384, 896, 128))
    assert token_runs(chosen, 1) == (Run(0, 128, 128), Run(128, 256, 128), Run(256, 640, 128), Run(384, 768, 128))


def test_ranks_of_a_ring_divide_a_chunk_of_every_sequence() -> None:
    fields = {"attention_chunk_tokens": 512, "seq_tokens": 1024, "micro_batch": 2, "global_batch": 2}
    found = token_runs(decide(GPT, Layout(cp=2), ("full", 0.0), **fields))
    starts = (0, 384, 1024, 1408, 512, 896, 1536, 1920)
    assert found == tuple(Run(128 * number, start, 128) for number, start in enumerate(starts))


def test_the_zigzag_gives_every_rank_the_same_work() -> None:
    decisions = decide(GPT, Layout(cp=4), seq_tokens=64, global_batch=1)
    held = [tokens(decisions, rank) for rank in range(4)]
    assert held[1] == [*range(8, 16), *range(48, 56)]
    assert {sum(places) for places in held} == {sum(range(64)) // 4}


@pytest.mark.parametrize("cp", [1, 2])
def test_exchanged_row_blocks_are_the_context_shard_in_order(cp: int) -> None:
    """The rows of the Ulysses ranks, concatenated block by block, equal those of the cp rank without Ulysses."""
    layout = Layout(ulysses=2, cp=cp)
    decisions = decide(GPT, layout, ("tokenwise", 0.5), seq_tokens=1024, micro_batch=3, global_batch=3)
    blocks = row_blocks(decisions)
    assert len(blocks) == 2
    for rank in range(cp):
        held = [tokens(decisions, 2 * rank + i) for i in range(2)]
        met = [token for first, rows in blocks for mine in held for token in mine[first : first + rows]]
        alone = decide(GPT, Layout(cp=cp), seq_tokens=1024, micro_batch=3, global_batch=3)
        assert met == tokens(alone, rank)


def test_clipping() -> None:
    runs = (Run(0, 10, 4), Run(4, 40, 4))
    assert list(clipped(runs, 2, 4)) == [Run(2, 12, 2), Run(4, 40, 2)]
    assert list(clipped_runs([(0, 128), (128, 64)], 0, 192)) == [(0, 128), (128, 64)]
    assert list(clipped_runs([(0, 128), (128, 64)], 128, 64)) == [(128, 64)]


@pytest.mark.parametrize("policy", [("tokenwise", 0.0), ("tokenwise", 0.5), ("none", 0.5), ("full", 1.0)])
def test_row_blocks_are_those_of_the_program(policy: tuple[str, float]) -> None:
    decisions = decide(GPT, Layout(ulysses=2), policy)
    forward = next(t for t in lower(decisions)[0].templates if t.name == "layer.fwd")
    packs = [i.operands[0] for i in forward.instructions if "/qkv.pack" in i.name]
    assert row_blocks(decisions) == [(o.first, o.tokens) for o in packs]
