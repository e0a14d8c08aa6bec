"""Products in FP8: programs pass the checkers; copies, bytes and work are as by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.documents import Documents
from memo_sim.contract.experts import Experts
from memo_sim.contract.knobs import Fp8Layouts, Fp8Recipe
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.instruction import BufferClass, Instruction, Mode
from memo_sim.program.ir.kinds import FamilyKind, TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Copy, Fp8Gemm, Gemm
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.fp8 import kept, row_features, two_copies
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower
from memo_sim.program.verify.values import check_values
from tests.sim.program.verify import planted
from tests.sim.small_programs import EXPERTS, GPT, LLAMA, decide, faults_of

MIXED = EXPERTS.of_layers([LayerShape(ffn_hidden=640), *[EXPERTS.layer(0)] * 3])
HALF = ("tokenwise", 0.5)
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tensor parallel": (Layout(tp=2, sequence_parallel=True, dp=2, zero=1), {"overlap": "both", "global_batch": 4}),
    "shared heads": (Layout(tp=8, sequence_parallel=True), {}),
    "whole tokens": (Layout(tp=2), {}),
    "ring": (Layout(cp=2), {}),
    "ulysses": (Layout(ulysses=2), {}),
    "interleaved": (Layout(pp=2, virtual_stages=2, schedule="interleaved"), {"global_batch": 4}),
    "zero 3": (Layout(dp=2, zero=3), {"global_batch": 4}),
    "fsdp2": (Layout(dp=2, zero=3), {"sharding": "fsdp2", "memory_policy": "eager"}),
    "all": (Layout(tp=2, sequence_parallel=True, cp=2, pp=2, dp=2, zero=1), {"global_batch": 8}),
}
RECIPES: list[tuple[Fp8Recipe, Fp8Layouts]] = [("delayed", "tn"), ("tensor", "any"), ("block", "tn"), ("mx", "any")]
WIDTH = {"norm1": 256, "attn_fp8": 256, "norm2": 256, "act": 640}
"""Features of the tensors of LLAMA that products read in FP8."""
MATRICES = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 640
"""Weights of a layer's products."""
VECTORS = 2 * 256 + 2 * 32
"""Those of its norms."""


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_passes_the_checkers(name: str, recipe: tuple[Fp8Recipe, Fp8Layouts]) -> None:
    layout, fields = LAYOUTS[name]
    assert faults_of(decide(LLAMA, layout, HALF, fp8=recipe[0], fp8_layouts=recipe[1], **fields)) == []


@pytest.mark.parametrize("policy", [("none", 0.0), ("none", 0.5), ("full", 1.0), ("selective", 0.0)], ids=str)
def test_every_policy_passes_the_checkers(policy: tuple[str, float]) -> None:
    sharded = Layout(tp=2, sequence_parallel=True)
    assert faults_of(decide(GPT, sharded, policy, fp8="block")) == []
    assert faults_of(decide(MIXED, sharded, policy, fp8="tensor")) == []


