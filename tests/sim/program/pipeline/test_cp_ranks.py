"""Programs of every context-parallel rank: their calls match, cover the causal square, and fit one arena."""

from __future__ import annotations

import re
from collections import Counter
from itertools import accumulate

import msgspec
import numpy as np
import pytest

from memo_sim.contract.knobs import CpExchange
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.memory.place import place
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.arena.check_placement import check_placement
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Attention, Collective, Exchange, PointToPoint
from memo_sim.program.layout.attention_chunks import attention_chunks
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.subsequence import run_ends
from memo_sim.program.layout.token_order import token_runs
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import check_deadlock, check_stages
from memo_sim.program.verify.values import check_values
from tests.sim.small_programs import GPT, LLAMA, POLICIES, decide

EXCHANGES: list[CpExchange] = ["ring", "all_gather"]
CHUNKED = decide(
    LLAMA.of_layers([LLAMA.layer(0)]), Layout(cp=4), ("full", 0.0), attention_chunk_tokens=1024, global_batch=1
)
"""Two chunks of attention, which a ring divides."""
SEVERAL = msgspec.structs.replace(CHUNKED, micro_batch=2, global_batch=2)
"""The same of two sequences, whose halves travel one behind the other."""

SUBSEQUENCES = [
    decide(LLAMA, Layout(cp=4, cp_exchange=exchange, subsequences=3), ("full", 0.0), seq_tokens=2560, global_batch=1)
    for exchange in EXCHANGES
]
"""Three subsequences, which context-parallel ranks divide."""
SEVERAL_SUBSEQUENCES = [msgspec.structs.replace(each, micro_batch=3, global_batch=3) for each in SUBSEQUENCES]
"""The same of three sequences."""
DIVIDED = {
    "chunks": CHUNKED,
    "several": SEVERAL,
    **dict(zip(EXCHANGES, SUBSEQUENCES, strict=True)),
    **{f"{name}, several": each for name, each in zip(EXCHANGES, SEVERAL_SUBSEQUENCES, strict=True)},
}


def ranks(decisions: Decisions) -> tuple[Program, ...]:
    """Return the program of every context-parallel rank."""
    return tuple(lower(decisions, cp_rank=rank)[0] for rank in range(decisions.layout.cp))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("cp", [2, 4])
def test_the_last_rank_is_the_representative(cp: int, exchange: CpExchange) -> None:
    decisions = decide(LLAMA, Layout(cp=cp, cp_exchange=exchange))
    programs = ranks(decisions)
    assert programs[-1].sha256 == lower(decisions)[0].sha256
    assert len({program.sha256 for program in programs}) == cp


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p[0]}-{p[1]}")
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_every_rank_passes_the_checkers_and_matches_the_others(
    model: Model, policy: tuple[str, float], exchange: CpExchange
) -> None:
    programs = ranks(decide(model, Layout(cp=4, cp_exchange=exchange), policy))
    columns = [expand(program) for program in programs]
    edges = [derive_edges(each) for each in columns]
    assert check_stages(programs) == []
    assert check_deadlock(programs, columns, edges, ("cp", "grads")) == []
    for program, mine, orders in zip(programs, columns, edges, strict=True):
        assert check_program(program, mine) == []
        assert check_edges(mine, orders) == []


@pytest.mark.parametrize("decisions", DIVIDED.values(), ids=DIVIDED)
def test_ranks_divide_chunks_and_subsequences(decisions: Decisions) -> None:
    programs = ranks(decisions)
    columns = [expand(program) for program in programs]
    edges = [derive_edges(each) for each in columns]
    assert check_stages(programs) == []
    assert check_deadlock(programs, columns, edges, ("cp", "grads")) == []
    for program, mine, orders in zip(programs, columns, edges, strict=True):
        assert check_program(program, mine) == []
        assert check_edges(mine, orders) == []
        assert check_values(program, mine, decisions) == []


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_calls_of_stages_match_at_every_context_parallel_rank(exchange: CpExchange) -> None:
    decisions = decide(LLAMA, Layout(cp=2, pp=2, cp_exchange=exchange), ("tokenwise", 0.5), global_batch=4)
    by_rank = [lower(decisions, cp_rank=rank) for rank in range(2)]
    for stages in by_rank:
        assert check_stages(stages) == []
        columns = [expand(program) for program in stages]
        assert check_deadlock(stages, columns, [derive_edges(each) for each in columns]) == []
    for one, other in zip(*by_rank, strict=True):
        assert _calls(one) == _calls(other)


