"""Binds a program to its buffers: for each lane, the instructions in order with their operands, waits and frees.

All ordering comes from ``derive_edges``. Host buffers are first laid out in the slab, and edges are derived over the
slab's bytes. So two buffers that share bytes at different times are ordered like any other reuse.

With a placement, edges are also derived over the arena's bytes, and those that the program's own edges already imply
are dropped. In all our programs that drops every one of them, because placements reuse memory in program order.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from memo_exec.memory.slab import SlabLayout, in_memory, lay_out
from memo_sim.contract.placement import Placement
from memo_sim.program.analysis.columns import Columns, Ints, expand
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.analysis.liveness import Liveness, liveness
from memo_sim.program.arena.library_workspaces import library_workspaces
from memo_sim.program.arena.requests import buffer_names
from memo_sim.program.ir.instruction import BufferClass, Family, Instruction, Lane, Mode
from memo_sim.program.ir.program import Program

Wait = tuple[Lane, int]
"""A lane, and the number of the instruction on it that must end first."""


@dataclass(frozen=True, slots=True)
class Touch:
    """An operand with the number of its buffer; ``first`` and ``tokens`` give the range of the buffer's tokens.

    An operand in a part of a region is a range of the region's bytes, with the part's family as ``part``.
    """

    role: str
    buffer: int
    first: int
    tokens: int
    mode: Mode
    part: Family | None = None


@dataclass(slots=True)
class Bound:
    """An instruction with its buffers and waits; ``awaited`` says that another lane waits for it."""

    number: int
    instruction: Instruction
    touches: tuple[Touch, ...]
    subsequence: int = 0
    offset: int = 0
    """The subsequence's row at which its buffers begin."""
    micro_batch: int = 0
    layer: int = -1
    """Number of the layer in the model; -1 for the embedding and what belongs to no layer."""
    waits: list[Wait] = field(default_factory=list)
    births: list[int] = field(default_factory=list)
    deaths: list[tuple[int, tuple[Wait, ...]]] = field(default_factory=list)
    """Buffers that no later instruction touches, each with its last uses on other lanes."""
    awaited: bool = False


@dataclass(frozen=True)
class Schedule:
    """A program's buffers, memory layout and bound instructions; they are the same in every step."""

    program: Program
    columns: Columns
    lives: Liveness
    slab: SlabLayout
    edges: Edges
    lanes: dict[Lane, list[Bound]]
    families: tuple[Family, ...]
    library: frozenset[int]
    """Workspaces that a library allocates itself; stores count them but do not allocate them."""
    arena: SlabLayout | None = None
    """Offsets of the device buffers, if a placement was given."""

    def family(self, buffer: int) -> Family:
        """Return the family of a buffer."""
        return self.families[int(self.columns.buffer_family[buffer])]


def schedule(program: Program, *, placement: Placement | None = None, edges: Edges | None = None) -> Schedule:
    """Return the schedule of ``program``.

    ``edges`` replaces the derived edges; tests use it to plant a race.

    Raises:
        ValueError: if an instruction writes tokens that it also uses under another role, or if ``placement`` does not
            name exactly the program's buffers.
    """
    columns = expand(program)
    lives = liveness(program, columns)
    slab = lay_out(program, columns, lives)
    arena = arena_layout(program, lives, placement) if placement is not None else None
    if edges is None:
        edges = derive_edges(in_memory(program, columns, slab))
        if arena is not None:
            edges = joined(edges, derive_edges(in_memory(program, columns, slab, arena)), columns.lane)
    bound = _bind(program, columns)
    lanes: dict[Lane, list[Bound]] = {}
    for each in bound:
        lanes.setdefault(each.instruction.lane, []).append(each)
    for producer, consumer in zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True):
        bound[consumer].waits.append((bound[producer].instruction.lane, producer))
        bound[producer].awaited = True
    _add_lives(bound, columns, lives)
    library = library_workspaces(program)
    return Schedule(program, columns, lives, slab, edges, lanes, program.all_families, library, arena)


