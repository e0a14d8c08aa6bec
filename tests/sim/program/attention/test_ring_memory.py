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
