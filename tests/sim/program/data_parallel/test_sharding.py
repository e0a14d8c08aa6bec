"""ZeRO 2 and 3: shards on a rank, lives of gathered blocks, bytes moved, and the overlap of collectives."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import simulate
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.analysis.liveness import live_bytes, liveness
from memo_sim.program.ir.instruction import Instance, Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective
from memo_sim.program.layout.parameters import embed_block, head_block, layer_block
from memo_sim.program.lower import lower, program_sha256
from memo_sim.program.verify.program import check_edges, check_program
from tests.pairs import covering
from tests.sim.small_programs import GPT, LLAMA, POLICIES, decide, faults_of
from tests.sim.toy_machine import TOY_CLUSTER, ToyPrices, alone, small_decisions, toy_hardware
from tests.sim.toy_machine import decide as decide_small

RANKS = 4
LAYOUTS = [
    Layout(dp=RANKS, zero=2),
    Layout(dp=RANKS, zero=3),
    Layout(cp=2, dp=2, zero=3),
    Layout(tp=2, sequence_parallel=True, cp=2, zero=3),
    Layout(tp=2, dp=2, zero=2),
]
GROUPS = [Layout(dp=RANKS, zero=zero, zero_ranks=2) for zero in (1, 2, 3)]
GROUPS += [Layout(cp=2, dp=2, zero=3, zero_ranks=2), Layout(tp=2, dp=6, zero=2, zero_ranks=3)]
"""Layouts with two groups of ranks that ZeRO divides over."""


def moved(program: Program, group: str = "grads") -> Counter[tuple[str, str]]:
    """Return the bytes of the whole tensors that a group's collectives move, by (kind of collective, operator)."""
    total: Counter[tuple[str, str]] = Counter()
    for _, instruction in program.walk():
        if isinstance(instruction.work, Collective) and instruction.work.group == group:
            total[instruction.work.kind, instruction.op] += instruction.work.bytes
    return total


@pytest.mark.parametrize(
    ("policy", "model"),
    covering(POLICIES, [GPT, LLAMA]),
    ids=lambda v: v.name if isinstance(v, Model) else f"{v[0]}-{v[1]}",
)
def test_every_sharded_program_passes_the_independent_checkers(model: Model, policy: tuple[str, float]) -> None:
    for layout, states in itertools.product([*LAYOUTS, *GROUPS], ("bf16", "host")):
        (program,) = lower(decide(model, layout, policy, states=states, global_batch=2 * layout.dp))
        columns = expand(program)
        assert check_program(program, columns) == []
        assert check_edges(columns, derive_edges(columns)) == []


STAGES: list[dict] = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"schedule": "interleaved", "virtual_stages": 2},
    {"schedule": "1f1b", "subsequences": 2},
    {"schedule": "1f1b", "zero_ranks": 2},
]


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("stages", STAGES, ids=str)
def test_every_sharded_stage_passes_the_independent_checkers(model: Model, stages: dict) -> None:
    for zero, more in itertools.product((2, 3), ({}, {"states": "host", "overlap": "both"})):
        chosen = decide(model, Layout(pp=2, dp=RANKS, zero=zero, **stages), global_batch=4 * RANKS, **more)
        assert faults_of(chosen) == []


def test_stages_gather_and_scatter_their_own_blocks_for_every_micro_batch() -> None:
    """As many bytes as without stages: each block is on one stage, and every micro-batch passes it twice."""
    embed, layer, head = (
        block.elements for block in (embed_block(LLAMA, 1), layer_block(LLAMA, 1, LLAMA.layer(0)), head_block(LLAMA, 1))
    )
    found = [moved(p) for p in lower(decide(LLAMA, Layout(pp=2, dp=RANKS, zero=3), global_batch=3 * RANKS))]
    half = LLAMA.layers // 2 * layer
    for stage, end in zip(found, (embed, head), strict=True):
        assert stage["all_gather", "params.all_gather"] == 2 * 3 * (2 * half + end)
        assert stage["reduce_scatter", "grads.reduce_scatter"] == 4 * 3 * (half + end)


