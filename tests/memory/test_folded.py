"""A placement's equal micro-batches are written once and read back exactly."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Layout
from memo_sim.memory.place import place
from memo_sim.program.arena.folded import folded, unfolded
from memo_sim.program.arena.requests import arena_requests
from memo_sim.program.lower import lower
from tests.refusals import refused
from tests.sim.small_programs import LLAMA, decide


def placed(layout: Layout, batch: int) -> Placement:
    decisions = decide(LLAMA, layout, global_batch=batch)
    return place(arena_requests(lower(decisions)[0], decisions), solver="greedy")


@pytest.mark.parametrize(
    ("layout", "batch", "alike"),
    [(Layout(), 12, True), (Layout(), 12, False), (Layout(pp=2), 20, False)],
    ids=["equal addresses", "other addresses", "1f1b"],
)
def test_a_placement_is_written_once_for_equal_micro_batches(layout: Layout, batch: int, alike: bool) -> None:
    placement = placed(layout, batch)
    if not alike:  # as if each had an arena of its own
        high = [offset + n * placement.arena_bytes for n, offset in enumerate(placement.offset_bytes)]
        placement = msgspec.structs.replace(placement, offset_bytes=high)
    short = folded(placement)
    assert short.repeated is not None
    assert bool(short.repeated.offset_bytes) is not alike
    assert len(short.ids) < len(placement.ids) / 2
    read = codec.decode(codec.encode(short), Placement, where="file")
    assert read == short == folded(short)
    assert unfolded(read) == placement
    assert unfolded(placement) == placement


def test_one_micro_batch_is_written_as_it_is() -> None:
    placement = placed(Layout(), 1)
    assert folded(placement) == placement


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_row": 10**6}, "are not there"),
        ({"times": 10**9}, "slots"),
        ({"times": 10**9, "index_steps": []}, "are not there"),
        ({"offset_bytes": [0]}, "1 addresses"),
        ({"first_row": 0}, "no number in brackets"),
    ],
)
def test_rows_that_cannot_be_repeated_are_refused(changes: dict[str, object], message: str) -> None:
    short = folded(placed(Layout(), 12))
    assert short.repeated is not None
    wrong = msgspec.to_builtins(short)
    wrong["repeated"] |= changes
    with refused(BadInput, where="file: $", what=message):
        codec.decode(msgspec.json.encode(wrong), Placement, where="file")
