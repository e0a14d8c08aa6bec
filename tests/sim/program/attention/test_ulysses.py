"""Ulysses: exchanged bytes, order of tokens after an exchange, attention's sizes, and refused degrees."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest

from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.placement import Placement, place
from memo_sim.planning.layouts import layouts
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.space import candidates
from memo_sim.program.ir.instruction import Instruction, Template
from memo_sim.program.ir.work import Attention, Collective, Gemm
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.skeletal import skeletal_tensors
from memo_sim.program.lower import lower
from tests.refusals import refused
from tests.sim.small_programs import GPT, LLAMA, POLICIES, decide, faults_of

LAYOUTS = [
    Layout(ulysses=4),
    Layout(ulysses=2, dp=2, zero=3),
    Layout(ulysses=2, cp=2, zero=1),
    Layout(tp=2, sequence_parallel=True, ulysses=2, zero=2),
    Layout(tp=2, ulysses=2),
]
THREE = msgspec.structs.replace(LLAMA, heads=6, kv_heads=3)
WITH_COPIES = [Layout(ulysses=8), Layout(tp=2, sequence_parallel=True, ulysses=4), Layout(ulysses=8, zero=3)]
UNEVEN = [Layout(ulysses=3, uneven_heads=True), Layout(ulysses=3, cp=2, uneven_heads=True, zero=1)]


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p[0]}-{p[1]}")
def test_every_program_passes_the_independent_checkers(model: Model, policy: tuple[str, float]) -> None:
    for layout in LAYOUTS:
        assert faults_of(decide(model, layout, policy, seq_tokens=4096)) == []


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p[0]}-{p[1]}")
def test_programs_with_copies_and_uneven_heads_pass_the_independent_checkers(policy: tuple[str, float]) -> None:
    for layout in WITH_COPIES:
        assert faults_of(decide(LLAMA, layout, policy, seq_tokens=8192)) == []
    for layout in UNEVEN:
        assert faults_of(decide(LLAMA, layout, policy, seq_tokens=6144)) == []
        assert faults_of(decide(GPT, layout, policy, seq_tokens=6144)) == []


def exchanged(decisions: Decisions) -> Counter[str]:
    """Return the bytes of a rank's shards in its all-to-alls, by phase."""
    total: Counter[str] = Counter()
    for name, instruction in lower(decisions)[0].walk():
        if isinstance(instruction.work, Collective) and instruction.work.kind == "all_to_all":
            assert instruction.work.group == "ulysses"
            total[name.split("/")[-2]] += instruction.work.bytes
    return total


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("degree", [2, 4])
def test_bytes_exchanged_are_those_of_the_formula(model: Model, degree: int) -> None:
    """Each pass sends 4 x tokens x hidden with equal heads: Q, K, V and the output, or their gradients."""
    tokens, layers, micro_batches = 4096 // degree, model.layers, 2
    whole = layers * micro_batches * tokens * (2 * model.q_width + 2 * model.kv_width) * 2
    if model is GPT:
        assert whole == layers * micro_batches * 4 * tokens * model.hidden * 2

    def at(policy: tuple[str, float]) -> Counter[str]:
        return exchanged(decide(model, Layout(ulysses=degree), policy, seq_tokens=4096))

    assert at(("none", 0.0)) == {"fwd": whole, "bwd": whole}
    assert at(("full", 0.0)) == {"fwd": whole, "rec": whole, "bwd": whole}
    # The last two layers are resident; the other layers exchange the rows that they recompute once more.
    rebuilt = whole * (layers - 2) // layers // 2
    assert at(("tokenwise", 0.5)) == {"fwd": whole, "rec": rebuilt, "bwd": whole}
    assert at(("none", 1.0)) == {"fwd": whole, "bwd": whole}


