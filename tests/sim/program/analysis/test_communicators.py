"""The communicators of a layout, for the executor's process groups and for an eager framework."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import get_args

import msgspec
import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.knobs import CpExchange, Schedule
from memo_sim.contract.plan import Layout
from memo_sim.program.analysis.communicators import communicators, least_communicators
from memo_sim.program.ir.instruction import COLLECTIVE_LANES
from memo_sim.program.ir.work import Group
from memo_sim.program.lower import lower
from tests.sim.small_programs import GPT, decide

EIGHT = Layout(tp=2, sequence_parallel=True, cp=2, dp=2, zero=1)
STAGES = Layout(tp=2, pp=4, dp=2, zero=1)


def sizes(layout: Layout, policy: str = "planned", **more: object) -> list[list[int]]:
    model = msgspec.structs.replace(GPT, layers=4)
    decisions = decide(model, layout, global_batch=8, memory_policy=policy, **more)
    return [communicators(program, decisions) for program in lower(decisions)]


def test_a_single_device_has_no_communicators() -> None:
    assert sizes(Layout()) == [[]]


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        (Layout(tp=4, sequence_parallel=True), [4, 4]),  # all ranks, and the tensor-parallel group of the same ranks
        # Hops of chunks have a communicator beside that of the collectives.
        (Layout(tp=4, sequence_parallel=True, tp_overlap="chunked"), [4, 4, 4]),
        (Layout(dp=2, zero=1), [2, 2]),
        (EIGHT, [8, 4, 2, 2]),
        # All ranks, all of them once more for the loss, the ranks that ZeRO divides over, those with the same shard.
        (Layout(dp=8, zero=3, zero_ranks=4), [8, 8, 4, 2]),
    ],
)
def test_all_ranks_and_every_group_that_a_program_names(layout: Layout, wanted: list[int]) -> None:
    (found,) = sizes(layout)
    assert found[0] == layout.devices
    assert sorted(found, reverse=True) == wanted


def test_a_stage_between_two_others_has_a_pair_for_each_way() -> None:
    first, second, third, last = sizes(STAGES)
    assert len(second) == len(third) == len(first) - 1 + 2  # the first and the last stage share the tied embeddings
    assert len(first) == len(last)


def test_a_group_has_one_communicator_with_and_without_overlap() -> None:
    (alone,), (beside,) = sizes(EIGHT, overlap="none"), sizes(EIGHT, overlap="gradients")
    assert sorted(beside) == sorted(alone)
    (eager,) = sizes(EIGHT, "eager", overlap="gradients")
    assert sorted(eager) == sorted(alone)


def test_chunks_of_an_eager_framework_take_no_communicator_of_their_own() -> None:
    """torch reads other ranks' symmetric memory, Transformer Engine their userbuffers."""
    plain, chunked = (Layout(tp=4, sequence_parallel=True, tp_overlap=overlap) for overlap in ("none", "chunked"))
    assert sizes(plain, "eager") == sizes(chunked, "eager") == [[4, 4]]


def test_the_collectives_of_each_group_have_a_lane() -> None:
    assert set(COLLECTIVE_LANES) == set(get_args(Group))
    assert len(set(COLLECTIVE_LANES.values())) == len(COLLECTIVE_LANES)


def test_stages_of_an_eager_framework_send_in_one_group() -> None:
    first, second, *_ = sizes(STAGES, "eager")
    assert sorted(second) == [2, 2, 4, 16]  # tensor-parallel, replicas, stages, all ranks
    assert sorted(first) == sorted([*second, 2])


@pytest.mark.parametrize(
    ("cp", "exchange", "pairs"), [(2, "ring", []), (4, "ring", [2, 2]), (4, "all_gather", [])], ids=str
)
def test_a_ring_of_an_eager_framework_has_one_with_each_neighbour(cp: int, exchange: str, pairs: list[int]) -> None:
    (eager,) = sizes(Layout(cp=cp, cp_exchange=exchange), "eager")
    assert eager == [cp, cp, cp, *pairs]  # all ranks, the ring, the replicas


DEGREES = [
    *({"pp": 2, "dp": 2, "zero": zero} for zero in (0, 1, 2, 3)),
    *({"cp": 4, "cp_exchange": exchange} for exchange in get_args(CpExchange)),
    {"pp": 4, "cp": 2, "ulysses": 2},
    {"metp": 2, "dp": 2, "zero": 1},
    {"metp": 4},
    {"dp": 8, "zero": 3, "zero_ranks": 4},
    {"pp": 2, "subsequences": 2},
    {"pp": 2, "subsequences": 2, "multiplexed": True},
    {"pp": 4},
]


@pytest.mark.parametrize(("tp", "schedule"), list(product((1, 2), get_args(Schedule))))
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_every_stage_has_the_least_communicators(degrees: dict[str, int], tp: int, schedule: Schedule) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    layout = Layout(tp=tp, sequence_parallel=tp > 1, schedule=schedule, virtual_stages=chunks, **degrees)
    model = msgspec.structs.replace(GPT, layers=8)
    try:
        programs = lower(decide(model, layout, global_batch=16))
    except Infeasible:
        pytest.skip("no such layout")
    least = Counter(least_communicators(layout))
    found = [Counter(communicators(program, decide(model, layout, global_batch=16))) for program in programs]
    assert all(least <= each for each in found)
    assert sum(least.values()) >= 0.5 * max(each.total() for each in found)