@dataclass(frozen=True, slots=True)
class LateFree:
    """A buffer that several lanes use, and its last use on each lane but compute."""

    buffer: int
    uses: tuple[Wait, ...]


def late_frees(schedule: Schedule) -> dict[int, list[LateFree]]:
    """Return by compute instruction the buffers that the compute lane frees just before it.

    This is for an allocator that hands freed memory to the compute lane at once and ignores ``record_stream``. Such an
    allocator may only get a buffer back when compute already waits for the buffer's uses on other lanes. The compute
    lane frees it before the first of its instructions after the buffer's death at which a buffer is born. Derived edges
    make that instruction wait for these uses in any case, so freeing there adds no wait. A buffer with no such
    instruction after its death is absent; it can be freed when the step has ended.

        compute   [a: writes B] ........ [c: next birth; frees B first]
        d2h               [b: reads B, its last user]
    """
    births = [bound.number for bound in schedule.lanes.get(Lane.COMPUTE, ()) if bound.births]
    found: dict[int, list[LateFree]] = {}
    for lane, bounds in schedule.lanes.items():
        for bound in bounds:
            at = bisect_right(births, bound.number)
            for buffer, others in bound.deaths:
                if others and buffer not in schedule.library and at < len(births):
                    uses = tuple(use for use in (*others, (lane, bound.number)) if use[0] is not Lane.COMPUTE)
                    found.setdefault(births[at], []).append(LateFree(buffer, uses))
    return found


def arena_layout(program: Program, lives: Liveness, placement: Placement) -> SlabLayout:
    """Return the offset of every device buffer, by number; -1 if it has none.

    Workspaces that libraries allocate may be absent from the placement.

    Raises:
        ValueError: if the placement does not name exactly the buffers that the program uses on its device.
    """
    numbers = {name: number for number, name in enumerate(buffer_names(program))}
    offsets = np.full(len(lives.bytes), -1, dtype=np.int64)
    for name, offset in zip(placement.ids, placement.offset_bytes, strict=True):
        if name not in numbers:
            raise ValueError(f"the placement has a buffer {name}, but the program has no buffer of this name")
        offsets[numbers[name]] = offset
    wanted = lives.on_device & (lives.death >= lives.birth)
    wrong = wanted != (offsets >= 0)
    wrong[[buffer for buffer in library_workspaces(program) if offsets[buffer] < 0]] = False
    if (wrong := np.flatnonzero(wrong)).size:
        raise ValueError(f"{len(wrong)} device buffers are not placed, or are placed but never used")
    return SlabLayout(offsets, placement.arena_bytes)


def joined(edges: Edges, more: Edges, lane: Ints) -> Edges:
    """Return ``edges`` plus those of ``more`` that they do not imply, sorted by consumer like derived edges."""
    needed = unimplied(edges, more, lane)
    producer = np.concatenate((edges.producer, more.producer[needed]))
    consumer = np.concatenate((edges.consumer, more.consumer[needed]))
    order = np.lexsort((producer, consumer))
    return Edges(producer[order], consumer[order])


def unimplied(edges: Edges, more: Edges, lane: Ints) -> np.ndarray:
    """Return a mask of the edges in ``more`` that no chain of ``edges`` and lane order implies.

    For every instruction, the function tracks the last instruction of each lane that has ended when it starts. That is
    the maximum over its predecessor on the same lane and all its producers.
    """
    waits: dict[int, list[int]] = {}
    for producer, consumer in zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True):
        waits.setdefault(consumer, []).append(producer)
    asked: dict[int, list[int]] = {}
    for row, consumer in enumerate(more.consumer.tolist()):
        asked.setdefault(consumer, []).append(row)
    lanes, producers = lane.tolist(), more.producer.tolist()
    now = {each: [-1] * len(Lane) for each in set(lanes)}
    awaited = set(edges.producer.tolist())
    at_end: dict[int, list[int]] = {}
    missing = np.zeros(len(producers), dtype=np.bool_)
    for number, own in enumerate(lanes):
        known = now[own]
        for producer in waits.get(number, ()):
            known[:] = map(max, known, at_end[producer])
        for row in asked.get(number, ()):
            missing[row] = known[lanes[producers[row]]] < producers[row]
        known[own] = number
        if number in awaited:
            at_end[number] = known.copy()
    return missing


