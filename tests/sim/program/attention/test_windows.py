"""Windows, sinks and norms behind attention and MLP: which pairs are computed, what travels, and planted faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import pytest

from memo_sim.contract.attended_pairs import pairs_in_window
from memo_sim.contract.knobs import CpExchange
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.memory.place import place
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.arena.check_placement import check_placement
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.ir.instruction import Instruction, Template
from memo_sim.program.ir.kinds import Phase, TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Exchange, Rotary, WindowedAttention
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.token_order import token_runs
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import check_deadlock, check_stages
from memo_sim.program.verify.values import check_values
from tests.sim.program.verify import planted
from tests.sim.small_programs import LLAMA, decide, faults_of

WINDOW, SEQ = 100, 2048
HALF = ("tokenwise", 0.5)


def of_kinds(model: Model, *kinds: tuple[int, float], **changes: Any) -> Model:
    shapes = [LayerShape(ffn_hidden=model.ffn_hidden, window=window, rope_theta=theta) for window, theta in kinds]
    return msgspec.structs.replace(model, **changes).of_layers(shapes)


EVERY = msgspec.structs.replace(LLAMA, window=WINDOW)
SINKS = of_kinds(LLAMA, *[(WINDOW, 0.0), (0, 0.0)] * 2, sinks=True, qkv_bias=True, proj_bias=True)
GEMMA = of_kinds(
    LLAMA,
    *[(WINDOW, 100.0)] * 3,
    (0, 0.0),
    post_norms=True,
    scaled_embeddings=True,
    activation="gelu_tanh",
    query_scalar=20.0,
)
PLANS: dict[str, Decisions] = {
    "keep": decide(SINKS),
    "tokenwise": decide(GEMMA, policy=HALF),
    "full": decide(GEMMA, policy=("full", 1.0)),
    "operators": decide(SINKS, policy=("operators", 0.0)),
    "tp": decide(GEMMA, Layout(tp=2, sequence_parallel=True), HALF),
    "tp whole": decide(GEMMA, Layout(tp=2), ("full", 0.0)),
    "tp chunked": decide(GEMMA, Layout(tp=4, sequence_parallel=True, tp_overlap="chunked"), HALF),
    "ulysses": decide(SINKS, Layout(ulysses=4), HALF),
    "stages": decide(GEMMA, Layout(pp=2), HALF, global_batch=4),
    "zero-bubble": decide(SINKS, Layout(pp=2, schedule="zero-bubble"), global_batch=4),
    "subsequences": decide(EVERY, Layout(pp=2, subsequences=4)),
    "short subsequences": decide(msgspec.structs.replace(EVERY, window=1000), Layout(subsequences=4)),
}


@pytest.mark.parametrize(
    "plan", ["tokenwise", *(pytest.param(p, marks=pytest.mark.slow) for p in PLANS if p != "tokenwise")]
)
def test_programs_are_accepted(plan: str) -> None:
    assert faults_of(PLANS[plan]) == []


NARROW = msgspec.structs.replace(LLAMA, window=60)
DIVIDED = {
    "subsequences, cp": decide(NARROW, Layout(cp=4, subsequences=3), ("full", 0.0), seq_tokens=2560, global_batch=1),
    "several, cp": decide(EVERY, Layout(cp=4), seq_tokens=2560, micro_batch=2, global_batch=2),
    "several, subsequences": decide(
        msgspec.structs.replace(EVERY, window=300, sinks=True),
        Layout(subsequences=5),
        ("full", 0.0),
        seq_tokens=640,
        micro_batch=2,
    ),
    "several, subsequences, cp": decide(
        NARROW, Layout(cp=4, subsequences=3), ("full", 0.0), seq_tokens=2560, micro_batch=2, global_batch=2
    ),
}
"""Every two, and all, of context parallelism, subsequences and several sequences a micro-batch."""


@pytest.mark.parametrize("plan", DIVIDED)
def test_every_rank_of_divided_windows_is_accepted(plan: str) -> None:
    _every_rank_is_accepted(DIVIDED[plan])


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
@pytest.mark.parametrize("policy", ["none", *(pytest.param(p, marks=pytest.mark.slow) for p in ("full", "tokenwise"))])
def test_every_rank_of_context_parallelism_is_accepted(policy: str, exchange: CpExchange) -> None:
    """All ranks have the same buffers and calls, so the last one's placement serves every rank."""
    alpha = 0.5 if policy == "tokenwise" else 0.0
    _every_rank_is_accepted(decide(SINKS, Layout(cp=4, cp_exchange=exchange), (policy, alpha)))


