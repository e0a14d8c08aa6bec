"""Edges derived from token ranges are the waits that MEMO 4.1 describes, and leave no conflict unordered."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.segments import cut
from memo_sim.program.analysis.columns import NUMBER, Columns, expand, fold
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak, peak_of
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.lower import lower
from tests.sim.engine.test_engine_player import conflicts
from tests.sim.program.pipeline.test_offload_window import windowed
from tests.sim.toy_machine import decide, small_decisions

LAYERS = 6


def reachable(columns: Columns, edges: Edges) -> list[int]:
    """Return for every instruction the set (as bits) of instructions that must have ended before it starts."""
    before: list[int] = []
    last: dict[int, int] = {}
    incoming: dict[int, list[int]] = {}
    for p, c in zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True):
        incoming.setdefault(c, []).append(p)
    for i, lane in enumerate(columns.lane.tolist()):
        known = 0
        for p in [*incoming.get(i, []), *([last[lane]] if lane in last else [])]:
            known |= before[p] | 1 << p
        before.append(known)
        last[lane] = i
    return before


def memory_orders(columns: Columns) -> list[tuple[int, int]]:
    """Return every order that allocation in program order needs, with plain loops."""
    lane = columns.lane.tolist()
    uses: dict[int, list[int]] = {}
    for buffer, i in zip(columns.operand_buffer.tolist(), columns.operand_instruction.tolist(), strict=True):
        if columns.buffer_dynamic[buffer]:
            uses.setdefault(buffer, []).append(i)
    births = [min(u) for u in uses.values()]
    wanted = [
        (min(u), next(i for i in sorted(u) if lane[i] == other))
        for u in uses.values()
        for other in {lane[i] for i in u}
    ]
    wanted = [(birth, touched) for birth, touched in wanted if lane[birth] != lane[touched]]
    for birth in births:
        kernels = [i for i in range(birth) if lane[i] == Lane.COMPUTE]
        if lane[birth] != Lane.COMPUTE and kernels:
            wanted.append((kernels[-1], birth))
    for u in uses.values():
        lasts = {lane[i]: i for i in sorted(u)}
        wanted += [
            (last, birth)
            for own, last in lasts.items()
            for birth in births
            if own != Lane.COMPUTE and birth > max(u) and lane[birth] != own
        ]
    return wanted


@given(decisions=small_decisions())
@settings(max_examples=30, deadline=None)
def test_operands_that_repeat_give_the_edges_and_lives_of_all_operands(decisions: Decisions) -> None:
    for program in lower(decisions):
        every, once = expand(program), fold(program)
        assert sum(len(operands.mode) for operands in once.operands) <= len(every.operand_mode)
        edges, folded = derive_edges(every), derive_edges(once)
        assert (edges.producer.tolist(), edges.consumer.tolist()) == (
            folded.producer.tolist(),
            folded.consumer.tolist(),
        )
        lives = liveness(program, every)
        assert (lives.birth == liveness(program, once).birth).all()
        assert (lives.death == liveness(program, once).death).all()
        for device in (True, False):
            assert peak_of(lives, device=device) == peak(live_bytes(lives, device=device))


def test_no_lane_touches_a_buffer_before_its_birth() -> None:
    """Half of a buffer's rows come from the host, half from another lane; neither lane waits for the other's rows."""
    columns = expand(lower(windowed(1, (256, 128, 128, 0)))[0])
    edges, wanted = derive_edges(columns), memory_orders(columns)
    before = reachable(columns, edges)
    assert all(before[consumer] >> producer & 1 for producer, consumer in wanted)
    ranges = set(conflicts(columns))
    apart = [pair for pair in wanted if pair not in ranges and columns.lane[pair[1]] == Lane.H2D]
    assert any(columns.lane[producer] == Lane.COMPUTE for producer, _ in apart)


@given(decisions=small_decisions())
@settings(max_examples=40, deadline=None)
def test_edges_order_every_conflict_and_reuse_of_memory_and_nothing_else(decisions: Decisions) -> None:
    columns = expand(lower(decisions)[0])
    edges = derive_edges(columns)
    before, wanted = reachable(columns, edges), [*conflicts(columns), *memory_orders(columns)]
    assert [(i, j) for i, j in wanted if not before[j] >> i & 1] == []
    assert set(zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True)) <= set(wanted)


@pytest.mark.parametrize("policy", [("none", 0.0), ("full", 0.0), ("tokenwise", 0.5)])
def test_input_gradients_do_not_wait_for_the_gather_of_weight_gradients(policy: tuple[str, float]) -> None:
    """No buffer is born in the memory of the norm's shard before the weight gradient has read the gathered tensor."""
    (program,) = lower(decide(policy, layout=Layout(tp=2, sequence_parallel=True)))
    columns, ids = expand(program), program.ids()
    before = reachable(columns, derive_edges(columns))
    pairs = {"qkv": "bwd/norm1.again.gather", "ffn_up": "bwd/norm2.again.gather"}
    for layer in range(3):
        for product, gather in pairs.items():
            place = f"m0/s0/l{layer}"
            dgrad, again = ids.index(f"{place}/bwd/{product}.dgrad"), ids.index(f"{place}/{gather}")
            assert again < dgrad
            assert not before[dgrad] >> again & 1