def test_copies_of_keys_and_values_are_exchanged_too() -> None:
    """Eight ranks read four key/value heads: each is sent twice (DeepSpeed's ``repeat_interleave``)."""
    tokens, layers, micro_batches = 8192 // 8, LLAMA.layers, 2
    whole = layers * micro_batches * tokens * (2 * LLAMA.q_width + 2 * 2 * LLAMA.kv_width) * 2
    decisions = decide(LLAMA, Layout(ulysses=8), seq_tokens=8192)
    assert exchanged(decisions) == {"fwd": whole, "bwd": whole}
    works = {i.work for _, i in lower(decisions)[0].walk() if isinstance(i.work, Attention)}
    assert {(w.q_tokens, w.heads, w.kv_heads) for w in works} == {(8192, 1, 1)}
    # Weights are whole under Ulysses, so their products have no copies.
    widths = {i.work.n for n, i in lower(decisions)[0].walk() if n.endswith("fwd/qkv") and isinstance(i.work, Gemm)}
    assert widths == {LLAMA.q_width + 2 * LLAMA.kv_width}


def test_the_rank_with_most_heads_stands_for_all() -> None:
    decisions = decide(LLAMA, Layout(ulysses=3, uneven_heads=True), seq_tokens=6144)

    def found(rank: int) -> tuple[set[tuple[int, int, int]], float, int]:
        (program,) = lower(decisions, ulysses_rank=rank)
        works = [i.work for _, i in program.walk() if isinstance(i.work, Attention)]
        kept = sum(f.bytes * f.count for f in program.families if f.name == "skeletal.qkv")
        return {(w.q_tokens, w.heads, w.kv_heads) for w in works}, sum(w.flops for w in works), kept

    ranks = [found(rank) for rank in range(3)]
    assert [heads for heads, _, _ in ranks] == [{(6144, 4, 2)}, {(6144, 2, 1)}, {(6144, 2, 1)}]
    assert ranks[0][1:] == (2 * ranks[1][1], 2 * ranks[1][2])
    assert lower(decisions) == lower(decisions, ulysses_rank=0)


@pytest.mark.parametrize(
    ("layout", "got", "wanted"),
    [
        (Layout(ulysses=3), "8", "a multiple of 3"),
        (Layout(ulysses=16), "8", "a multiple of 16"),
        (Layout(ulysses=5, uneven_heads=True), "4 of a", "ulysses below 4"),
        (Layout(tp=2, ulysses=3, uneven_heads=True), "2 of a", "ulysses below 2"),
    ],
    ids=str,
)
def test_degrees_without_whole_heads_are_refused(layout: Layout, got: object, wanted: str) -> None:
    with refused(Infeasible, got=got, wanted=wanted):
        lower(decide(LLAMA, layout, seq_tokens=3840))


def test_a_degree_that_leaves_a_remainder_names_uneven_heads() -> None:
    with refused(Infeasible, where="heads", hint="--uneven-heads"):
        lower(decide(LLAMA, Layout(ulysses=3), seq_tokens=6144))


@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_share_the_work_evenly(degree: int) -> None:
    def flops(layout: Layout) -> tuple[float, float]:
        works = [i.work for _, i in lower(decide(GPT, layout, seq_tokens=4096))[0].walk()]
        return (
            sum(w.flops for w in works if isinstance(w, Attention)),
            sum(w.flops for w in works if isinstance(w, Gemm)),
        )

    assert flops(Layout()) == tuple(degree * part for part in flops(Layout(ulysses=degree)))


def test_attention_has_whole_sequences_and_a_part_of_the_heads() -> None:
    decisions = decide(LLAMA, Layout(ulysses=4), micro_batch=2, seq_tokens=4096)
    works = {i.work for _, i in lower(decisions)[0].walk() if isinstance(i.work, Attention)}
    assert {(w.batch, w.q_tokens, w.k_tokens, w.heads, w.kv_heads) for w in works} == {(2, 4096, 4096, 2, 1)}


def test_skeletal_tensors_are_divided_and_the_projections_input_is_added() -> None:
    decisions = decide(GPT, Layout(ulysses=4), seq_tokens=4096)
    tensors = [t for t in skeletal_tensors(GPT, shape_of(decisions), "bf16") if not t.statistics]
    unit = 4096 // 4 * GPT.hidden
    assert sum(t.tokens * t.features for t in tensors) == (16 + 1) * unit
    assert {t.name: t.tokens for t in tensors if t.tokens != 1024} == {"qkv": 4096, "attn": 4096}