def _calls(program: Program) -> list[object]:
    """Return a rank's collectives, exchanges and p2p transfers, sorted by lane."""
    found = [(i.lane, i.work) for _, i in program.walk() if isinstance(i.work, Collective | Exchange | PointToPoint)]
    return sorted(found, key=lambda each: each[0])


def test_a_hop_in_the_wrong_order_is_a_deadlock() -> None:
    """A hop that waits for a later hop never starts, and nothing after it starts on either rank."""
    decisions = decide(LLAMA, Layout(cp=2))
    programs = list(ranks(decisions))
    columns = [expand(program) for program in programs]
    edges = [derive_edges(each) for each in columns]
    hops = np.flatnonzero(columns[0].lane == Lane.P2P)
    late = Edges(np.append(edges[0].producer, hops[1]), np.append(edges[0].consumer, hops[0]))
    assert check_deadlock(programs, columns, [late, edges[1]], ("cp",)) != []


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("policy", [("none", 0.0), ("tokenwise", 0.5), ("full", 0.0)], ids=lambda p: p[0])
def test_the_representatives_arena_serves_every_rank(policy: tuple[str, float], exchange: CpExchange) -> None:
    """All ranks have the same buffers, sizes and addresses; only the lifetimes differ."""
    _serves_every_rank(decide(LLAMA, Layout(cp=4, cp_exchange=exchange), policy))


@pytest.mark.parametrize("decisions", DIVIDED.values(), ids=DIVIDED)
def test_the_representatives_arena_serves_every_rank_of_divided_parts(decisions: Decisions) -> None:
    _serves_every_rank(decisions)


def _serves_every_rank(decisions: Decisions) -> None:
    placement = place(requests_of(lower(decisions)[0]), solver="greedy")
    offsets = dict(zip(placement.ids, placement.offset_bytes, strict=True))
    for program in ranks(decisions):
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
        faults = check_placement(own, wanted)
        assert [fault for fault in faults if "lower bound" not in fault] == []


