"""SPPO's offload window: copies beside the next subsequence, the recurrence of kept bytes (5.2), and Figure 8."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.subsequences import held_bytes, most_held_bytes
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.analysis.liveness import live_bytes, liveness
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Copy, Gemm, Work
from memo_sim.program.layout.partition import partition, swapped_parts
from memo_sim.program.layout.schedule import Kind
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.skeletal import skeletal_tensors
from memo_sim.program.layout.subsequence import subsequences_of
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges
from tests.sim.small_programs import faults_of
from tests.sim.toy_machine import TOY_CLUSTER, alone, decide, toy_hardware

VOCAB = 96
UNIT = 128
"""Tokens of one unit of Figure 8. Four subsequences of equal work have 3, 2, 2 and 1 of the toy model's 8 units."""
ONE = (UNIT, UNIT, UNIT, 0)
"""Swaps one unit of every subsequence (alpha_i A_i is constant) but the last, whose backward follows at once."""


def windowed(
    window: int,
    swapped: tuple[int, ...] | None,
    *,
    recompute: str = "none",
    layout: Layout | None = None,
    layers: int = 4,
    **knobs: object,
) -> Decisions:
    """Return decisions with 1024 tokens in four subsequences; ``swapped``: tokens of each one, None for all tokens."""
    layout = layout or Layout(subsequences=4)
    decisions = decide((recompute, 0.0), layout=layout, layers=layers, **knobs)
    decisions = msgspec.structs.replace(decisions, seq_tokens=1024)
    if swapped is None:
        return msgspec.structs.replace(decisions, swapped_tokens=1024, offload_window=window)
    return msgspec.structs.replace(
        decisions, swapped_tokens=sum(swapped), subsequence_swapped_tokens=swapped, offload_window=window
    )


