"""Tests the planned arena: bitwise the results of torch's allocator, the planned size, no races, wrong ones refused."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.interpreter.record import StepRecord
from memo_exec.kernels import KERNELS, Call
from memo_exec.machine.memory_budget import RESULTS, needs_of
from memo_exec.machine.placement_file import checked_placement
from memo_exec.memory.arena import ArenaStore
from memo_exec.memory.binding import Schedule, joined, schedule, unimplied
from memo_exec.memory.slab import in_memory
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, CannotRun
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Plan
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.analysis.liveness import live_bytes, peak
from memo_sim.program.lower import lower
from tests.exec_cpu.machine.test_preflight import CPU
from tests.exec_cpu.plans import byte_decisions, placed, write_plan
from tests.exec_cpu.small import batch, decide, gpt, gradients, llama, one_step, play, scalars, states, wrapped
from tests.pairs import covering
from tests.refusals import refused

POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "alpha 0": {"recompute": "tokenwise"},
    "alpha 1": {"recompute": "tokenwise", "swapped_tokens": 256},
    "half swapped, half kept": {"swapped_tokens": 128},
    "alpha 0.5": {"recompute": "tokenwise", "swapped_tokens": 128},
    "full swap": {"swapped_tokens": 256},
    "full recompute": {"recompute": "full"},
    "full recompute in rounding buffers": {"recompute": "full", "rounding_buffers": True},
    "full recompute, ended early": {"recompute": "full", "early_stop": True},
    "full recompute, inputs swapped": {"recompute": "full", "swapped_tokens": 256},
    "MLP in row blocks": {"recompute": "full", "swapped_tokens": 256, "mlp_chunk_tokens": 128},
    "attention in chunks": {"recompute": "full", "seq_tokens": 320, "micro_batch": 1, "attention_chunk_tokens": 128},
}
MODELS = {"gpt": gpt(layers=4), "llama": llama(layers=4)}
HOST_STATES = decide(llama(layers=4), global_batch=6, states="host", recompute="tokenwise", swapped_tokens=128)
PAIRS = covering(POLICIES, MODELS)


def decided(policy: str, model: str) -> Decisions:
    """Return the decisions of a policy; those of "host states" have a model of their own."""
    return HOST_STATES if policy == "host states" else decide(MODELS[model], global_batch=4, **POLICIES[policy])


@pytest.mark.parametrize(("policy", "model"), PAIRS)
def test_an_arena_gives_the_bits_of_the_caching_store(policy: str, model: str) -> None:
    decisions = decided(policy, model)
    placement = placed(decisions)
    plain, wanted = trained(decisions)
    record, found = trained(decisions, placement=placement)

    assert (record.loss, record.grad_norm) == (plain.loss, plain.grad_norm)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert record.peak_device_bytes == placement.arena_bytes
    assert plain.peak_device_bytes <= placement.arena_bytes
    assert record.device_memory.bytes_by_class.keys() == plain.device_memory.bytes_by_class.keys()


def trained(decisions: Decisions, **options: Any) -> tuple[StepRecord, dict[str, Tensor]]:
    """Play three steps with updates; return the last record, its gradients and all states."""
    with play(decisions, **options) as interpreter:
        for step in (1, 2, 3):
            batches = batch(decisions, seed=step)
            record = interpreter.run_step(batches, scalars(batches, step=step, clip=1.0))
        saved = {name: value.clone() for name, value in states(interpreter).items()}
        return record, gradients(interpreter) | saved


def test_nothing_moves_and_nothing_is_left_outside() -> None:
    decisions = byte_decisions()
    placement = placed(decisions)
    with play(decisions, placement=placement) as interpreter:
        store = interpreter.store
        assert isinstance(store, ArenaStore)
        assert store.memory.numel() == placement.arena_bytes
        library = interpreter.schedule.library
        assert library
        assert not any(store.has_address(buffer) for buffer in library)
        first = store.memory.data_ptr()
        for buffer, view in store._views.items():
            offset = int(interpreter.schedule.arena.offsets[buffer])  # type: ignore[union-attr]
            assert view.data_ptr() == first + offset
        assert len(store._views) + len(library) == len(placement.ids)


def test_lasting_buffers_start_as_zeros() -> None:
    decisions = byte_decisions()
    with Interpreter(decisions, lower(decisions)[0], placement=placed(decisions)) as interpreter:
        assert not any(value.any() for value in states(interpreter).values())
        assert states(interpreter)


@pytest.mark.parametrize(("policy", "model"), [*PAIRS, ("host states", "llama")])
def test_the_programs_edges_order_all_that_shares_addresses(policy: str, model: str) -> None:
    """A placement adds no edge to the program's own, so the engine and the executor wait for the same instructions."""
    decisions = decided(policy, model)
    (program,) = lower(decisions)
    planned = schedule(program, placement=placed(decisions))
    plain = schedule(program)
    assert np.array_equal(planned.edges.producer, plain.edges.producer)
    assert np.array_equal(planned.edges.consumer, plain.edges.consumer)
    assert pairs_out_of_order(planned) == []


