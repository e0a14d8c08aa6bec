"""Experts: the programs of every layout pass the independent checkers; rows, bytes and FLOPs are as by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.experts import Experts
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.plan import Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.work import Collective, Gemm, GroupedGemm
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.expert_load import nearest_load, rows_of, shown_load, sizes_of
from memo_sim.program.layout.parameters import layer_block
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.skeletal import Fate
from memo_sim.program.lower import lower
from memo_sim.program.verify.values import check_values
from tests.pairs import covering
from tests.sim.program.verify import planted
from tests.sim.small_programs import EXPERTS, POLICIES, decide, faults_of

MIXED = EXPERTS.of_layers([LayerShape(ffn_hidden=640), *[EXPERTS.layer(0)] * 3])
"""The first layer has an MLP, as in DeepSeek's models."""
DEEPSEEK = Experts(
    count=8,
    per_token=2,
    hidden=192,
    scores="sigmoid",
    scale=2.5,
    groups=4,
    groups_per_token=2,
    selection_bias=True,
    selection_rate=0.001,
    shared=384,
)
GPT_OSS = Experts(count=8, per_token=2, hidden=192, router_bias=True, bias=True, activation="clamped", z_loss=0.001)
ROUTED = {
    "deepseek": EXPERTS.of_layers([LayerShape(ffn_hidden=640), *[LayerShape(ffn_hidden=640, experts=DEEPSEEK)] * 3]),
    "gpt-oss": msgspec.structs.replace(EXPERTS, experts=GPT_OSS, qkv_bias=True, proj_bias=True),
}
ROUTED["qwen2-moe"] = msgspec.structs.replace(
    EXPERTS, qkv_bias=True, experts=Experts(count=8, per_token=2, hidden=192, shared=384, shared_gate=True)
)
HALF = ("tokenwise", 0.5)
LAYOUTS = {
    "tensor parallel": (Layout(tp=2, sequence_parallel=True, dp=2, zero=3), {}),
    "tensor parallel, whole tokens": (Layout(tp=4), {}),
    "tensor parallel with all": (Layout(tp=2, sequence_parallel=True, cp=2, ulysses=2, pp=2), {"global_batch": 4}),
    "ring": (Layout(cp=4), {}),
    "all-gather": (Layout(cp=4, cp_exchange="all_gather"), {}),
    "ulysses": (Layout(ulysses=4), {}),
    "interleaved": (Layout(pp=2, virtual_stages=2, schedule="interleaved"), {"global_batch": 4}),
    "zero 1": (Layout(dp=2, zero=1), {"overlap": "both"}),
    "zero 3": (Layout(dp=2, zero=3), {"states": "host"}),
    "all": (Layout(cp=2, ulysses=2, pp=2, dp=2), {"global_batch": 8}),
    "pure bf16": (Layout(dp=2, zero=3), {"states": "pure-bf16"}),
}


ROW_BLOCKS = {name: case for name, case in LAYOUTS.items() if name != "pure bf16"}


@pytest.mark.parametrize(("name", "model"), covering(ROW_BLOCKS, {"experts": EXPERTS, **ROUTED}))
def test_row_wise_recompute_passes_the_checkers(name: str, model: str) -> None:
    """Two row blocks, each routed by itself; the second is a third of the first."""
    (layout, fields), granule = ROW_BLOCKS[name], 256
    cut = {"seq_tokens": 4 * granule * layout.cp * layout.ulysses, "mlp_chunk_tokens": 3 * granule}
    chosen = {"experts": EXPERTS, **ROUTED}[model]
    assert faults_of(decide(chosen, layout, ("rowwise", 0.5), **(cut | fields))) == []


@pytest.mark.parametrize(
    ("op", "role", "said"),
    [
        ("experts.dispatch", "order", "not route_order"),
        ("experts.combine", "places", "not route_places"),
        ("experts.linear", "x", "ends is not route_ends"),
    ],
)
def test_rows_of_another_block_are_found(op: str, role: str, said: str) -> None:
    """The last rows of the first block are left where the second one is shorter."""
    decisions = decide(EXPERTS, None, ("rowwise", 0.0), seq_tokens=1024, mlp_chunk_tokens=768, global_batch=1)
    (program,) = lower(decisions)

    def second(instruction: Instruction) -> bool:
        return instruction.op == op and instruction.name.endswith(".b1")

    wrong = planted.replaced(program, planted.places(program, second)[0], second, lambda i: _later(i, role))
    assert any(said in fault for fault in check_values(wrong, expand(wrong), decisions))


def _later(instruction: Instruction, role: str) -> Instruction:
    """Return an instruction that reads an operand behind the rows that the shorter block has written."""
    moved = tuple(
        msgspec.structs.replace(o, first=o.first + o.tokens) if o.role == role else o for o in instruction.operands
    )
    return msgspec.structs.replace(instruction, operands=moved)


