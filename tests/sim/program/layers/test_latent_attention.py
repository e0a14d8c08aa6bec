"""Latent attention: programs pass the checkers in every layout, and sizes and work are those by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from memo_sim.contract.experts import Experts
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.ir.kinds import TemplateKind
from memo_sim.program.ir.work import Attention, Collective, Gemm
from memo_sim.program.layout.parameters import layer_block
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.skeletal import skeletal_tensors
from memo_sim.program.lower import lower
from tests.pairs import covering
from tests.sim.small_programs import LATENT, NO_Q_LATENT, POLICIES, decide, faults_of

SP = {"sequence_parallel": True}
DEEPSEEK = msgspec.structs.replace(LATENT, name="deepseek").of_layers(
    [
        LayerShape(ffn_hidden=640),
        *[
            LayerShape(
                ffn_hidden=640,
                experts=Experts(count=8, per_token=2, hidden=192, scores="sigmoid", selection_bias=True, shared=192),
            )
        ]
        * 3,
    ]
)
"""A selection bias lies between the product of latents and the norms, whose gradients ranks sum."""
LAYOUTS = {
    "one rank": Layout(),
    "tp": Layout(tp=2),
    "tp with token shards": Layout(tp=2, **SP),
    "ring": Layout(cp=2),
    "all-gather": Layout(cp=2, cp_exchange="all_gather"),
    "ulysses": Layout(ulysses=2),
    "everything": Layout(tp=2, cp=2, pp=2, dp=2, zero=1, **SP),
    "zero 3": Layout(dp=2, zero=3),
}
CASES = [(policy, alpha, rebuilt) for policy, alpha in POLICIES for rebuilt in (False, True)]
FORMS = {f"{p} {a}{' rebuilt' if r else ''}": (p, a, r) for p, a, r in CASES if not (r and p == "full")}
FORMS["selective"], FORMS["norms"] = ("selective", 0.0, True), ("norms", 0.0, False)


def chosen(model: Model, layout: Layout, form: str = "none 0.0", **more: Any) -> Decisions:
    policy, alpha, rebuilt = FORMS[form]
    return decide(model, layout, (policy, alpha), rebuild_qkv=rebuilt, kernels=Kernels(attention="flash2"), **more)


@pytest.mark.parametrize(("layout", "form"), covering(LAYOUTS, FORMS))
@pytest.mark.parametrize("model", [LATENT, NO_Q_LATENT, DEEPSEEK], ids=lambda model: model.name)
def test_programs_pass_the_checkers(model: Model, layout: str, form: str) -> None:
    assert faults_of(chosen(model, LAYOUTS[layout], form)) == []


SUBSEQUENCES = [
    Layout(subsequences=3),
    Layout(tp=2, subsequences=3, **SP),
    Layout(ulysses=2, subsequences=2),
    Layout(cp=2, subsequences=2),
    Layout(cp=2, cp_exchange="all_gather", subsequences=2),
    Layout(pp=2, subsequences=3, schedule="interleaved", virtual_stages=2),
    Layout(pp=2, dp=2, zero=3, subsequences=3),
]


@pytest.mark.parametrize(
    ("layout", "policy"),
    covering(SUBSEQUENCES, [("none", 0.0), ("none", 1.0), ("full", 1.0), ("rowwise", 0.0), ("tokenwise", 0.0)]),
    ids=str,
)
@pytest.mark.parametrize("model", [LATENT, NO_Q_LATENT], ids=lambda model: model.name)
def test_subsequences_pass_the_checkers(model: Model, layout: Layout, policy: tuple[str, float]) -> None:
    assert faults_of(decide(model, layout, policy)) == []
    if policy[1] == 0:
        assert faults_of(decide(model, layout, policy, micro_batch=2, global_batch=4 * layout.dp)) == []


def test_the_kv_cache_holds_expanded_keys_and_values() -> None:
    """A token of a layer has every head's key and its narrower value; the latents of a subsequence are its own."""
    (program,) = lower(decide(LATENT, Layout(subsequences=2), seq_tokens=2048))
    families = {family.name: family for family in program.families}
    latent = LATENT.latent
    assert latent is not None
    cache = families["prefix.kv"]
    assert (cache.tokens, cache.features) == (2048, LATENT.heads * (LATENT.head_dim + latent.value_dim))
    kept = [families[f"skeletal.kv_latent.s{n}"] for n in range(2)]
    assert sum(family.tokens for family in kept) == 2048
    assert {family.features for family in kept} == {latent.kv_rank}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [LATENT, NO_Q_LATENT], ids=lambda model: model.name)