def pairs_out_of_order(planned: Schedule) -> list[tuple[int, int]]:
    """Return the pairs of buffers that share addresses without an order by edges and lanes.

    Compares all pairs, independently of the code under test.
    """
    arena, lives, columns = planned.arena, planned.lives, planned.columns
    assert arena is not None
    uses: dict[int, list[int]] = {}
    for buffer, instruction in zip(columns.operand_buffer.tolist(), columns.operand_instruction.tolist(), strict=True):
        uses.setdefault(buffer, []).append(instruction)
    before = ancestors(planned.edges, columns.lane.tolist())
    dynamic = [b for b in np.flatnonzero((arena.offsets >= 0) & (lives.birth >= 0)).tolist() if lives.bytes[b]]
    wrong = []
    for one in dynamic:
        for two in dynamic:
            apart = (
                arena.offsets[one] + lives.bytes[one] <= arena.offsets[two]
                or arena.offsets[two] + lives.bytes[two] <= arena.offsets[one]
            )
            if not apart and lives.death[one] < lives.birth[two]:
                wanted = sum({1 << use for use in uses[one]})
                if any(wanted & ~before[use] for use in uses[two]):
                    wrong.append((one, two))
    return wrong


def ancestors(edges: Edges, lanes: list[int]) -> list[int]:
    """Return, for every instruction, the instructions that have ended when it starts, as a bit set."""
    producers: dict[int, list[int]] = {}
    for producer, consumer in zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True):
        producers.setdefault(consumer, []).append(producer)
    found: list[int] = []
    last: dict[int, int] = {}
    for number, lane in enumerate(lanes):
        known = 0
        for earlier in [*producers.get(number, []), *([last[lane]] if lane in last else [])]:
            known |= found[earlier] | (1 << earlier)
        found.append(known)
        last[lane] = number
    return found


