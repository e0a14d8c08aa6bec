"""Chunked attention under full recompute: the same products and bytes, buffers for one chunk, and refused options."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Attention, Copy, Exchange, Gemm
from memo_sim.program.layout.attention_chunks import attention_chunks
from memo_sim.program.layout.token_order import token_runs
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import check_stages
from tests.refusals import refused
from tests.sim.small_programs import GPT, LLAMA, decide

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True, ulysses=2),
    Layout(ulysses=2, dp=2, zero=3),
    Layout(cp=2),
    Layout(cp=2, ulysses=2, zero=1),
]
MODELS = pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])


def chunks(
    model: Model = GPT, layout: Layout | None = None, *, chunk: int = 512, alpha: float = 0.0, **more: Any
) -> Decisions:
    return decide(model, layout, ("full", alpha), attention_chunk_tokens=chunk, **more)


@MODELS
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("seq_tokens", "alpha", "mlp"), [(2048, 1.0, 0), (1664, 0.0, 512)])
def test_every_program_passes_the_independent_checkers(
    model: Model, layout: Layout, seq_tokens: int, alpha: float, mlp: int
) -> None:
    programs = lower(chunks(model, layout, seq_tokens=seq_tokens, alpha=alpha, mlp_chunk_tokens=mlp))
    columns = expand(programs[0])
    assert check_program(programs[0], columns) == []
    assert check_edges(columns, derive_edges(columns)) == []
    assert check_stages(programs) == []


def work(decisions: Decisions) -> dict[str, float]:
    """Return FLOPs by phase: of products, and of attention over the pairs of query and key that are not masked."""
    total: Counter[str] = Counter()
    for name, i in lower(decisions)[0].walk():
        phase = name.split("/")[-2]
        if isinstance(i.work, Gemm):
            total[f"{phase}/{name.split('/')[-1].split('.c')[0]}"] += i.work.flops
        elif isinstance(i.work, Attention):
            total[f"{phase}/attention"] += i.work.flops
    return dict(total)


@MODELS
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seq_tokens", [2048, 1664])
def test_the_work_is_that_of_whole_attention(model: Model, layout: Layout, seq_tokens: int) -> None:
    whole = work(decide(model, layout, ("full", 0.0), seq_tokens=seq_tokens))
    assert work(chunks(model, layout, seq_tokens=seq_tokens)) == pytest.approx(whole)


def test_every_query_attends_to_every_earlier_key_once() -> None:
    """Forward and recompute go by chunks of queries, backward by chunks of keys.

    Backward takes a chunk's own queries last, so that the gradients of its queries and keys are then complete.
    """
    by_phase: dict[str, list[tuple[int, int]]] = {"fwd": [], "rec": [], "bwd": []}
    for name, i in lower(chunks(seq_tokens=1536))[0].walk():
        if isinstance(i.work, Attention) and name.startswith("m0/s0/l0/"):
            c, _, k = name.split(".c")[1].partition(".k")
            by_phase[name.split("/")[-2]].append((int(c), int(k or c)))
    assert by_phase["fwd"] == by_phase["rec"] == [(0, 0), (1, 1), (1, 0), (2, 2), (2, 0), (2, 1)]
    assert by_phase["bwd"] == [(1, 0), (2, 0), (0, 0), (2, 1), (1, 1), (2, 2)]


def copied(decisions: Decisions, layers: int) -> Counter[tuple[str, str]]:
    """Return the bytes that a layer copies of each tensor, by phase and direction."""
    found: Counter[tuple[str, str]] = Counter()
    for name, i in lower(decisions)[0].walk():
        parts = name.split("/")
        if isinstance(i.work, Copy) and parts[-2] in ("fwd", "rec", "bwd"):
            found[parts[-2], parts[-1].split(".c")[0]] += i.work.bytes
    return Counter({key: size // layers for key, size in found.items()})


@pytest.mark.parametrize("ulysses", [1, 2])
def test_bytes_that_are_copied_to_the_host_and_back(ulysses: int) -> None:
    """Four chunks: forward stores the keys of three, for later chunks.

    Recompute stores all chunks. Backward goes by chunks of keys and fetches the queries that attend to each of them.
    """
    decisions = chunks(GPT, Layout(ulysses=ulysses), global_batch=1)
    chunk, pairs, unit = 512, 10, 2 * GPT.q_width // ulysses
    lse = 4 * GPT.heads // ulysses
    wanted = {
        ("fwd", "kv.store"): 3 * chunk * 2 * unit,
        ("fwd", "kv.fetch"): 6 * chunk * 2 * unit,
        ("rec", "kv.store"): 4 * chunk * 2 * unit,
        ("rec", "kv.fetch"): 6 * chunk * 2 * unit,
        ("rec", "q.store"): 4 * chunk * unit,
        ("rec", "lse.store"): 4 * chunk * lse,
        ("bwd", "kv.fetch"): 4 * chunk * 2 * unit,
        ("bwd", "q.fetch"): pairs * chunk * unit,
        ("bwd", "lse.fetch"): pairs * chunk * lse,
        ("bwd", "d_attn.store"): 4 * chunk * unit,
        ("bwd", "d_attn.fetch"): pairs * chunk * unit,
        # In fp32. The first chunk of keys fetches none, and complete gradients are not stored.
        ("bwd", "d_q.store"): 6 * chunk * 2 * unit,
        ("bwd", "d_q.fetch"): 6 * chunk * 2 * unit,
    }
    if ulysses > 1:  # otherwise the output is already in its sequence-sharded form on the device
        wanted |= {("rec", "attn.store"): 4 * chunk * unit, ("bwd", "attn.fetch"): pairs * chunk * unit}
    assert copied(decisions, GPT.layers) == wanted


def hops(decisions: Decisions, layers: int) -> dict[tuple[str, str], float]:
    """Return the bytes that a rank sends round the ring for one layer: keys, and gradients of keys, by phase."""
    found: Counter[tuple[str, str]] = Counter()
    for name, i in lower(decisions)[0].walk():
        if isinstance(i.work, Exchange):
            phase, last = name.split("/")[-2:]
            found[phase, last.split(".")[0]] += i.work.bytes
    return {key: size / layers for key, size in found.items()}


def test_bytes_that_go_round_the_ring() -> None:
    """Four chunks, ten pairs of them: the keys of each pass three hops, and so do the sums of their gradients.

    Without chunks the keys of all tokens pass once, 2.5 times less.
    """
    decisions = chunks(GPT, Layout(cp=4), global_batch=1)
    size = 512 // 4 * 2 * GPT.kv_width * 2
    passed = 10 * 3 * size
    named = [("fwd", "kv"), ("rec", "kv"), ("bwd", "kv"), ("bwd", "d_kv")]
    assert hops(decisions, GPT.layers) == dict.fromkeys(named, passed)
    assert hops(chunks(GPT, Layout(cp=4), chunk=2048, global_batch=1), GPT.layers)["fwd", "kv"] == passed / 2.5


def test_a_ring_copies_its_share_of_every_chunk_to_the_host_and_back() -> None:
    alone, ring = (copied(chunks(GPT, Layout(cp=cp), global_batch=1), GPT.layers) for cp in (1, 4))
    assert {key: 4 * size for key, size in ring.items()} == alone


def test_each_rank_of_a_ring_has_two_parts_of_every_chunk() -> None:
    decisions = chunks(GPT, Layout(cp=2), seq_tokens=1152)
    assert attention_chunks(decisions) == [(0, 256), (256, 256), (512, 64)]
    starts = [[run.token for run in token_runs(decisions, rank)] for rank in (0, 1)]
    assert starts == [[0, 384, 512, 896, 1024, 1120], [128, 256, 640, 768, 1056, 1088]]
    assert [run.row for run in token_runs(decisions, 1)] == [0, 128, 256, 384, 512, 544]


def peak_bytes(decisions: Decisions) -> int:
    program = lower(decisions)[0]
    return peak(live_bytes(liveness(program, expand(program)), device=True)).bytes


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[4]], ids=str)
def test_the_peak_falls_with_the_chunk(layout: Layout) -> None:
    more: dict[str, Any] = {"seq_tokens": 8192, "global_batch": 1, "states": "host", "mlp_chunk_tokens": 512}
    whole = peak_bytes(decide(LLAMA, layout, ("full", 1.0), **more))
    cut = [peak_bytes(chunks(LLAMA, layout, chunk=chunk, alpha=1.0, **more)) for chunk in (2048, 1024, 512)]
    assert whole > cut[0] > cut[1] >= cut[2]


@MODELS
def test_on_the_device_there_is_room_for_a_few_chunks_of_queries_keys_and_values(model: Model) -> None:
    program = lower(chunks(model, chunk=512, alpha=1.0))[0]
    (backward,) = (t for t in program.templates if t.name == "layer.bwd")
    inside = ("q", "kv", "qkv", "attn.part", "d_q", "d_kv", "d_qkv", "d_attn", "lse", "norm1", "qk_raw", "host")
    mine = [f for f in backward.own if f.name.startswith(inside)]
    assert {f.name: f.tokens for f in mine if f.tokens > 512} == {}
    assert {f.space for f in mine if f.name.startswith("host")} == {"host"}
    assert {i.lane for i in backward.instructions if i.op in ("h2d", "d2h")} == {Lane.H2D, Lane.D2H}


@MODELS
def test_tensor_parallel_ranks_gather_and_sum_one_chunk_at_a_time(model: Model) -> None:
    """The gathered gradient of the embedding is an exception: one call adds all of its rows."""
    layout = Layout(tp=2, sequence_parallel=True)
    program = lower(chunks(model, layout, chunk=512, mlp_chunk_tokens=512, loss_chunk_tokens=256))[0]
    gathered = {
        f"{t.name}/{t.slots[o.slot]}": next((f.tokens for f in t.own if f.name == t.slots[o.slot]), 0)
        for t in program.templates
        if t.name.startswith(("layer", "head"))
        for i in t.instructions
        if i.op in ("all_gather", "reduce_scatter")
        for o in i.operands
        if o.role == "full"
    }
    assert len(gathered) > 8
    assert set(gathered.values()) == {512}


def test_each_rank_of_ulysses_holds_its_share_of_every_chunk() -> None:
    decisions = chunks(GPT, Layout(ulysses=2), seq_tokens=1664)
    assert attention_chunks(decisions) == [(0, 256), (256, 256), (512, 256), (768, 64)]
    for rank in (0, 1):
        starts = [(run.row, run.token, run.tokens) for run in token_runs(decisions, rank)]
        assert starts == [(256 * c, 512 * c + 256 * rank, 256) for c in range(3)] + [(768, 1536 + 64 * rank, 64)]


def test_a_chunk_that_holds_all_is_whole_attention() -> None:
    whole = lower(decide(GPT, policy=("full", 0.0)))[0]
    assert lower(chunks(chunk=2048))[0].sha256 == whole.sha256
    assert lower(chunks(chunk=1024))[0].sha256 != whole.sha256
    ring = decide(GPT, Layout(cp=2), ("full", 0.0))
    assert lower(chunks(GPT, Layout(cp=2), chunk=4096))[0].sha256 == lower(ring)[0].sha256


CHUNK = "decisions.attention_chunk_tokens"


@pytest.mark.parametrize(
    ("change", "where", "got", "wanted"),
    [
        ({"recompute": "none"}, "decisions.recompute", "none", "full"),
        ({"recompute": "tokenwise"}, "decisions.recompute", "tokenwise", "full"),
        ({"layout": Layout(cp=2, cp_exchange="all_gather")}, "layout.cp_exchange", "all_gather", "ring"),
        ({"layout": Layout(cp=2), "memory_policy": "eager"}, "decisions.memory_policy", "eager", "planned"),
        (
            {"layout": Layout(cp_exchange="rsa"), "kernels": Kernels(attention="torch-flash")},
            *("layout.cp_exchange", "rsa", "ring"),
        ),
        ({"layout": Layout(pp=2, subsequences=2)}, "layout.subsequences", "2", "1"),
        ({"layout": Layout(pp=2, schedule="zero-bubble")}, "layout.schedule", "zero-bubble", "1f1b, gpipe"),
        ({"kernels": Kernels(attention="plain")}, "decisions.kernels.attention", "plain", "flash"),
        ({"attention_chunk_tokens": 200}, CHUNK, "200 of 2048 tokens", "a multiple of 128, at least 32"),
        (
            {"attention_chunk_tokens": 128, "layout": Layout(ulysses=2)},
            *(CHUNK, "128 of 2048 tokens", "a multiple of 256, at least 32"),
        ),
        (
            {"attention_chunk_tokens": 128, "seq_tokens": 1 << 14},
            *(CHUNK, "128 of 16384 tokens", "a multiple of 128, at least 256"),
        ),
        (
            {"attention_chunk_tokens": 256, "seq_tokens": 1 << 14, "layout": Layout(cp=2)},
            *(CHUNK, "256 of 16384 tokens", "a multiple of 256, at least 365"),
        ),
        ({"model": msgspec.structs.replace(GPT, bidirectional=True)}, "model.bidirectional", "true", "causal"),
    ],
)
def test_what_cannot_be_cut_is_refused(change: dict[str, Any], where: str, got: str, wanted: str) -> None:
    fields = {"model": GPT, "seq_tokens": 2048, "recompute": "full", "attention_chunk_tokens": 512, **change}
    with refused(Infeasible, where=where, got=got, wanted=wanted):
        lower(Decisions(**fields))
