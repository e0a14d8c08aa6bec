"""Tests the bytes that libraries allocate outside the arena.

Planner and executor subtract the same bytes from the device's memory, and agree on which plans fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from memo_exec.commands import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.machine import preflight
from memo_exec.machine.memory_budget import Needs, check_memory, needs_of
from memo_exec.machine.placement_file import checked_placement, has_library_slots, placement_path
from memo_exec.machine.rank_placement import rank_placement
from memo_exec.memory.arena import ArenaStore
from memo_exec.memory.binding import schedule
from memo_sim.answers.what_if import Answer, what_if
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import BadInput, CannotRun
from memo_sim.contract.hardware import Hardware, Quantity
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Kernels, Layout, Plan
from memo_sim.memory.place import place
from memo_sim.planning.question import Pins, Question
from memo_sim.program.arena.library_workspaces import (
    COMMUNICATORS,
    IN_USE,
    LATER,
    LATER_BYTES,
    MERGES,
    RESULTS,
    beside_arena,
    library_workspaces,
    results_bytes,
)
from memo_sim.program.arena.requests import arena_requests, buffer_names, requests_of
from memo_sim.program.ir.work import Attention
from memo_sim.program.lower import lower, program_sha256
from memo_sim.program.operators.workspaces import attention_workspace_bytes
from tests.exec_cpu.machine.test_preflight import GPU
from tests.exec_cpu.small import decide, llama
from tests.refusals import refused

GIB, TAKEN = 2**30, 3 * 2**28
POLICIES = {
    "keep": Pins(recompute="none", alpha=0.0),
    "alpha 0.5": Pins(recompute="tokenwise", alpha=0.5),
    "full recompute": Pins(recompute="full", alpha=0.0, mlp_chunk_tokens=0, attention_chunk_tokens=0),
    "inputs swapped, MLP in blocks": Pins(recompute="full", alpha=1.0, mlp_chunk_tokens=4096),
    "replay": Pins(recompute="full", alpha=0.0, mlp_chunk_tokens=0, replay_allocator=True),
}


def hardware_of(device_bytes: int, *, later_bytes: int = 2**20) -> Hardware:
    """Return a GPU with ``device_bytes`` of memory and the reserve that a calibration measures."""
    _, hardware = load_cluster("a800-1x1")
    source = hardware.device_memory_bytes.source
    reserve = {IN_USE: float(TAKEN), "kernels and libraries": float(later_bytes)}
    return msgspec.structs.replace(
        hardware,
        device_memory_bytes=Quantity(value=float(device_bytes), source=source),
        reserve_bytes={name: Quantity(value=size, source=source) for name, size in reserve.items()},
    )


def asked(tokens: int, pins: Pins, hardware: Hardware, devices: int = 1) -> Answer:
    cluster, _ = load_cluster(f"a800-1x{devices}")
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=2, vocab=32_768)
    return what_if(
        Question(
            model=model,
            cluster=cluster,
            hardware=hardware,
            seq_tokens=tokens,
            system="any",
            pins=pins,
            global_batch=devices,
        )
    )


def needs(answer: Answer) -> Needs:
    """Return the needs of the stage that needs the most memory, each stage in its own arena."""
    assert answer.best is not None
    assert answer.arena is not None
    decisions, pinned = answer.best.decisions, answer.arena.placement
    found = []
    for program in answer.best.full_programs:
        own = rank_placement(pinned, arena_requests(program, decisions))
        found.append(needs_of(program, GPU, own, lent=decisions.replay_allocator))
    return max(found, key=lambda each: each.device_bytes + each.reserve_bytes)


@pytest.mark.parametrize("tokens", [8192, 65_536])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_if_and_run_agree_to_the_byte(policy: str, tokens: int) -> None:
    pins = POLICIES[policy]
    found = needs(asked(tokens, pins, hardware_of(200 * GIB)))
    least = found.device_bytes + found.reserve_bytes + TAKEN
    # With a lent arena the planner counts the profile's own reserve; otherwise as much as the executor subtracts.
    if pins.replay_allocator:
        least += 2**20 - LATER_BYTES
    for device_bytes, fits in ((least, True), (least - 1, False)):
        answer = asked(tokens, pins, hardware_of(device_bytes))
        assert (answer.best is not None) is fits
        machine = replace(GPU, device_memory_bytes=device_bytes, device_free_bytes=device_bytes - TAKEN)
        machine = replace(machine, host_available_bytes=2**50)
        if pins.replay_allocator:
            continue
        if fits:
            check_memory(needs(answer), machine)
        else:
            with refused(CannotRun, got="free", wanted="library calls", hint="--device-memory-gib"):
                check_memory(found, machine)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 4},
        {"tp": 2, "cp": 2},
        {"ulysses": 2, "dp": 2, "zero": 3},
        {"pp": 2, "dp": 2},
    ],
    ids=lambda layout: " ".join(f"{axis}{degree}" for axis, degree in layout.items()),
)
@pytest.mark.parametrize("policy", ["alpha 0.5", "full recompute"])
def test_so_do_ranks_of_several(layout: dict[str, int], policy: str) -> None:
    """Planner and executor count the same workspaces of libraries and the same merges. The arena has no slots for them.

    The planner also counts the communicators.
    """
    pins = replace(POLICIES[policy], **dict.fromkeys(("tp", "cp", "ulysses", "dp", "pp"), 1) | layout)
    found = asked(16_384, pins, hardware_of(200 * GIB), devices=4)
    assert found.best is not None
    assert found.arena is not None
    planned, played = found.best.memory.reserve, needs(found).reserve
    assert not has_library_slots(found.best.full_program, found.arena.placement)
    assert planned[RESULTS] == played[RESULTS] > 0
    assert planned.get(MERGES) == played.get(MERGES)
    assert (MERGES in played) is ("cp" in layout)
    least = needs(found).device_bytes + sum(played.values()) + TAKEN + planned[COMMUNICATORS]
    for device_bytes, fits in ((least, True), (least - 1, False)):
        answer = asked(16_384, pins, hardware_of(device_bytes), devices=4)
        assert (answer.best is not None) is fits
        free = device_bytes - TAKEN - planned[COMMUNICATORS]  # what a rank finds free after it has made its groups
        machine = replace(GPU, device_memory_bytes=device_bytes, device_free_bytes=free, host_available_bytes=2**50)
        if fits:
            check_memory(needs(answer), machine)
        else:
            with refused(CannotRun, got="free", wanted="library calls", hint="--device-memory-gib"):
                check_memory(needs(found), machine)


def test_the_same_items_on_both_sides() -> None:
    answer = asked(16_384, POLICIES["full recompute"], hardware_of(200 * GIB))
    assert answer.best is not None
    planned, played = answer.best.memory.reserve, needs(answer).reserve
    assert planned[RESULTS] == played[RESULTS] == results_bytes(answer.best.full_program) > 0
    assert planned["kernels and libraries"] + planned[LATER] == played[LATER] == LATER_BYTES
    assert any(RESULTS in line for line in answer.result.why)


def test_a_profile_that_measured_more_is_believed() -> None:
    answer = asked(8192, POLICIES["keep"], hardware_of(200 * GIB, later_bytes=GIB))
    assert answer.best is not None
    assert set(answer.best.memory.reserve) == {IN_USE, "kernels and libraries", RESULTS}


def test_they_are_attentions_workspaces() -> None:
    decisions = decide(llama(), dtype="bf16", recompute="full", kernels=Kernels(attention="flash2"))
    (program,) = lower(decisions)
    works = [i.work for _, i in program.walk() if isinstance(i.work, Attention)]
    assert results_bytes(program) == max(attention_workspace_bytes(work, 1) for work in works)


@pytest.mark.parametrize(
    ("changes", "beside"),
    [
        ({}, True),
        ({"replay_allocator": True}, False),
        ({"memory_policy": "caching"}, False),
        ({"kernels": Kernels(attention="torch-flash-cpu")}, False),
    ],
)
def test_which_plans_have_them_beside_the_arena(changes: dict[str, object], beside: bool) -> None:
    decisions = decide(llama(), **({"dtype": "bf16", "kernels": Kernels(attention="flash2")} | changes))
    (program,) = lower(decisions)
    assert beside_arena(decisions) is beside
    names = {buffer_names(program)[buffer] for buffer in library_workspaces(program)}
    assert names
    assert names.isdisjoint(arena_requests(program, decisions).ids) is beside
    assert set(requests_of(program).ids) - set(arena_requests(program, decisions).ids) == (names if beside else set())


def written(path: Path, decisions: Decisions, placement: Placement) -> Plan:
    plan = Plan(
        decisions=decisions,
        program_sha256=program_sha256(lower(decisions)),
        placement_sha256=codec.sha256_of(placement),
    )
    codec.write(path, plan)
    codec.write(placement_path(path), placement)
    return plan


def small(**changes: object) -> Decisions:
    return decide(llama(), dtype="bf16", recompute="full", kernels=Kernels(attention="torch-flash"), **changes)


def test_an_arena_without_their_slots_is_whole(tmp_path: Path) -> None:
    decisions = small()
    (program,) = lower(decisions)
    lean, full = (place(found, solver="greedy") for found in (arena_requests(program, decisions), requests_of(program)))
    assert lean.arena_bytes <= full.arena_bytes
    for placement in (lean, full):  # plans of older versions have slots for them
        plan = written(tmp_path / "plan.json", decisions, placement)
        assert checked_placement(plan, program, tmp_path / "plan.json") == placement
        store = ArenaStore(schedule(program, placement=placement), torch.device("cpu"))
        assert store.arena_bytes == placement.arena_bytes
        assert bool(store.slots) is (placement is full) is has_library_slots(program, placement)


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(pp=2), Layout(tp=2, dp=2, zero=1)])
def test_every_rank_of_several_runs_in_an_arena_without_them(layout: Layout, tmp_path: Path) -> None:
    even = msgspec.structs.replace(llama(), layers=4)
    decisions = msgspec.structs.replace(small(layout=layout, global_batch=4), model=even)
    first, *_ = lower(decisions)
    plan = written(tmp_path / "plan.json", decisions, place(arena_requests(first, decisions), solver="greedy"))
    for rank in range(layout.devices):
        program = rank_program(decisions, MeshCoordinates(layout, rank))
        found = checked_placement(plan, program, tmp_path / "plan.json")
        assert found is not None
        assert set(found.ids) == set(arena_requests(program, decisions).ids)
        assert not has_library_slots(program, found)
        assert not ArenaStore(schedule(program, placement=found), torch.device("cpu")).slots


def test_without_their_slots_a_long_sequence_needs_less(tmp_path: Path) -> None:
    """There the peak is in attention's backward, and most of its workspace would be unused bytes of the arena."""
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=1, vocab=32_768)
    kernels = Kernels(attention="flash2", rowwise="triton")
    fields = {"recompute": "full", "loss_chunk_tokens": 4096, "mlp_chunk_tokens": 8192, "kernels": kernels}
    decisions = Decisions(model=model, seq_tokens=262_144, **fields)
    (program,) = lower(decisions)
    lean, full = (place(found, solver="greedy") for found in (arena_requests(program, decisions), requests_of(program)))
    assert lean.arena_bytes < full.arena_bytes - results_bytes(program) / 2


