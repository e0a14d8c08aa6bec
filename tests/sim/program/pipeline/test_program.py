"""The lowering of one stage: every policy and layout gives a program that the independent checkers accept."""

from __future__ import annotations

import itertools

import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import BadInput, Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Attention, Copy, Gemm
from memo_sim.program.layout.schedule import Units, one_stage
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.skeletal import Fate, skeletal_tensors
from memo_sim.program.layout.swap_schedule import LayerPass, buffer_slots, layer_passes_of, swap_schedule
from memo_sim.program.lower import lower, program_sha256
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import check_stages
from tests.pairs import covering
from tests.refusals import refused
from tests.sim.small_programs import GPT, LLAMA, POLICIES, decide

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2),
    Layout(cp=4, zero=1),
    Layout(tp=2, sequence_parallel=True, cp=2, dp=2, zero=1),
]


def step_layer_passes(layers: int, micro_batches: int) -> list[LayerPass]:
    """Return the layer passes of a step without pipeline parallelism: each micro-batch's forward, then its backward."""
    return [
        layer_pass for each in one_stage(Units(micro_batches)) for layer_pass in layer_passes_of(each, range(layers))
    ]


@pytest.mark.parametrize(
    ("policy", "model"),
    covering(POLICIES, [GPT, LLAMA]),
    ids=lambda v: v.name if isinstance(v, Model) else f"{v[0]}-{v[1]}",
)
def test_every_program_passes_the_independent_checkers(model: Model, policy: tuple[str, float]) -> None:
    for layout, states in itertools.product(LAYOUTS, ("fp32", "bf16", "host")):
        programs = lower(decide(model, layout, policy, states=states))
        columns = expand(programs[0])
        assert check_program(programs[0], columns) == []
        assert check_edges(columns, derive_edges(columns)) == []
        assert check_stages(programs) == []


def test_the_edge_checker_finds_a_missing_edge() -> None:
    columns = expand(lower(decide(policy=("tokenwise", 0.5)))[0])
    edges = derive_edges(columns)
    offloads = [i for i, c in enumerate(edges.consumer) if columns.lane[c] == Lane.D2H]
    assert offloads
    for dropped in offloads:
        keep = [i for i in range(len(edges.producer)) if i != dropped]
        assert check_edges(columns, Edges(edges.producer[keep], edges.consumer[keep]))


def test_skeletal_tensors_of_a_gpt_layer_sum_to_figure_4() -> None:
    decisions = decide(policy=("none", 0.0), dtype="bf16")
    tensors = [t for t in skeletal_tensors(GPT, shape_of(decisions), "bf16") if not t.statistics]
    elements = {t.name: t.tokens * t.features for t in tensors}
    unit = 2048 * GPT.hidden
    assert sum(elements.values()) == 16 * unit
    assert sum(t.bytes for t in tensors) == 32 * unit
    assert (elements["x"], elements["attn"]) == (unit, unit)
    assert {t.name for t in tensors if t.fate is Fate.WHOLE} == {"x", "attn"}


def test_recompute_rebuilds_three_products_and_no_attention() -> None:
    program = lower(decide(policy=("tokenwise", 0.5)))[0]
    rebuilt = [i for name, i in program.walk() if "/l0/rec/" in name and name.startswith("m0")]
    products = [i.name for i in rebuilt if isinstance(i.work, Gemm)]
    assert products == ["rec/qkv.r1", "rec/proj.r1", "rec/ffn_up.r1"]
    assert not any(isinstance(i.work, Attention) for i in rebuilt)
    whole = lower(decide(policy=("full", 0.0)))[0]
    assert any(isinstance(i.work, Attention) for name, i in whole.walk() if "/rec/" in name)


def test_recompute_repeats_forward_call_by_call() -> None:
    program = lower(decide(LLAMA, policy=("tokenwise", 0.25)))[0]
    by_id = dict(program.walk())
    for name, instruction in by_id.items():
        if "/rec/" in name:
            assert by_id[name.replace("/rec/", "/fwd/")].work == instruction.work


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
def test_which_layers_are_swapped_is_derived(layers: int) -> None:
    layer_passes = step_layer_passes(layers, micro_batches=2)
    schedule = swap_schedule(layer_passes, buffer_slots(layer_passes))
    assert schedule.swapped == {(m, 0, layer) for m in range(2) for layer in range(layers - 2)}