class Swapping:
    """MEMO's plan for six layers: instruction ids by phase and layer, and which instruction waits for which."""

    def __init__(self, alpha: float) -> None:
        (program,) = lower(decide(("tokenwise", alpha), layers=LAYERS))
        columns = expand(program)
        self.ids = program.ids()
        self.before = reachable(columns, derive_edges(columns))

    def numbers(self, layer: int, *phases: str) -> list[int]:
        prefixes = tuple(f"m0/s0/l{layer}/{phase}/" for phase in phases)
        return [i for i, name in enumerate(self.ids) if name.startswith(prefixes)]

    def waits(self, later: int, earlier: list[int]) -> bool:
        return all(self.before[later] >> i & 1 for i in earlier)


@pytest.fixture(params=[0.25, 1.0])
def swapping(request: pytest.FixtureRequest) -> Swapping:
    return Swapping(request.param)


def test_forward_of_the_layer_after_next_waits_for_the_offload(swapping: Swapping) -> None:
    for layer in range(LAYERS - 2):
        offload, forward = swapping.numbers(layer, "off"), swapping.numbers(layer + 2, "fwd")
        # The last operator of a layer writes the next layer's input into the other buffer, so writers of this buffer
        # wait.
        assert swapping.waits(forward[-1], offload)
        assert offload
        overwrites = swapping.ids.index(f"m0/s0/l{layer + 1}/fwd/out_add")  # writes the input of layer + 2
        assert swapping.before[overwrites] >> offload[0] & 1


def test_the_offload_runs_under_the_next_forward(swapping: Swapping) -> None:
    for layer in range(LAYERS - 2):
        for offload in swapping.numbers(layer, "off"):
            assert not any(swapping.before[offload] >> i & 1 for i in swapping.numbers(layer + 1, "fwd"))


def test_prefetch_waits_for_the_backward_that_frees_the_buffer(swapping: Swapping) -> None:
    for layer in range(LAYERS - 2):
        prefetch = swapping.numbers(layer, "pre")
        uses = [i for i in swapping.numbers(layer + 2, "bwd") if swapping.ids[i].endswith(("act.bwd", "norm1.bwd"))]
        assert prefetch
        assert swapping.waits(prefetch[-1], uses)


def test_the_prefetch_runs_under_the_next_backward(swapping: Swapping) -> None:
    for layer in range(LAYERS - 2):
        for prefetch in swapping.numbers(layer, "pre"):
            assert not any(swapping.before[prefetch] >> i & 1 for i in swapping.numbers(layer + 1, "rec", "bwd"))


def test_backward_and_recompute_wait_for_the_prefetch(swapping: Swapping) -> None:
    for layer in range(LAYERS - 2):
        prefetch = swapping.numbers(layer, "pre")
        rebuilt, backward = swapping.numbers(layer, "rec"), swapping.numbers(layer, "bwd")
        assert swapping.waits(backward[-1], prefetch)
        if rebuilt:
            brings_input = swapping.ids.index(f"m0/s0/l{layer}/pre/x")
            assert swapping.waits(rebuilt[0], [brings_input])
            assert swapping.waits(swapping.ids.index(f"m0/s0/l{layer}/bwd/ffn_up.dgrad"), [brings_input])
        attention = swapping.ids.index(f"m0/s0/l{layer}/bwd/attn.bwd")
        assert swapping.waits(attention, [i for i in prefetch if swapping.ids[i].endswith(("/attn", "/lse", "/qkv"))])


def test_the_last_two_layers_are_not_swapped(swapping: Swapping) -> None:
    moved = [bool(swapping.numbers(layer, "off", "pre")) for layer in range(LAYERS)]
    assert moved == [True] * (LAYERS - 2) + [False, False]


def test_rounding_buffers_hold_figure_4() -> None:
    """16 elements per token and hidden unit (32 bytes in half precision), plus statistics; two buffers of each."""
    small = decide(("tokenwise", 0.5)).model
    model = msgspec.structs.replace(small, ffn_hidden=4 * small.hidden)
    (program,) = lower(Decisions(model=model, seq_tokens=512, micro_batch=2, global_batch=2, recompute="tokenwise"))
    skeletal = [f for f in program.families if f.name.startswith("skeletal.")]
    statistics = {"skeletal.lse", "skeletal.norm1_stats", "skeletal.norm2_stats"}
    tensors = [f for f in skeletal if f.name not in statistics]
    elements = {f.name: f.tokens * f.features for f in tensors}
    one = 2 * 512 * model.hidden
    assert sum(elements.values()) == 16 * one
    assert elements["skeletal.x"] == elements["skeletal.attn"] == one
    assert sum(f.bytes for f in tensors) == 32 * one
    assert {f.count for f in skeletal} == {2}


def test_arrays_as_long_as_the_step_have_32_bits() -> None:
    """They are most of an evaluation's memory; the rows of a region may be billions, so ranges keep 64 bits."""
    (program,) = lower(decide(("tokenwise", 0.5), layout=Layout(tp=2, sequence_parallel=True)))
    columns = fold(program)
    edges, lives = derive_edges(columns), liveness(program, columns)
    segments = cut(columns.lane, edges, len(Lane), np.zeros(0, dtype=NUMBER))
    numbers = [columns.lane, columns.template_of, columns.starts, columns.instance, columns.template, columns.position]
    numbers += [edges.producer, edges.consumer, lives.birth, lives.death, lives.family, lives.class_of]
    numbers += [segments.order, segments.of, segments.first, segments.waits, segments.targets, segments.target_bounds]
    numbers += [each for o in columns.operands for each in (o.instruction, o.buffer, o.mode, o.lane, *o.starts)]
    assert {each.dtype for each in numbers} == {np.dtype(NUMBER)}
    ranges = [each for operands in columns.operands for each in (operands.first, operands.end)]
    assert {each.dtype for each in [*ranges, lives.bytes]} == {np.dtype(np.int64)}
