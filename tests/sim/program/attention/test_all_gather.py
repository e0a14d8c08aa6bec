"""Context parallelism by all-gather: the bytes and FLOPs of the ring, and each query attends to each key once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.knobs import CpExchange
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.collective import volume_factor
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.planning.space import candidates
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.ir.work import Attention, Collective, Exchange
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower
from tests.sim.small_programs import GPT, LLAMA, POLICIES, decide, faults_of

LAYOUTS = [
    Layout(cp=2, cp_exchange="all_gather"),
    Layout(cp=4, zero=3, cp_exchange="all_gather"),
    Layout(tp=2, sequence_parallel=True, cp=2, cp_exchange="all_gather"),
    Layout(cp=2, ulysses=2, zero=1, cp_exchange="all_gather"),
]


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p[0]}-{p[1]}")
def test_every_program_passes_the_independent_checkers(model: Model, policy: tuple[str, float]) -> None:
    for layout in LAYOUTS:
        assert faults_of(decide(model, layout, policy, seq_tokens=4096)) == []


def passed(decisions: Decisions) -> tuple[Counter[str], float]:
    """Return the bytes that cross the link of a cp rank, by kind of communication, and the FLOPs of attention."""
    crossed: Counter[str] = Counter()
    flops = 0.0
    for _, instruction in lower(decisions)[0].walk():
        work = instruction.work
        if isinstance(work, Collective) and work.group == "cp":
            crossed[work.kind] += round(volume_factor(work.kind, work.ranks) * work.bytes)
        if isinstance(work, Exchange):
            crossed["send_recv"] += work.bytes
        if isinstance(work, Attention):
            flops += work.flops
    return crossed, flops


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("policy", [("none", 0.0), ("full", 0.0)])
def test_bytes_and_flops_equal_those_of_the_ring(model: Model, cp: int, policy: tuple[str, float]) -> None:
    def at(exchange: CpExchange) -> tuple[Counter[str], float]:
        return passed(decide(model, Layout(cp=cp, cp_exchange=exchange), policy, seq_tokens=4096, global_batch=1))

    (ring, ring_flops), (gathered, gathered_flops) = at("ring"), at("all_gather")
    shard = 4096 // cp * 2 * model.kv_width * 2
    passes = 3 if policy[0] == "full" else 2
    assert gathered == {
        "all_gather": passes * model.layers * (cp - 1) * shard,
        "reduce_scatter": model.layers * (cp - 1) * shard,
    }
    assert ring == {"send_recv": sum(gathered.values())}
    assert gathered_flops == ring_flops


@pytest.mark.parametrize("cp", [2, 4])
def test_every_query_attends_to_every_earlier_key_once(cp: int) -> None:
    """Count the pairs in all calls of the last rank's program, by the position of each row in the sequence."""
    tokens = 256
    decisions = decide(GPT, Layout(cp=cp, cp_exchange="all_gather"), seq_tokens=cp * tokens)
    (program,) = lower(decisions)
    chunk = tokens // 2
    positions = [np.arange(n * chunk, (n + 1) * chunk) for n in range(2 * cp)]
    mine = np.concatenate([positions[cp - 1], positions[cp]])
    gathered = np.concatenate([*positions[:cp], *reversed(positions[cp:])])
    for template, phase in (("layer.fwd", "fwd"), ("layer.bwd", "bwd")):
        calls = next(t for t in program.templates if t.name == template).instructions
        met = Counter()
        for call in calls:
            if isinstance(call.work, Attention):
                keys = mine if call.work.mask == "causal" else gathered[slice(*key_rows(call))]
                assert call.work.q_tokens == tokens
                assert call.work.k_tokens == len(keys)
                pairs = np.argwhere(mine[:, None] >= keys[None, :]) if call.work.mask == "causal" else None
                if pairs is None:
                    pairs = np.argwhere(np.ones((tokens, len(keys)), dtype=bool))
                met.update(zip(mine[pairs[:, 0]].tolist(), keys[pairs[:, 1]].tolist(), strict=True))
        assert set(met.values()) == {1}, phase
        assert met.keys() == {(q, k) for q in mine.tolist() for k in range(q + 1)}, phase


def key_rows(call: Instruction) -> tuple[int, int]:
    (keys,) = [o for o in call.operands if o.role == "kv"]
    return keys.first, keys.first + keys.tokens


