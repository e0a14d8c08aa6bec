"""Buffers of the ring's hops: two when memory is planned, one for each hop in an eager framework."""

from __future__ import annotations

import pytest

from memo_sim.contract.plan import Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from tests.sim.small_programs import LLAMA, decide


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_an_eager_forward_has_a_buffer_for_every_hop(recompute: str) -> None:
    found = {}
    for memory_policy in ("planned", "eager"):
        (program,) = lower(decide(LLAMA, Layout(cp=4), (recompute, 0.0), memory_policy=memory_policy))
        columns = expand(program)
        assert check_program(program, columns) == []
        assert check_edges(columns, derive_edges(columns)) == []
        forward = next(t for t in program.templates if t.name == "layer.fwd")
        backward = next(t for t in program.templates if t.name == "layer.bwd")
        found[memory_policy] = tuple(
            sum(f.name.startswith("kv.ring") for f in template.own) for template in (forward, backward)
        )
    rebuilt = 2 if recompute == "none" else 4  # recompute runs attention's forward inside the backward template
    assert found == {"planned": (2, 2), "eager": (4, rebuilt)}


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("cp", [2, 4])
def test_subsequences_have_two_buffers_with_room_for_the_longest_block(cp: int, sequences: int) -> None:
    """A block of one sequence is a run of two subsequences of 128 rows; of two sequences, one subsequence of both.

    With two ranks a block is sent from the KV cache and received once; of several sequences it is copied first.
    """
    layout = Layout(cp=cp, subsequences=16, partition="length")
    batch = {"micro_batch": sequences, "global_batch": sequences}
    (program,) = lower(decide(LLAMA.of_layers([LLAMA.layer(0)]), layout, seq_tokens=cp * 2048, **batch))
    sums = {"d_kv.ring0": 256, "d_kv.ring1": 256}
    received = {"kv.ring1": 256} if cp == 2 and sequences == 1 else {"kv.ring0": 256, "kv.ring1": 256}
    for name, wanted in (("layer.fwd.s15", received), ("layer.bwd.s15", received | sums)):
        template = next(t for t in program.templates if t.name == name)
        assert {family.name: family.tokens for family in template.own if ".ring" in family.name} == wanted