LAYOUTS = [
    Layout(subsequences=4),
    Layout(subsequences=4, pp=2),
    Layout(subsequences=4, pp=2, schedule="interleaved", virtual_stages=2),
    Layout(subsequences=4, pp=2, schedule="zero-bubble", dp=2, zero=1),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("recompute", ["none", "full", "tokenwise"])
def test_every_policy_passes_the_independent_checkers(recompute: str, layout: Layout) -> None:
    for window, swapped in ((1, ONE), (2, (256, 0, 128, 128)), (1, None)):
        assert (
            faults_of(windowed(window, swapped, recompute=recompute, layout=layout, global_batch=2 * layout.dp)) == []
        )


def activations(decisions: Decisions, layers: int) -> list[int]:
    """Return A_i: the skeletal bytes of ``layers`` layers for each subsequence."""
    model, dtype = decisions.model, decisions.dtype
    parts = subsequences_of(decisions, shape_of(decisions))
    return [layers * sum(t.bytes for t in skeletal_tensors(model, each.shape, dtype)) for each in parts]


def held(program: Program) -> list[int]:
    """Return the skeletal bytes on the device at the end of each forward pass."""
    columns = expand(program)
    lives = liveness(program, columns)
    skeletal = lives.class_of == lives.class_names.index(BufferClass.SKELETAL)
    mine = lives.on_device & skeletal & (lives.death >= lives.birth)
    marks = np.searchsorted(columns.instance, [first for _, first in program.passes])
    ends = [int(b) for (each, _), b in zip(program.passes, marks[1:], strict=False) if each.kind is Kind.FORWARD]
    return [int(lives.bytes[mine & (lives.birth < end) & (lives.death >= end)].sum()) for end in ends]


@pytest.mark.parametrize("swapped", [ONE, (384, 256, 256, 0), (128, 0, 256, 0), (256, 256, 0, 128)])
def test_the_recurrence_of_kept_bytes(swapped: tuple[int, ...]) -> None:
    """M_i = M_(i-1) + A_i - alpha_(i-1) A_(i-1): the planner's sum equals the live bytes of the program."""
    decisions = windowed(1, swapped)
    program = lower(decisions)[0]
    parts, kept = partition(decisions), activations(decisions, 4)
    found = held(program)
    assert found == pytest.approx(held_bytes(kept, [n / tokens for n, tokens in zip(swapped, parts, strict=True)]))
    assert max(found) == pytest.approx(most_held_bytes(decisions))
    # For each layer that forward computes, one layer is offloaded, so the peak exceeds this by at most one layer.
    curve = live_bytes(liveness(program, expand(program)), device=True)["skeletal"]
    assert max(found) <= curve.max() <= max(found) + max(kept) // 4


def test_a_wider_window_keeps_activations_for_more_passes() -> None:
    kept = activations(windowed(1, None), 4)
    for window in (1, 2, 3):
        found = held(lower(windowed(window, None))[0])
        assert found == [sum(kept[max(0, i - window + 1) : i + 1]) for i in range(4)]


def test_offloaded_bytes_are_prefetched_and_nothing_else_moves() -> None:
    """The last subsequence stays, whatever its share, because its backward follows. So do those that swap nothing."""
    for swapped in (ONE, (256, 0, 128, 128)):
        decisions = windowed(1, swapped)
        program = lower(decisions)[0]
        moved = {lane: {} for lane in (Lane.D2H, Lane.H2D)}
        for instance in program.instances:
            for instruction in program.templates[instance.template].instructions:
                if isinstance(instruction.work, Copy):
                    of_lane = moved[instruction.lane]
                    of_lane[instance.subsequence] = of_lane.get(instance.subsequence, 0) + instruction.work.bytes
        kept, parts = activations(decisions, 4), partition(decisions)
        wanted = {s: kept[s] * n // parts[s] for s, n in enumerate(swapped_parts(decisions)[:3]) if n}
        assert moved == {Lane.D2H: wanted, Lane.H2D: wanted}


def test_the_checker_finds_a_birth_that_does_not_wait_for_an_offload() -> None:
    """Memory is reused after an offload. Without the edges to the copies the checker reports a fault."""
    columns = expand(lower(windowed(1, None))[0])
    edges = derive_edges(columns)
    keep = columns.lane[edges.producer] != Lane.D2H
    found = check_edges(columns, Edges(edges.producer[keep], edges.consumer[keep]))
    assert any("may still use" in fault for fault in found)


class Figure8:
    """Prices of Figure 8: a layer's forward of a subsequence, its backward, and a copy of one unit each take 4 s."""

    def __init__(self, unit_bytes: int) -> None:
        self.outside_of: dict[Work, frozenset[str]] = {}
        self.unit_bytes = unit_bytes

    def seconds(self, work: Work) -> float:
        if isinstance(work, Copy):
            return 4.0 * work.bytes / self.unit_bytes
        if not isinstance(work, Gemm) or VOCAB in (work.m, work.n, work.k):
            return 0.0
        return 1.0 if work.gemm_pass == "fprop" else 0.5


def figure_8(window: int, swapped: tuple[int, ...] | None) -> Simulation:
    """Simulate two stages of eight layers with four subsequences; offloading a unit takes as long as one forward."""
    decisions = windowed(window, swapped, layout=Layout(subsequences=4, pp=2), layers=16)
    assert [n // UNIT for n in partition(decisions)] == [3, 2, 2, 1]
    unit = activations(decisions, 1)[3]
    return simulate(decisions, toy_hardware(), TOY_CLUSTER, pricer=Figure8(unit), rates=alone)


def test_figure_8() -> None:
    """Full offload keeps 7 units, because copying s0 to the host takes three forwards. One unit of each keeps only 5.

    Under full offload the prefetch of s0 delays its backward. With one unit of each nothing waits: the step is as short
    as without copies.
    """
    full, adaptive = figure_8(3, None), figure_8(1, ONE)
    unit = activations(full.decisions, 8)[3]
    assert [size / unit for size in held(full.stages[0].program)] == [3, 5, 7, 5]
    assert [size / unit for size in held(adaptive.stages[0].program)] == [3, 4, 5, 5]
    leaves = [
        float(end)
        for name, end in zip(full.stages[0].program.ids(), full.stages[0].playback.end_s, strict=True)
        if "/s0/" in name and "/off/" in name
    ]
    forward = 4.0 * 8
    assert 3 * forward < max(leaves) <= 4 * forward  # during F3, the fourth forward
    ideal = (4 + 1) * 2 * forward
    assert adaptive.prediction.step_s == pytest.approx(ideal, rel=1e-9)
    assert full.prediction.step_s > 1.1 * ideal
    waits = full.stages[0].playback.waits
    names = full.stages[0].program.ids()
    late = [
        names[i] for i, s in zip(waits.instruction.tolist(), waits.seconds.tolist(), strict=True) if s > forward / 16
    ]
    assert any(name.startswith("m0/s0/") and "/bwd/" in name for name in late)


def test_a_window_without_subsequences_or_without_swapping_is_refused() -> None:
    whole = decide(("none", 1.0))
    for decisions in (
        msgspec.structs.replace(whole, offload_window=1),
        windowed(1, None, layout=Layout()),
        msgspec.structs.replace(decide(("none", 0.0), layout=Layout(subsequences=2)), offload_window=1),
    ):
        with pytest.raises(Infeasible) as error:
            lower(decisions)
        assert error.value.where == "decisions.offload_window"
