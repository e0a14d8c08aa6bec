"""Full recompute of some layers, or of groups: which layers run again, and what they hold (gradients: exec_cpu)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import UsageError
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import KIB, parse_layer_choice
from memo_sim.engine.simulate import simulate
from memo_sim.planning.presets import FULL_RECOMPUTE, PAIRS_OF_LAYERS, SYSTEMS
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.planning.space import last_resorts, policies
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.program import Program
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower
from memo_sim.reasons.answer import explain
from tests.refusals import refused
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

CHOICES = ["every-2", "every-3", "first-1", "first-2", "groups-2", "groups-3", "groups-9"]
LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2, dp=2, zero=2),
    Layout(cp=2, cp_exchange="rsa"),
    Layout(ulysses=2, dp=2, zero=1),
    Layout(pp=2),
    Layout(pp=2, schedule="zero-bubble"),
    Layout(pp=2, schedule="interleaved", virtual_stages=2),
    Layout(pp=2, schedule="gpipe", tp=2, sequence_parallel=True),
]


def chosen(model: Model, layers: str, layout: Layout | None = None, **more: Any) -> Decisions:
    return decide(model, layout, ("full", 0.0), recompute_layers=layers, **more)


@pytest.mark.parametrize("layers", CHOICES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_program_passes_the_independent_checkers(layout: Layout, layers: str) -> None:
    for model in (GPT, LLAMA):
        assert faults_of(chosen(model, layers, layout)) == []
    if not layers.startswith("groups"):
        assert faults_of(chosen(LLAMA, layers, Layout(dp=4, zero=3, zero_ranks=2))) == []


def again(decisions: Decisions) -> list[list[int]]:
    """Return for each stage the layers whose attention runs forward again, in order, of the first micro-batch."""
    return [
        [
            int(name.split("/")[2][1:])
            for name, instruction in program.walk()
            if name.startswith("m0/") and "/rec/" in name and instruction.op == "attention"
        ]
        for program in lower(decisions)
    ]


@pytest.mark.parametrize(
    ("layers", "whole", "staged"),
    [
        # The model has five layers; two stages hold layers 0 to 2 and 3 to 4.
        ("all", [4, 3, 2, 1, 0], [[2, 1, 0], [4, 3]]),
        ("every-2", [3, 1], [[1], [4]]),
        ("every-3", [2], [[2], []]),
        ("first-1", [0], [[0], [3]]),
        ("first-2", [1, 0], [[1, 0], [4, 3]]),
        ("groups-2", [4, 2, 3, 0, 1], [[2, 0, 1], [3, 4]]),
        ("groups-3", [3, 4, 0, 1, 2], [[0, 1, 2], [3, 4]]),
    ],
)
def test_the_layers_are_counted_on_each_stage(layers: str, whole: list[int], staged: list[list[int]]) -> None:
    assert again(chosen(GPT, layers)) == [whole]
    assert again(chosen(GPT, layers, Layout(pp=2))) == staged


def test_a_chunk_of_a_stage_is_a_block_of_its_own() -> None:
    layout = Layout(pp=2, schedule="interleaved", virtual_stages=2)  # chunks l0, l3 and l1 l2, l4
    assert [sorted(stage) for stage in again(chosen(GPT, "first-1", layout))] == [[0, 3], [1, 4]]
    assert [sorted(stage) for stage in again(chosen(GPT, "every-2", layout))] == [[3], [2]]
    assert again(chosen(GPT, "groups-9", layout))[1] == [4, 1, 2]


def skeletal_at(program: Program, name: str) -> int:
    """Return the live bytes of skeletal tensors when an instruction runs."""
    curve = live_bytes(liveness(program, expand(program)), device=True)[BufferClass.SKELETAL.value]
    return int(curve[program.ids().index(name)])


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    ("layers", "kept"), [("all", []), ("every-2", [0, 2, 4]), ("first-2", [2, 3, 4]), ("every-9", [0, 1, 2, 3, 4])]
)
def test_layers_keep_their_input_or_everything(model: Model, layers: str, kept: list[int]) -> None:
    decisions = chosen(model, layers, global_batch=1)
    (program,) = lower(decisions)
    tensors = skeletal_of(decisions, shape_of(decisions), decisions.model.layer(0))
    x, whole = tensors[0].bytes, sum(t.bytes for t in tensors)
    count = len([layer for layer in kept if layer < model.layers])
    wanted = count * whole + (model.layers - count) * x
    before_backward = next(name for name in program.ids() if "/head/fwd" in name)
    assert skeletal_at(program, before_backward) == wanted + x  # and the head's input


def test_a_group_keeps_one_input_and_is_whole_in_its_backward() -> None:
    decisions = chosen(GPT, "groups-2", global_batch=1)
    (program,) = lower(decisions)
    tensors = skeletal_of(decisions, shape_of(decisions), decisions.model.layer(0))
    x, whole = tensors[0].bytes, sum(t.bytes for t in tensors)
    before_backward = next(name for name in program.ids() if "/head/fwd" in name)
    assert skeletal_at(program, before_backward) == 3 * x + x  # of l0, l2 and l4, and the head's input
    # When the first backward of l3 begins, l2 and l3 are whole, and l0 keeps its input.
    first = next(name for name in program.ids() if "/l3/bwd/" in name)
    assert skeletal_at(program, first) == x + 2 * whole
    inner = next(name for name in program.ids() if "/l2/bwd/" in name)
    assert skeletal_at(program, inner) == x + whole


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_can_be_asked_for_some_layers(system: str) -> None:
    cluster, hardware = load_cluster("h100-1x8")
    asked = Question(load_model("gpt-7b"), cluster, hardware, 2**16, system, Pins(recompute_layers="first-8"))
    (only,) = policies(asked)
    assert (only.recompute, only.alpha, only.layers) == ("full", 0.0, "first-8")
    assert only.label == "full recompute, layers first-8"


@pytest.mark.parametrize(
    ("pins", "got"),
    [
        ({"recompute": "none"}, "every-2 with recompute none"),
        ({"recompute": "tokenwise"}, "every-2 with recompute tokenwise"),
        ({"recompute": "full", "alpha": 1.0}, "65536 with recompute_layers every-2"),
        ({"offload_inputs": True}, "65536 with recompute_layers every-2"),
        ({"mlp_chunk_tokens": 8192}, "8192 with recompute_layers every-2"),
    ],
)
def test_pins_that_do_not_go_with_some_layers_are_refused(pins: dict[str, Any], got: str) -> None:
    cluster, hardware = load_cluster("h100-1x8")
    pinned = Pins(recompute_layers="every-2", **pins)
    with refused(UsageError, got=got):
        policies(Question(load_model("gpt-7b"), cluster, hardware, 2**16, "any", pinned))


@pytest.mark.parametrize("text", ["every", "every-0", "every-1", "first-0", "2", "groups-1", "first-8,9", "ALL"])
def test_other_choices_are_refused(text: str) -> None:
    with refused(UsageError, got=repr(text), hint="--recompute-layers every-2"):
        parse_layer_choice(text, option="--recompute-layers")


def test_pairs_of_layers_are_the_last_resort_of_megatron() -> None:
    cluster, hardware = load_cluster("a800-1x8")
    asked = Question(
        load_model("gpt-7b"), cluster, hardware, 640 * KIB, "megatron-lm", Pins(tp=8, cp=1, pp=1), global_batch=2
    )
    assert last_resorts(asked) == (PAIRS_OF_LAYERS,)
    found = search(asked)
    assert found.best is not None
    assert found.best.decisions.recompute_layers == "groups-2"
    assert found.best.policy == PAIRS_OF_LAYERS
    assert {e.decisions.recompute_layers for e in found.ranked} == {"all", "groups-2"}
    pinned = replace(asked, pins=replace(asked.pins, recompute="full"))
    assert last_resorts(pinned) == ()
    assert search(pinned).best is None
    shorter = replace(asked, seq_tokens=32 * KIB)
    assert {e.decisions.recompute_layers for e in search(shorter).ranked} == {"all"}


def test_time_and_memory_lie_between_keep_and_full_recompute() -> None:
    cluster, hardware = load_cluster("h100-1x8")
    found = []
    for pins in ({"recompute": "none"}, {"recompute_layers": "every-2"}, {"recompute": "full"}):
        asked = Question(
            model=load_model("llama-7b"),
            cluster=cluster,
            hardware=hardware,
            seq_tokens=4096,
            system="fsdp",
            pins=Pins(dp=8, **pins),
            global_batch=8,
        )
        result = search(asked)
        best = result.best
        assert best is not None
        found.append((best.prediction.step_s or 0.0, best.prediction.peak_device_bytes))
        if "recompute_layers" in pins:
            text = explain(asked, result, simulate(best.decisions, hardware, cluster))
            assert any("Only the last of every 2 layers of a stage runs forward again" in line for line in text)
            assert best.policy.layers == "every-2"
            assert best.policy.recompute == FULL_RECOMPUTE.recompute
    (keep_s, keep_bytes), (own_s, own_bytes), (full_s, full_bytes) = found
    assert keep_s < own_s < full_s
    assert full_bytes < own_bytes < keep_bytes
    assert own_s - keep_s == pytest.approx((full_s - keep_s) / 2, rel=0.1)