def test_row_wise_recompute_passes_the_checkers(model: Model, layout: str) -> None:
    """Two row blocks, of which the second is a third of the first."""
    where = LAYOUTS[layout]
    granule = 128 * (where.tp if where.sequence_parallel else 1)
    cut = {"seq_tokens": 4 * granule * where.cp * where.ulysses, "mlp_chunk_tokens": 3 * granule}
    kernels = Kernels(attention="flash2")
    assert faults_of(decide(model, where, ("rowwise", 0.5), kernels=kernels, **cut)) == []


def test_row_wise_recompute_makes_latents_once_in_backward() -> None:
    """Heads are expanded block by block before attention's backward; latents stay, and only norm1 is repeated."""
    (program,) = lower(decide(LATENT, None, ("rowwise", 0.0), mlp_chunk_tokens=1024))
    backward = next(t for t in program.templates if t.name == "layer.bwd")
    names = [i.name for i in backward.instructions]
    attention = next(n for n, name in enumerate(names) if name.startswith("bwd/attn"))
    assert [name for name in names[:attention] if "latent.b" in name] == ["rec/latent.b0", "rec/latent.b1"]
    again = [name for name in names[attention:] if name.startswith("rec/")]
    assert again == ["rec/norm1.again.b0", "rec/norm1.again.b1"]


def instructions(decisions: Decisions, kind: TemplateKind) -> Iterator[Instruction]:
    (program,) = lower(decisions)
    for template in program.templates:
        if template.kind is kind:
            yield from template.instructions


def test_what_backward_needs_by_hand() -> None:
    """Features of a token: latents of 96, 64 and 16; heads of 48 and values of 32."""
    packed = 4 * (2 * 48 + 32)
    for rebuilt, wanted in ((False, packed), (True, 16)):
        decisions = chosen(LATENT, Layout(), "none 0.0 rebuilt" if rebuilt else "none 0.0")
        kept = skeletal_tensors(LATENT, shape_of(decisions).of_layer(LATENT.layer(0)), "bf16")
        features = {t.name: t.features for t in kept}
        attention = {"latent": 176, "latent_stats": 2, "q_latent": 96, "kv_latent": 64, "attn": 4 * 32}
        assert {name: features[name] for name in attention} == attention
        assert features.get("k_rope" if rebuilt else "qkv") == wanted
        assert ("qkv" in features, "k_rope" in features) == (not rebuilt, rebuilt)


def test_token_shards_gather_latents_not_the_norm() -> None:
    """Per token of a rank's layer: 96 + 64 + 16 features before attention, and 256 before the MLP."""
    decisions = chosen(LATENT, Layout(tp=2, **SP))
    found = [i.work for i in instructions(decisions, TemplateKind.FORWARD) if i.op == "all_gather"]
    sizes = [work.bytes for work in found if isinstance(work, Collective)]
    assert sizes[:4] == [2 * 2048 * features for features in (96, 64, 16, 256)]


def test_tensor_parallelism_divides_the_products_of_heads_alone() -> None:
    decisions = chosen(LATENT, Layout(tp=2, **SP))
    found = {i.name: i.work for i in instructions(decisions, TemplateKind.FORWARD) if isinstance(i.work, Gemm)}
    products = {name.rpartition("/")[2]: (work.m, work.n, work.k) for name, work in found.items()}
    assert products["latent"] == (1024, 176, 256)
    assert products["q_up"] == (2048, 2 * 48, 96)
    assert products["kv_up"] == (2048, 2 * (32 + 32), 64)


def test_gradients_of_what_ranks_hold_whole_are_summed() -> None:
    block = layer_block(LATENT, 2, LATENT.layer(0))
    latent, norms = 176 * 256, 2 * 256 + 96 + 64
    assert block.partial_elements(sequence_parallel=True) == latent + norms
    assert block.partial_elements(sequence_parallel=False) == 0
    with_bias = layer_block(DEEPSEEK, 2, DEEPSEEK.layer(1))
    assert [elements for _, elements in with_bias.partial_runs(sequence_parallel=True)] == [latent, norms]


@pytest.mark.parametrize(
    ("kernel", "padded"), [("flash2", (96, 240)), ("flash3", (80, 240)), ("torch-cudnn", (80, 208))]
)
def test_what_a_kernel_computes_of_narrow_values(kernel: str, padded: tuple[int, int]) -> None:
    """Heads of 48, values of 32. Forward has products over 48 and 32 features; backward three over 48, two over 32."""
    for backward, needed, computed in zip((False, True), (48 + 32, 3 * 48 + 2 * 32), padded, strict=True):
        work = Attention(1, 64, 64, "none", 4, 4, 48, backward, kernel, "bf16", 32)
        assert work.flops == 2 * 64 * 64 * 4 * needed
        assert work.computed_flops == 2 * 64 * 64 * 4 * computed