def test_another_order_of_layer_passes_swaps_other_layers() -> None:
    """With two micro-batches forward before any backward, only the layers of the last layer passes stay."""
    layer_passes = [v for v in step_layer_passes(4, 2) if not v.backward]
    layer_passes += [v for v in step_layer_passes(4, 2) if v.backward and v.micro_batch == 1]
    layer_passes += [v for v in step_layer_passes(4, 2) if v.backward and v.micro_batch == 0]
    schedule = swap_schedule(layer_passes, buffer_slots(layer_passes))
    assert schedule.swapped == {(m, 0, layer) for m, layer in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]}


def test_offloaded_bytes_are_prefetched() -> None:
    for policy in (("tokenwise", 0.0), ("tokenwise", 0.5), ("none", 1.0), ("none", 0.5)):
        program = lower(decide(policy=policy))[0]
        moved = {Lane.D2H: 0, Lane.H2D: 0}
        for _, instruction in program.walk():
            if isinstance(instruction.work, Copy):
                moved[instruction.lane] += instruction.work.bytes
        assert moved[Lane.D2H] == moved[Lane.H2D] > 0


def test_keep_moves_nothing_and_full_swap_everything() -> None:
    decisions = decide(policy=("none", 1.0), global_batch=1)
    layer = sum(t.bytes for t in skeletal_tensors(GPT, shape_of(decisions), "bf16"))
    program = lower(decisions)[0]
    copied = sum(i.work.bytes for _, i in program.walk() if i.lane is Lane.D2H)
    assert copied == layer * (GPT.layers - 2)
    assert not any(isinstance(i.work, Copy) for _, i in lower(decide())[0].walk())


def test_memory_of_the_policies_is_ordered() -> None:
    def peak_bytes(policy: tuple[str, float]) -> int:
        program = lower(decide(Model(**{**_fields(GPT), "layers": 12}), policy=policy, global_batch=1))[0]
        return peak(live_bytes(liveness(program, expand(program)), device=True)).bytes

    keep, swap, full = (peak_bytes(p) for p in (("none", 0.0), ("none", 1.0), ("full", 0.0)))
    half = peak_bytes(("none", 0.5))
    assert swap < half < keep
    assert full < keep
    assert peak_bytes(("tokenwise", 0.5)) == swap


def _fields(model: Model) -> dict:
    return {name: getattr(model, name) for name in model.__struct_fields__}


def test_equal_decisions_give_equal_hashes_and_others_do_not() -> None:
    decisions = [decide(policy=p) for p in POLICIES] + [decide(LLAMA), decide(seq_tokens=4096), decide(states="bf16")]
    hashes = [program_sha256(lower(d)) for d in decisions]
    assert hashes == [program_sha256(lower(d)) for d in decisions]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": Layout(tp=3)},
        {"layout": Layout(cp=3)},
        {"layout": Layout(dp=3), "global_batch": 2},
        {"swapped_tokens": 128, "recompute": "selective"},
        {"layout": Layout(metp=2, tp=2)},
        {"model": load_model("gpt-tiny"), "seq_tokens": 1 << 20},
    ],
)
def test_infeasible_decisions_are_refused(change: dict) -> None:
    fields = {"model": GPT, "seq_tokens": 2048, **change}
    with pytest.raises(Infeasible) as error:
        lower(Decisions(**fields))
    assert error.value.got is not None
    assert error.value.exit_code == 4


def test_swapped_tokens_that_end_inside_a_row_block_are_bad_input() -> None:
    layout = Layout(tp=2, sequence_parallel=True)
    with refused(BadInput, where="$.decisions.swapped_tokens", got="128", wanted=("256", "2048")) as error:
        lower(Decisions(model=GPT, seq_tokens=2048, swapped_tokens=128, recompute="tokenwise", layout=layout))
    assert error.value.exit_code == 3


@pytest.mark.parametrize("swapped", [100, 4096])
def test_swapped_tokens_are_whole_row_blocks(swapped: int) -> None:
    with pytest.raises(ValueError, match="swapped_tokens"):
        Decisions(model=GPT, seq_tokens=2048, recompute="tokenwise", swapped_tokens=swapped)


def test_growth_is_linear_in_layers() -> None:
    counts = [lower(decide(Model(**{**_fields(GPT), "layers": n})))[0].instruction_count for n in (8, 16, 24)]
    assert counts[2] - counts[1] == counts[1] - counts[0]
