"""Expert parallelism: programs of every layout pass the independent checkers; bytes, rows and blocks as by hand."""

from __future__ import annotations

from math import ceil
from typing import Any

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.experts import Experts
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Layout
from memo_sim.engine.simulate import simulate
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.instruction import BufferClass, Instruction
from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.ir.work import Collective, GroupedGemm
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.expert_load import (
    MARGIN,
    capacity_rows,
    fullest_share,
    received_rows,
    received_sizes,
    rows_of,
)
from memo_sim.program.layout.rank_order import members
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower
from memo_sim.program.verify.values import check_values
from tests.sim.program.verify import planted
from tests.sim.small_programs import EXPERTS, LLAMA, decide, faults_of

BIASED = msgspec.structs.replace(
    EXPERTS, experts=Experts(count=8, per_token=2, hidden=192, router_bias=True, bias=True, activation="clamped")
)
SHARED = msgspec.structs.replace(
    EXPERTS,
    experts=Experts(
        count=8, per_token=2, hidden=192, shared=192, scores="sigmoid", selection_bias=True, selection_rate=0.001
    ),
)
GATED = msgspec.structs.replace(
    EXPERTS, experts=Experts(count=8, per_token=2, hidden=192, shared=192, shared_gate=True)
)
MIXED = EXPERTS.of_layers([LayerShape(ffn_hidden=640), *[EXPERTS.layer(0)] * 3])
HALF = ("tokenwise", 0.5)
LAYOUTS: dict[str, tuple[Layout, tuple[str, float], dict[str, Any]]] = {
    "dp": (Layout(dp=2, ep=2), ("none", 0.0), {}),
    "zipf": (Layout(dp=2, ep=2), HALF, {"expert_load": "zipf-1"}),
    "full recompute": (Layout(dp=2, ep=2), ("full", 0.5), {}),
    "mlp recompute": (Layout(dp=2, ep=2), ("mlp", 0.0), {}),
    "ring": (Layout(cp=4, ep=4), HALF, {}),
    "tp": (Layout(cp=2, tp=2, sequence_parallel=True, ep=2), HALF, {"expert_overflow": "refuse"}),
    "zero 1": (Layout(dp=4, ep=2, zero=1), HALF, {"overlap": "both"}),
    "zero 2 and tp": (Layout(dp=4, ep=2, zero=2, tp=2, sequence_parallel=True), HALF, {}),
    "zero 3": (Layout(dp=4, ep=2, zero=3), HALF, {"states": "host"}),
    "zero 3, no two ranks with the same experts": (Layout(dp=4, ep=4, zero=3), HALF, {}),
    "groups of replicas": (Layout(dp=8, ep=2, zero=3, zero_ranks=4), HALF, {"global_batch": 8}),
    "all": (Layout(cp=2, ulysses=2, pp=2, dp=2, ep=4), HALF, {"global_batch": 8}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_passes_the_checkers(name: str) -> None:
    layout, policy, fields = LAYOUTS[name]
    assert faults_of(decide(EXPERTS, layout, policy, **fields)) == []


def test_layers_without_experts_pass_the_checkers() -> None:
    assert faults_of(decide(MIXED, Layout(cp=2, pp=2, dp=2, zero=1, ep=2), HALF, global_batch=8)) == []


BIASED_LAYOUTS = {
    "tp": (Layout(tp=2, sequence_parallel=True, cp=2, ep=2), HALF),
    "whole tokens, zero 3": (Layout(tp=2, dp=2, ep=2, zero=3), ("none", 0.0)),
}


@pytest.mark.parametrize("name", BIASED_LAYOUTS)
def test_biases_pass_the_checkers(name: str) -> None:
    layout, policy = BIASED_LAYOUTS[name]
    assert faults_of(decide(BIASED, layout, policy)) == []


WHOLE: dict[str, Any] = {"sequence_parallel": True, "expert_tp": 1}
WHOLE_LAYOUTS = {
    "plain": (EXPERTS, Layout(tp=2, dp=2, ep=4, zero=1, **WHOLE), HALF),
    "biases, copies in tp": (BIASED, Layout(tp=4, ep=2, **WHOLE), ("none", 0.0)),
    "shared expert": (SHARED, Layout(tp=2, cp=2, ep=2, zero=3, **WHOLE), ("full", 0.5)),
    "gate": (GATED, Layout(tp=2, dp=2, ep=4, **WHOLE), ("mlp", 0.0)),
}


@pytest.mark.parametrize("name", WHOLE_LAYOUTS)
def test_whole_experts_on_ranks_of_tp_pass_the_checkers(name: str) -> None:
    model, layout, policy = WHOLE_LAYOUTS[name]
    assert faults_of(decide(model, layout, policy)) == []


@pytest.mark.parametrize("name", [*WHOLE_LAYOUTS, "full recompute", "zero 2 and tp", "zero 3"])
def test_frozen_experts_pass_the_checkers_and_have_no_states(name: str) -> None:
    model, layout, policy = WHOLE_LAYOUTS.get(name) or (EXPERTS, *LAYOUTS[name][:2])
    more = {"adapters": "r=4,alpha=8,targets=q+k+v+proj", "global_batch": 8}
    decisions = decide(model, layout, policy, **more)
    assert faults_of(decisions) == []
    for program in lower(decisions):
        held = {
            f.name for f in program.families if f.block is BlockKind.EXPERTS and f.buffer_class is BufferClass.STATE
        }
        assert held == {"params.experts"}


OVERLAPPED = {
    "features divided": (GATED, Layout(tp=2, sequence_parallel=True, dp=2, ep=2), HALF),
    "whole tokens": (SHARED, Layout(tp=2, dp=2, ep=2, zero=1), ("full", 0.0)),
    "whole experts": (SHARED, Layout(tp=2, dp=2, ep=4, **WHOLE), HALF),
    "nothing recomputed": (BIASED, Layout(dp=4, ep=2, zero=3), ("none", 0.0)),
    "experts again": (GATED, Layout(dp=2, ep=2), ("mlp", 0.0)),
}


@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlapped_exchanges_pass_the_checkers(name: str) -> None:
    model, layout, policy = OVERLAPPED[name]
    assert faults_of(decide(model, layout, policy, expert_overlap=True)) == []


def test_what_needs_no_rows_under_way_stands_beside_their_exchange() -> None:
    """Between an exchange and the copy of what arrived lie the shared expert, and of backward what needs other rows."""
    (program,) = lower(decide(SHARED, Layout(dp=2, ep=2), HALF, expert_overlap=True))
    names = {t.name: [i.name for i in t.instructions] for t in program.templates}
    forward, backward = names["layer.fwd"], names["layer.bwd"]

    def between(found: list[str], first: str, last: str) -> list[str]:
        return found[found.index(first) + 1 : found.index(last)]

    assert between(forward, "fwd/dispatch.exchange.r0", "fwd/dispatch.arrange.r0") == [
        "fwd/shared_up.r0",
        "fwd/shared_act.r0",
        "fwd/shared_up.r1",
        "fwd/shared_act.r1",
    ]
    assert between(forward, "fwd/combine.exchange", "fwd/combine") == ["fwd/shared_down"]
    assert backward[:2] == ["bwd/dispatch.grad", "bwd/dispatch.grad.exchange"]
    assert between(backward, "rec/dispatch.exchange.r1", "rec/dispatch.arrange.r1") == [
        "rec/shared_up.r1",
        "rec/shared_act.r1",
        "bwd/shared_down.dgrad",
        "bwd/shared_down.wgrad",
        "bwd/shared_act.bwd",
        "bwd/dispatch.grad.arrange",
        "bwd/experts_down.dgrad",
    ]
    assert between(backward, "bwd/dispatch.bwd.exchange", "bwd/dispatch.bwd") == [
        "bwd/experts_down.wgrad",
        "bwd/shared_up.dgrad",
        "bwd/shared_up.wgrad",
        "bwd/experts_up.wgrad",
    ]


LOSSY = msgspec.structs.replace(EXPERTS, experts=Experts(count=8, per_token=2, hidden=192, balance=0.01, z_loss=0.001))
ROW_BLOCKS: dict[str, tuple[Model, Layout, dict[str, Any]]] = {
    **{name: (EXPERTS, layout, fields) for name, (layout, _, fields) in LAYOUTS.items()},
    "layers without experts": (MIXED, Layout(cp=2, pp=2, dp=2, zero=1, ep=2), {"global_batch": 8}),
    "biases": (BIASED, BIASED_LAYOUTS["tp"][0], {}),
    "biases, whole tokens": (BIASED, BIASED_LAYOUTS["whole tokens, zero 3"][0], {}),
    "whole experts": (*WHOLE_LAYOUTS["plain"][:2], {}),
    "whole experts, shared expert": (*WHOLE_LAYOUTS["shared expert"][:2], {}),
    "whole experts, gate, frozen": (
        *WHOLE_LAYOUTS["gate"][:2],
        {"adapters": "r=4,alpha=8,targets=q+k+v+proj", "global_batch": 4},
    ),
    "overlap": (GATED, Layout(tp=2, sequence_parallel=True, dp=2, ep=2), {"expert_overlap": True}),
    "overlap, whole experts": (SHARED, Layout(tp=2, dp=2, ep=4, **WHOLE), {"expert_overlap": True}),
    "fp8": (GATED, Layout(tp=2, sequence_parallel=True, dp=2, ep=2), {"fp8": "block", "fp8_experts": True}),
    "attention in chunks": (EXPERTS, Layout(dp=2, ep=2), {"attention_chunk_tokens": 768}),
    "losses": (LOSSY, Layout(dp=2, ep=2), {"swap_dtype": "fp8"}),
    "losses, whole experts": (LOSSY, Layout(tp=2, dp=2, ep=4, zero=3, **WHOLE), {}),
    "losses, interleaved": (
        LOSSY,
        Layout(dp=2, ep=2, pp=2, virtual_stages=2, schedule="interleaved"),
        {"global_batch": 8},
    ),
}


@pytest.mark.parametrize("name", ROW_BLOCKS)
def test_row_wise_recompute_passes_the_checkers(name: str) -> None:
    """Two row blocks, each with seats and exchanges of its own; the second is a third of the first."""
    model, layout, fields = ROW_BLOCKS[name]
    cut = {"seq_tokens": 1024 * layout.cp * layout.ulysses, "mlp_chunk_tokens": 768}
    alpha = 1.0 if "attention_chunk_tokens" in fields else 0.5
    assert faults_of(decide(model, layout, ("rowwise", alpha), **(cut | fields))) == []


def test_overlap_shortens_a_step_and_takes_memory() -> None:
    cluster, hardware = load_cluster("h100-2x8")
    whole = load_model("deepseek-v3")
    model = whole.of_layers([whole.layer(60)] * 4)
    found = []
    for overlap in (False, True):
        layout = Layout(tp=4, sequence_parallel=True, expert_tp=1, dp=4, ep=16, zero=1)
        decisions = decide(model, layout, HALF, seq_tokens=32768, expert_overlap=overlap)
        found.append(simulate(decisions, hardware, cluster))
    assert found[1].prediction.step_s < found[0].prediction.step_s
    assert found[1].memory.device_total_bytes > found[0].memory.device_total_bytes


def test_whole_experts_send_no_row_twice_and_gather_nothing() -> None:
    """Two of 8 experts of 2,048 tokens, of which a rank of tp 2 routes half: 2,048 rows, 1.25 of the mean to each of 4.

    With features divided every rank sends the rows of all tokens: 2.5 times as many to each of 2 ranks.
    """
    programs = [
        lower(decide(EXPERTS, Layout(tp=2, dp=2, sequence_parallel=True, **fields), global_batch=2))[0]
        for fields in ({"ep": 4, "expert_tp": 1}, {"ep": 2})
    ]
    wide = [4 * 640 * 256 * 2, 2 * 2560 * 256 * 2]
    for program, expected, gathers in zip(programs, wide, (["fwd/norm1.gather"], None), strict=True):
        (forward,) = (t for t in program.templates if t.name == "layer.fwd")
        (work,) = (i.work for i in forward.instructions if i.name == "fwd/dispatch.exchange")
        assert work == Collective("all_to_all", expected, 4 if gathers else 2, "ep")
        gathered = [i.name for i in forward.instructions if i.op == "all_gather"]
        assert gathered == (gathers or ["fwd/norm1.gather", "fwd/norm2.gather"])
    up = [next(i.work for t in p.templates for i in t.instructions if i.name == "fwd/experts_up") for p in programs]
    assert [work.flops for work in up if isinstance(work, GroupedGemm)] == [2.0 * 2048 * 2 * 192 * 256] * 2


def test_biases_for_slots_that_may_have_no_seat_are_found() -> None:
    """Their probabilities have to count as zero, which needs the seats."""
    decisions = decide(BIASED, Layout(dp=2, ep=2), global_batch=2, seq_tokens=256)
    (program,) = lower(decisions)

    def elsewhere(each: Instruction) -> Instruction:
        slot = next(o.slot for o in each.operands if o.role == "experts")
        return msgspec.structs.replace(
            each,
            operands=tuple(msgspec.structs.replace(o, slot=slot) if o.role == "seats" else o for o in each.operands),
        )

    for part in ("", ".dgrad", ".wgrad"):

        def chosen(each: Instruction, part: str = part) -> bool:
            return each.op == f"experts.out_bias{part}"

        wrong = planted.replaced(program, planted.places(program, chosen)[0], chosen, elsewhere)
        assert any("route_seats" in fault for fault in check_values(wrong, expand(wrong), decisions)), part


MOVES = ("experts.seats", "experts.gates", "experts.all_to_all", "experts.arrivals", "experts.arrange")
BACK = ("experts.arrange.back", "experts.gates.bwd")


BLOCKS = {"seq_tokens": 1024, "mlp_chunk_tokens": 768}


@pytest.mark.parametrize(
    ("op", "policy"),
    [
        *((op, ("none", 0.0)) for op in (*MOVES, *BACK)),
        *((op, ("rowwise", 0.5)) for op in (*MOVES, *BACK, "experts.ends.sum")),
    ],
    ids=str,
)
def test_a_kernel_left_out_is_found(op: str, policy: tuple[str, float]) -> None:
    cut = BLOCKS if policy[0] == "rowwise" else {"seq_tokens": 256}
    decisions = decide(LOSSY, Layout(dp=2, ep=2), policy, global_batch=2, **cut)
    (program,) = lower(decisions)
    names = {i.name for t in program.templates for i in t.instructions if i.op == op}
    assert names
    for name in names:

        def chosen(each: Instruction, name: str = name) -> bool:
            return each.name == name

        less = planted.without(program, planted.places(program, chosen)[0], chosen)
        assert check_values(less, expand(less), decisions), name


@pytest.mark.parametrize(
    ("op", "role"),
    [
        ("experts.seats", "order"),
        ("experts.arrange", "order"),
        ("experts.arrange.back", "order"),
        ("experts.all_to_all", "send"),
        ("experts.combine", "places"),
        ("experts.linear", "x"),
        ("experts.gates.bwd", "seats"),
    ],
)
def test_rows_of_another_block_are_found(op: str, role: str) -> None:
    """The last rows of the first block are left where the second one is shorter."""
    (program,) = lower(decisions := decide(EXPERTS, Layout(dp=2, ep=2), ("rowwise", 0.0), global_batch=2, **BLOCKS))

    def second(each: Instruction) -> bool:
        return each.op == op and each.name.endswith(".b1")

    def later(each: Instruction) -> Instruction:
        moved = (msgspec.structs.replace(o, first=o.first + o.tokens) if o.role == role else o for o in each.operands)
        return msgspec.structs.replace(each, operands=tuple(moved))

    wrong = planted.replaced(program, planted.places(program, second)[0], second, later)
    assert check_values(wrong, expand(wrong), decisions)


@pytest.mark.parametrize("op", ["experts.route.bwd", "experts.ends.sum"])
def test_ends_of_one_block_do_not_serve_a_loss_of_balance(op: str) -> None:
    (program,) = lower(decisions := decide(LOSSY, Layout(dp=2, ep=2), ("rowwise", 0.0), global_batch=2, **BLOCKS))

    def fewer(each: Instruction) -> Instruction:
        slot = next(o.slot for o in each.operands if o.role in {"ends", "x"})
        operands = (
            msgspec.structs.replace(o, slot=slot, first=0, tokens=8) if o.role in {"all_ends", "x"} else o
            for o in each.operands
        )
        return msgspec.structs.replace(each, operands=tuple(operands))

    def chosen(each: Instruction) -> bool:
        return each.op == op

    wrong = planted.replaced(program, planted.places(program, chosen)[0], chosen, fewer)
    assert any("ends" in fault for fault in check_values(wrong, expand(wrong), decisions))


def test_bytes_of_the_all_to_alls_of_row_blocks_by_hand() -> None:
    """Blocks of 768 and 256 of 1,024 tokens, two rows each: a rank can send 960 and 320 rows to each of two."""
    (program,) = lower(decide(EXPERTS, Layout(dp=2, ep=2), ("rowwise", 0.0), global_batch=2, **BLOCKS))
    sent = {
        i.name: i.work.bytes
        for t in program.templates
        for i in t.instructions
        if i.op == "experts.all_to_all" and isinstance(i.work, Collective)
    }
    for block, rows in enumerate((2 * 960, 2 * 320)):
        wide = [n for n, size in sent.items() if n.endswith(f".b{block}") and size == rows * 256 * 2]
        ways = ("fwd/dispatch", "fwd/combine", "rec/dispatch", "bwd/dispatch.grad", "bwd/dispatch.bwd")
        assert wide == [f"{way}.exchange.b{block}" for way in ways]
        assert sent[f"fwd/gates.exchange.b{block}"] == sent[f"bwd/d_gates.exchange.b{block}"] == rows * 4


def test_bytes_of_the_all_to_alls_by_hand() -> None:
    """Two of 8 experts a token, 2,048 tokens, hidden 256: 4,096 rows; a rank can send 1.25 of the mean to each of 4."""
    decisions = decide(EXPERTS, Layout(dp=4, ep=4), HALF, global_batch=4)
    (program,) = lower(decisions)
    capacity = 1280
    rows = 4 * capacity

    def sent(template: str) -> list[tuple[str, int]]:
        (found,) = (t for t in program.templates if t.name == template)
        sent = [(i.name, i.work) for i in found.instructions if i.op == "experts.all_to_all"]
        return [(name, work.bytes) for name, work in sent if isinstance(work, Collective)]

    wide = rows * 256 * 2
    assert sent("layer.fwd") == [
        ("fwd/ends.exchange", 8 * 4),
        ("fwd/gates.exchange", rows * 4),
        ("fwd/dispatch.exchange.r0", wide),
        ("fwd/combine.exchange", wide),
    ]
    assert sent("layer.bwd") == [
        ("rec/dispatch.exchange.r1", wide),
        ("bwd/dispatch.grad.exchange", wide),
        ("bwd/d_gates.exchange", rows * 4),
        ("bwd/dispatch.bwd.exchange", wide),
    ]


def test_products_have_the_rows_that_are_there() -> None:
    decisions = decide(EXPERTS, Layout(dp=4, ep=4), global_batch=4, expert_capacity=2.0)
    (program,) = lower(decisions)
    products = {i.name: i.work for t in program.templates for i in t.instructions if isinstance(i.work, GroupedGemm)}
    assert {work.sizes for work in products.values()} == {((2048, 2),)}
    assert products["fwd/experts_up"].flops == 2.0 * 4096 * 2 * 192 * 256
    up = next(t for t in skeletal_of(decisions, shape_of(decisions), EXPERTS.layer(0)) if t.name == "up")
    assert up.tokens == 4 * 2048


def test_the_fullest_rank_is_priced() -> None:
    """Rows 8 4 2 2 per mille of experts dealt in turn: rank 0 has the 1st and 3rd, the mean is half of all."""
    of = EXPERTS.experts
    assert of is not None
    rows = 4096
    each = rows_of(of, rows, "zipf-1")
    first = sum(each[::4])
    assert fullest_share(of, rows, "zipf-1", 4) == pytest.approx(4 * first / rows)
    capacity = capacity_rows(of, rows, "zipf-1", 4, 0.0)
    assert capacity == min(4096, ceil(MARGIN * first))
    assert received_rows(of, rows, "zipf-1", 4, capacity) == 4 * first
    assert received_sizes(of, rows, "zipf-1", 4, capacity, 0, 4 * capacity) == (
        (4 * each[0], 1),
        (4 * each[4], 1),
    )
    assert received_rows(of, rows, "zipf-1", 4, 100) == 400
    assert capacity_rows(of, rows, "balanced", 8, 100.0) == 2048  # a token has one row at most for one expert


def test_experts_have_a_block_of_their_own_with_fewer_replicas() -> None:
    decisions = decide(EXPERTS, Layout(tp=2, dp=4, ep=2, zero=1), global_batch=4)
    (program,) = lower(decisions)
    size = 4 * (2 * 96 * 256 + 256 * 96)
    families = {f.name: f for f in program.families}
    assert families["params.experts"].tokens == families["grads.experts"].tokens == size
    assert families["params.experts"].block is BlockKind.EXPERTS
    assert families["moment1.experts"].tokens == size // 2
    assert families["moment1.layer"].tokens == pytest.approx(families["params.layer"].tokens / 4, abs=2)
    reduced = {t.name: [i.work for i in t.instructions] for t in program.templates if t.name == "experts.reduce"}
    assert reduced == {"experts.reduce": [Collective("reduce_scatter", 4 * size, 2, "expert_grads")]}


def test_states_of_experts_are_divided_inside_groups_of_replicas() -> None:
    """Eight replicas in groups of four, ep 2: a group has every expert twice, so two ranks share its states."""
    layout = Layout(dp=8, ep=2, zero=1, zero_ranks=4)
    (program,) = lower(decide(EXPERTS, layout, global_batch=8))
    size = 4 * 3 * 192 * 256
    assert {f.name: f.tokens for f in program.families}["moment1.experts"] == size // 2
    (reduced,) = ([i.work for i in t.instructions] for t in program.templates if t.name == "experts.reduce")
    scattered = Collective("reduce_scatter", 4 * size, 2, "expert_shard")
    assert reduced == [scattered, Collective("all_reduce", 2 * size, 2, "expert_replicate")]
    assert (members("expert_shard", layout, 5), members("expert_replicate", layout, 5)) == ([5, 7], [1, 5])


def test_biases_of_the_first_products_lie_with_their_experts() -> None:
    """The others, which token rows get, are whole on every rank: 8 experts x 256 features."""
    (divided,), (whole,) = (lower(decide(BIASED, Layout(tp=2, dp=2, ep=ep), global_batch=2)) for ep in (2, 1))
    sizes = [{f.name: f.tokens for f in program.families} for program in (divided, whole)]
    assert sizes[0]["params.experts"] == 4 * (2 * 96 * 256 + 256 * 96 + 2 * 96)
    assert sizes[1]["params.layer"] - sizes[0]["params.layer"] == 2 * sizes[0]["params.experts"]


def test_groups_are_consecutive_ranks_with_the_same_tp_coordinate() -> None:
    layout = Layout(tp=2, cp=2, dp=2, ep=2, pp=2)
    assert members("ep", layout, 0) == [0, 2]
    assert members("ep", layout, 5) == [5, 7]
    assert members("expert_grads", layout, 2) == [2, 6]
    assert members("ep", layout, 14) == [12, 14]
    assert layout.devices == 16


def test_groups_of_whole_experts_are_consecutive_ranks_of_all_axes_inside_a_stage() -> None:
    layout = Layout(tp=2, cp=2, dp=2, ep=4, pp=2, **WHOLE)
    assert members("ep", layout, 5) == [4, 5, 6, 7]
    assert members("expert_grads", layout, 9) == [9, 13]
    few = Layout(tp=4, ep=2, dp=2, **WHOLE)
    assert members("ep", few, 2) == [2, 3]
    assert members("expert_grads", few, 3) == [1, 3, 5, 7]
    assert (layout.expert_replicas, few.expert_replicas) == (2, 4)


REFUSED: dict[str, tuple[Model, Layout, dict[str, Any]]] = {
    "layout.ep": (LLAMA, Layout(dp=2, ep=2), {}),
    "layout.ep ": (EXPERTS, Layout(dp=2, tp=2, ep=4), {}),
    "layout.ep  ": (EXPERTS, Layout(tp=2, dp=2, ep=8, **WHOLE), {}),
    "experts": (EXPERTS, Layout(dp=3, ep=3), {}),
    "layout.zero_ranks": (EXPERTS, Layout(dp=4, ep=4, zero=1, zero_ranks=2), {}),
    "layout.zero_ranks ": (EXPERTS, Layout(dp=4, ep=4, zero=1, zero_ranks=8), {}),
    "decisions.expert_capacity": (EXPERTS, Layout(dp=2), {"expert_capacity": 2.0}),
    "decisions.expert_capacity ": (EXPERTS, Layout(dp=2), {"expert_overflow": "refuse"}),
}


@pytest.mark.parametrize("where", REFUSED)
def test_what_does_not_go_together_is_refused(where: str) -> None:
    model, layout, fields = REFUSED[where]
    with pytest.raises(Infeasible) as error:
        lower(decide(model, layout, **fields))
    assert error.value.where == where.strip()


def test_no_framework_divides_experts() -> None:
    framework = {"memory_policy": "eager", "modules": "huggingface"}
    with pytest.raises(Infeasible, match="ep 2 has no lowering beside experts"):
        lower(decide(EXPERTS, Layout(dp=2, ep=2), ("full", 0.0), **framework))
