"""Programs of models whose layers differ: no faults, and sizes that are each layer's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.instruction import BufferClass, Family, Lane
from memo_sim.program.ir.kinds import FamilyKind, TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Copy
from memo_sim.program.layers.activations import REGION
from memo_sim.program.layout.parameters import embed_block, head_block
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.skeletal import Fate, skeletal_tensors
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.layout.stage_layers import layers_by_kind
from memo_sim.program.lower import lower
from memo_sim.program.verify.values import check_values
from tests.pairs import covering
from tests.sim.small_programs import GPT, LLAMA, POLICIES, decide, faults_of


def of_widths(model: Model, *widths: int) -> Model:
    return model.of_layers([LayerShape(ffn_hidden=width) for width in widths])


MODELS = {
    "gpt": of_widths(GPT, 1024, 512, 512, 1024, 256),
    "llama": of_widths(LLAMA, 384, 640, 640, 640, 384, 384),
}
LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2, ulysses=2),
    Layout(dp=2, zero=2),
    Layout(dp=2, zero=3),
    Layout(pp=2, dp=2, zero=1),
    Layout(pp=2, schedule="zero-bubble"),
    Layout(pp=2, virtual_stages=2, schedule="interleaved"),
]
FURTHER: list[dict[str, Any]] = [
    *({"recompute": mode} for mode in ("selective", "norms", "mlp", "operators")),
    *({"recompute": "full", "recompute_layers": layers} for layers in ("every-2", "first-1", "groups-2")),
    {"recompute": "full", "swapped_tokens": 1024, "rounding_buffers": True},
    {"recompute": "full", "mlp_chunk_tokens": 512},
    {"recompute": "full", "attention_chunk_tokens": 512},
]


@pytest.mark.parametrize(("layout", "policy"), covering(range(len(LAYOUTS)), range(len(POLICIES))))
def test_the_checkers_find_no_fault(layout: int, policy: int) -> None:
    name = list(MODELS)[layout % 2]
    assert not faults_of(decide(MODELS[name], LAYOUTS[layout], POLICIES[policy]))


@pytest.mark.parametrize("changes", FURTHER, ids=lambda each: "-".join(map(str, each.values())))
def test_other_ways_to_recompute_have_no_fault(changes: dict[str, Any]) -> None:
    decisions = decide(MODELS["llama"], Layout(pp=2))
    assert not faults_of(msgspec.structs.replace(decisions, **changes))


def by_name(program: Program) -> dict[str, Family]:
    return {family.name: family for family in program.families}


def test_a_region_holds_the_tensors_of_the_largest_kind() -> None:
    decisions = decide(MODELS["llama"], policy=("tokenwise", 0.5))
    (program,) = lower(decisions)
    families, shape = by_name(program), shape_of(decisions)
    wide = skeletal_tensors(decisions.model, shape, "bf16")  # the widest layer's
    region = families[REGION]
    aligned = sum(-(-t.bytes // 512) * 512 for t in wide if t.name != "x")
    assert aligned - 512 < region.bytes <= aligned
    assert region.count == families["skeletal.x"].count == 2
    for kind, width in enumerate((384, 640)):
        up = families[f"skeletal.up.k{kind}"]
        assert (up.region, up.count, up.features) == (REGION, 0, 2 * width)


def test_models_whose_layers_are_alike_have_no_region() -> None:
    (program,) = lower(decide(LLAMA, policy=("tokenwise", 0.5)))
    assert not any(f.region or f.layer_kind is not None for f in program.families)
    assert all(template.layer_kind is None for template in program.templates)


def test_kept_tensors_are_those_of_each_layer() -> None:
    model = MODELS["llama"]
    decisions = decide(model, micro_batch=1, global_batch=1)
    (program,) = lower(decisions)
    kept = sum(f.bytes * f.count for f in program.families if f.kind is FamilyKind.SKELETAL)
    shape = shape_of(decisions)
    wanted = sum(
        tensor.bytes
        for number in range(model.layers)
        for tensor in skeletal_tensors(model, shape.of_layer(model.layer(number)), "bf16")
    )
    assert kept == wanted


def test_swapped_bytes_are_those_of_each_layer() -> None:
    """One alpha: the same rows of every layer are swapped, and the layers' input and attention output whole."""
    model = MODELS["llama"]
    decisions = decide(model, policy=("tokenwise", 0.5), micro_batch=1, global_batch=1)
    (program,) = lower(decisions)
    moved = sum(i.work.bytes for _, i in program.walk() if i.lane is Lane.D2H and isinstance(i.work, Copy))
    shape, wanted = shape_of(decisions), 0
    for number in range(model.layers - 2):  # the last two stay in the rounding buffers
        for t in skeletal_tensors(model, shape.of_layer(model.layer(number)), "bf16"):
            rows = t.tokens if t.fate is Fate.WHOLE else t.tokens * decisions.swapped_tokens // shape.tokens
            wanted += rows * t.features * DTYPE_BYTES[t.dtype]
    assert moved == wanted


@pytest.mark.parametrize("zero", [0, 3])
def test_states_are_those_of_each_layer(zero: int) -> None:
    model = MODELS["llama"]
    (program,) = lower(decide(model, Layout(dp=2, zero=zero)))
    elements = sum(f.tokens * f.count for f in program.families if f.kind is FamilyKind.PARAMS)
    ends = sum(block.elements for block in (embed_block(model, 1), head_block(model, 1)))
    whole = sum(model.layer_params(number) for number in range(model.layers)) + ends
    assert elements == whole // (2 if zero == 3 else 1)
    whole_once = [f for f in program.families if f.buffer_class is BufferClass.GATHERED]
    of_layers = {f.tokens for f in whole_once if f.layer_kind is not None}
    assert of_layers == ({model.layer_params(0), model.layer_params(1)} if zero == 3 else set())


def test_stages_hold_their_own_kinds() -> None:
    decisions = decide(MODELS["gpt"], Layout(pp=2, pp_layers=(1, 4)))
    first, second = (layers_by_kind(decisions.model, stage) for stage in stages_of(decisions))
    assert [(kind.suffix, kind.layers) for kind in first] == [(".k0", (0,))]
    assert [(kind.suffix, kind.layers) for kind in second] == [(".k0", (2,)), (".k1", (0, 1)), (".k2", (3,))]
    assert not faults_of(decisions)


def test_a_layer_reads_the_parameters_of_its_own_kind() -> None:
    decisions = decide(MODELS["gpt"])
    (program,) = lower(decisions)
    forward = {t.name: n for n, t in enumerate(program.templates) if t.kind is TemplateKind.FORWARD}
    played = [i.template for i in program.instances if i.template in forward.values() and i.micro_batch == 0]
    names = [next(name for name, number in forward.items() if number == each) for each in played]
    assert [name.rpartition(".")[2] for name in names if name.startswith("layer.fwd")] == ["k0", "k1", "k1", "k0", "k2"]


def test_the_checker_finds_rows_that_another_kind_has_overwritten() -> None:
    """Without the layers' prefetches, a backward finds what layers of other kinds have left in the region."""
    decisions: Decisions = decide(MODELS["llama"], policy=("none", 1.0), micro_batch=1, global_batch=1)
    (program,) = lower(decisions)
    prefetch = {n for n, t in enumerate(program.templates) if t.kind is TemplateKind.PREFETCH}
    left_out = replace(program, instances=tuple(i for i in program.instances if i.template not in prefetch))
    assert any(
        "hold nothing" in fault or "holds" in fault for fault in check_values(left_out, expand(left_out), decisions)
    )
