"""Row-wise recompute with attention in chunks: attention runs forward once, and no tensor inside of it is whole."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.work import Attention, Copy, Gemm
from memo_sim.program.lower import lower
from tests.refusals import refused
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

CHUNK = 512


def chunked(model: Model = GPT, layout: Layout | None = None, *, block: int = 0, **more: Any) -> Decisions:
    """Return a plan with chunks of 512 tokens; ``block``: the rows of a row block, unless given those of a chunk."""
    where = layout or Layout()
    fields: dict[str, Any] = {"alpha": 0.0, "attention_chunk_tokens": CHUNK} | more
    rows = block or CHUNK // where.cp // where.ulysses
    return decide(model, layout, ("rowwise", fields.pop("alpha")), mlp_chunk_tokens=rows, **fields)


@pytest.mark.parametrize(
    ("layout", "model", "seq_tokens", "alpha"),
    [
        (Layout(), GPT, 1664, 1.0),
        (Layout(tp=2, sequence_parallel=True, ulysses=2), LLAMA, 1664, 1.0),
        (Layout(cp=2, ulysses=2, zero=1), GPT, 2048, 0.5),
        (Layout(tp=2, cp=2), LLAMA, 1664, 0.0),
        (Layout(pp=2), LLAMA, 2048, 0.5),
    ],
    ids=["one", "tp-sp-ulysses", "cp-ulysses-zero", "tp-cp", "pp"],
)
def test_every_program_passes_the_independent_checkers(
    layout: Layout, model: Model, seq_tokens: int, alpha: float
) -> None:
    assert faults_of(chunked(model, layout, seq_tokens=seq_tokens, alpha=alpha)) == []


def test_a_chunk_may_have_several_row_blocks() -> None:
    assert faults_of(chunked(LLAMA, block=128, seq_tokens=1664, alpha=1.0)) == []


def work(decisions: Decisions) -> dict[str, float]:
    """Return FLOPs by phase: of products, and of attention over the pairs of query and key that are not masked."""
    total: dict[str, float] = defaultdict(float)
    for name, i in lower(decisions)[0].walk():
        phase, last = name.split("/")[-2:]
        if isinstance(i.work, Gemm | Attention):
            what = "attention" if isinstance(i.work, Attention) else last.split(".b")[0].split(".c")[0]
            total[f"{phase}/{what}"] += i.work.flops
    return dict(total)


@pytest.mark.parametrize("block", [0, 128])
def test_the_work_is_that_of_row_wise_recompute_with_whole_attention(block: int) -> None:
    whole = work(chunked(attention_chunk_tokens=0))
    assert work(chunked(block=block)) == pytest.approx(whole)
    assert "rec/attention" not in whole


def test_bytes_that_are_copied_to_the_host_and_back() -> None:
    """Four chunks: no output and no log-sum-exp moves; the gradient of the output does, and queries, keys and values.

    Forward stores keys of three chunks. Backward stores all once, and fetches queries once for each pair of chunks.
    """
    found: Counter[tuple[str, str]] = Counter()
    for name, i in lower(chunked(global_batch=1))[0].walk():
        phase, last = name.split("/")[-2:]
        if isinstance(i.work, Copy):
            found[phase, last.split(".c")[0]] += i.work.bytes
    pairs, unit = 10, CHUNK * 2 * GPT.q_width
    assert {key: size // GPT.layers for key, size in found.items()} == {
        ("fwd", "kv.store"): 3 * 2 * unit,
        ("fwd", "kv.fetch"): 6 * 2 * unit,
        ("rec", "kv.store"): 4 * 2 * unit,
        ("rec", "q.store"): 4 * unit,
        ("bwd", "kv.fetch"): 4 * 2 * unit,
        ("bwd", "q.fetch"): pairs * unit,
        ("bwd", "d_attn.store"): 4 * unit,
        ("bwd", "d_attn.fetch"): pairs * unit,
        # In fp32. The first chunk of keys fetches none, and complete gradients are not stored.
        ("bwd", "d_q.store"): 6 * 2 * unit,
        ("bwd", "d_q.fetch"): 6 * 2 * unit,
    }


def test_chunks_need_less_memory() -> None:
    """Of a layer's backward 24 KiB a row of Llama 3 8B are left out of 56: Q, K, V and the gradients of attention."""

    def peaks(chunk: int) -> int:
        sizes: dict[str, Any] = {"seq_tokens": 16384, "global_batch": 1, "states": "host", "alpha": 1.0}
        program = lower(chunked(LLAMA, block=512, attention_chunk_tokens=chunk, **sizes))[0]
        return peak(live_bytes(liveness(program, expand(program)), device=True)).bytes

    tokens, whole = 16384, peaks(0)
    assert whole - peaks(1024) > 2 * tokens * (LLAMA.q_width + 2 * LLAMA.kv_width)


@pytest.mark.parametrize(
    ("layout", "block"), [(Layout(), 384), (Layout(ulysses=2), 128), (Layout(tp=2, sequence_parallel=True), 256)]
)
def test_row_blocks_that_do_not_divide_chunks_are_refused(layout: Layout, block: int) -> None:
    with refused(Infeasible, where="decisions.mlp_chunk_tokens", hint=("--mlp-chunk", "--attention-chunk")):
        lower(chunked(GPT, layout, block=block))
