"""Full recompute with swapped layer inputs: inputs copied to the host, inputs kept, and unchanged compute."""

from __future__ import annotations

import pytest

from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.presets import FULL_RECOMPUTE, INPUTS_SWAPPED, Policy
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.planning.space import policies
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Copy
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import check_stages
from memo_sim.reasons.answer import plan_title
from tests.sim.small_programs import GPT, LLAMA, decide

LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True, cp=2),
    Layout(cp=4, zero=3, cp_exchange="all_gather"),
    Layout(ulysses=2, dp=2, zero=3),
]


def shaped(layers: int, model: Model = GPT) -> Model:
    return Model(**{**{name: getattr(model, name) for name in model.__struct_fields__}, "layers": layers})


def input_bytes(decisions: Decisions) -> int:
    """Return the bytes of one layer's input on one rank: bf16, divided by sequence parallelism."""
    layout = decisions.layout
    return 2 * decisions.local_tokens * decisions.model.hidden // (layout.tp if layout.sequence_parallel else 1)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_every_program_passes_the_independent_checkers(model: Model, layout: Layout, alpha: float) -> None:
    programs = lower(decide(model, layout, ("full", alpha)))
    columns = expand(programs[0])
    assert check_program(programs[0], columns) == []
    assert check_edges(columns, derive_edges(columns)) == []
    assert check_stages(programs) == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_inputs_of_all_layers_but_two_are_swapped(layout: Layout, alpha: float) -> None:
    decisions = decide(shaped(6), layout, ("full", alpha))
    moved = {Lane.D2H: 0, Lane.H2D: 0}
    layers: dict[Lane, set[str]] = {Lane.D2H: set(), Lane.H2D: set()}
    for name, instruction in lower(decisions)[0].walk():
        if isinstance(instruction.work, Copy):
            moved[instruction.lane] += instruction.work.bytes
            layers[instruction.lane].add(name.split("/")[2])
    expected = decisions.micro_batches * 4 * int(alpha * input_bytes(decisions))
    assert moved == {Lane.D2H: expected, Lane.H2D: expected}
    assert layers == {lane: {"l0", "l1", "l2", "l3"} for lane in moved}


def live_in_backward(decisions: Decisions, *, device: bool) -> int:
    """Return the bytes alive during the last layer's activation backward, while all layer inputs are still needed."""
    program = lower(decisions)[0]
    at = program.ids().index(f"m0/s0/l{decisions.model.layers - 1}/bwd/act.bwd")
    return sum(int(curve[at]) for curve in live_bytes(liveness(program, expand(program)), device=device).values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("layers", [2, 5, 12])
def test_two_inputs_stay_on_the_device_instead_of_one_for_each_layer(layout: Layout, layers: int) -> None:
    kept, half, swapped = (decide(shaped(layers), layout, ("full", a), global_batch=layout.dp) for a in (0.0, 0.5, 1.0))
    left = (layers - 2) * input_bytes(kept)
    on_device = [live_in_backward(d, device=True) for d in (kept, half, swapped)]
    assert [on_device[0] - size for size in on_device] == [0, left // 2, left]
    assert [live_in_backward(d, device=False) for d in (kept, half, swapped)] == [0, left // 2, left]


def test_the_peak_no_longer_grows_by_one_input_for_each_layer() -> None:
    def peak_bytes(layers: int, alpha: float) -> int:
        program = lower(decide(shaped(layers), policy=("full", alpha), global_batch=1, states="host"))[0]
        return peak(live_bytes(liveness(program, expand(program)), device=True)).bytes

    size = input_bytes(decide())
    grown = [peak_bytes(24, alpha) - peak_bytes(12, alpha) for alpha in (0.0, 1.0)]
    assert grown[0] - grown[1] == 12 * size


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compute_is_that_of_full_recompute(layout: Layout) -> None:
    def computed(alpha: float) -> list[tuple[str, object]]:
        walked = lower(decide(LLAMA, layout, ("full", alpha)))[0].walk()
        return [(name, i.work) for name, i in walked if i.lane is not Lane.D2H and i.lane is not Lane.H2D]

    assert computed(1.0) == computed(0.0)


def test_an_input_is_offloaded_while_its_own_layer_reads_it() -> None:
    """The copy waits for the layer before, which writes the input.

    Only the layer after the next waits for the copy, because it reuses the rounding buffer.
    """
    program = lower(decide(shaped(6), policy=("full", 1.0), global_batch=1))[0]
    columns = expand(program)
    edges, ids = derive_edges(columns), program.ids()
    pairs = {(ids[p], ids[c]) for p, c in zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True)}
    left = "m0/s0/l2/off/x"
    assert {p for p, c in pairs if c == left} == {"m0/s0/l1/fwd/out_add"}
    assert {c for p, c in pairs if p == left and "/fwd/" in c} == {"m0/s0/l3/fwd/out_add"}
    back = "m0/s0/l2/pre/x"
    assert "m0/s0/l4/bwd/norm1.bwd" in {p for p, c in pairs if c == back}
    assert {c for p, c in pairs if p == back} == {"m0/s0/l2/rec/norm1"}


def ask(seq_tokens: int, *, system: str = "any", **pins) -> Question:
    cluster, hardware = load_cluster("h100-1x8")
    pinned = Pins(tp=8, recompute="full", mlp_chunk_tokens=0, attention_chunk_tokens=0, **pins)
    return Question(load_model("llama3-8b"), cluster, hardware, seq_tokens, system=system, pins=pinned)


def test_swapped_inputs_are_tried_when_inputs_cannot_be_kept_and_cost_no_time() -> None:
    short, long = search(ask(1 << 19), prune=False), search(ask(1 << 20), prune=False)
    assert [e.policy for e in short.ranked] == [FULL_RECOMPUTE]
    assert short.pruned == 1
    assert [(e.policy, e.prediction.status) for e in long.ranked] == [
        (INPUTS_SWAPPED, "ok"),
        (FULL_RECOMPUTE, "gpu_oom"),
    ]
    alone = search(ask(1 << 19, alpha=1.0)).best
    assert alone is not None
    assert short.best is not None
    assert alone.policy == INPUTS_SWAPPED
    assert alone.prediction.peak_device_bytes < short.best.prediction.peak_device_bytes
    hidden = alone.prediction.step_s / short.best.prediction.step_s
    assert hidden == pytest.approx(1, abs=1e-3)


def test_systems_that_keep_inputs_in_the_literature_do_not_swap_them() -> None:
    assert policies(ask(1 << 20)) == (FULL_RECOMPUTE, INPUTS_SWAPPED)
    for system in ("megatron-lm", "full-recompute", "memo"):
        assert policies(ask(1 << 20, system=system)) == (FULL_RECOMPUTE,)
    assert policies(ask(1 << 20, alpha=0.5)) == (Policy("full", 0.5),)


def test_the_answer_says_how_many_bytes_move_and_why() -> None:
    answer = what_if(ask(1 << 20))
    (line,) = [line for line in answer.result.why if line.startswith("Layer inputs")]
    # 30 of 32 layers, 1 Mi tokens of 4096 features in bf16, an eighth of them on each rank.
    assert "30.00 GiB per step" in line
    assert "short by 4.64 GiB of device memory" in line
    assert answer.best is not None
    assert ", full recompute, inputs swapped, step" in plan_title(answer.best.decisions, 1.0)
