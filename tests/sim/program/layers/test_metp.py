"""METP's programs: independent checkers, FLOPs, and its rows of the paper's Tables 1 and 2 (``paper_layer.py``).

Where the paper leaves out a buffer, the test names it beside the paper's figure. ``test_metp_rivals.py`` tests the rows
of the other methods.
"""

from __future__ import annotations

from math import log2

import msgspec
import pytest
from hypothesis import given, settings

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.program.ir.instruction import BufferClass, Mode
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Attention, Gemm
from memo_sim.program.lower import lower
from tests.sim.program.layers.paper_layer import Sizes, elements, peak_elements, sent, sizes, template
from tests.sim.small_programs import GPT, LLAMA, POLICIES, decide, faults_of


def metp(ranks: int, **more: object) -> Layout:
    return Layout(**{"metp": ranks, **more})  # type: ignore[arg-type]


def chosen(model: Model, layout: Layout, policy: tuple[str, float] = ("none", 0.0)) -> Decisions:
    """Return decisions with sequences of 2048 tokens; the second field of ``policy`` is the swapped share."""
    swapped = int(policy[1] * 2048) // layout.metp
    decisions = decide(model, layout, (policy[0], 0.0), seq_tokens=2048)
    return msgspec.structs.replace(decisions, swapped_tokens=swapped)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("model", "ranks"), [(GPT, 4), (LLAMA, 2)], ids=["gpt", "llama"])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_checkers_find_nothing(model: Model, ranks: int, policy: tuple[str, float], overlap: bool) -> None:
    assert faults_of(chosen(model, metp(ranks, overlap_exchanges=overlap), policy)) == []


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("policy", [("tokenwise", 0.5), ("full", 0.0)])
def test_the_checkers_find_nothing_on_stages_that_divide_gradients(policy: tuple[str, float], zero: int) -> None:
    assert faults_of(chosen(LLAMA, metp(2, pp=2, dp=2, zero=zero), policy)) == []


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy[0] != "full"])
def test_the_checkers_find_nothing_with_kept_norms(policy: tuple[str, float]) -> None:
    decisions = msgspec.structs.replace(chosen(GPT, metp(4), policy), keep_norms=True)
    assert faults_of(decisions) == []


@pytest.mark.parametrize("kept", [True, False])
def test_kept_norms_are_not_recomputed(kept: bool) -> None:
    (program,) = lower(msgspec.structs.replace(chosen(LLAMA, metp(2)), keep_norms=kept))
    norms = [i.name for _, i in program.walk() if i.name.endswith(("norm1", "norm2"))]
    again = [name for name in norms if name.startswith("rec/")]
    assert len(norms) - len(again) == 2 * LLAMA.layers * program.micro_batches
    assert len(again) == (0 if kept else 2 * LLAMA.layers * program.micro_batches)


@pytest.mark.parametrize(
    ("layout", "changes", "where"),
    [
        (metp(2, tp=2), {}, "layout.tp"),
        (metp(2, cp=2), {}, "layout.cp"),
        (metp(2, ulysses=2), {}, "layout.ulysses"),
        (metp(2, pp=5, schedule="zero-bubble"), {}, "layout.schedule"),
        (metp(2, subsequences=2), {}, "layout.subsequences"),
        (metp(2), {"recompute": "selective"}, "decisions.recompute"),
        (metp(2), {"memory_policy": "eager"}, "decisions.memory_policy"),
        (metp(2), {"recompute": "full", "keep_norms": True}, "decisions.keep_norms"),
        (Layout(tp=2), {"keep_norms": True}, "decisions.keep_norms"),
        (metp(8), {}, "heads"),
    ],
)
def test_incompatible_options_are_refused(layout: Layout, changes: dict, where: str) -> None:
    with pytest.raises(Infeasible) as refused:
        lower(msgspec.structs.replace(decide(GPT, layout, seq_tokens=2048), **changes))
    assert refused.value.where == where
    assert refused.value.hint


BOTH_WAYS = msgspec.structs.replace(GPT, bidirectional=True)


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=4), metp(2), metp(4)])
def test_without_a_mask_every_query_attends_to_every_key(layout: Layout) -> None:
    decisions = chosen(BOTH_WAYS, layout)
    assert faults_of(decisions) == []
    ranks = [lower(decisions, cp_rank=rank)[0] for rank in range(layout.ring)]
    works = [i.work for program in ranks for _, i in program.walk() if isinstance(i.work, Attention)]
    pairs = sum(w.batch * w.q_tokens * w.k_tokens * w.heads for w in works if not w.backward)
    assert {w.mask for w in works} == {"none"}
    assert pairs == decisions.micro_batches * BOTH_WAYS.layers * BOTH_WAYS.heads * 2048**2


@pytest.mark.parametrize(
    ("layout", "kernel", "where"),
    [
        (Layout(cp=2, cp_exchange="all_gather"), "flash2", "layout.cp_exchange"),
        (Layout(subsequences=2), "flash2", "layout.subsequences"),
        (Layout(), "plain", "decisions.kernels.attention"),
    ],
)
def test_options_that_need_a_causal_mask_are_refused_without_one(layout: Layout, kernel: str, where: str) -> None:
    decisions = decide(BOTH_WAYS, layout, seq_tokens=2048, kernels=Kernels(attention=kernel))
    with pytest.raises(Infeasible) as refused:
        lower(decisions)
    assert refused.value.where == where


