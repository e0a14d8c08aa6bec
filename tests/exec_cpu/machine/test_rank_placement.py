"""Tests that every rank has an arena: the plan's, one with the plan's addresses, or one by first fit."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.machine.placement_file import checked_placement
from memo_exec.machine.rank_placement import rank_placement
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, CannotRun
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Layout, Plan
from memo_sim.contract.requests import Requests
from memo_sim.program.arena.check_placement import check_placement, largest_live_sum
from memo_sim.program.arena.folded import folded
from memo_sim.program.arena.requests import requests_of
from tests.exec_cpu.plans import byte_decisions, write_plan
from tests.exec_cpu.small import gpt
from tests.refusals import refused

LAYOUTS = [Layout(cp=4), Layout(cp=4, cp_exchange="all_gather"), Layout(pp=2), Layout(cp=2, pp=2)]


def plan_for(path: Path, layout: Layout) -> Plan:
    model = gpt(vocab=256, layers=4)
    decisions = byte_decisions(model=model, layout=layout, seq_tokens=512, global_batch=4)
    write_plan(path, decisions)
    return codec.read(path, Plan)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_has_an_arena_that_serves_its_program(layout: Layout, tmp_path: Path) -> None:
    plan = plan_for(tmp_path / "plan.json", layout)
    pinned = codec.read(tmp_path / "plan.placement.json", Placement)
    for rank in range(layout.devices):
        place = MeshCoordinates(layout, rank)
        program = rank_program(plan.decisions, place)
        found = checked_placement(plan, program, tmp_path / "plan.json")
        assert found is not None
        assert found.program_sha256 == program.sha256
        assert check_placement(found, requests_of(program)) == []
        if place.at("pp") == 0:
            assert found.arena_bytes == pinned.arena_bytes
            assert dict(zip(found.ids, found.offset_bytes, strict=True)) == dict(
                zip(pinned.ids, pinned.offset_bytes, strict=True)
            )
        else:
            assert found.arena_bytes <= 1.1 * largest_live_sum(requests_of(program))


def test_a_placement_with_equal_micro_batches_once_serves_all_of_them(tmp_path: Path) -> None:
    decisions = byte_decisions(model=gpt(vocab=256, layers=4), layout=Layout(), seq_tokens=512, global_batch=10)
    write_plan(tmp_path / "plan.json", decisions)
    plan, file = codec.read(tmp_path / "plan.json", Plan), tmp_path / "plan.placement.json"
    short = folded(codec.read(file, Placement))
    assert short.repeated is not None
    codec.write(file, short)
    plan = msgspec.structs.replace(plan, placement_sha256=codec.sha256_of(short))
    program = rank_program(decisions, MeshCoordinates(Layout()))
    found = checked_placement(plan, program, tmp_path / "plan.json")
    assert found is not None
    assert sorted(found.ids) == sorted(requests_of(program).ids)
    again = msgspec.structs.replace(short.repeated, times=short.repeated.times - 1)
    wrong = msgspec.structs.replace(short, repeated=again)
    codec.write(file, wrong)
    plan = msgspec.structs.replace(plan, placement_sha256=codec.sha256_of(wrong))
    with refused(BadInput, where="plan.placement.json", got="is not placed"):
        checked_placement(plan, program, tmp_path / "plan.json")


def test_a_placement_of_another_plan_is_still_refused(tmp_path: Path) -> None:
    plan = plan_for(tmp_path / "plan.json", Layout(cp=2))
    other = msgspec.structs.replace(plan.decisions, seq_tokens=256)
    program = rank_program(other, MeshCoordinates(other.layout))
    with refused(BadInput, where="plan.placement.json", got=program.sha256[:12]):
        checked_placement(msgspec.structs.replace(plan, decisions=other), program, tmp_path / "plan.json")


def buffers(lower: list[int], upper: list[int], **changes: Any) -> Requests:
    fields: dict[str, Any] = {"ids": ["a", "b", "c"], "size_bytes": [512, 512, 1024], "alignment_bytes": 512}
    return Requests(name="rank", lower=lower, upper=upper, **(fields | changes))


def test_addresses_that_do_not_serve_a_rank_are_refused() -> None:
    """On the plan's rank ``b`` dies before ``a`` is born; on another rank both live at the same time."""
    pinned = rank_placement(Placement(arena_bytes=0, lower_bound_bytes=0, **EMPTY), buffers([1, 0, 0], [2, 1, 2]))
    assert pinned.arena_bytes == 1536
    moved = buffers([0, 0, 0], [2, 1, 2])
    with refused(CannotRun, got=("a and b", "1024")):
        rank_placement(pinned, moved)


EMPTY: dict[str, list[Any]] = {"ids": [], "lower": [], "upper": [], "size_bytes": [], "offset_bytes": []}


def test_first_fit_uses_what_is_free() -> None:
    """c, a and b live one after the other, so they share the bytes of c."""
    found = rank_placement(Placement(arena_bytes=0, lower_bound_bytes=0, **EMPTY), buffers([1, 2, 0], [2, 3, 1]))
    assert found.arena_bytes == found.lower_bound_bytes == 1024
    assert found.solver == "first-fit"