@pytest.mark.parametrize("policy", [*POLICIES[1::3], ("selective", 0.0), ("norms", 0.0), ("mlp", 0.0)], ids=str)
def test_every_policy_passes_the_checkers(policy: tuple[str, float]) -> None:
    assert faults_of(decide(EXPERTS, policy=policy)) == []


@pytest.mark.parametrize("policy", [("none", 1.0), HALF, ("full", 0.5), ("full", 0.0)], ids=str)
def test_layers_without_experts_pass_the_checkers(policy: tuple[str, float]) -> None:
    assert faults_of(decide(MIXED, policy=policy)) == []
    assert faults_of(decide(MIXED, Layout(cp=2, pp=2, dp=2, zero=1), policy, global_batch=8)) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_passes_the_checkers(name: str) -> None:
    layout, fields = LAYOUTS[name]
    assert faults_of(decide(EXPERTS, layout, HALF, **fields)) == []


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("policy", [("none", 0.0), ("mlp", 0.0), ("full", 0.5)], ids=str)
def test_shared_experts_and_biases_pass_the_checkers(name: str, policy: tuple[str, float]) -> None:
    assert faults_of(decide(ROUTED[name], policy=policy)) == []


SOME = ["tensor parallel with all", "zero 3", "zero 1"]


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize(
    "layout", [*SOME, *[pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if n not in SOME]]
)
def test_shared_experts_and_biases_go_with_every_layout(name: str, layout: str) -> None:
    if name == "deepseek" and layout == "pure bf16":
        with pytest.raises(Infeasible, match="bf16 holds neither"):
            lower(decide(ROUTED[name], LAYOUTS[layout][0], HALF, **LAYOUTS[layout][1]))
        return
    chosen, fields = LAYOUTS[layout]
    assert faults_of(decide(ROUTED[name], chosen, HALF, **fields)) == []


BESIDE = [
    *[("deepseek", op) for op in ("linear.add", "linear.dgrad.add", "router.balance")],
    *[("gpt-oss", f"experts.{op}") for op in ("bias", "bias.bwd", "clamped", "clamped.bwd")],
    *[("gpt-oss", f"experts.out_bias{op}") for op in ("", ".dgrad", ".wgrad")],
    *[("qwen2-moe", f"shared_gate{op}") for op in ("", ".swiglu", ".swiglu.bwd", ".bwd", ".dgrad", ".wgrad")],
]


@pytest.mark.parametrize(("name", "op"), BESIDE)
def test_a_kernel_of_theirs_left_out_is_found(name: str, op: str) -> None:
    decisions = decide(ROUTED[name], Layout(tp=2, sequence_parallel=True), HALF, global_batch=1)
    (program,) = lower(decisions)
    number = planted.places(program, lambda each: each.op == op)[0]
    less = planted.without(program, number, lambda each: each.op == op)
    assert check_values(less, expand(less), decisions)


def test_a_gate_of_the_shared_expert_is_one_vector_and_one_number_of_each_token() -> None:
    model = ROUTED["qwen2-moe"]
    tensors = {t.name: t for t in skeletal_of(decide(model), shape_of(decide(model)), model.layer(0))}
    gate = tensors["route_shared_gate"]
    assert (gate.tokens, gate.features, gate.fate) == (2048, 1, Fate.WHOLE)
    block = layer_block(model, 2, model.layer(0))
    found = block.find("shared_gate.weight")
    assert found is not None
    assert (found.shape, (found.first, 256) in block.partial_runs(sequence_parallel=False)) == ((1, 256), True)
    assert layer_block(model, 1, model.layer(0)).elements == model.layer_params(0)