def flops(program: Program) -> float:
    return sum(i.work.flops for _, i in program.walk() if isinstance(i.work, Gemm | Attention))


@pytest.mark.parametrize(("model", "ranks"), [(GPT, 2), (GPT, 4), (LLAMA, 4)])
def test_ranks_together_compute_the_whole_model_and_two_products_again(model: Model, ranks: int) -> None:
    decisions = chosen(model, metp(ranks))
    found = sum(flops(lower(decisions, cp_rank=rank)[0]) for rank in range(ranks))
    up = 2 * model.ffn_hidden if model.gated else model.ffn_hidden
    rebuilt = 2.0 * 2048 * model.hidden * (up + model.q_width + 2 * model.kv_width)
    alone = flops(lower(chosen(model, Layout()))[0])
    assert found == pytest.approx(alone + decisions.micro_batches * model.layers * rebuilt, rel=1e-12)


@given(size=sizes())
@settings(max_examples=15, deadline=None)
def test_table_1_of_metp(size: Sizes) -> None:
    p, h, bsh = size.p, size.h, size.bsh
    program = size.program(metp=p)
    assert sent(program, "send_recv", ("ffn.", "d_ffn.")) == 24 * (p - 1) * h * h / p
    assert elements(template(program, "layer.fwd.last"), "up") * p * p == 4 * bsh


@given(size=sizes())
@settings(max_examples=15, deadline=None)
def test_table_2_of_metp(size: Sizes) -> None:
    p, h, bsh = size.p, size.h, size.bsh
    program = size.program(metp=p)
    # A broadcast or a reduction of N elements counts log2(p) N, as in a tree.
    passed = (sent(program, "broadcast") + sent(program, "reduce")) * log2(p)
    assert passed == 12 * log2(p) * h * h
    assert sent(program, "send_recv", ("kv.", "d_kv.")) == 6 * (p - 1) * bsh / p
    assert elements(template(program, "layer.fwd.last"), "qkv") * p * p == 3 * bsh


@given(size=sizes())
@settings(max_examples=10, deadline=None)
def test_states_and_kept_tensors_are_those_of_the_tables(size: Sizes) -> None:
    """States are parameters, gradients and moments of a layer; kept are the inputs of both halves and attn's output.

    The input of a half is the input of its norm. With kept norms the result of the norm is kept too, which is bsh / p
    in Table 1.
    """
    p, h = size.p, size.h
    program = size.program(metp=p)
    states = [f for f in program.families if f.name.endswith(".layer") and f.buffer_class is BufferClass.STATE]
    norms = 4 * h
    assert sum(f.tokens for f in states) == 4 * (12 * h * h // p + norms)
    kept = [f for f in program.families if f.name.startswith("skeletal.")]
    lse = [f for f in kept if ".lse." in f.name]
    assert sum(f.tokens * f.features for f in kept if f not in lse) * p == 3 * size.bsh
    assert sum(f.tokens * f.features for f in lse) * p == size.b * size.s * h // 16
    norms_too = [f for f in size.program(keep_norms=True, metp=p).families if f.name.startswith("skeletal.")]
    added = {f.name.removeprefix("skeletal."): f for f in norms_too if f.name not in {each.name for each in kept}}
    assert added.keys() == {"norm1", "norm1_stats", "norm2", "norm2_stats"}
    assert all(added[name].tokens * added[name].features * p == size.bsh for name in ("norm1", "norm2"))


def test_the_mlps_peak_is_the_papers_plus_the_buffers_that_it_leaves_out() -> None:
    """The paper counts T, which has 4 bsh/p2, beside the kept bsh/p.

    It leaves out the result of f, the norm's output, the sum, and the buffers of arriving weights.
    """
    size = Sizes(2, 1024, 128, 4)
    p, h, bsh = size.p, size.h, size.bsh
    found, names = peak_elements(size.program(metp=p), "layer.fwd.last", "norm2", "ffn_down.t3")
    assert names == {"up", "act", "norm2", "down_out", "ffn.weights0", "ffn.weights1"}
    left_out = 4 * bsh // p**2 + 2 * bsh // p + 2 * 8 * h * h // p
    assert found == 4 * bsh // p**2 + left_out


def test_a_rank_reads_the_weights_of_a_step_after_their_arrival() -> None:
    """The products of each step read the buffer that its hop has written; steps alternate between two buffers."""
    fwd = template(Sizes(1, 128, 64, 4).program(metp=4), "layer.fwd.last")
    slots = [fwd.slots[o.slot] for i in fwd.instructions for o in i.operands if i.op == "send_recv"]
    assert {"ffn.weights0", "ffn.weights1"} <= set(slots)
    for step in range(1, 4):
        product = next(i for i in fwd.instructions if i.name == f"fwd/ffn_up.t{step}")
        hop = next(i for i in fwd.instructions if i.name == f"fwd/ffn.weights.hop{step}")
        (read,) = (o.slot for o in product.operands if o.role == "weight")
        (taken,) = (o.slot for o in hop.operands if o.mode is Mode.WRITE)
        assert read == taken