def test_any_other_missing_buffer_is_a_fault(tmp_path: Path) -> None:
    decisions = small()
    (program,) = lower(decisions)
    lean = place(arena_requests(program, decisions), solver="greedy")
    shorter = msgspec.structs.replace(
        lean,
        **{
            name: getattr(lean, name)[1:] for name in ("ids", "lower", "upper", "size_bytes", "offset_bytes", "classes")
        },
    )
    plan = written(tmp_path / "plan.json", decisions, shorter)
    with refused(BadInput, where="plan.placement.json", got="input.ids"):
        checked_placement(plan, program, tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"\b1 device buffers"):
        schedule(program, placement=shorter)


def test_a_plan_that_lends_needs_their_slots(tmp_path: Path) -> None:
    decisions = small(replay_allocator=True)
    (program,) = lower(decisions)
    lean = place(arena_requests(program, small()), solver="greedy")
    with refused(BadInput, where="plan.placement.json", got="layer.fwd/attn.scratch[0]"):
        checked_placement(written(tmp_path / "plan.json", decisions, lean), program, tmp_path / "plan.json")


def test_an_arena_without_slots_lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    decisions = small()
    (program,) = lower(decisions)
    lean = place(arena_requests(program, decisions), solver="greedy")
    with refused(CannotRun, where="$.decisions.replay_allocator", got="false", wanted="true"):
        preflight.check(decisions, program, GPU, lean, lent=True)


def test_a_plan_that_lends_is_run_with_the_allocator(tmp_path: Path) -> None:
    """A machine without CUDA refuses the plan before it allocates, instead of running it without the allocator."""
    decisions = small(replay_allocator=True)
    (program,) = lower(decisions)
    written(tmp_path / "plan.json", decisions, place(requests_of(program), solver="greedy"))
    with refused(CannotRun, got="CPU", wanted="CUDA", hint="--replay-allocator"):
        run.run(tmp_path / "plan.json", RunOptions(steps=1))