def test_a_shared_expert_by_hand() -> None:
    """Its tensors are rows of tokens, its features are divided, and its products are plain ones of all tokens."""
    decisions = decide(ROUTED["deepseek"], Layout(tp=4), HALF, global_batch=1)
    shape = ROUTED["deepseek"].layer(1)
    tensors = {t.name: t for t in skeletal_of(decisions, shape_of(decisions), shape)}
    for name, width in (("shared_up", 2 * 384), ("shared_act", 384)):
        found = tensors[name]
        assert (found.tokens, found.features, found.fate) == (2048, width // 4, Fate.BY_TOKEN)
    (program,) = lower(decide(ROUTED["deepseek"], policy=("none", 0.0), global_batch=1))
    flops = 0.0
    for instance in program.instances:
        for each in program.templates[instance.template].instructions:
            flops += each.work.flops if "shared_" in each.name and isinstance(each.work, Gemm) else 0.0
    assert flops == 3 * 3 * 2 * 2048 * 3 * 256 * 384  # three layers, forward and twice as much in backward
    block = layer_block(ROUTED["deepseek"], 1, shape)
    router, biases = 8 * 256, {"selection.bias": 8}
    sizes = {parameter.name: parameter.elements for parameter in block.parameters}
    assert sizes["router.weight"] == router
    assert sum(sizes[n] for n in ("shared_up.weight", "shared_down.weight")) == 3 * 256 * 384
    assert DEEPSEEK.params(256) == router + 3 * 256 * (8 * 192 + 384)
    assert DEEPSEEK.params(256, active=True) == router + 3 * 256 * (2 * 192 + 384)
    trained = sum(size for name, size in sizes.items() if name not in biases)
    assert trained == ROUTED["deepseek"].layer_params(1)
    assert [name for name, _, _ in block.runs()] == ["decay", "selection", "no_decay"]


def test_biases_by_hand() -> None:
    """Both products of each of 8 experts have biases, of which a token uses those of two; the router has one."""
    block = layer_block(ROUTED["gpt-oss"], 1, ROUTED["gpt-oss"].layer(0))
    sizes = {parameter.name: parameter.elements for parameter in block.parameters}
    assert (sizes["experts_up.bias"], sizes["experts_down.bias"], sizes["router.bias"]) == (8 * 384, 8 * 256, 8)
    assert block.elements == ROUTED["gpt-oss"].layer_params(0)
    unused = 6 * (3 * 256 * 192 + 384 + 256)
    assert ROUTED["gpt-oss"].active_params == ROUTED["gpt-oss"].total_params - 4 * unused


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"groups": 3}, "3 groups do not divide 8 experts"),
        ({"groups": 8}, "into groups of two or more"),
        ({"groups": 2, "groups_per_token": 3}, "more than the 2 groups"),
        ({"groups": 4, "per_token": 3}, "more than the experts of 1 of 4 groups"),
        ({"selection_rate": 0.1}, "needs a selection_bias"),
        ({"scores": "sigmoid", "z_loss": 0.1}, "need softmax scores"),
    ],
)
def test_routers_that_cannot_be_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Experts(**{"count": 8, "per_token": 2, "hidden": 64, **fields})


OPS = (
    *("router", "experts.route", "experts.sort", "experts.places", "experts.dispatch", "experts.linear"),
    *("experts.swiglu", "experts.combine", "experts.linear.dgrad", "experts.linear.wgrad", "experts.swiglu.bwd"),
    *("experts.route.bwd", "router.dgrad", "router.wgrad"),
)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("op", OPS)
def test_a_kernel_left_out_is_found(op: str, tp: int) -> None:
    decisions = decide(EXPERTS, Layout(tp=tp, sequence_parallel=tp > 1), HALF, global_batch=1)
    (program,) = lower(decisions)
    number = planted.places(program, lambda each: each.op == op)[0]
    less = planted.without(program, number, lambda each: each.op == op)
    assert check_values(less, expand(less), decisions)


@pytest.mark.parametrize("op", ["experts.linear", "experts.dispatch", "experts.swiglu"])
def test_a_recomputed_kernel_left_out_is_found(op: str) -> None:
    decisions = decide(EXPERTS, policy=HALF, global_batch=1)
    (program,) = lower(decisions)

    def again(each: planted.Instruction) -> bool:
        return each.op == op and each.phase is Phase.RECOMPUTE

    less = planted.without(program, planted.places(program, again)[0], again)
    assert check_values(less, expand(less), decisions)


def test_skeletal_tensors_by_hand() -> None:
    """Per token: 2 of 8 experts of width 192. The router keeps 8 scores, and 2 probabilities, experts and places."""
    decisions = decide(EXPERTS, policy=HALF)
    shape = shape_of(decisions)
    tensors = {t.name: t for t in skeletal_of(decisions, shape, EXPERTS.layer(0))}
    tokens, rows = shape.tokens, 2 * shape.tokens
    assert (tensors["up"].tokens, tensors["up"].features) == (rows, 2 * 192)
    assert (tensors["act"].tokens, tensors["act"].features) == (rows, 192)
    assert tensors["up"].bytes + tensors["act"].bytes == tokens * 2 * 3 * 192 * 2
    decided = [t for name, t in tensors.items() if name.startswith("route_")]
    assert sum(t.bytes for t in decided) == tokens * (8 * 4 + 2 * 4 + 3 * 2 * 8) + 8 * 4
    assert {t.fate for t in decided} == {Fate.WHOLE}
    assert all(t.tokens == tokens for t in tensors.values() if t.fate is Fate.BY_TOKEN and t.name not in ("up", "act"))