def test_a_missing_order_is_found_and_added() -> None:
    """When an edge of the program is missing, the arena's own edges replace it."""
    (program,) = lower(HOST_STATES)
    planned = schedule(program, placement=placed(HOST_STATES))
    assert planned.arena is not None
    lane = planned.columns.lane
    exact = derive_edges(in_memory(program, planned.columns, planned.slab, planned.arena))
    assert not unimplied(planned.edges, exact, lane).any()
    none = Edges(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert unimplied(none, exact, lane).all()
    for dropped in range(len(exact.producer)):
        fewer = Edges(np.delete(exact.producer, dropped), np.delete(exact.consumer, dropped))
        again = joined(fewer, exact, lane)
        assert not unimplied(again, exact, lane).any()
        assert len(again.producer) <= len(exact.producer)


@pytest.mark.parametrize(("policy", "model"), [*PAIRS, ("host states", "llama")])
def test_debug_mode_finds_no_race(policy: str, model: str) -> None:
    decisions = decided(policy, model)
    _, wanted = one_step(decisions)
    delays = random.Random(0)

    def before(call: Call) -> None:
        del call
        time.sleep(delays.choice((0.0, 0.0, 0.0, 0.002)))

    kernels = {op: wrapped(kernel, before) for op, kernel in KERNELS.items()}
    _, found = one_step(decisions, debug=True, placement=placed(decisions), kernels=kernels)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def moved(placement: Placement, row: int, offset: int) -> Placement:
    offsets = list(placement.offset_bytes)
    offsets[row] = offset
    return msgspec.structs.replace(placement, offset_bytes=offsets)


def onto_a_living_neighbour(placement: Placement) -> Placement:
    """Move the last dynamic buffer onto a buffer that is live at its birth."""
    lasting = placement.ids.index("loss")
    row = max(range(len(placement.ids)), key=lambda i: placement.lower[i])
    return moved(placement, row, placement.offset_bytes[lasting])


def too_small(placement: Placement) -> Placement:
    return msgspec.structs.replace(placement, arena_bytes=placement.arena_bytes - 512)


def of_another_program(placement: Placement) -> Placement:
    del placement
    return placed(byte_decisions(seq_tokens=512))


def without_a_buffer(placement: Placement) -> Placement:
    fields = ("ids", "lower", "upper", "size_bytes", "offset_bytes", "classes")
    return msgspec.structs.replace(placement, **{name: getattr(placement, name)[1:] for name in fields})


def off_its_alignment(placement: Placement) -> Placement:
    row = placement.ids.index("grad_norm")
    return moved(placement, row, placement.offset_bytes[row] + 4)


def placed_twice(placement: Placement) -> Placement:
    columns = ("ids", "lower", "upper", "size_bytes", "offset_bytes", "classes")
    twice = {name: [*getattr(placement, name), getattr(placement, name)[0]] for name in columns}
    return msgspec.structs.replace(placement, **twice)


def of_a_stranger(placement: Placement) -> Placement:
    return msgspec.structs.replace(placement, ids=["stranger", *placement.ids[1:]])


def dying_early(placement: Placement) -> Placement:
    row = max(range(len(placement.ids)), key=lambda i: placement.upper[i] - placement.lower[i])
    upper = list(placement.upper)
    upper[row] -= 1
    return msgspec.structs.replace(placement, upper=upper)


def too_short(placement: Placement) -> Placement:
    return msgspec.structs.replace(placement, size_bytes=[placement.size_bytes[0] - 1, *placement.size_bytes[1:]])


def too_large(placement: Placement) -> Placement:
    return msgspec.structs.replace(placement, arena_bytes=placement.arena_bytes + 512)


def of_another_alignment(placement: Placement) -> Placement:
    return msgspec.structs.replace(placement, alignment_bytes=256)


def with_another_bound(placement: Placement) -> Placement:
    return msgspec.structs.replace(placement, lower_bound_bytes=placement.lower_bound_bytes + 512)


def of_another_class(placement: Placement) -> Placement:
    return msgspec.structs.replace(placement, classes=["exchange", *placement.classes[1:]])


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (placed_twice, ("input.ids[0]", "twice")),
        (of_a_stranger, ("stranger", "input.ids[0]")),
        (dying_early, ("input.ids[0]", "[0, 289)", "[0, 290)")),
        (too_short, ("input.ids[0]", "2047", "2048")),
        (too_large, ("5978112", "5977600")),
        (of_another_alignment, ("alignment", "256", "512")),
        (with_another_bound, ("bound", "5978112", "5977600")),
        (of_another_class, ("input.ids[0]", "exchange", "input")),
        (onto_a_living_neighbour, ("loss and grad.x[4]", "8192")),
        (too_small, ("head/loss.scratch[0]", "5977408", "5977088")),
        (of_another_program, ("program",)),
        (without_a_buffer, ("input.ids[0]",)),
        (off_its_alignment, ("grad_norm", "8708", "512")),
    ],
)
def test_a_wrong_placement_is_refused(
    tmp_path: Path, change: Callable[[Placement], Placement], got: tuple[str, ...]
) -> None:
    """Pinned by the plan, so that only the checker stands between it and the step."""
    path = write_plan(tmp_path / "plan.json")
    plan, wrong = codec.read(path, Plan), change(placed(byte_decisions()))
    codec.write(tmp_path / "plan.placement.json", wrong)
    codec.write(path, msgspec.structs.replace(plan, placement_sha256=codec.sha256_of(wrong)))
    with refused(BadInput, where="plan.placement.json", got=got, hint="memo-sim what-if -o"):
        run(path, RunOptions(steps=1))