def _every_rank_is_accepted(decisions: Decisions) -> None:
    programs = ranks(decisions)
    assert programs[-1].sha256 == lower(decisions)[0].sha256
    placement = place(requests_of(programs[-1]), solver="greedy")
    offsets = dict(zip(placement.ids, placement.offset_bytes, strict=True))
    columns = [expand(program) for program in programs]
    edges = [derive_edges(each) for each in columns]
    assert check_stages(programs) == []
    assert check_deadlock(programs, columns, edges, ("cp", "grads")) == []
    for program, mine, orders in zip(programs, columns, edges, strict=True):
        assert check_program(program, mine) + check_edges(mine, orders) + check_values(program, mine, decisions) == []
        wanted = requests_of(program)
        own = msgspec.structs.replace(
            placement,
            ids=wanted.ids,
            size_bytes=wanted.size_bytes,
            lower=wanted.lower,
            upper=wanted.upper,
            classes=wanted.classes,
            offset_bytes=[offsets[name] for name in wanted.ids],
            program_sha256=program.sha256,
        )
        assert [fault for fault in check_placement(own, wanted) if "lower bound" not in fault] == []


def ranks(decisions: Decisions) -> tuple[Program, ...]:
    return tuple(lower(decisions, cp_rank=rank)[0] for rank in range(decisions.layout.cp))


