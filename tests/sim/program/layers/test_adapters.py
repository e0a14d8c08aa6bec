"""Adapters: programs of every layout pass the checkers; weights, bytes and FLOPs are as by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.adapters import adapters_of, parse_adapters
from memo_sim.contract.errors import UsageError
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.instruction import BufferClass, Mode
from memo_sim.program.ir.kinds import FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.work import AdapterGemm, Gemm
from memo_sim.program.layers.frozen_products import INPUTS, unread
from memo_sim.program.lower import lower
from memo_sim.program.verify.values import check_values
from tests.sim.program.verify import planted
from tests.sim.small_programs import EXPERTS, GPT, LLAMA, POLICIES, decide, faults_of

EVERY = "r=16,alpha=32,targets=qkv+proj+ffn"
FEW = "r=16,alpha=32,targets=q+v"
DOWN = "r=16,alpha=32,targets=down"
ATTENTION = "r=16,alpha=32,targets=qkv+proj"
HALF = ("tokenwise", 0.5)
UNEVEN = LLAMA.of_layers([LayerShape(ffn_hidden=640), LayerShape(ffn_hidden=512)] * 2)
SHARED = msgspec.structs.replace(EXPERTS.layer(0).experts, shared=128, selection_bias=True, z_loss=1e-3)
MIXED = EXPERTS.of_layers([LayerShape(ffn_hidden=640), *[LayerShape(ffn_hidden=640, experts=SHARED)] * 3])
"""The first layer has an MLP; the others have experts, a shared one, and a bias of their choice."""
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tensor parallel": (Layout(tp=2, sequence_parallel=True, dp=2, zero=3), {}),
    "copies of heads": (Layout(tp=8, sequence_parallel=True), {}),
    "whole tokens": (Layout(tp=4), {}),
    "ring": (Layout(cp=4), {}),
    "all-gather, ulysses": (Layout(cp=2, cp_exchange="all_gather", ulysses=2), {}),
    "all": (Layout(tp=2, sequence_parallel=True, cp=2, ulysses=2, pp=2), {"global_batch": 4}),
    "interleaved": (Layout(pp=2, virtual_stages=2, schedule="interleaved"), {"global_batch": 4}),
    "zero 1": (Layout(dp=2, zero=1), {"overlap": "both"}),
    "zero 1 in groups": (Layout(dp=4, zero=1, zero_ranks=2), {"overlap": "gradients"}),
    "zero 2": (Layout(dp=2, zero=2), {}),
    "zero 3 in groups": (Layout(dp=4, zero=3, zero_ranks=2), {"states": "host"}),
    "pure bf16": (Layout(dp=2, zero=1), {"states": "pure-bf16"}),
}


@pytest.mark.parametrize("text", [EVERY, DOWN])
@pytest.mark.parametrize("policy", [*POLICIES[1::3], ("selective", 0.0), ("norms", 0.0), ("mlp", 0.0)], ids=str)
def test_every_policy_passes_the_checkers(policy: tuple[str, float], text: str) -> None:
    assert faults_of(decide(LLAMA, policy=policy, adapters=text, global_batch=1)) == []


@pytest.mark.parametrize(
    "text", [EVERY, pytest.param(FEW, marks=pytest.mark.slow), pytest.param(DOWN, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_passes_the_checkers(name: str, text: str) -> None:
    layout, fields = LAYOUTS[name]
    assert faults_of(decide(LLAMA, layout, HALF, adapters=text, **fields)) == []


@pytest.mark.parametrize(
    ("model", "layout", "policy", "fields"),
    [
        (GPT, Layout(pp=2, dp=2, zero=1), HALF, {"overlap": "both"}),
        (LLAMA, Layout(subsequences=4, pp=2), ("none", 1.0), {"offload_window": 1}),
        (LLAMA, Layout(tp=2, sequence_parallel=True), ("full", 1.0), {"mlp_chunk_tokens": 512}),
        (LLAMA, Layout(dp=2, zero=2), ("full", 0.0), {"recompute_layers": "groups-2"}),
        (UNEVEN, Layout(dp=2, zero=3), HALF, {}),
    ],
    ids=["tied over stages", "subsequences in a window", "row blocks", "groups of layers", "layers that differ"],
)
def test_other_knobs_pass_the_checkers(
    model: Model, layout: Layout, policy: tuple[str, float], fields: dict[str, Any]
) -> None:
    for text in (EVERY, DOWN):
        assert faults_of(decide(model, layout, policy, adapters=text, **fields)) == []


@pytest.mark.parametrize(("recompute", "alpha"), [("none", 0.5), HALF, ("mlp", 0.0), ("norms", 0.0), ("full", 1.0)])
def test_attention_beside_experts_passes_the_checkers(recompute: str, alpha: float) -> None:
    for layout in (Layout(), Layout(tp=2, sequence_parallel=True, dp=2, zero=3)):
        assert faults_of(decide(MIXED, layout, (recompute, alpha), adapters=ATTENTION)) == []


@pytest.mark.parametrize("op", ["lora.a", "lora.b", "lora.b.dgrad", "linear.dgrad.add", "lora.b.wgrad", "linear.wgrad"])
@pytest.mark.parametrize("product", ["qkv", "proj", "ffn_up", "ffn_down"])
def test_a_kernel_left_out_is_found(op: str, product: str) -> None:
    decisions = decide(LLAMA, Layout(tp=2, sequence_parallel=True), HALF, global_batch=1, adapters=EVERY)
    (program,) = lower(decisions)

    def chosen(each: planted.Instruction) -> bool:
        return each.op == op and each.name.partition("/")[2].startswith(f"{product}.lora")

    for number in planted.places(program, chosen)[:2]:
        less = planted.without(program, number, chosen)
        assert check_values(less, expand(less), decisions)


@pytest.mark.parametrize("text", [EVERY, DOWN, FEW, "r=4,alpha=4,targets=proj", "r=4,alpha=4,targets=gate"])
@pytest.mark.parametrize("recompute", ["none", "mlp", "norms", "selective"])
def test_a_layer_keeps_what_its_backward_reads(recompute: str, text: str) -> None:
    """The kept tensors are those that a backward reads before it writes them; others are left out."""
    check_kept(decide(LLAMA, Layout(ulysses=2), (recompute, 0.0), adapters=text))


@pytest.mark.parametrize("recompute", ["none", "mlp", "norms", "selective"])
def test_a_layer_of_experts_keeps_what_its_backward_reads(recompute: str) -> None:
    shared = EXPERTS.of_layers([LayerShape(ffn_hidden=640, experts=SHARED)] * 2)
    check_kept(decide(shared, policy=(recompute, 0.0), adapters=ATTENTION))


def check_kept(decisions: Decisions) -> None:
    (program,) = lower(decisions)
    (backward,) = (t for t in program.templates if t.name == "layer.bwd")
    kept = {f.name for f in program.families if f.kind is FamilyKind.SKELETAL}
    written, read = set(), set()
    for instruction in backward.instructions:
        for operand in instruction.operands:
            name = backward.slots[operand.slot]
            if operand.mode & Mode.READ and name not in written:
                read.add(name)
            if operand.mode & Mode.WRITE:
                written.add(name)
    assert kept <= read
    dropped = unread(decisions, experts=decisions.model.mixture is not None)
    assert {f"skeletal.{name}" for name in dropped}.isdisjoint(kept | read)
    assert dropped <= {*INPUTS.values(), "shared_act"}


def test_weights_and_states_are_those_of_the_adapters() -> None:
    decisions = decide(LLAMA, Layout(dp=2, zero=1), adapters=EVERY)
    (program,) = lower(decisions)
    h, q, kv, f, r = 256, 256, 128, 640, 16
    layer = r * ((h + q) + 2 * (h + kv) + (q + h) + 2 * (h + f) + (f + h))
    assert decisions.lora is not None
    assert decisions.lora.params(LLAMA) == 4 * layer
    held = {family.name: family.tokens for family in program.families if family.buffer_class is BufferClass.STATE}
    assert {name for name in held if "embed" in name or "head" in name} == {"params.embed", "params.head"}
    assert held["grads.layer"] == layer
    assert held["master.layer"] == held["moment1.layer"] == layer // 2
    assert held["params.layer"] == layer + LLAMA.layer_params(0)


def test_frozen_products_have_half_a_backward() -> None:
    frozen, trained = decide(LLAMA, adapters=DOWN), decide(LLAMA)

    def flops(decisions: Any, phase: Phase) -> float:
        (program,) = lower(decisions)
        found = 0.0
        for template in program.templates:
            if template.kind in (TemplateKind.FORWARD, TemplateKind.BACKWARD) and template.name.startswith("layer."):
                products = [i for i in template.instructions if i.phase is phase and isinstance(i.work, Gemm)]
                found += sum(i.work.flops for i in products if not isinstance(i.work, AdapterGemm))
        return found

    assert flops(frozen, Phase.FORWARD) == flops(trained, Phase.FORWARD)
    assert flops(frozen, Phase.BACKWARD) == flops(trained, Phase.BACKWARD) / 2
    tokens, pairs = 2 * 2048, 2 * 2048**2
    weights = LLAMA.mfu_params
    attention = 6 * 4 * 256 * pairs
    assert trained.step_flops == 6 * tokens * weights + attention
    assert frozen.step_flops == tokens * (4 * weights + 6 * 4 * 16 * (640 + 256)) + attention


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("r=16", "r=16,alpha=16,targets=qkv+proj+ffn"),
        ("targets=v+q,rslora,r=8,alpha=0.5", "r=8,alpha=0.5,targets=q+v,rslora"),
        ("r=8, targets=up+gate+down+k", "r=8,alpha=8,targets=k+ffn"),
        ("none", "none"),
    ],
)
def test_adapters_have_one_text(text: str, wanted: str) -> None:
    assert parse_adapters(text, option="--lora") == wanted


def test_rslora_divides_by_the_root_of_the_rank() -> None:
    plain, stable = adapters_of("r=16,alpha=8,targets=q"), adapters_of("r=16,alpha=8,targets=q,rslora")
    assert plain is not None
    assert stable is not None
    assert (plain.scale, stable.scale) == (0.5, 2.0)


@pytest.mark.parametrize(
    "text", ["", "16", "r=0", "r=16,alpha=0", "r=8,r=8", "r=8,targets=w", "alpha=8", "r=8,dropout=0.1"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a description of adapters"):
        parse_adapters(text, option="--lora")