def test_products_by_hand() -> None:
    """A layer multiplies each dispatched row with three matrices of an expert, and twice as often in backward."""
    for policy, times in ((("none", 0.0), 3.0), (("full", 0.0), 4.0)):
        decisions = decide(EXPERTS, policy=policy, global_batch=1)
        (program,) = lower(decisions)
        flops = 0.0
        for instance in program.instances:
            works = [i.work for i in program.templates[instance.template].instructions]
            flops += sum(work.flops for work in works if isinstance(work, GroupedGemm))
        rows = 2 * decisions.seq_tokens
        assert flops == times * EXPERTS.layers * 2 * rows * 3 * 256 * 192


def test_tensor_parallelism_divides_the_features_of_every_expert() -> None:
    """It gathers norm and gradient, sums results and gradients of inputs, and the gradients of the logits in fp32."""
    decisions = decide(EXPERTS, Layout(tp=4, sequence_parallel=True), global_batch=1)
    tensors = {t.name: t for t in skeletal_of(decisions, shape_of(decisions), EXPERTS.layer(0))}
    assert (tensors["up"].features, tensors["act"].features) == (2 * 192 // 4, 192 // 4)
    (program,) = lower(decisions)
    found: dict[str, int] = {}
    for template in program.templates:
        for each in template.instructions:
            if template.name in ("layer.fwd", "layer.bwd") and isinstance(each.work, Collective):
                found[each.name] = each.work.bytes
    whole = 2048 * 256 * 2
    assert found["fwd/norm2.gather"] == found["bwd/experts.grad.gather"] == found["bwd/norm2.again.gather"] == whole
    assert found["fwd/experts_down.scatter"] == found["bwd/d_norm2.scatter"] == whole
    assert found["bwd/router.reduce"] == 2048 * 8 * 4


def test_the_load_changes_no_size() -> None:
    even, skewed = (decide(EXPERTS, policy=HALF, expert_load=load) for load in ("balanced", "zipf-1.5"))
    shapes = []
    for decisions in (even, skewed):
        (program,) = lower(decisions)
        shapes.append([(f.name, f.tokens, f.features, f.count) for f in program.all_families])
    assert shapes[0] == shapes[1]


def test_loads_by_hand() -> None:
    of = Experts(count=4, per_token=2, hidden=16)
    assert rows_of(of, 200, "balanced") == (50, 50, 50, 50)
    assert rows_of(of, 120, "zipf-0") == (30, 30, 30, 30)
    assert rows_of(of, 250, "zipf-1") == (120, 60, 40, 30)  # 250 / (1 + 1/2 + 1/3 + 1/4) = 120
    # At most one row of each of 500 tokens; the other 500 rows by 1/16, 1/81 and 1/256, which sum to 0.0788.
    assert rows_of(of, 1000, "zipf-4") == (500, 397, 78, 25)
    assert sizes_of(of, 200, "balanced", 0, 200) == ((50, 4),)
    assert sizes_of(of, 200, "balanced", 75, 75) == ((25, 1), (50, 1))
    assert sizes_of(of, 250, "zipf-1", 100, 150) == ((20, 1), (60, 1), (40, 1), (30, 1))


def test_measured_loads_by_hand() -> None:
    of = Experts(count=4, per_token=2, hidden=16)
    assert rows_of(of, 400, "measured-1600-1200-840-360") == (160, 120, 84, 36)
    assert rows_of(of, 400, "measured-4000-0-0-0") == (200, 67, 67, 66)  # one row of every token at most
    assert shown_load("measured-1600-1200-840-360") == "as measured (the fullest of 4 experts: 1.60 times the mean)"


def test_a_measured_load_is_named() -> None:
    of = Experts(count=16, per_token=2, hidden=16)
    assert nearest_load(of, [100] * 16) == "balanced"
    for load in ("zipf-0.35", "zipf-1.2"):
        assert nearest_load(of, rows_of(of, 20_000, load)) == load


@given(
    count=st.integers(2, 40),
    chosen=st.integers(1, 8),
    tokens=st.integers(1, 500),
    power=st.sampled_from(["balanced", "zipf-0.3", "zipf-1", "zipf-4.99"]),
    cut=st.floats(0, 1),
)
def test_loads_have_every_row_once(count: int, chosen: int, tokens: int, power: str, cut: float) -> None:
    of = Experts(count=max(count, chosen), per_token=chosen, hidden=8)
    rows = tokens * chosen
    loads = rows_of(of, rows, power)
    assert sum(loads) == rows
    assert len(loads) == of.count
    assert max(loads) <= tokens + 1  # a rounded row more
    assert min(loads) >= 0
    first = int(cut * rows)
    parts = (sizes_of(of, rows, power, 0, first), sizes_of(of, rows, power, first, rows - first))
    assert [sum(n * many for n, many in part) for part in parts] == [first, rows - first]