@pytest.mark.parametrize(("exchange", "batch"), [(each, batch) for each in EXCHANGES for batch in (1, 2)])
@pytest.mark.parametrize("cp", [2, 4])
def test_every_query_attends_to_every_earlier_key_once(cp: int, batch: int, exchange: CpExchange) -> None:
    """Count the pairs in the calls of all ranks, forward and backward, by each row's position in its sequence."""
    chunk = 8
    seq = 2 * cp * chunk
    decisions = decide(GPT, Layout(cp=cp, cp_exchange=exchange), seq_tokens=seq, micro_batch=batch, global_batch=batch)
    for template, phase in (("layer.fwd", "fwd"), ("layer.bwd", "bwd")):
        met: Counter[tuple[int, int, int]] = Counter()
        for rank, program in enumerate(ranks(decisions)):
            calls = next(t for t in program.templates if t.name == template)
            for call in calls.instructions:
                if isinstance(call.work, Attention):
                    queries = _own(rank, cp, chunk)[-call.work.q_tokens :]
                    keys = _keys(call, rank, cp, chunk, batch)
                    assert call.work.k_tokens == len(keys)
                    for q in queries.tolist():
                        seen = keys[keys <= q] if call.work.mask == "causal" else keys
                        met.update((s, q, k) for s in range(batch) for k in seen.tolist())
        wanted = {(s, q, k) for s in range(batch) for q in range(seq) for k in range(q + 1)}
        assert set(met.values()) == {1}, phase
        assert met.keys() == wanted, phase


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD])
def test_every_query_in_a_divided_chunk_attends_to_every_earlier_key_once(phase: Phase) -> None:
    """Count the pairs in the calls of both ranks, by the places of their rows in the sequence."""
    decisions = decide(GPT, Layout(cp=2), ("full", 0.0), seq_tokens=640, attention_chunk_tokens=256, global_batch=1)
    held = [
        np.concatenate([np.arange(run.token, run.token + run.tokens) for run in token_runs(decisions, rank)])
        for rank in range(2)
    ]
    rows, met = attention_chunks(decisions), np.zeros((640, 640), dtype=int)
    for rank, program in enumerate(ranks(decisions)):
        for call in (i for t in program.templates for i in t.instructions if t.name in ("layer.fwd", "layer.bwd")):
            if not isinstance(call.work, Attention) or call.phase is not phase:
                continue
            numbers = [int(n) for n in re.findall(r"\.[ck](\d+)", call.name)]
            hops = int("".join(re.findall(r"ring(\d+)", call.name)) or 0)
            (of,) = (o for o in call.operands if o.role == "kv")
            first, count = rows[numbers[0]]
            queries = held[rank][first : first + count][-call.work.q_tokens :]
            keys = held[(rank - hops) % 2][rows[numbers[-1]][0] + of.first :][: of.tokens]
            met[np.ix_(queries, keys)] += 1 if call.work.mask == "none" else keys <= queries[:, None]
    assert np.array_equal(met, np.tri(640, dtype=int))


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
@pytest.mark.parametrize(("exchange", "batch"), [(each, batch) for each in EXCHANGES for batch in (1, 2)])
def test_every_query_in_a_divided_subsequence_attends_to_every_earlier_key_once(
    exchange: CpExchange, batch: int, phase: Phase
) -> None:
    """Count the pairs in the calls of all ranks, by the places of their rows in the micro-batch."""
    cp, seq = 4, 4 * (5 if batch == 1 else 3) * 128
    layout = Layout(cp=cp, cp_exchange=exchange, subsequences=3, partition="length")
    decisions = decide(GPT, layout, seq_tokens=seq, micro_batch=batch, global_batch=batch)
    held = [
        np.concatenate([np.arange(run.token, run.token + run.tokens) for run in token_runs(decisions, rank)])
        for rank in range(cp)
    ]
    starts, met = (0, *accumulate(partition(decisions))), np.zeros((batch, seq, seq), dtype=int)
    runs = (0, *run_ends(partition(decisions))) if batch == 1 else starts
    for rank, program in enumerate(ranks(decisions)):
        for template in (t for t in program.templates if t.name.startswith(f"layer.{phase}.s")):
            number = int(template.name[-1])
            start, end = starts[number : number + 2]
            for call in (i for i in template.instructions if isinstance(i.work, Attention)):
                blocks = [int(n) for n in re.findall(r"\.k(\d+)", call.name)]
                low, high = (runs[blocks[0]], min(start, runs[blocks[0] + 1])) if blocks else (start, end)
                (of,) = (o for o in call.operands if o.role == "kv")
                hops = int("".join(re.findall(r"ring(\d+)", call.name)) or 0)
                rows = held[(rank - hops) % cp]
                if template.slots[of.slot].startswith("kv.all"):
                    parts = [_travelling(each[low:high], batch, own=not blocks) for each in held]
                    rows = np.stack(parts, axis=1).reshape(-1)
                elif template.slots[of.slot].startswith("kv.ring"):
                    rows = _travelling(rows[low:high], batch, own=not blocks).reshape(-1)
                keys = rows[of.first :][: of.tokens].reshape(batch, -1)
                queries = held[rank][start:end].reshape(batch, -1)[:, -call.work.q_tokens :]
                for sequence in range(batch):
                    q, k = queries[sequence] - sequence * seq, keys[sequence] - sequence * seq
                    assert {*(q // seq), *(k // seq)} == {0}  # of this sequence
                    met[sequence][np.ix_(q, k)] += 1 if call.work.mask == "none" else k <= q[:, None]
    assert all(np.array_equal(each, np.tri(seq, dtype=int)) for each in met)


def _travelling(rows: np.ndarray, batch: int, *, own: bool) -> np.ndarray:
    """Return a rank's rows of a subsequence in the order in which ranks exchange them, in blocks.

    Of the queries' ``own`` subsequence, the early halves of all sequences come first; others go sequence by sequence.
    """
    return rows.reshape(batch, 2, -1).swapaxes(0, 1).reshape(2, -1) if own else rows.reshape(batch, -1)


def _own(rank: int, cp: int, chunk: int) -> np.ndarray:
    """Return the positions of a rank's rows in a sequence."""
    late = 2 * cp - 1 - rank
    return np.r_[rank * chunk : (rank + 1) * chunk, late * chunk : (late + 1) * chunk]


def _keys(call: Instruction, rank: int, cp: int, chunk: int, batch: int) -> np.ndarray:
    """Return the positions of the keys of one sequence that a call reads."""
    keys = [o for o in call.operands if o.role == "kv"]
    if not keys:
        return _own(rank, cp, chunk)
    name = call.name.partition("attn.")[2]
    if name.startswith("ring"):
        step = int(name[4 : (name + ".").index(".")])
        chunks = _own((rank - step) % cp, cp, chunk)
    else:
        order = [*range(cp), *range(2 * cp - 1, cp - 1, -1)]
        chunks = np.concatenate([np.arange(c * chunk, (c + 1) * chunk) for c in order])
        assert batch == 1 or keys[0].tokens == batch * chunk  # in two chunks the keys of a sequence are no range
    first, end = keys[0].first // batch, (keys[0].first + keys[0].tokens) // batch
    return chunks[first:end]