def _bind(program: Program, columns: Columns) -> list[Bound]:
    buffers, first = columns.operand_buffer.tolist(), columns.operand_first.tolist()
    rows = (columns.operand_end - columns.operand_first).tolist()
    instances = columns.instance.tolist()
    parts = {family.name: family for family in program.families if family.region}
    bound = []
    row = 0
    for number, (name, instruction) in enumerate(program.walk()):
        touches = []
        instance = program.instances[instances[number]]
        slots = program.templates[instance.template].slots
        for operand in instruction.operands:
            part = parts.get(slots[operand.slot])
            touches.append(Touch(operand.role, buffers[row], first[row], rows[row], operand.mode, part))
            row += 1
        _refuse_aliases(name, touches)
        bound.append(
            Bound(
                number,
                instruction,
                tuple(touches),
                instance.subsequence,
                instance.first,
                micro_batch=instance.micro_batch,
                layer=instance.layer,
            )
        )
    return bound


def _refuse_aliases(name: str, touches: list[Touch]) -> None:
    for one in touches:
        for two in touches:
            overlap = one.first < two.first + two.tokens and two.first < one.first + one.tokens
            if one is not two and one.buffer == two.buffer and overlap and one.mode is not Mode.READ:
                raise ValueError(f"{name}: {one.role} is written and overlaps {two.role}")


def _add_lives(bound: list[Bound], columns: Columns, lives: Liveness) -> None:
    """Attach births and deaths of dynamic device buffers to instructions.

    The last instruction that uses a buffer releases it, so it waits for the last uses on other lanes.
    """
    dynamic = lives.on_device & (lives.birth >= 0) & (lives.death >= lives.birth)
    last = _last_uses(columns, dynamic)
    for buffer in np.flatnonzero(dynamic).tolist():
        birth, death = int(lives.birth[buffer]), int(lives.death[buffer])
        own = bound[death].instruction.lane
        others = tuple((lane, number) for lane, number in last.get(buffer, {}).items() if lane is not own)
        for _, number in others:
            bound[number].awaited = True
        bound[birth].births.append(buffer)
        bound[death].deaths.append((buffer, others))


def lanes_touching(columns: Columns) -> Ints:
    """Return for each buffer the lanes that touch it, as a sum of ``1 << lane``."""
    lane: Ints = columns.lane[columns.operand_instruction]
    touching = np.zeros(len(columns.buffer_family), dtype=np.int64)
    np.bitwise_or.at(touching, columns.operand_buffer, 1 << lane)
    return touching


def _last_uses(columns: Columns, chosen: np.ndarray) -> dict[int, dict[Lane, int]]:
    """Return the last use on each lane, for those chosen buffers that several lanes touch."""
    lane: Ints = columns.lane[columns.operand_instruction]
    touching = lanes_touching(columns)
    rows = chosen[columns.operand_buffer] & ((touching & (touching - 1)) > 0)[columns.operand_buffer]
    found: dict[int, dict[Lane, int]] = {}
    for row in np.flatnonzero(rows).tolist():
        uses = found.setdefault(int(columns.operand_buffer[row]), {})
        uses[Lane(int(lane[row]))] = int(columns.operand_instruction[row])
    return found


def buffer_class(schedule: Schedule, buffer: int) -> BufferClass:
    """Return the class of a buffer."""
    return schedule.family(buffer).buffer_class
