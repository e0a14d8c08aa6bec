"""Experts and latent attention in FP8: programs pass the checkers; copies, bytes and work are as by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.experts import Experts
from memo_sim.contract.knobs import Fp8Layouts, Fp8Recipe
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.ir.kinds import FamilyKind, TemplateKind
from memo_sim.program.ir.work import Collective, Fp8Gemm, Fp8GroupedGemm, Gemm, GroupedGemm, Rowwise
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower
from tests.sim.small_programs import EXPERTS, LLAMA, decide, faults_of

SHARED = msgspec.structs.replace(LLAMA, experts=Experts(count=4, per_token=2, hidden=64, shared=128, shared_gate=True))
LATENT = msgspec.structs.replace(load_model("mla-tiny"), experts=Experts(count=4, per_token=2, hidden=64, shared=128))
WITHOUT_QUERY_LATENT = msgspec.structs.replace(
    load_model("mla-tiny"), latent=msgspec.structs.replace(load_model("mla-tiny").latent, q_rank=0)
)
RECIPES: list[tuple[Fp8Recipe, Fp8Layouts]] = [("delayed", "tn"), ("tensor", "any"), ("block", "tn"), ("mx", "any")]
HALF = ("tokenwise", 0.5)
DIVIDED = Layout(tp=2, sequence_parallel=True, dp=2, ep=2, zero=1)
TOKENS, ROWS, HIDDEN, WIDTH, SHARED_WIDTH = 2048, 2 * 2048, 256, 64, 128


def in_fp8(model: Model, layout: Layout | None = None, policy: Any = ("none", 0.0), **fields: Any) -> Decisions:
    chosen = {"fp8": "block", "fp8_experts": model.mixture is not None} | fields
    if model.latent is not None:
        chosen |= {"kernels": Kernels(attention="torch-cudnn")}
    return decide(model, layout or Layout(), policy, global_batch=layout.dp if layout else 1, **chosen)


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
@pytest.mark.parametrize("model", [SHARED, LATENT], ids=["shared expert", "latents"])
def test_divided_experts_pass_the_checkers(model: Model, recipe: tuple[Fp8Recipe, Fp8Layouts]) -> None:
    chosen = {"fp8": recipe[0], "fp8_layouts": recipe[1], "fp8_params": recipe[0] != "mx"}
    assert faults_of(in_fp8(model, DIVIDED, HALF, **chosen)) == []


@pytest.mark.parametrize(
    ("model", "layout", "policy"),
    [
        (EXPERTS, Layout(), HALF),
        (SHARED, Layout(tp=2, sequence_parallel=True), ("full", 0.0)),
        (SHARED, Layout(dp=4, ep=2, zero=3), ("none", 0.5)),
        (load_model("gpt-oss-tiny"), Layout(dp=2, ep=2), ("none", 0.0)),
        (LATENT, Layout(ulysses=2), ("selective", 0.0)),
        (WITHOUT_QUERY_LATENT, Layout(tp=2, sequence_parallel=True), HALF),
        (WITHOUT_QUERY_LATENT, Layout(cp=2), ("full", 0.0)),
    ],
)
def test_layouts_and_policies_pass_the_checkers(model: Model, layout: Layout, policy: Any) -> None:
    for alone in (False, True):
        assert faults_of(in_fp8(model, layout, policy, fp8_params=alone)) == []


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(tp=4, sequence_parallel=True, ep=2, expert_tp=1)])
def test_experts_and_the_rest_of_a_layer_may_differ_in_whether_they_are_sharded(layout: Layout) -> None:
    """Where one has a single replica, ZeRO-3 shards the other alone, and each is quantised as its own shards need."""
    sharded = msgspec.structs.replace(layout, zero=3)
    for alone in (False, True):
        decisions = in_fp8(EXPERTS, sharded, fp8_params=alone)
        assert faults_of(decisions) == []
        (program,) = lower(msgspec.structs.replace(decisions, global_batch=2 * layout.dp))
        played = [program.templates[each.template].name for each in program.instances]
        whole = "experts" if layout.tp == 1 else "layer"
        assert played.count(f"{whole}.quantize") == EXPERTS.layers
        other = "layer" if whole == "experts" else "experts"
        assert played.count(f"{other}.quantize_again") == 2 * EXPERTS.layers


def instructions(decisions: Decisions, kind: TemplateKind) -> list[Instruction]:
    (program,) = lower(decisions)
    return [i for t in program.templates if t.kind is kind for i in t.instructions]


def products(decisions: Decisions, kind: TemplateKind) -> dict[str, Any]:
    found = {i.name.partition("/")[2]: i.work for i in instructions(decisions, kind)}
    ends = ("classifier", "logits")
    return {n: w for n, w in found.items() if isinstance(w, Gemm | GroupedGemm) and not n.startswith(ends)}


def test_products_of_experts_are_those_of_bf16_in_fp8() -> None:
    for kind in (TemplateKind.FORWARD, TemplateKind.BACKWARD):
        plain, narrow = (
            products(in_fp8(SHARED, fp8=recipe, fp8_experts=recipe != "none"), kind) for recipe in ("none", "block")
        )
        assert plain.keys() == narrow.keys()
        for name, work in plain.items():
            other = narrow[name]
            assert work.flops == other.flops
            if name.startswith("experts_"):
                assert isinstance(other, Fp8GroupedGemm)
                assert (other.sizes, other.n, other.k, other.copied_bytes) == (work.sizes, work.n, work.k, 0)
            else:
                assert isinstance(other, Fp8Gemm) == (not name.startswith(("router", "shared_gate"))), name


def test_tensors_that_experts_keep_are_as_by_hand() -> None:
    decisions = in_fp8(SHARED)
    kept = {t.name: (t.dtype, t.bytes) for t in skeletal_of(decisions, shape_of(decisions), SHARED.layer(0))}
    assert kept["act"] == ("e4m3", ROWS * (WIDTH + 2))  # with a byte of scale for 32 values
    assert kept["shared_act"] == ("e4m3", TOKENS * (SHARED_WIDTH + 4))
    assert kept["up"] == ("bf16", 2 * ROWS * 2 * WIDTH)
    assert kept["norm2"] == ("bf16", 2 * TOKENS * HIDDEN)


def test_rows_are_quantised_where_a_product_reads_them() -> None:
    def quantised(kind: TemplateKind) -> dict[str, tuple[int, int]]:
        works = {i.name.partition("/")[2]: i.work for i in instructions(in_fp8(SHARED), kind) if i.op == "fp8.quantize"}
        return {n: (w.read_bytes, w.write_bytes) for n, w in works.items() if isinstance(w, Rowwise)}

    row, wide, narrow = 33 * HIDDEN // 32, WIDTH + 2, SHARED_WIDTH + 4
    forward = quantised(TemplateKind.FORWARD)
    assert forward["dispatched.rows.quantize"] == (2 * ROWS * HIDDEN, ROWS * row)
    assert forward["norm2.rows.quantize"] == (2 * TOKENS * HIDDEN, TOKENS * row)
    assert forward["act.quantize"] == (2 * ROWS * WIDTH, 2 * ROWS * wide)  # both copies at once
    assert forward["shared_act.quantize"] == (2 * TOKENS * SHARED_WIDTH, 2 * TOKENS * narrow)
    backward = quantised(TemplateKind.BACKWARD)
    assert backward["dispatched.columns.quantize"] == forward["dispatched.rows.quantize"]
    assert backward["norm2.columns.quantize"] == forward["norm2.rows.quantize"]
    assert backward["d_expert_out.quantize"] == (2 * ROWS * HIDDEN, 2 * ROWS * row)
    assert backward["d_up.quantize"] == (2 * ROWS * 2 * WIDTH, 2 * ROWS * 2 * wide)


def test_divided_experts_have_copies_of_their_own_and_rows_are_exchanged_in_bf16() -> None:
    layout = Layout(dp=2, ep=2, zero=1)
    (plain,), (narrow,) = lower(in_fp8(SHARED, layout, fp8="none", fp8_experts=False)), lower(in_fp8(SHARED, layout))
    copies = {f.name: f.bytes for f in narrow.families if f.kind is FamilyKind.PARAMS_FP8}
    mine = 2 * 3 * WIDTH * HIDDEN  # two experts with three matrices each
    assert copies["params_fp8.experts"] == 2 * mine
    shared = 3 * SHARED_WIDTH * HIDDEN
    assert copies["params_fp8.layer"] == 2 * (HIDDEN * (2 * HIDDEN + 2 * 128) + shared)

    def exchanged(program: Any) -> list[int]:
        works = [i.work for t in program.templates for i in t.instructions]
        return [w.bytes for w in works if isinstance(w, Collective) and w.kind == "all_to_all"]

    assert exchanged(plain) == exchanged(narrow)


def test_grouped_products_in_fp8_have_the_rate_of_one_product_with_all_rows() -> None:
    pricer = Pricer(load_cluster("h100-1x8")[1], load_cluster("h100-1x8")[0], Layout())
    shape = (((4096, 8),), 4096, 7168)
    one = pricer.seconds(Fp8Gemm(8 * 4096, 4096, 7168, "fprop", "bf16", "fp8-block"))
    assert pricer.seconds(Fp8GroupedGemm(*shape, "fprop", "bf16", operands="fp8-block")) == pytest.approx(one)
    assert one < pricer.seconds(GroupedGemm(*shape, "fprop", "bf16"))
    # Few rows: the time of reading every expert's weight, which is half of that in bf16.
    few = (((1, 256),), 4096, 7168)
    narrow = pricer.seconds(Fp8GroupedGemm(*few, "fprop", "bf16", operands="fp8-block"))
    assert narrow < 0.75 * pricer.seconds(GroupedGemm(*few, "fprop", "bf16"))


def test_latents_are_kept_and_gathered_in_fp8_and_their_own_product_is_in_bf16() -> None:
    decisions = in_fp8(LATENT, Layout(tp=2, sequence_parallel=True), fp8="tensor")
    latent, tokens = LATENT.latent, shape_of(decisions).shard_tokens
    assert latent is not None
    kept = {t.name: (t.dtype, t.bytes) for t in skeletal_of(decisions, shape_of(decisions), LATENT.layer(0))}
    assert kept["q_latent"] == ("e4m3", tokens * latent.q_rank)
    assert kept["kv_latent"] == ("e4m3", tokens * latent.kv_rank)
    assert kept["norm1"] == ("bf16", 2 * tokens * LATENT.hidden)
    forward = instructions(decisions, TemplateKind.FORWARD)
    gathers = {i.name: i.work.bytes for i in forward if isinstance(i.work, Collective) and i.work.kind == "all_gather"}
    assert gathers["fwd/q_latent.gather"] == 2 * tokens * latent.q_rank
    made = products(decisions, TemplateKind.FORWARD)
    assert [name for name, work in made.items() if not isinstance(work, Fp8Gemm | Fp8GroupedGemm)] == [
        "latent",
        "router",
    ]


def test_only_the_queries_part_of_a_packed_gradient_is_quantised_for_their_product() -> None:
    decisions = in_fp8(LATENT, fp8="delayed")
    found = {i.name: i.work for i in instructions(decisions, TemplateKind.BACKWARD) if i.op == "fp8.quantize"}
    queries = LATENT.heads * (LATENT.latent.nope_dim + LATENT.latent.rope_dim) if LATENT.latent else 0
    work = found["bwd/d_qkv.quantize"]
    assert isinstance(work, Rowwise)
    assert (work.read_bytes, work.write_bytes) == (2 * TOKENS * queries, 2 * TOKENS * queries)
