"""Tensor parallelism in chunks: the checkers, the work, the bytes, the buffers, and what hides behind the products."""

from __future__ import annotations

from collections import Counter

import pytest

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Exchange, Gemm, Work
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import check_calls, check_deadlock, check_stages
from tests.sim.small_programs import GPT, LLAMA, decide
from tests.sim.toy_machine import TOY_CLUSTER, alone, toy_hardware

TP = 4
PEAK = 300e12
MODELS = pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
POLICIES = [("none", 0.0), ("none", 1.0), ("full", 0.0), ("full", 1.0), ("selective", 0.0), ("operators", 0.0)]
POLICIES += [("tokenwise", 0.0), ("tokenwise", 0.5), ("tokenwise", 1.0)]
LAYOUTS = [
    Layout(tp=2, cp=2),
    Layout(tp=2, cp=2, cp_exchange="all_gather"),
    Layout(tp=2, ulysses=2),
    Layout(tp=2, dp=2, zero=3),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, schedule="zero-bubble"),
    Layout(tp=8),
]


def layout_of(tp: int = TP, overlap: str = "chunked", **more: object) -> Layout:
    return Layout(**{"tp": tp, "sequence_parallel": True, "tp_overlap": overlap, **more})


def faults(decisions: Decisions) -> list[str]:
    """Return the faults of all tensor-parallel ranks' programs, and of each stage's ranks together."""
    ranks = [lower(decisions, tp_rank=rank) for rank in range(decisions.layout.tp)]
    found = [fault for stages in ranks for fault in check_stages(stages)]
    for alike in zip(*ranks, strict=True):
        columns = [expand(program) for program in alike]
        edges = [derive_edges(each) for each in columns]
        for program, own, given in zip(alike, columns, edges, strict=True):
            found += [*check_program(program, own), *check_edges(own, given)]
        found += check_calls(alike)
        if decisions.layout.pp == 1:
            found += check_deadlock(alike, columns, edges, ("tp",))
    return found


@MODELS
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_ranks_program_passes_the_checkers(model: Model, policy: tuple[str, float]) -> None:
    assert faults(decide(model, layout_of(), policy)) == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_beside_other_layouts(layout: Layout) -> None:
    shared = {name: getattr(layout, name) for name in ("cp", "cp_exchange", "ulysses", "dp", "zero", "pp", "schedule")}
    assert faults(decide(LLAMA, layout_of(layout.tp, **shared))) == []


def test_beside_an_mlp_in_blocks_the_last_of_which_is_shorter() -> None:
    assert faults(decide(LLAMA, layout_of(2), ("full", 0.0), seq_tokens=1280, mlp_chunk_tokens=512)) == []


def test_ranks_whose_programs_differ_have_the_same_buffers_and_names() -> None:
    (first,), (last,) = (lower(decide(LLAMA, layout_of()), tp_rank=rank) for rank in (0, TP - 1))
    assert first != last
    assert first.families == last.families
    assert [(name, i.work) for name, i in first.walk()] == [(name, i.work) for name, i in last.walk()]


def sent_bytes(program: Program) -> Counter[str]:
    """Return the bytes that a rank sends to other tensor-parallel ranks, by phase."""
    total: Counter[str] = Counter()
    for _, i in program.walk():
        if isinstance(i.work, Exchange) and i.work.group == "tp":
            total[i.phase] += i.work.bytes
        elif isinstance(i.work, Collective) and i.work.kind in ("all_gather", "reduce_scatter"):
            total[i.phase] += i.work.bytes * (i.work.ranks - 1) // i.work.ranks
    return total


def flops(program: Program) -> Counter[str]:
    """Return the FLOPs of products, by phase."""
    total: Counter[str] = Counter()
    for _, i in program.walk():
        if isinstance(i.work, Gemm):
            total[i.phase] += int(i.work.flops)
    return total