@pytest.mark.parametrize("policy", [("none", 0.0), ("tokenwise", 0.25), ("tokenwise", 0.0)])
@pytest.mark.parametrize("degree", [2, 4])
def test_exchanges_keep_the_order_of_tokens_both_ways(policy: tuple[str, float], degree: int) -> None:
    """Play the exchanges of one layer's forward on every rank, with numbers that identify each token and head."""
    decisions = decide(GPT, Layout(ulysses=degree), policy, seq_tokens=2048)
    (program,) = lower(decisions)
    forward = next(t for t in program.templates if t.name == "layer.fwd")
    exchanges = [i for i in forward.instructions if i.op in ("heads.transpose", "all_to_all")]
    shape, heads = shape_of(decisions), GPT.heads
    blocks = [(0, decisions.swapped_tokens), (decisions.swapped_tokens, shape.tokens - decisions.swapped_tokens)]
    mine = [
        np.concatenate([degree * first + rank * n + np.arange(n) for first, n in blocks]).astype(np.int64)
        for rank in range(degree)
    ]
    # Element (token, head) is token * heads + head. Only Q is played: packed K and V move with the same head.
    ranks = [{"qkv_seq": rows[:, None] * heads + np.arange(heads)} for rows in mine]
    for instruction in exchanges:
        if instruction.name in {"fwd/attn.to_tokens", "fwd/attn.to_tokens.r0"}:
            for held in ranks:  # attention: its output for a token and head keeps the same number
                held["attn"] = held["qkv"].copy()
        play(forward, instruction, ranks, (shape.tokens, heads))
    for rank, held in enumerate(ranks):
        part = heads // degree
        wanted = np.arange(2048)[:, None] * heads + np.arange(rank * part, (rank + 1) * part)
        np.testing.assert_array_equal(held["qkv"], wanted)
        np.testing.assert_array_equal(held["attn_seq"], held["qkv_seq"])


def play(template: Template, i: Instruction, ranks: list[dict[str, np.ndarray]], size: tuple[int, int]) -> None:
    """Play one exchange on all ranks; ``size``: rows and heads of the sequence-sharded form.

    A packed buffer has the heads of one destination rank together, by token.
    """
    degree, (tokens, heads) = len(ranks), size
    names = [name.removeprefix("skeletal.") for name in template.slots]
    source, target = ((names[o.slot], slice(o.first, o.first + o.tokens)) for o in i.operands)
    part = heads // degree
    for held in ranks:
        sequence_sharded = target[0].endswith("_seq") or "fwd." in target[0]
        held.setdefault(target[0], np.full((tokens, heads) if sequence_sharded else (tokens * degree, part), -1))
    sent = [held[source[0]][source[1]] for held in ranks]
    for me, held in enumerate(ranks):
        if i.op == "heads.transpose":
            n = len(sent[me])
            if "pack" in i.name and "unpack" not in i.name:
                by_rank = sent[me].reshape(n, degree, part).transpose(1, 0, 2)
                held[target[0]][target[1]] = by_rank.reshape(n, heads)
            else:
                held[target[0]][target[1]] = sent[me].reshape(degree, n, part).transpose(1, 0, 2).reshape(n, heads)
        else:
            shards = [np.array_split(s.reshape(-1), degree)[me] for s in sent]
            held[target[0]][target[1]] = np.concatenate(shards).reshape(held[target[0]][target[1]].shape)


@pytest.mark.parametrize(
    ("model", "layout", "seq_tokens", "fields"),
    [
        (GPT, Layout(ulysses=8), 4096, ("heads", "4", "a multiple of 8")),
        (LLAMA, Layout(ulysses=16), 4096, ("heads", "8", "a multiple of 16")),
        (THREE, Layout(ulysses=2), 4096, ("kv_heads", "3", "a multiple of 2")),
        (THREE, Layout(tp=2), 4096, ("kv_heads", "3", "a multiple of 2")),
        (GPT, Layout(ulysses=4), 4098, ("seq_tokens", "4098", "a multiple of 4")),
        (GPT, Layout(ulysses=4, cp=2), 4104, ("seq_tokens", "4104", "a multiple of 16")),
    ],
)
def test_degrees_that_divide_neither_heads_nor_tokens_are_refused(
    model: Model, layout: Layout, seq_tokens: int, fields: tuple[str, str, str]
) -> None:
    with pytest.raises(Infeasible) as error:
        lower(Decisions(model=model, layout=layout, seq_tokens=seq_tokens))
    assert (error.value.where, str(error.value.got), error.value.wanted) == fields


