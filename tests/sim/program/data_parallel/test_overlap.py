"""``overlap``: collectives of replicas beside compute. Their place in the step, the time saved, and shared links."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.knobs import Overlap
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.engine.simulate import simulate
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Collective
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from tests.pairs import covering
from tests.sim.small_programs import GPT, LLAMA, POLICIES, decide

OVERLAPS: tuple[Overlap, ...] = ("none", "gradients", "both")
LAYOUTS = [
    Layout(dp=4, zero=0),
    Layout(dp=4, zero=1),
    Layout(cp=2, dp=2, zero=1),
    Layout(tp=2, sequence_parallel=True, cp=2, zero=1),
    Layout(dp=4, zero=2),
]


def replica_calls(decisions: Decisions) -> list[tuple[str, str, Lane, int]]:
    """Return (id, kind, lane, bytes) of every collective between replicas, in program order."""
    (program,) = lower(decisions)
    return [
        (name, i.work.kind, i.lane, i.work.bytes)
        for name, (_, i) in zip(program.ids(), program.walk(), strict=True)
        if isinstance(i.work, Collective) and i.work.group == "grads" and i.op != "all_reduce"
    ]


@pytest.mark.parametrize(
    ("policy", "model"),
    covering(POLICIES, [GPT, LLAMA]),
    ids=lambda v: v.name if isinstance(v, Model) else f"{v[0]}-{v[1]}",
)
def test_every_program_passes_the_independent_checkers(model: Model, policy: tuple[str, float]) -> None:
    for layout, overlap in itertools.product(LAYOUTS, OVERLAPS[1:]):
        (program,) = lower(decide(model, layout, policy, overlap=overlap))
        columns = expand(program)
        assert check_program(program, columns) == []
        assert check_edges(columns, derive_edges(columns)) == []


@given(
    model=st.sampled_from([GPT, LLAMA]),
    layout=st.sampled_from(LAYOUTS),
    batches=st.integers(1, 3),
)
@settings(max_examples=20, deadline=None)
def test_every_overlap_moves_the_same_bytes(model: Model, layout: Layout, batches: int) -> None:
    calls = [
        replica_calls(decide(model, layout, global_batch=batches * layout.dp, overlap=overlap)) for overlap in OVERLAPS
    ]
    moved = [sorted((kind, size) for _, kind, _, size in found) for found in calls]
    assert moved[0] == moved[1] == moved[2]
    assert {lane for found in calls for _, _, lane, _ in found} == {Lane.REPLICA}


def test_gradients_are_reduced_after_the_last_backward_and_parameters_gathered_before_the_first_forward() -> None:
    (program,) = lower(decide(LLAMA, Layout(dp=4, zero=1), global_batch=8, overlap="both"))
    ids = program.ids()
    for layer in range(LLAMA.layers):
        reduced = ids.index(f"step/l{layer}/reduce/grads")
        backward = [i for i, name in enumerate(ids) if name.startswith(f"m1/s0/l{layer}/bwd/")]
        later = [i for i, name in enumerate(ids) if name.startswith(f"m1/s0/l{layer - 1}/bwd/")]
        assert max(backward) < reduced
        assert not later or reduced < min(later)
        assert ids.index(f"step/l{layer}/gather/gather") < ids.index("m0/s0/embed/fwd/lookup")
    assert not any(name.startswith("m0/") and "reduce" in name for name in ids)


def test_a_tied_embedding_is_reduced_after_its_second_use() -> None:
    ids = lower(decide(GPT, Layout(dp=4, zero=1), overlap="gradients"))[0].ids()
    assert ids.index("step/embed/reduce/grads") > max(i for i, name in enumerate(ids) if name.startswith("m1/s0/embed"))


@pytest.mark.parametrize("overlap", OVERLAPS[1:])
def test_long_backwards_hide_the_collectives_of_replicas(overlap: Overlap) -> None:
    cluster, hardware = load_cluster("a800-1x8")
    base = Decisions(
        model=load_model("gpt-7b"),
        layout=Layout(tp=2, sequence_parallel=True, dp=4, zero=1),
        seq_tokens=16384,
        global_batch=8,
        recompute="full",
    )
    exposed = simulate(base, hardware, cluster)
    hidden = simulate(msgspec.structs.replace(base, overlap=overlap), hardware, cluster)
    assert exposed.prediction.step_s
    assert hidden.prediction.step_s
    saved = exposed.prediction.step_s - hidden.prediction.step_s
    ops = {"gradients": ["grads.reduce_scatter"], "both": ["grads.reduce_scatter", "params.all_gather"]}[overlap]
    moved = float(np.sum(exposed.seconds * exposed.pace.per_instruction(lambda i: float(i.op in ops))))
    # Compute is slower beside the collectives, so the step saves only a part of their time.
    assert 0.5 * moved < saved < moved
    assert hidden.prediction.peak_device_bytes == exposed.prediction.peak_device_bytes


def test_replicas_use_a_part_of_the_link_inside_a_node() -> None:
    cluster, hardware = load_cluster("a800-4x8")

    def share(layout: Layout) -> float:
        return Pricer(hardware, cluster, layout).demands[Lane.REPLICA].get("node out", 0.0)

    one_node = load_cluster("a800-1x8")[0]
    inside = Pricer(hardware, one_node, Layout(tp=2, dp=4)).demands[Lane.REPLICA]
    assert inside == pytest.approx({"node out": 1.0, "node in": 1.0}, rel=0.05)
    assert share(Layout(tp=8, dp=4)) == 0.0
    assert 0.2 < share(Layout(tp=4, dp=8)) < 0.5
    assert Pricer(hardware, cluster, Layout(tp=8, dp=4)).demands[Lane.REPLICA]["network out"] == 1.0


def test_metps_ranks_are_the_replicas_of_embedding_and_head() -> None:
    cluster, hardware = load_cluster("a800-1x8")
    assert Lane.REPLICA not in Pricer(hardware, cluster, Layout(metp=8)).demands
    assert Pricer(hardware, cluster, Layout(metp=8)).demands[Lane.ENDS]["node in"] == 1.0
    assert Pricer(hardware, cluster, Layout(tp=8)).demands.keys() == {Lane.TP}


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(dp=4, zero=1), Layout(tp=2, dp=4)])
def test_without_overlap_no_gradient_is_reduced_before_the_last_backward_has_ended(layout: Layout) -> None:
    cluster, hardware = load_cluster("a800-1x8")
    simulation = simulate(decide(GPT, layout), hardware, cluster)
    ids, playback = simulation.program.ids(), simulation.playback
    backward_end = max(playback.end_s[i] for i, name in enumerate(ids) if "/bwd/" in name)
    left = [playback.start_s[i] for i, name in enumerate(ids) if name.endswith("/reduce/grads")]
    assert left
    assert min(left) >= backward_end