def test_a_placement_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json")
    other = msgspec.structs.replace(placed(byte_decisions()), solver="another")
    codec.write(tmp_path / "plan.placement.json", other)
    pinned = codec.read(path, Plan).placement_sha256
    with refused(BadInput, where="plan.placement.json", got=codec.sha256_of(other)[:16], wanted=pinned[:16]):
        run(path, RunOptions(steps=1))


def test_a_placement_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json")
    beside = tmp_path / "plan.placement.json"
    whole = beside.read_text()
    negative = json.loads(whole)
    negative["offset_bytes"][3] = -512
    for text, where, got in ((whole[:1000], "", "early"), (json.dumps(negative), ": $.offset_bytes[3]", "-512")):
        beside.write_text(text)
        with refused(BadInput, where=f"plan.placement.json{where}", got=got):
            run(path, RunOptions(steps=1))


def test_nothing_is_allocated_for_a_placement_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*arguments: object, **options: object) -> None:
        raise AssertionError("the interpreter was made")

    monkeypatch.setattr("memo_exec.commands.run.Interpreter", too_late)
    path = write_plan(tmp_path / "plan.json")
    codec.write(tmp_path / "plan.placement.json", too_small(placed(byte_decisions())))
    with refused(BadInput, where="plan.placement.json", wanted=codec.read(path, Plan).placement_sha256[:16]):
        run(path, RunOptions(steps=1))


def test_planned_memory_needs_a_placement(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json")
    (tmp_path / "plan.placement.json").unlink()
    with refused(BadInput, where="plan.placement.json", got=None, hint=f"memo-sim plan-memory {path} -o "):
        run(path, RunOptions(steps=1))
    codec.write(path, msgspec.structs.replace(codec.read(path, Plan), placement_sha256=""))
    with refused(CannotRun, where="plan.json: $.placement_sha256", hint="--memory-policy caching"):
        run(path, RunOptions(steps=1))


def test_the_caching_policy_needs_none_and_plays_the_same_program(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json", byte_decisions(memory_policy="caching"))
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    caching = run(path, RunOptions(steps=2))
    planned = run(write_plan(tmp_path / "planned.json"), RunOptions(steps=2))
    assert caching is not None
    assert planned is not None
    assert planned.comparison.losses == caching.comparison.losses
    assert planned.comparison.measured.peak_device_bytes == placed(byte_decisions()).arena_bytes
    assert codec.read(path, Plan).program_sha256 == codec.read(tmp_path / "planned.json", Plan).program_sha256


def test_a_plan_of_an_eager_framework_is_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json", byte_decisions(memory_policy="eager"))
    with refused(CannotRun, where="$.decisions.memory_policy", got="eager", wanted="planned or caching"):
        run(path, RunOptions(steps=1))


def test_the_arena_is_what_is_asked_of_the_machine() -> None:
    decisions = byte_decisions()
    (program,) = lower(decisions)
    planned = schedule(program, placement=placed(decisions))
    found = needs_of(program, CPU, placed(decisions))
    largest = max(int(planned.lives.bytes[buffer]) for buffer in planned.library)
    assert found.device_bytes == placed(decisions).arena_bytes
    assert found.reserve[RESULTS] == largest
    assert RESULTS not in needs_of(program, CPU, placed(decisions), lent=True).reserve
    assert found.host_bytes == peak(live_bytes(planned.lives, device=False)).bytes


def test_a_checked_placement_is_the_plans(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json")
    (program,) = lower(byte_decisions())
    found = checked_placement(codec.read(path, Plan), program, path)
    assert found is not None
    assert found.offset_bytes == placed(byte_decisions()).offset_bytes