def test_placement_of_groups_on_nodes() -> None:
    layout = Layout(tp=2, ulysses=4, cp=2, dp=2)
    assert place("ulysses", 4, layout, 8) == Placement(ranks=4, per_node=4, nodes=1, together=2, span=1)
    assert place("cp", 2, layout, 8) == Placement(ranks=2, per_node=1, nodes=2, together=8, span=2)
    assert place("grads", 16, layout, 8) == Placement(ranks=16, per_node=4, nodes=4, together=2, span=4)
    # With 16 ranks the exchange crosses two nodes, and two such groups share the network cards.
    crossing = Placement(ranks=8, per_node=4, nodes=2, together=2, span=2)
    assert place("ulysses", 8, Layout(tp=2, ulysses=8), 8) == crossing


def ask(
    cluster_name: str, model: str, *, seq_tokens: int = 131072, system: str = "deepspeed-ulysses", **pins
) -> Question:
    cluster, hardware = load_cluster(cluster_name)
    return Question(load_model(model), cluster, hardware, seq_tokens, system=system, pins=Pins(**pins), global_batch=16)


def test_deepspeeds_degree_is_limited_by_heads() -> None:
    """MEMO 5.2: 40 and 56 heads allow a degree of at most 8 on 16 and 32 devices."""
    for cluster, model, most in (("a800-2x8", "gpt-13b", 8), ("a800-4x8", "gpt-30b", 8), ("a800-8x8", "gpt-7b", 32)):
        asked = ask(cluster, model)
        found, refused = candidates(asked)
        assert max(c.base.layout.ulysses for c in found) == most
        assert {c.base.layout.zero for c in found} == {3}
        assert {c.base.layout.tp * c.base.layout.cp for c in found} == {1}
        assert any("does not divide heads" in reason for reason in refused)


def test_ulysses_is_searched_only_by_systems_that_have_it_and_can_be_pinned() -> None:
    assert {layout.ulysses for layout in layouts(ask("a800-1x8", "gpt-7b"))} == {1, 2, 4, 8}
    assert {layout.ulysses for layout in layouts(ask("a800-1x8", "gpt-7b", system="any"))} == {1}
    pinned = layouts(ask("a800-1x8", "gpt-7b", system="any", ulysses=4))
    assert {(layout.tp, layout.cp, layout.dp) for layout in pinned} == {(1, 1, 2), (1, 2, 1), (2, 1, 1)}
    named = layouts(ask("a800-1x8", "gpt-7b", system="megatron-lm", ulysses=2))
    assert {layout.ulysses for layout in named} == {2}
    with refused(UsageError, what="fsdp", got="ulysses 2", wanted="dp"):
        layouts(ask("a800-1x8", "gpt-7b", system="fsdp", ulysses=2))
    with refused(UsageError, what="deepspeed-ulysses", got="tp 2", wanted="ulysses and dp"):
        layouts(ask("a800-1x8", "gpt-7b", tp=2))


def test_the_answer_waits_for_all_to_alls() -> None:
    answer = what_if(ask("a800-1x8", "gpt-7b", ulysses=8))
    best = answer.result.best
    assert best is not None
    assert (best.layout.ulysses, best.layout.zero, best.memory_policy) == (8, 3, "eager")
    layer = 4 * (131072 // 8) * 4096 * 2 / 2**30  # GiB of a layer's forward; backward and recompute have the same
    passes = {"none": 2, "full": 3}[best.recompute]
    (line,) = [line for line in answer.result.why if line.startswith("Ulysses 8")]
    assert f"exchanges {16 * 32 * passes * layer:.2f} GiB" in line
    waited = {s.waits_for: s.seconds for s in best.stalls if s.lane == "compute"}
    assert waited["all_to_all"] == max(waited.values())


def test_different_layouts_have_different_programs() -> None:
    pairs = itertools.combinations([lower(decide(GPT, layout, seq_tokens=4096))[0].sha256 for layout in LAYOUTS], 2)
    assert all(a != b for a, b in pairs)
