"""FSDP's passes over whole units: what each version copies, on which lane, and in which order beside gathers."""

from __future__ import annotations

from collections import Counter

import pytest

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.knobs import ReduceDtype, Sharding
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.engine.simulate import simulate
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import FRESH, Collective, Rowwise
from memo_sim.program.layout.parameters import embed_block, head_block, layer_block
from memo_sim.program.lower import lower, program_sha256
from memo_sim.program.operators.framework_kernels import framework_kernels, launches
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

RANKS = 4
FSDP: tuple[Sharding, ...] = ("fsdp1", "fsdp2")
LAYOUTS = [
    Layout(dp=RANKS, zero=2),
    Layout(dp=RANKS, zero=3),
    Layout(cp=2, dp=2, zero=3),
    Layout(tp=2, sequence_parallel=True, dp=2, zero=3),
    Layout(dp=RANKS, zero=3, zero_ranks=2),
]


def played(sharding: Sharding, layout: Layout = LAYOUTS[1], **more) -> list[tuple[str, Instruction]]:
    (program,) = lower(decide(LLAMA, layout, memory_policy="eager", sharding=sharding, **more))
    return list(program.walk())


@pytest.mark.parametrize("sharding", FSDP)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_checkers_pass(layout: Layout, sharding: Sharding) -> None:
    for model in (GPT, LLAMA):  # with a tied embedding, and without
        for reduced in ("auto", "bf16"):
            chosen = decide(model, layout, memory_policy="eager", sharding=sharding, reduce_dtype=reduced)
            assert faults_of(chosen) == []
    assert faults_of(decide(LLAMA, layout, memory_policy="eager", sharding=sharding, states="pure-bf16")) == []


def test_without_sharding_of_gradients_nothing_is_copied() -> None:
    for zero in (0, 1):
        plans = [decide(LLAMA, Layout(dp=RANKS, zero=zero), memory_policy="eager", sharding=s) for s in ("memo", *FSDP)]
        assert len({program_sha256(lower(plan)) for plan in plans}) == 1


def test_fsdp2_copies_every_gather_out_on_the_compute_lane_and_fsdp1_none() -> None:
    gathers = Counter(
        name.rpartition("/")[2].split(".")[1] for name, i in played("fsdp2") if i.op == "params.all_gather"
    )
    copies = [(name, i) for name, i in played("fsdp2") if i.op == "params.copy_out"]
    assert Counter(name.rpartition("/")[2].split(".")[1] for name, _ in copies) == gathers
    assert {i.lane for _, i in copies} == {Lane.COMPUTE}
    layer = layer_block(LLAMA, 1, LLAMA.layer(0)).elements
    works = {i.work for name, i in copies if name.endswith("copy_out.layer")}
    assert works == {Rowwise("copy_out", layer, 2 * layer, 2 * layer, elements=layer)}
    assert not [i for _, i in played("fsdp1") if i.op == "params.copy_out"]


@pytest.mark.parametrize(
    ("sharding", "reduced", "kind", "written", "summed"),
    [
        ("fsdp2", "auto", "flatten.widen", 4, 4),
        ("fsdp2", "bf16", "flatten", 2, 2),
        ("fsdp1", "auto", "flatten", 2, 4),  # its cast to fp32 runs beside compute
        ("fsdp1", "bf16", "flatten", 2, 2),
    ],
)
def test_gradients_are_copied_once_and_reduced_in_their_dtype(
    sharding: Sharding, reduced: ReduceDtype, kind: str, written: int, summed: int
) -> None:
    walked = played(sharding, reduce_dtype=reduced)
    blocks = (embed_block(LLAMA, 1), layer_block(LLAMA, 1, LLAMA.layer(0)), head_block(LLAMA, 1))
    elements = [block.elements for block in blocks]
    assert {i.work for _, i in walked if i.op == "grads.flatten"} == {
        Rowwise(kind, each, 2 * each, written * each, elements=each) for each in elements
    }
    scattered = {i.work.bytes for _, i in walked if i.op == "grads.reduce_scatter" and isinstance(i.work, Collective)}
    assert scattered == {summed * each for each in elements}