def test_blocks_of_the_mlp_and_subsequences_pass_the_checkers() -> None:
    sharded = Layout(tp=2, sequence_parallel=True)
    assert faults_of(decide(LLAMA, sharded, ("full", 0.0), fp8="block", mlp_chunk_tokens=512)) == []
    assert faults_of(decide(LLAMA, Layout(pp=2, subsequences=4), fp8="tensor", global_batch=1)) == []


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
def test_attention_in_chunks_passes_the_checkers(recipe: tuple[Fp8Recipe, Fp8Layouts]) -> None:
    fields = {"fp8": recipe[0], "fp8_layouts": recipe[1], "attention_chunk_tokens": 512}
    for layout in (Layout(tp=2, sequence_parallel=True), Layout(ulysses=2), Layout(dp=2, zero=3)):
        assert faults_of(decide(LLAMA, layout, ("full", 1.0), mlp_chunk_tokens=512, **fields)) == []


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
@pytest.mark.parametrize("name", LAYOUTS)
def test_row_wise_recompute_passes_the_checkers(name: str, recipe: tuple[Fp8Recipe, Fp8Layouts]) -> None:
    layout, fields = LAYOUTS[name]
    cut = {"seq_tokens": 4096, "mlp_chunk_tokens": 1536 // layout.cp}  # the last block is shorter
    if layout.tp == 8:
        cut["mlp_chunk_tokens"] = 3072
    policy = ("rowwise", 0.5)
    assert faults_of(decide(LLAMA, layout, policy, fp8=recipe[0], fp8_layouts=recipe[1], **(cut | fields))) == []


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
def test_row_wise_recompute_with_attention_in_chunks_passes_the_checkers(recipe: tuple[Fp8Recipe, Fp8Layouts]) -> None:
    fields = {"fp8": recipe[0], "fp8_layouts": recipe[1], "attention_chunk_tokens": 512}
    for layout, rows in ((Layout(tp=2, sequence_parallel=True), 512), (Layout(ulysses=2), 256), (Layout(), 128)):
        assert faults_of(decide(LLAMA, layout, ("rowwise", 1.0), mlp_chunk_tokens=rows, **fields)) == []


def test_row_wise_recompute_keeps_no_copy_and_leaves_no_norm_beside_attention() -> None:
    """What outlives a layer is in bf16 alone, and attention's backward begins when a block of the norm is dead."""
    found = program("tensor", "tn", policy=("rowwise", 0.0), mlp_chunk_tokens=512)
    kept = {f.name: f.dtype for f in found.families if f.kind is FamilyKind.SKELETAL}
    assert kept == {"skeletal.x": "bf16", "skeletal.attn": "bf16", "skeletal.lse": "fp32"}
    backward = next(t for t in found.templates if t.name == "layer.bwd")
    names = [i.name for i in backward.instructions]
    attention = next(n for n, name in enumerate(names) if name.startswith("bwd/attn"))
    before, after = (
        {backward.slots[o.slot] for i in part for o in i.operands}
        for part in (backward.instructions[:attention], backward.instructions[attention:])
    )
    assert not [slot for slot in before & after if "norm1" in slot]


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
@pytest.mark.parametrize(
    "fields",
    [
        {"policy": ("rowwise", 0.0), "mlp_chunk_tokens": 512},
        {"policy": ("full", 0.0), "mlp_chunk_tokens": 512, "attention_chunk_tokens": 512},
    ],
    ids=["row-wise", "attention in chunks"],
)
def test_the_repeated_first_norm_has_only_the_copy_that_backward_reads(
    fields: dict[str, Any], recipe: tuple[Fp8Recipe, Fp8Layouts]
) -> None:
    backward = next(t for t in program(*recipe, **fields).templates if t.name == "layer.bwd")
    repeated = [n for n, i in enumerate(backward.instructions) if i.name.startswith("rec/norm1.quantize.again")]
    assert len(repeated) == 4
    for n in repeated:
        (copy,) = (o for o in backward.instructions[n].operands if o.mode is Mode.WRITE)
        uses = [(i.op, o) for i in backward.instructions[n:] for o in i.operands if o.slot == copy.slot]
        assert any(op.startswith("linear.wgrad") and use.mode is Mode.READ for op, use in uses)


def program(recipe: Fp8Recipe, layouts: Fp8Layouts = "tn", **fields: Any) -> Program:
    layout, policy = fields.pop("layout", None), fields.pop("policy", HALF)
    return lower(decide(LLAMA, layout, policy, fp8=recipe, fp8_layouts=layouts, **fields))[0]


def instructions(program: Program) -> list[tuple[Instruction, dict[str, str]]]:
    """Return the instructions of all templates, with the dtype of each operand's buffer by its role."""
    dtypes = {family.name: family.dtype for family in program.families}
    found = []
    for template in program.templates:
        own = {family.name: family.dtype for family in template.own}
        found += [
            (each, {o.role: (own | dtypes)[template.slots[o.slot]] for o in each.operands})
            for each in template.instructions
        ]
    return found


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
def test_products_of_layers_read_fp8_and_others_do_not(recipe: tuple[Fp8Recipe, Fp8Layouts]) -> None:
    gradient = "e4m3" if recipe[0] in ("block", "mx") else "e5m2"
    products = 0
    for each, dtypes in instructions(program(*recipe)):
        if isinstance(each.work, Fp8Gemm):
            products += 1
            assert each.work.dtype == "bf16"
            read = {role: dtypes[role] for role in ("x", "weight", "grad") if role in dtypes}
            assert read == {role: gradient if role == "grad" else "e4m3" for role in read}
        elif isinstance(each.work, Gemm):
            assert set(dtypes.values()) <= {"bf16", "fp32"}
            assert each.name.partition("/")[2].startswith(("logits", "classifier", "loss"))
    # Two forms of forward with row blocks (three of four products twice), and backward with and without recompute.
    assert products == 2 * (3 * 2 + 1) + 3 + 2 * 8


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
def test_bytes_that_layers_keep_are_as_by_hand(recipe: tuple[Fp8Recipe, Fp8Layouts]) -> None:
    decisions = decide(LLAMA, fp8=recipe[0], fp8_layouts=recipe[1])
    plain = decide(LLAMA)
    shape, layer, tokens = shape_of(decisions), LLAMA.layer(0), 2048
    found = {t.name: t for t in skeletal_of(decisions, shape, layer)}
    before = {t.name: t for t in skeletal_of(plain, shape, layer)}
    scaled = 33 / 32 if recipe[0] in ("block", "mx") else 1
    assert {name: t.bytes for name, t in found.items() if t.dtype == "e4m3"} == {
        name: int(scaled * width) * tokens for name, width in WIDTH.items()
    }
    assert {name: t.bytes for name, t in found.items() if name not in WIDTH} == {
        name: t.bytes for name, t in before.items() if name not in WIDTH
    }


def test_experts_and_their_router_stay_in_bf16() -> None:
    decisions = decide(EXPERTS, fp8="block")
    names = {t.name for t in skeletal_of(decisions, shape_of(decisions), EXPERTS.layer(0)) if t.dtype == "e4m3"}
    assert names == {"norm1", "attn_fp8"}
    works = [each.work for each, _ in instructions(lower(decisions)[0]) if isinstance(each.work, Fp8Gemm)]
    assert len({(work.n, work.k) for work in works if work.gemm_pass == "fprop"}) == 2


def test_swapped_bytes_follow_the_dtype_of_each_buffer() -> None:
    plain, block = (program(recipe, policy=("none", 1.0)) for recipe in ("none", "block"))
    swapped = [
        {o for t in each.templates for i in t.instructions if isinstance(i.work, Copy) for o in [i.work.bytes]}
        for each in (plain, block)
    ]
    assert 2048 * 640 * 2 in swapped[0]
    assert 2048 * 640 * 2 not in swapped[1]
    assert 2048 * 660 in swapped[1]


def gathers(program: Program) -> list[int]:
    return sorted(
        each.work.bytes
        for each, _ in instructions(program)
        if isinstance(each.work, Collective) and (each.work.kind, each.work.group) == ("all_gather", "tp")
    )


def test_sequence_parallelism_gathers_fp8() -> None:
    layout = Layout(tp=2, sequence_parallel=True)
    fields = {"layout": layout, "policy": ("none", 0.0)}
    in_bf16, in_fp8 = 2048 * 256 * 2, 2048 * 256
    plain, tensor, block = (gathers(program(recipe, **fields)) for recipe in ("none", "tensor", "block"))
    other = [size for size in plain if size != in_bf16]
    # Two forms of forward gather both norms; backward gathers them again, and two gradients.
    assert plain.count(in_bf16) - tensor.count(in_bf16) == tensor.count(in_fp8) == 2 * 2 + 2 + 2
    assert block.count(in_fp8 * 33 // 32) == 2 * 2 + 2  # gradients are gathered in bf16, then quantised both ways
    assert len(plain) == len(tensor) == len(block)
    assert [size for size in tensor if size not in (in_bf16, in_fp8)] == other


def test_only_gathered_copies_are_transposed_and_only_where_products_need_it() -> None:
    def transposes(recipe: Fp8Recipe, layouts: Fp8Layouts, tp: int) -> int:
        layout = Layout(tp=tp, sequence_parallel=tp > 1)
        found = instructions(program(recipe, layouts, layout=layout, policy=("none", 0.0)))
        return sum(each.op == "fp8.transpose" for each, _ in found)

    assert transposes("tensor", "tn", 1) == transposes("tensor", "any", 2) == transposes("mx", "any", 2) == 0
    assert transposes("tensor", "tn", 2) == 4  # norm1, norm2 and both gathered gradients
    assert transposes("block", "tn", 2) == 2


def test_current_scaling_reads_its_input_twice() -> None:
    def read(recipe: Fp8Recipe) -> set[int]:
        found = instructions(program(recipe, policy=("none", 0.0)))
        return {e.work.read_bytes for e, _ in found if e.op == "fp8.quantize" and "norm1" in e.name}

    assert read("delayed") == read("block") == {2048 * 256 * 2}
    assert read("tensor") == {2 * 2048 * 256 * 2}


@pytest.mark.parametrize(("recipe", "layouts", "copies"), [("tensor", "tn", 2), ("tensor", "any", 1), ("mx", "any", 2)])
def test_weights_are_quantised_once_a_step(recipe: Fp8Recipe, layouts: Fp8Layouts, copies: int) -> None:
    made = program(recipe, layouts, global_batch=4)
    kinds = [made.templates[each.template].kind for each in made.instances]
    assert kinds.count(TemplateKind.QUANTIZE) == LLAMA.layers
    (family,) = (f for f in made.families if f.kind is FamilyKind.PARAMS_FP8)
    assert family.buffer_class is BufferClass.STATE
    assert family.bytes == copies * (MATRICES + (MATRICES // 32 if recipe == "mx" else 0))


def test_gathered_weights_are_quantised_before_every_use() -> None:
    made = program("tensor", layout=Layout(dp=2, zero=3), global_batch=4, policy=("none", 0.0))
    kinds = [made.templates[each.template].kind for each in made.instances]
    assert kinds.count(TemplateKind.QUANTIZE) == kinds.count(TemplateKind.QUANTIZE_AGAIN) == 2 * LLAMA.layers
    assert not [f for f in made.families if f.kind is FamilyKind.PARAMS_FP8]


@pytest.mark.parametrize("recipe", [("tensor", "any"), ("block", "tn")], ids="-".join)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "fsdp2"])
def test_parameters_in_fp8_alone_pass_the_checkers(name: str, recipe: tuple[Fp8Recipe, Fp8Layouts]) -> None:
    layout, fields = LAYOUTS[name]
    chosen = {"fp8": recipe[0], "fp8_layouts": recipe[1], "fp8_params": True}
    assert faults_of(decide(LLAMA, layout, HALF, **chosen, **fields)) == []


def test_layers_of_kinds_and_eager_states_with_parameters_in_fp8_alone_pass_the_checkers() -> None:
    layout = Layout(tp=2, sequence_parallel=True, dp=2, zero=1)
    chosen = {"fp8": "tensor", "fp8_params": True, "global_batch": 2}
    assert faults_of(decide(MIXED, layout, ("none", 0.0), overlap="both", **chosen)) == []
    assert faults_of(decide(LLAMA, layout, ("none", 0.0), memory_policy="eager", **chosen)) == []
    assert faults_of(decide(GPT, Layout(dp=2, zero=2), ("full", 0.0), states="bf16", **chosen)) == []


@pytest.mark.parametrize(("layouts", "copies"), [("tn", 2), ("any", 1)])
def test_states_of_parameters_in_fp8_alone_are_as_by_hand(layouts: Fp8Layouts, copies: int) -> None:
    layout = Layout(dp=2, zero=1)
    plain, alone = (
        program("tensor", layouts, layout=layout, global_batch=2, fp8_params=given) for given in (False, True)
    )

    def held(made: Program) -> dict[FamilyKind, int]:
        found: dict[FamilyKind, int] = {}
        for f in made.families:
            if f.buffer_class is BufferClass.STATE and f.name.endswith(".layer"):
                found[f.kind] = found.get(f.kind, 0) + f.bytes
        return found

    before, after = held(plain), held(alone)
    assert after.pop(FamilyKind.PARAMS) == 2 * VECTORS
    assert before.pop(FamilyKind.PARAMS) == 2 * (MATRICES + VECTORS)
    # As many FP8 bytes as the copies beside bf16 weights; gradients, masters and moments as they were.
    columns = after.pop(FamilyKind.PARAMS_FP8_COLUMNS, 0)
    assert (after.pop(FamilyKind.PARAMS_FP8), columns) == (MATRICES, (copies - 1) * MATRICES)
    assert before.pop(FamilyKind.PARAMS_FP8) == copies * MATRICES
    assert after.pop(FamilyKind.LARGEST) == 4 * 4  # one number in fp32 for each of four matrices
    assert after == before


@pytest.mark.parametrize(
    ("recipe", "largest"),
    # 128 x 128 values: Q K V 4 x 2 blocks, projection 2 x 2, the first product of the MLP 10 x 2, the second 2 x 5
    [("delayed", 0), ("tensor", 4), ("block", 8 + 4 + 20 + 10)],
)
def test_the_optimizer_writes_fp8_and_ranks_gather_it(recipe: Fp8Recipe, largest: int) -> None:
    """Current scales of shares follow from the largest values of all ranks, which another pass finds."""
    made = program(recipe, layout=Layout(dp=2, zero=1), global_batch=2, fp8_params=True)
    (update,) = (t for t in made.templates if t.kind is TemplateKind.UPDATE and t.name.startswith("layer"))
    quantised = [i.work for i in update.instructions if i.op == "params.quantize"]
    half = MATRICES // 2
    assert [(w.rows, w.read_bytes, w.write_bytes) for w in quantised] == [(half, 4 * half, half)]
    found = [i.work for i in update.instructions if i.op == "params.largest"]
    assert [(w.read_bytes, w.write_bytes) for w in found] == [(4 * half, 4 * largest)] * (largest > 0)
    sizes = [i.work.bytes for i in update.instructions if isinstance(i.work, Collective)]
    assert sorted(sizes) == sorted([2 * VECTORS, MATRICES, *[4 * largest] * (largest > 0)])
    moved = [i.work for i in update.instructions if i.name.endswith("adamw.fp8")]
    assert [(w.read_bytes, w.write_bytes) for w in moved] == [(16 * half, 12 * half)]  # no copy in bf16
    kinds = [made.templates[each.template].kind for each in made.instances]
    assert kinds.count(TemplateKind.QUANTIZE) == LLAMA.layers
    (turned,) = (t for t in made.templates if t.kind is TemplateKind.QUANTIZE)
    assert [(i.op, i.work.read_bytes, i.work.write_bytes) for i in turned.instructions] == [
        ("params.transpose", MATRICES, MATRICES)
    ]


def test_zero_3_gathers_fp8_and_transposes_it_for_backward_alone() -> None:
    fields = {"layout": Layout(dp=2, zero=3), "global_batch": 4, "policy": ("none", 0.0)}
    made = program("tensor", fp8_params=True, **fields)
    gathered = [
        i.work.bytes
        for t in made.templates
        if t.kind in (TemplateKind.GATHER, TemplateKind.REGATHER) and t.name.startswith("layer")
        for i in t.instructions
        if isinstance(i.work, Collective)
    ]
    assert sorted(gathered) == [2 * VECTORS, 2 * VECTORS, MATRICES, MATRICES]
    kinds = [made.templates[each.template].kind for each in made.instances]
    assert kinds.count(TemplateKind.QUANTIZE) == 0
    assert kinds.count(TemplateKind.QUANTIZE_AGAIN) == 2 * LLAMA.layers
    (shard,) = (f for f in made.families if f.kind is FamilyKind.PARAMS_FP8)
    assert (shard.bytes, shard.buffer_class) == (MATRICES // 2, BufferClass.STATE)
    # On Blackwell one copy serves every product.
    kinds = [t.kind for t in program("tensor", "any", fp8_params=True, **fields).templates]
    assert TemplateKind.QUANTIZE_AGAIN not in kinds


def test_parameters_in_fp8_that_were_not_updated_are_found() -> None:
    decisions = decide(LLAMA, Layout(dp=2, zero=1), ("none", 0.0), fp8="tensor", fp8_params=True, global_batch=2)
    (made,) = lower(decisions)
    faults = {
        "params.quantize": "not those that were updated",
        "params.transpose": "hold nothing",
        "params.largest": "before they were found",
        "fp8.max_reduce": "before the largest values of all shares were reduced",
    }
    for op, fault in faults.items():
        (number, *_) = planted.places(made, lambda each, op=op: each.op == op)
        broken = planted.without(made, number, lambda each, op=op: each.op == op)
        assert any(fault in each for each in check_values(broken, expand(broken), decisions)), op


def test_plans_without_fp8_have_nothing_of_it() -> None:
    decisions = decide(LLAMA)
    tensors = skeletal_of(decisions, shape_of(decisions), LLAMA.layer(0))
    assert kept(decisions, LLAMA.layer(0), tensors) is tensors
    assert not [each for each, _ in instructions(lower(decisions)[0]) if "fp8" in each.op or "quant" in each.op]


def test_scales_lie_behind_the_values_of_a_row() -> None:
    assert [row_features(recipe, 256) for recipe in ("delayed", "tensor", "block", "mx")] == [256, 256, 264, 264]
    both = [two_copies(decide(fp8=recipe, fp8_layouts=layouts)) for recipe, layouts in RECIPES]
    assert both == [True, False, True, True]


def test_a_quantisation_that_is_left_out_is_found() -> None:
    decisions = decide(LLAMA, policy=("none", 0.0), fp8="block")
    (made,) = lower(decisions)
    for op in ("fp8.quantize", "params.quantize"):
        (number, *_) = planted.places(made, lambda each, op=op: each.op == op)
        broken = planted.without(made, number, lambda each, op=op: each.op == op)
        assert any("hold nothing" in fault for fault in check_values(broken, expand(broken), decisions)), op


SHARED = msgspec.structs.replace(LLAMA, experts=Experts(count=4, per_token=2, hidden=64, shared=128))


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (load_model("gemma3-tiny"), {}),
        (load_model("sinks-tiny"), {}),
        (SHARED, {}),
        (LLAMA, {"documents": Documents(lengths=((256, 1),))}),
        (LLAMA, {"grad_sums": "params", "states": "pure-bf16"}),
    ],
    ids=["norms behind, windows", "sinks", "shared expert", "documents", "sums in bf16"],
)
def test_other_layers_pass_the_checkers(model: Model, fields: dict[str, Any]) -> None:
    sharded = Layout(tp=2, sequence_parallel=True)
    assert faults_of(decide(model, sharded, HALF, fp8="block", **fields)) == []
    assert faults_of(decide(model, Layout(cp=2, dp=2, zero=3), ("full", 0.0), fp8="tensor", **fields)) == []