def test_a_tied_embedding_of_two_stages_is_whole() -> None:
    """The first stage has it with learned positions, the last without: shards of both are not of the same rows."""
    for program in lower(decide(GPT, Layout(pp=2, dp=RANKS, zero=3), global_batch=2 * RANKS)):
        names = {family.name for family in program.families}
        assert {"gathered.layer", "whole_grads.layer"} <= names
        assert not {"gathered.embed", "whole_grads.embed"} & names
        (params,) = (family for family in program.families if family.name == "params.embed")
        (states,) = (family for family in program.families if family.name == "master.embed")
        assert params.tokens > (RANKS - 1) * states.tokens


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bytes_moved_are_those_of_the_formula(model: Model, micro_batches: int) -> None:
    blocks = (embed_block(model, 1), layer_block(model, 1, model.layer(0)), head_block(model, 1))
    embed, layer, head = (block.elements for block in blocks)
    tied = 2 if model.tied_embeddings else 1
    backward = model.layers * layer + tied * embed + head
    every_use = 2 * model.layers * layer + tied * embed + head
    once = model.layers * layer + embed + head
    for zero in (2, 3):
        layout = Layout(dp=RANKS, zero=zero)
        found = moved(lower(decide(model, layout, global_batch=micro_batches * RANKS))[0])
        gathered = 2 * (every_use * micro_batches if zero == 3 else once)
        assert found == {
            ("reduce_scatter", "grads.reduce_scatter"): 4 * backward * micro_batches,
            ("all_gather", "params.all_gather"): gathered,
            ("all_reduce", "all_reduce"): 8,  # the gradient norm, the loss
        }


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_reduce_inside_and_each_shard_between_them_once_a_step(zero: int, micro_batches: int) -> None:
    blocks = (embed_block(LLAMA, 1), layer_block(LLAMA, 1, LLAMA.layer(0)), head_block(LLAMA, 1))
    embed, layer, head = (block.elements for block in blocks)
    once = LLAMA.layers * layer + embed + head
    every_use = 2 * LLAMA.layers * layer + embed + head
    layout = Layout(dp=RANKS, zero=zero, zero_ranks=2)
    (program,) = lower(decide(LLAMA, layout, global_batch=micro_batches * RANKS))
    assert moved(program, "shard") == {
        ("reduce_scatter", "grads.reduce_scatter"): 4 * once * (micro_batches if zero > 1 else 1),
        ("all_gather", "params.all_gather"): 2 * (every_use * micro_batches if zero == 3 else once),
        ("all_reduce", "all_reduce"): 4,  # the gradient norm: the other group has the same gradients
    }
    assert moved(program, "replicate") == {("all_reduce", "shards.all_reduce"): 4 * once // 2}
    assert moved(program) == {("all_reduce", "all_reduce"): 4}  # the loss
    ranks = {i.work.group: i.work.ranks for _, i in program.walk() if isinstance(i.work, Collective)}
    assert ranks == {"shard": 2, "replicate": 2, "grads": RANKS}


@pytest.mark.parametrize("zero", [2, 3])
def test_a_shard_is_reduced_between_groups_beside_the_backward_of_earlier_layers(zero: int) -> None:
    layout = Layout(dp=RANKS, zero=zero, zero_ranks=2)
    (program,) = lower(decide(LLAMA, layout, global_batch=2 * RANKS))
    ids, calls = program.ids(), {name: i for name, i in program.walk() if i.op == "shards.all_reduce"}
    assert len(calls) == LLAMA.layers + 2
    assert {i.lane for i in calls.values()} == {Lane.REPLICATE}
    for number in range(2, LLAMA.layers):
        reduced = ids.index(f"step/l{number}/reduce/shard")
        assert max(ids.index(f"m{m}/s0/l{number}/reduce/add.no_decay") for m in range(2)) < reduced
        assert reduced < min(i for i, name in enumerate(ids) if name.startswith(f"m1/s0/l{number - 2}/bwd/"))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_of_all_replicas_are_no_groups(zero: int) -> None:
    all_of_them, unsaid = (Layout(dp=RANKS, zero=zero, zero_ranks=ranks) for ranks in (RANKS, 0))
    assert program_sha256(lower(decide(LLAMA, all_of_them))) == program_sha256(lower(decide(LLAMA, unsaid)))


def test_groups_of_one_rank_divide_nothing() -> None:
    alone, whole = Layout(dp=RANKS, zero=3, zero_ranks=1), Layout(dp=RANKS)
    assert program_sha256(lower(decide(LLAMA, alone))) == program_sha256(lower(decide(LLAMA, whole)))


def test_compute_waits_less_for_gathers_inside_a_node() -> None:
    """Four nodes with four cards each; the price of it is four times the states."""
    cluster, hardware = load_cluster("a100-4x8-hdr4")
    found = []
    for ranks in (0, 8):
        layout = Layout(dp=32, zero=3, zero_ranks=ranks)
        decisions = decide(load_model("gpt-7b"), layout, ("full", 0.0), seq_tokens=1024, global_batch=32)
        found.append(simulate(decisions, hardware, cluster).prediction)
    whole, groups = found
    assert groups.step_s is not None
    assert whole.step_s is not None
    assert groups.step_s < whole.step_s
    assert groups.peak_by_class["state"] == pytest.approx(4 * whole.peak_by_class["state"], rel=1e-3)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_a_rank_holds_its_shard(zero: int, states: str) -> None:
    (program,) = lower(decide(LLAMA, Layout(dp=RANKS, zero=zero), states=states))
    held = Counter()
    for family in program.families:
        if family.name.partition(".")[0] in ("params", "grads", "master", "moment1", "moment2"):
            held[family.name.partition(".")[0]] += family.bytes * family.count
    blocks = [
        (embed_block(LLAMA, 1), 1),
        (layer_block(LLAMA, 1, LLAMA.layer(0)), LLAMA.layers),
        (head_block(LLAMA, 1), 1),
    ]
    whole = sum(block.elements * count for block, count in blocks)
    runs = [
        (n * count)
        for block, count in blocks
        for n in (-(-block.decayed_elements // RANKS), -(-(block.elements - block.decayed_elements) // RANKS))
    ]
    share = sum(runs)
    moment = 2 if states == "bf16" else 4
    assert held == {
        "params": 2 * (share if zero >= 3 else whole),
        "grads": 4 * (share if zero >= 2 else whole),
        "master": 4 * (share if zero >= 1 else whole),
        "moment1": moment * (share if zero >= 1 else whole),
        "moment2": moment * (share if zero >= 1 else whole),
    }


def whole_at_once(program: Program, prefix: str) -> int:
    """Return the most bytes alive at once in families whose names start with ``prefix``."""
    columns = expand(program)
    lives = liveness(program, columns)
    chosen = np.array([f.name.startswith(prefix) for f in program.all_families])[columns.buffer_family]
    only = dataclasses.replace(lives, bytes=np.where(chosen, lives.bytes, 0))
    return int(np.sum(list(live_bytes(only, device=True).values()), axis=0).max())


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_two_whole_blocks_live_at_a_time(model: Model) -> None:
    """The peak is the largest pair of consecutive uses: of parameters in any pass, of gradients in backward."""
    blocks = (embed_block(model, 1), layer_block(model, 1, model.layer(0)), head_block(model, 1))
    embed, layer, head = (block.elements for block in blocks)
    last = head + embed * model.tied_embeddings
    (program,) = lower(decide(model, Layout(dp=RANKS, zero=3)))
    assert whole_at_once(program, "gathered.") == 2 * max(embed + layer, 2 * layer, layer + last)
    assert whole_at_once(program, "whole_grads.") == 4 * max(last + layer, 2 * layer, layer + embed)


@pytest.mark.parametrize("zero", [2, 3])
def test_without_replicas_zero_changes_nothing(zero: int) -> None:
    for layout in (Layout(), Layout(tp=2)):
        divided = with_zero(layout, zero=zero)
        assert program_sha256(lower(decide(LLAMA, divided))) == program_sha256(lower(decide(LLAMA, layout)))


def with_zero(layout: Layout, *, zero: int) -> Layout:
    return Layout(tp=layout.tp, cp=layout.cp, dp=layout.dp, zero=zero)


def test_an_all_gather_runs_beside_the_use_before_it() -> None:
    """With a fast network compute waits only for a micro-batch's first two all-gathers and at the ends of the step."""
    decisions = decide_small(("none", 0.0), layout=Layout(dp=2, zero=3), layers=4)
    simulation = simulate(decisions, toy_hardware(), TOY_CLUSTER, pricer=Network(1e-6), rates=alone)
    spans = by_id(simulation)
    for layer in range(3):
        gather, before = spans[f"m0/s0/l{layer + 1}/gather/params.layer"], spans[f"m0/s0/l{layer}/fwd/norm1"]
        assert gather[0] <= before[0]
        assert gather[1] <= spans[f"m0/s0/l{layer}/fwd/out_add"][1]
        scattered = spans[f"m0/s0/l{layer + 1}/reduce/grads"]
        assert scattered[0] < spans[f"m0/s0/l{layer}/bwd/norm1.bwd"][1]
        assert spans[f"m0/s0/l{layer + 1}/reduce/add.decay"][0] >= spans[f"m0/s0/l{layer}/bwd/norm1.bwd"][1]


def test_compute_waits_for_a_slow_network() -> None:
    decisions = decide_small(("none", 0.0), layout=Layout(dp=2, zero=3), layers=4)
    hardware = toy_hardware()
    quick, slow = (
        simulate(decisions, hardware, TOY_CLUSTER, pricer=Network(s), rates=alone).prediction for s in (1e-6, 1e-2)
    )
    gathered = next(s for s in slow.stalls if s.lane == "compute" and s.waits_for == "params.all_gather")
    assert gathered.seconds > 0.05
    # Every collective is on the critical path: two uses of four layers, embedding, head, and their gradients.
    assert slow.step_s is not None
    assert quick.step_s is not None
    assert slow.step_s > slow.lanes["replica"] > quick.step_s


class Network(ToyPrices):
    """Toy prices in which every collective takes the same time, whatever its size."""

    def __init__(self, collective_s: float) -> None:
        super().__init__()
        self.collective_s = collective_s

    def seconds(self, work) -> float:
        return self.collective_s if isinstance(work, Collective) else super().seconds(work)


def by_id(simulation) -> dict[str, tuple[float, float]]:
    playback = simulation.playback
    return dict(
        zip(
            simulation.program.ids(),
            zip(playback.start_s.tolist(), playback.end_s.tolist(), strict=True),
            strict=True,
        )
    )


@settings(max_examples=20, deadline=None)
@given(decisions=small_decisions())
def test_repeated_micro_batches_take_as_long_as_played_ones(decisions: Decisions) -> None:
    layout = Layout(tp=decisions.layout.tp, sequence_parallel=decisions.layout.sequence_parallel, dp=2, zero=3)
    fields = {f: getattr(decisions, f) for f in decisions.__struct_fields__}
    fields |= {"layout": layout, "global_batch": 10, "seq_tokens": 512 * layout.tp, "swapped_tokens": 0}
    chosen = Decisions(**fields)
    rates = {"pricer": ToyPrices(), "rates": alone}
    short = simulate(chosen, toy_hardware(), TOY_CLUSTER, **rates).prediction
    whole = simulate(chosen, toy_hardware(), TOY_CLUSTER, micro_batches_played=5, **rates).prediction
    assert short.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert short.peak_device_bytes == whole.peak_device_bytes


def test_zero_3_needs_less_memory_than_2_and_2_than_1() -> None:
    peaks = []
    for zero in (0, 1, 2, 3):
        model = Model(**{f: getattr(LLAMA, f) for f in LLAMA.__struct_fields__} | {"layers": 40})
        (program,) = lower(decide(model, Layout(dp=RANKS, zero=zero), policy=("full", 0.0)))
        columns = expand(program)
        total = np.sum(list(live_bytes(liveness(program, columns), device=True).values()), axis=0)
        peaks.append(int(total.max()))
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_gathered_parameters_wait_on_the_replicas_lane_in_program_order() -> None:
    (program,) = lower(decide(GPT, Layout(dp=RANKS, zero=3), global_batch=RANKS))
    calls = [name for name, i in program.walk() if i.lane is Lane.REPLICA]
    assert calls[:3] == [
        "m0/s0/embed/gather/params.embed",
        "m0/s0/l0/gather/params.layer",
        "m0/s0/l1/gather/params.layer",
    ]
    head = calls.index("m0/s0/head/gather/params.head")
    assert calls[head : head + 5] == [
        "m0/s0/head/gather/params.head",
        "m0/s0/head.embed/gather/params.embed",
        "m0/s0/l4/regather/params.layer",
        "m0/s0/head/reduce/grads",
        "m0/s0/head.embed/reduce/grads",
    ]
    assert calls[head + 5 : head + 8] == [
        "m0/s0/l3/regather/params.layer",
        "m0/s0/l4/reduce/grads",
        "m0/s0/l2/regather/params.layer",
    ]


def test_the_checker_finds_a_shard_of_the_wrong_size_and_a_second_reader() -> None:
    (program,) = lower(decide(GPT, Layout(dp=RANKS, zero=3)))
    templates = list(program.templates)
    at = next(n for n, t in enumerate(templates) if t.name == "layer.gather")
    (gather,) = templates[at].instructions
    shorter = msgspec.structs.replace(gather.operands[0], tokens=gather.operands[0].tokens - 2)
    broken = msgspec.structs.replace(gather, operands=(shorter, gather.operands[1]))
    templates[at] = dataclasses.replace(templates[at], instructions=(broken,))
    faulty = dataclasses.replace(program, templates=tuple(templates))
    assert any("is not 1/4 of" in fault for fault in check_program(faulty, expand(faulty)))

    # Let a layer's backward read the parameters gathered for its forward, which should be dead by then.
    slot = next(t for t in program.templates if t.name == "layer.fwd").slots.index("gathered.layer")
    instances = list(program.instances)
    forward, backward = (next(i for i in instances if i.place == "m0/s0/l1" and named(program, i) == t) for t in PASSES)
    indices = list(backward.indices)
    indices[slot] = forward.indices[slot]
    instances[instances.index(backward)] = msgspec.structs.replace(backward, indices=tuple(indices))
    faulty = dataclasses.replace(program, instances=tuple(instances))
    faults = check_program(faulty, expand(faulty))
    assert any("is read by 2 passes" in fault for fault in faults)
    assert any("is read by 0 passes" in fault for fault in faults)


PASSES = ("layer.fwd", "layer.bwd")


def named(program: Program, instance: Instance) -> str:
    return program.templates[instance.template].name