def test_gradients_of_keys_that_a_rank_does_not_read_are_zeroed() -> None:
    decisions = decide(LLAMA, Layout(cp=4, cp_exchange="all_gather"))
    backward = next(t for t in lower(decisions)[0].templates if t.name == "layer.bwd")
    rows = sorted(
        (o.first, o.first + o.tokens)
        for i in backward.instructions
        for o in i.operands
        if backward.slots[o.slot] == "d_kv.all" and i.op != "reduce_scatter"
    )
    assert rows == [(0, 3 * 256), (3 * 256, 4 * 512)]


def test_the_number_of_calls_does_not_grow_with_cp() -> None:
    def attention_calls(exchange: CpExchange) -> int:
        forward = lower(decide(GPT, Layout(cp=8, cp_exchange=exchange)))[0].templates[0]
        return sum(isinstance(i.work, Attention) for i in forward.instructions)

    assert attention_calls("ring") == 8
    assert attention_calls("all_gather") == 2


def ask(exchange: CpExchange, seq_tokens: int, *, lent: bool = False) -> Question:
    """Return a question; ``lent``: workspaces of libraries lie in the arena, so they need no extra head groups."""
    cluster, hardware = load_cluster("a800-1x8")
    pins = Pins(
        tp=1,
        cp=8,
        cp_exchange=exchange,
        recompute="full",
        alpha=0.0,
        mlp_chunk_tokens=0,
        zero=3,
        replay_allocator=lent,
    )
    return Question(load_model("gpt-7b"), cluster, hardware, seq_tokens, system="any", pins=pins)


def test_more_keys_in_one_call_need_more_groups_of_heads() -> None:
    """32 heads x 7 x 131072 keys x 128 features exceed 2**31; a call of the ring has at most 131072 keys."""
    groups = {}
    for exchange in ("ring", "all_gather"):
        found, _ = candidates(ask(exchange, 1 << 21, lent=True))
        (candidate,) = [each for each in found if not each.policy.attention_chunks]
        groups[exchange] = candidate.base.kernels.head_groups
        lower(candidate.base)  # refuses head groups in which the element count overflows
    assert groups == {"ring": 1, "all_gather": 2}


def test_the_search_keeps_the_pinned_exchange() -> None:
    ring, gathered = (search(ask(exchange, 1 << 18)).best for exchange in ("ring", "all_gather"))
    assert ring is not None
    assert gathered is not None
    assert gathered.decisions.layout == replace_exchange(ring.decisions.layout)
    assert gathered.prediction.peak_device_bytes > ring.prediction.peak_device_bytes
    waits = {s.waits_for for s in gathered.prediction.stalls if s.lane == "compute"}
    assert "all_gather" in waits
    assert "send_recv" not in waits


def replace_exchange(layout: Layout) -> Layout:
    return Layout(tp=layout.tp, cp=layout.cp, dp=layout.dp, zero=layout.zero, cp_exchange="all_gather")


def test_without_context_parallelism_nothing_is_gathered() -> None:
    one, other = (lower(decide(GPT, Layout(tp=2, cp_exchange=e)))[0].sha256 for e in ("ring", "all_gather"))
    assert one == other
    asked = ask("all_gather", 1 << 16)
    whole = {"mlp_chunk_tokens": 0, "attention_chunk_tokens": 0}
    pins = Pins(tp=8, cp=1, cp_exchange="all_gather", recompute="full", alpha=0.0, **whole)
    (candidate,), _ = candidates(replace(asked, pins=pins))
    assert candidate.base.layout.cp_exchange == "ring"
    assert shape_of(candidate.base).cp == 1


@pytest.mark.parametrize("policy", [("full", 0.0), ("selective", 0.0)])
def test_gathered_keys_of_recompute_die_before_backward_gathers_them_again(policy: tuple[str, float]) -> None:
    """Backward's gather writes other buffers, so nothing holds them while the MLP's backward runs."""
    (program,) = lower(decide(LLAMA, Layout(cp=4, cp_exchange="all_gather"), policy, seq_tokens=4096))
    backward = next(t for t in program.templates if t.name == "layer.bwd")
    used: dict[str, set[str]] = {}
    for i in backward.instructions:
        for operand in i.operands:
            if backward.slots[operand.slot].startswith(("kv.all", "kv.mine")):
                used.setdefault(backward.slots[operand.slot], set()).add(str(i.phase))
    assert all(len(phases) == 1 for phases in used.values())
    assert {name.removesuffix(".rec") for name in used} == {"kv.all", "kv.mine"}
