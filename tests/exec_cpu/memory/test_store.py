"""Tests which buffers of a CPU have their memory before a step, and that no two living ones share it."""

from collections import defaultdict
from itertools import combinations

import pytest
import torch

from memo_exec.memory.binding import Schedule, lanes_touching, schedule
from memo_exec.memory.store import CachingStore
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.lower import lower
from tests.exec_cpu.plans import byte_decisions
from tests.exec_cpu.small import decide, gpt

CPU = torch.device("cpu")
KEPT = decide(gpt(layers=4))
CROSSING = byte_decisions(recompute="full", swapped_tokens=0, attention_chunk_tokens=128)
"""Attention in chunks moves buffers between the compute lane and the copy lanes."""


def born_by_size(planned: Schedule) -> dict[int, list[int]]:
    """Return the buffers that a step allocates, by bytes."""
    found = defaultdict(list)
    for buffer in (b for bounds in planned.lanes.values() for bound in bounds for b in bound.births):
        if buffer not in planned.library:
            found[planned.family(buffer).bytes].append(buffer)
    return found


@pytest.mark.parametrize("decisions", [KEPT, CROSSING])
def test_buffers_whose_size_one_lane_uses_have_an_address(decisions: Decisions) -> None:
    planned = schedule(lower(decisions)[0])
    store = CachingStore(planned, CPU)
    touching = lanes_touching(planned.columns)
    crossing = 0
    for found in born_by_size(planned).values():
        alone = bool((touching[found] == 1 << Lane.COMPUTE).all())
        assert {store.has_address(buffer) for buffer in found} == {alone}
        crossing += not alone
    assert bool(crossing) == (decisions is CROSSING)


def test_buffers_that_live_at_once_share_no_memory() -> None:
    """The blocks of a size are as many as its buffers that live at once, and no two of these share one."""
    planned = schedule(lower(KEPT)[0])
    store, lives, by_size = CachingStore(planned, CPU), planned.lives, born_by_size(planned)
    assert max(map(len, by_size.values())) > 10
    for found in by_size.values():
        address = {b: store.view(b, 0, planned.family(b).tokens).data_ptr() for b in found}
        for one, two in combinations(found, 2):
            if lives.birth[one] <= lives.death[two] and lives.birth[two] <= lives.death[one]:
                assert address[one] != address[two]
        most = max(sum(bool(lives.birth[b] <= at <= lives.death[b]) for b in found) for at in lives.birth[found])
        assert len(set(address.values())) == most