@MODELS
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("more", [{}, {"pp": 2, "schedule": "zero-bubble"}], ids=["one stage", "zero-bubble"])
def test_bytes_and_flops_are_those_of_the_plain_collectives(
    model: Model, policy: tuple[str, float], more: dict[str, object]
) -> None:
    stages = [lower(decide(model, layout_of(overlap=overlap, **more), policy)) for overlap in ("none", "chunked")]
    for plain, chunked in zip(*stages, strict=True):
        assert sent_bytes(plain) == sent_bytes(chunked)
        assert flops(plain) == flops(chunked)


def names(program: Program, template: str) -> list[str]:
    (found,) = (t for t in program.templates if t.name == template)
    return [i.name for i in found.instructions]


def test_hops_are_written_ahead_of_the_products_that_they_overlap() -> None:
    (program,) = lower(decide(LLAMA, layout_of(tp=2)))
    gathered = ["norm2.own", "norm2.gather1", "ffn_up.c0", "ffn_up.c1", "act"]
    summed = ["ffn_down.c0", "ffn_down.scatter1", "ffn_down.c1", "ffn_down.sum", "out_add"]
    assert names(program, "layer.fwd")[-10:] == [f"fwd/{name}" for name in gathered + summed]


@pytest.mark.parametrize(
    ("more", "chunks"), [({}, 1), ({"pp": 2, "schedule": "zero-bubble"}, 2)], ids=["whole", "W pass"]
)
def test_sums_of_input_gradients_are_whole_where_weight_gradients_hide_them(
    more: dict[str, object], chunks: int
) -> None:
    program = lower(decide(LLAMA, layout_of(2, **more)))[0]
    found = names(program, "layer.bwd")
    assert sum(name.startswith("bwd/ffn_up.dgrad") for name in found) == chunks
    assert ("bwd/d_norm2.scatter" in found) == (chunks == 1)


def test_buffers_of_chunks() -> None:
    """The gathered rows are whole; behind a product there are two chunks to send, and one of every rank to add up."""
    decisions = decide(LLAMA, layout_of())
    (found,) = (t for t in lower(decisions)[0].templates if t.name == "layer.fwd")
    exchanged = {f.name: f.tokens for f in found.own if f.buffer_class is BufferClass.EXCHANGE}
    tokens, chunk = decisions.seq_tokens, decisions.seq_tokens // TP
    after = {"parts": tokens, "sent0": chunk, "sent1": chunk}
    wanted = {f"{product}.{name}": rows for product in ("proj", "ffn_down") for name, rows in after.items()}
    wanted |= {"fwd.norm1_full": tokens, "fwd.norm2_full": tokens, "proj_shard": chunk, "ffn_down_shard": chunk}
    assert exchanged == wanted
    assert {f.name for f in found.own} & {"proj_out", "down_out"} == set()


class Ideal:
    """Prices: products at the peak rate, hops between tensor-parallel ranks in ``hop_s``, all else is free."""

    def __init__(self, hop_s: float) -> None:
        self.outside_of: dict[Work, frozenset[str]] = {}
        self.hop_s = hop_s

    def seconds(self, work: Work) -> float:
        if isinstance(work, Gemm):
            return work.flops / PEAK
        return self.hop_s if isinstance(work, Exchange) else 0.0


def played(hop_s: float) -> Simulation:
    decisions = decide(GPT, layout_of(), global_batch=1)
    return simulate(decisions, toy_hardware(), TOY_CLUSTER, pricer=Ideal(hop_s), rates=alone)


def test_hops_that_are_shorter_than_any_chunks_product_hide() -> None:
    (program,) = lower(decide(GPT, layout_of(), global_batch=1))
    chunks = [i.work.flops / PEAK for _, i in program.walk() if isinstance(i.work, Gemm) and ".c" in i.name]
    free, hidden, longer = (played(hop_s).prediction.step_s or 0.0 for hop_s in (0.0, 0.9 * min(chunks), 1e-3))
    assert hidden == pytest.approx(free, rel=1e-9)
    hops = sum(isinstance(i.work, Exchange) for _, i in program.walk())
    # Of long hops every one is waited for, and the products run meanwhile.
    assert 1e-3 * hops <= longer < 1e-3 * hops + free