def calls(program: Program, op: str) -> list[Instruction]:
    """Return the windowed calls of a layer's template, forward or backward."""
    found = (t for t in program.templates if any(isinstance(i.work, WindowedAttention) for i in t.instructions))
    return next(c for t in found if (c := [i for i in t.instructions if i.op == op and i.work is not None]))


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("op", ["attention", "attention.bwd"])
def test_every_query_meets_the_keys_of_its_window_once(op: str, cp: int, window: int) -> None:
    """Count the pairs of all ranks by position: keys of a call end with the queries' own."""
    chunk = 8
    seq = 2 * cp * chunk
    decisions = decide(msgspec.structs.replace(LLAMA, window=window), Layout(cp=cp), seq_tokens=seq, global_batch=1)
    met: Counter[tuple[int, int]] = Counter()
    for rank, program in enumerate(ranks(decisions)):
        for call in calls(program, op):
            work = call.work
            assert isinstance(work, WindowedAttention)
            late = call.operands[[o.role for o in call.operands].index("qkv")].first > 0
            first = (2 * cp - 1 - rank if late else rank) * chunk
            for q in range(first, first + chunk):
                keys = range(first + chunk - work.k_tokens, q + 1)
                met.update((q, k) for k in keys if k > q - window)
            pairs = pairs_in_window(work.q_tokens, work.k_tokens, window)
            factor = 2.5 if work.backward else 1.0
            assert work.flops == 4.0 * pairs * work.heads * work.head_dim * factor
    assert met == Counter({(q, k): 1 for q in range(seq) for k in range(max(0, q - window + 1), q + 1)})
    assert met.total() == pairs_in_window(seq, seq, window)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("cp", "subsequences", "window"),
    [(1, 5, 300), (1, 3, 1), (2, 1, 100), (2, 3, 65), (4, 3, 2), (4, 3, 1), (4, 2, 64)],
)
def test_every_query_of_a_subsequence_meets_the_keys_of_its_window_once(
    cp: int, subsequences: int, window: int, batch: int, phase: Phase
) -> None:
    """Play all copies and hops of keys with the numbers of their tokens, and count the pairs of all calls."""
    seq = cp * 640
    layout = Layout(cp=cp, subsequences=subsequences)
    model = msgspec.structs.replace(LLAMA, window=window, layers=1)
    decisions = decide(model, layout, ("full", 0.0), seq_tokens=seq, micro_batch=batch, global_batch=batch)
    held = [
        np.concatenate([np.arange(run.token, run.token + run.tokens) for run in token_runs(decisions, rank)])
        for rank in range(cp)
    ]
    met = np.zeros((batch, seq, seq), dtype=int)
    forward = phase is Phase.FORWARD
    names = [f".s{n}" for n in range(subsequences)] if subsequences > 1 else [""]
    begun = (0, *accumulate(partition(decisions)))
    for n, end in enumerate(names):
        wanted = {f"layer.{'fwd' if forward else 'bwd'}{end}"}
        rows = [each[begun[n] : begun[n + 1]] for each in held]
        templates = [next(t for t in program.templates if t.name in wanted) for program in ranks(decisions)]
        for queries, keys in _played(templates, phase, held, rows):
            for q, k in zip(queries.reshape(-1, *queries.shape[-1:]), keys, strict=True):
                sequence = q[0] // seq
                assert {*(q // seq), *(k // seq)} == {sequence}
                pairs = (k <= q[:, None]) & (k > q[:, None] - window)
                met[sequence][np.ix_(q % seq, k % seq)] += pairs
    wanted_pairs = np.tri(seq, dtype=int) - np.tri(seq, k=-window, dtype=int)
    assert all(np.array_equal(each, wanted_pairs) for each in met)


def _played(
    templates: list[Template], phase: Phase, held: list[np.ndarray], rows: list[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens (sequence, row) of the queries and of the keys of every call of all ranks.

    ``held``: the tokens of each rank's rows. ``rows``: those of the subsequence.
    """
    buffers = [
        {"qkv": of.copy(), "q": of.copy(), "prefix.kv": every.copy()} for of, every in zip(rows, held, strict=True)
    ]
    lines = [
        [i for i in t.instructions if i.phase is phase and not i.name.startswith(f"{phase}/d_")] for t in templates
    ]

    def at(rank: int, each: Instruction, *roles: str) -> np.ndarray:
        (operand,) = [o for o in each.operands if o.role in roles]
        name = templates[rank].slots[operand.slot]
        found = buffers[rank].setdefault(name, np.full(8 * len(held[rank]), -1))
        return found[operand.first : operand.first + operand.tokens]

    done = [0] * len(templates)
    while any(place < len(line) for place, line in zip(done, lines, strict=True)):
        hops = []
        for rank, line in enumerate(lines):
            while done[rank] < len(line):
                each, done[rank] = line[done[rank]], done[rank] + 1
                if isinstance(each.work, Exchange):
                    hops.append(each)
                    break
                if each.op.startswith("kv.pack"):
                    at(rank, each, "out")[:] = at(rank, each, "qkv")
                elif each.op == "copy":
                    at(rank, each, "target")[:] = at(rank, each, "source")
                elif isinstance(each.work, WindowedAttention):
                    queries, keys = (at(rank, each, *roles).copy() for roles in (("q", "qkv"), ("kv",)))
                    yield queries.reshape(each.work.batch, -1), keys.reshape(each.work.batch, -1)
        sent = [at(rank, each, "send").copy() for rank, each in enumerate(hops)]
        for rank, each in enumerate(hops):
            assert isinstance(each.work, Exchange)
            at(rank, each, "recv")[:] = sent[(rank - each.work.distance) % len(hops)]


def test_keys_travel_to_the_neighbours_alone() -> None:
    """Two hops of a window's keys and values, however many ranks there are; full layers send all keys on."""
    for cp in (2, 4):
        program = lower(decide(SINKS, Layout(cp=cp), seq_tokens=SEQ))[0]
        sent = {
            tuple((i.work.bytes, i.work.distance) for i in t.instructions if isinstance(i.work, Exchange))
            for t in program.templates
            if t.kind is TemplateKind.FORWARD and any(i.op == "rotary" for i in t.instructions)
        }
        width = 2 * LLAMA.kv_width * 2
        windowed = tuple(((WINDOW - 1) * width, distance) for distance in (1, cp - 1))
        assert sent == {windowed, ((SEQ // cp * width, 1),) * (cp - 1)}


def test_subsequences_read_no_keys_before_the_window() -> None:
    program = lower(PLANS["subsequences"])[0]
    for call in (i for _, i in program.walk() if isinstance(i.work, WindowedAttention)):
        keys = next(o for o in call.operands if o.role == "kv")
        assert keys.tokens == call.work.k_tokens  # type: ignore[union-attr]
        assert keys.tokens - call.work.q_tokens == min(keys.first + keys.tokens - call.work.q_tokens, WINDOW - 1)  # type: ignore[union-attr]
    assert not any(i.op == "attention.merge" for _, i in program.walk())


def test_subsequences_with_windows_are_equally_long() -> None:
    assert partition(PLANS["subsequences"]) == (512,) * 4
    full = msgspec.structs.replace(PLANS["subsequences"], model=LLAMA)
    assert partition(full)[0] > 512


def test_a_window_that_no_sequence_exceeds_changes_no_program() -> None:
    for window in (SEQ, SEQ + 1):
        decisions = decide(msgspec.structs.replace(LLAMA, window=window))
        assert lower(decisions)[0].sha256 == lower(decide(LLAMA))[0].sha256
    shorter = decide(msgspec.structs.replace(LLAMA, window=SEQ - 1))
    assert lower(shorter)[0].sha256 != lower(decide(LLAMA))[0].sha256


def test_layers_have_the_rotary_tables_of_their_kind() -> None:
    program = lower(PLANS["tokenwise"])[0]
    found = Counter(
        i.work.theta if isinstance(i.work, Rotary) else 0.0 for _, i in program.walk() if i.op == "rotary.bwd"
    )
    assert found == {100.0: 3 * 2, 0.0: 2}


def test_recompute_repeats_the_second_product_for_the_norm_behind_it() -> None:
    def products(model: Model) -> int:
        program = lower(decide(model, policy=HALF))[0]
        return sum(i.phase is Phase.RECOMPUTE and i.op == "linear" for _, i in program.walk())

    plain = of_kinds(LLAMA, *[(WINDOW, 100.0)] * 3, (0, 0.0))
    rebuilt = products(GEMMA) - products(plain)
    norms = lower(PLANS["tokenwise"])[0]
    assert rebuilt == sum(i.phase is Phase.RECOMPUTE and "/post_mlp" in i.name for _, i in norms.walk()) > 0


Chosen = Callable[[Instruction], bool]


@cache
def program_of(plan: str) -> tuple[Program, Decisions]:
    decisions = (PLANS | DIVIDED)[plan] if plan != "cp" else decide(EVERY, Layout(cp=4))
    return lower(decisions)[0], decisions


def named(*ends: str) -> Chosen:
    return lambda each: each.name.endswith(ends)


@pytest.mark.parametrize(
    ("plan", "chosen"),
    [
        ("keep", named("attn.sink")),
        ("keep", named("attn.sink.bwd")),
        ("tokenwise", named("fwd/post_attn.r0")),
        ("tokenwise", named("post_mlp.r1", "post_mlp.r0")),
        ("tokenwise", named("post_mlp.bwd")),
        ("cp", named("fwd/kv.own")),
        ("cp", named("kv.hop.early.bwd")),
        ("cp", named("d_kv.add.own")),
        ("cp", named("d_kv.hop.early")),
        ("cp", named("d_kv.add.early")),
        ("cp", named("d_kv.add.late")),
        ("cp", named("d_kv.clear.late")),
        *[("subsequences, cp", named(end)) for end in ("kv.own.bwd", "kv.hop.early.bwd", "d_kv.add.late.later")],
        *[("subsequences, cp", named(end)) for end in ("d_kv.earlier", "d_kv.put.early", "kv.pack.late")],
        ("several, cp", named("kv.pack.late.q1")),
        ("several, cp", named("d_kv.add.own.q0")),
        ("several, subsequences", named("kv.seen.q1.0")),
        ("several, subsequences", named("kv.seen.q0.1.bwd")),
        ("several, subsequences", named("d_kv.put1")),
        ("several, subsequences", named("d_kv.add1")),
        ("several, subsequences, cp", named("d_kv.add.late.q1.later")),
        ("short subsequences", named("d_kv.put")),
        ("short subsequences", named("d_kv.add")),
    ],
)
def test_an_instruction_that_is_left_out_is_found(plan: str, chosen: Chosen) -> None:
    program, decisions = program_of(plan)
    less = planted.without(program, planted.places(program, chosen)[-1], chosen)
    assert check_values(less, expand(less), decisions)


@pytest.mark.parametrize(
    ("plan", "chosen", "change"),
    [
        ("keep", {"op": "attention"}, {"window": WINDOW + 1}),
        ("cp", {"name": "fwd/kv.hop.early"}, {"distance": 2}),
        ("cp", {"name": "bwd/d_kv.hop.early"}, {"distance": 1}),
    ],
)
def test_another_window_or_another_neighbour_is_found(
    plan: str, chosen: dict[str, str], change: dict[str, Any]
) -> None:
    program, decisions = program_of(plan)

    def is_it(each: Instruction) -> bool:
        fits = all(getattr(each, key) == value for key, value in chosen.items())
        return fits and (isinstance(each.work, WindowedAttention) or "op" not in chosen)

    wrong = planted.replaced(
        program,
        planted.places(program, is_it)[0],
        is_it,
        lambda each: msgspec.structs.replace(each, work=replace(each.work, **change)),
    )
    assert check_values(wrong, expand(wrong), decisions)


def test_the_first_rank_begins_the_sums_of_the_subsequence_before() -> None:
    """Other ranks begin them with zeros; the first rank's gradients are none."""
    decisions = DIVIDED["subsequences, cp"]
    program, chosen = lower(decisions, cp_rank=0)[0], named("d_kv.earlier")
    number = planted.places(program, chosen)[-1]
    less = planted.without(program, number, chosen)
    assert check_values(program, expand(program), decisions) == []
    assert check_values(less, expand(less), decisions)


def test_keys_of_several_sequences_in_the_order_of_a_ring_are_found() -> None:
    program, decisions = program_of("several, cp")
    chosen = named("fwd/kv.pack.early.q0")
    change: Callable[[Instruction], Instruction] = lambda each: msgspec.structs.replace(each, op="kv.pack")  # noqa: E731
    wrong = planted.replaced(program, planted.places(program, chosen)[0], chosen, change)
    assert any("sequence by sequence" in fault for fault in check_values(wrong, expand(wrong), decisions))


def test_a_window_that_begins_one_key_late_is_found() -> None:
    program, decisions = program_of("cp")

    def one_key_less(each: Instruction) -> Instruction:
        operands = [
            msgspec.structs.replace(o, first=o.first + 1, tokens=o.tokens - 1) if o.role == "kv" else o
            for o in each.operands
        ]
        return msgspec.structs.replace(each, operands=tuple(operands))

    chosen = named("fwd/attn.late")
    wrong = planted.replaced(program, planted.places(program, chosen)[0], chosen, one_key_less)
    assert any("no window of 100" in fault for fault in check_values(wrong, expand(wrong), decisions))