def test_gradients_of_autograd_are_not_zeroed_first() -> None:
    """Whole gradients are born when a product writes them; only this rank's sums are zeroed, once a step."""
    cleared = [i.work for name, i in played("fsdp2") if i.op == "zero" and not name.startswith("step/")]
    assert {work.kind for work in cleared if isinstance(work, Rowwise)} == {FRESH}
    work = Rowwise(FRESH, 10, 0, 0)
    assert launches(work, "eager") == 0
    cluster, hardware = load_cluster("h100-1x8")
    assert Pricer(hardware, cluster, Layout(), rowwise="eager").seconds(work) == 0.0
    kept = [i.work for name, i in played("memo") if i.op == "zero" and not name.startswith("step/")]
    assert {work.kind for work in kept if isinstance(work, Rowwise)} == {"zero"}


@pytest.mark.parametrize("sharding", ["memo", "fsdp2"])
def test_a_unit_is_gathered_one_use_ahead_and_no_earlier(sharding: Sharding) -> None:
    """As FSDP's implicit prefetch and backward_prefetch: gather i + 1 is issued after use i - 1, before use i."""
    walked = [(name, i) for name, i in played(sharding, global_batch=RANKS) if name.startswith("m0")]
    order = [name.split("/")[2] for name, i in walked if i.op == "params.all_gather"]
    first_of_use = {}
    for at, (name, i) in enumerate(walked):
        phase = name.split("/")[3]
        if phase in ("fwd", "bwd") and i.lane is Lane.COMPUTE:
            first_of_use.setdefault((name.split("/")[2], phase), at)
    issued = [at for at, (_, i) in enumerate(walked) if i.op == "params.all_gather"]
    begins = sorted(first_of_use.values())
    for use, at in list(enumerate(issued))[2:]:
        assert begins[use - 2] < at < begins[use - 1], order[use]


def test_copies_take_time_of_compute_and_none_of_collectives() -> None:
    cluster, hardware = load_cluster("h100-1x8")
    layout, kernels = Layout(dp=8, zero=3), Kernels(attention="torch-flash", rowwise="eager")
    predicted = {}
    for sharding in ("memo", *FSDP):
        chosen = decide(LLAMA, layout, memory_policy="eager", sharding=sharding, kernels=kernels, global_batch=8)
        predicted[sharding] = simulate(chosen, hardware, cluster).prediction.lanes
    assert predicted["fsdp2"]["compute"] > predicted["fsdp1"]["compute"]
    assert predicted["fsdp2"]["replica"] == pytest.approx(predicted["memo"]["replica"])


def test_fused_adamw_is_one_pass_over_parameters_gradients_and_moments() -> None:
    plain, fused = (Rowwise(kind, 10, 0, 0, elements=10) for kind in ("adamw", "adamw.fused"))
    for library in ("eager", "compiled"):  # torch.compile leaves the optimizer as it is
        moved = [sum(k.moved_bytes(work) for k in framework_kernels(work, library)) for work in (plain, fused)]
        assert moved == [10 * (8 * 6 + 4 * 4 * 3 - 4 * 2 + 6), 10 * (8 + 28 + 6)]
    works = [i.work for _, i in played("fsdp2", kernels=Kernels(rowwise="compiled", adamw="fused"))]
    assert {"adamw.fused"} == {w.kind for w in works if isinstance(w, Rowwise) and w.kind.startswith("adamw")}
    own = [i.work for _, i in played("fsdp2", kernels=Kernels(adamw="fused"))]
    assert {"adamw"} == {w.kind for w in own if isinstance(w, Rowwise) and w.kind.startswith("adamw")}
