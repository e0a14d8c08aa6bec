"""Checks the program of one stage independently of the lowering, in plain loops.

Only data is shared with the lowering, ``edges.py`` and ``liveness.py``, no code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from memo_sim.program.analysis.columns import Columns
from memo_sim.program.analysis.edges import Edges
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, BufferClass, Instruction, Lane, Mode
from memo_sim.program.ir.kinds import TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Copy, Exchange, PointToPoint


def check_program(program: Program, columns: Columns) -> list[str]:
    """Return every fault of one program: ids, lanes, bounds, aliasing, sizes, unwritten rows, gathered buffers."""
    return [
        *_check_ids(program),
        *_check_lanes(program),
        *_check_operands(program),
        *_check_defined(program, columns),
        *_check_gathered(program, columns),
    ]


def check_edges(columns: Columns, edges: Edges) -> list[str]:
    """Return the pairs of conflicting accesses that neither lane order nor ``edges`` order.

    An access is compared with the last writes of its rows, and a write with the reads since then too; pairs beyond
    those follow, because order is transitive. So the work grows with the program and not with its square. Each
    instruction has a vector clock: for every lane, the last instruction known to have ended before it starts.
    """
    lanes = len(Lane)
    lane = columns.lane.tolist()
    incoming: dict[int, list[int]] = defaultdict(list)
    for p, c in zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True):
        incoming[c].append(p)
    known: list[list[int]] = []
    previous = [-1] * lanes
    for i, mine in enumerate(lane):
        clock = [-1] * lanes
        for before in (previous[mine], *incoming[i]):
            if before >= 0:
                clock = [max(a, b) for a, b in zip(clock, known[before], strict=True)]
                clock[lane[before]] = max(clock[lane[before]], before)
        known.append(clock)
        previous[mine] = i
    faults = []
    reads: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    writes: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    rows = zip(
        columns.operand_buffer.tolist(),
        columns.operand_instruction.tolist(),
        columns.operand_first.tolist(),
        columns.operand_end.tolist(),
        columns.operand_mode.tolist(),
        strict=True,
    )
    for buffer, i, first, end, mode in rows:
        before = [*writes[buffer], *reads[buffer]] if mode & Mode.WRITE else writes[buffer]
        for j, other_first, other_end in before:
            if first < other_end and other_first < end and lane[i] != lane[j] and known[i][lane[j]] < j:
                faults.append(f"instructions {j} and {i} touch buffer {buffer}, and no edge orders them")
        if mode & Mode.WRITE:
            # Order is transitive: what comes after this write comes after every earlier access to its rows.
            for earlier in (reads, writes):
                earlier[buffer] = list(_outside(earlier[buffer], first, end))
        (writes if mode & Mode.WRITE else reads)[buffer].append((i, first, end))
    return faults + _check_reuse(columns, known)


def _outside(accesses: list[tuple[int, int, int]], first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of (instruction, first, end) that lie outside of rows [first, end)."""
    for i, low, high in accesses:
        if low < first:
            yield i, low, min(high, first)
        if high > end:
            yield i, max(low, end), high


def _check_reuse(columns: Columns, known: list[list[int]]) -> list[str]:
    """Find births in memory that another lane may still be using.

    Device memory is allocated in program order. A new buffer may take the bytes of any dynamic buffer that died before,
    so every lane's last use of that buffer must have ended. ``known`` gives for each instruction, lane by lane, the
    last instruction that has ended when it starts.
    """
    lane = columns.lane.tolist()
    births: dict[int, int] = {}
    uses: dict[int, dict[int, int]] = defaultdict(dict)
    for buffer, i in zip(columns.operand_buffer.tolist(), columns.operand_instruction.tolist(), strict=True):
        if columns.buffer_dynamic[buffer]:
            births.setdefault(buffer, i)
            uses[buffer][lane[i]] = i
    born = set(births.values())
    dead: dict[int, list[int]] = defaultdict(list)
    for buffer, mine in uses.items():
        dead[max(mine.values())].append(buffer)
    faults = []
    latest = [-1] * len(Lane)
    for i, own in enumerate(lane):
        late = [n for n, last in enumerate(latest) if n != own and last > known[i][n]] if i in born else []
        faults += [f"instruction {i} takes memory that instruction {latest[n]} may still use" for n in late]
        for buffer in dead[i]:
            for n, last in uses[buffer].items():
                latest[n] = max(latest[n], last)
    return faults


def _check_ids(program: Program) -> list[str]:
    seen: set[str] = set()
    faults = []
    for name in program.ids():
        if name in seen:
            faults.append(f"id {name} is used twice")
        seen.add(name)
    return faults


def _check_lanes(program: Program) -> list[str]:
    """Find calls on the lane of another communicator. METP's may be on the compute lane (``overlap_exchanges``)."""
    faults = []
    for template in program.templates:
        for each in template.instructions:
            if isinstance(each.work, Collective):
                own = COLLECTIVE_LANES[each.work.group]
            elif isinstance(each.work, Exchange):
                own = Lane.P2P
            else:
                if each.lane in (*COLLECTIVE_LANES.values(), Lane.P2P):
                    faults.append(f"{template.name}: {each.name} is no call, but on lane {each.lane.label}")
                continue
            allowed = (own, Lane.COMPUTE) if each.work.group == "metp" else (own,)
            if each.lane not in allowed:
                faults.append(f"{template.name}: {each.name} of group {each.work.group} is on lane {each.lane.label}")
    return faults


def _check_operands(program: Program) -> list[str]:
    tokens = {f.name: f.tokens for f in program.all_families}
    row_bytes = {f.name: f.row_bytes for f in program.all_families}
    faults = []
    for template in program.templates:
        own = {f.name for f in template.own}
        names = [f"{template.name}/{s}" if s in own else s for s in template.slots]
        for instruction in template.instructions:
            label = f"{template.name}: {instruction.name}"
            faults += [
                f"{label}: {o.role} reaches beyond its buffer"
                for o in instruction.operands
                if o.first < 0 or o.tokens <= 0 or o.first + o.tokens > tokens[names[o.slot]]
            ]
            faults += [f"{label}: {fault}" for fault in _aliases(instruction)]
            moved = [o.tokens * row_bytes[names[o.slot]] for o in instruction.operands]
            if isinstance(instruction.work, Copy | Exchange | PointToPoint) and set(moved) != {instruction.work.bytes}:
                faults.append(f"{label}: moves {moved} bytes, but is priced for {instruction.work.bytes}")
            if isinstance(instruction.work, Collective):
                sizes = {o.role: size for o, size in zip(instruction.operands, moved, strict=True)}
                rows = {o.role: row_bytes[names[o.slot]] for o in instruction.operands}
                faults += [f"{label}: {fault}" for fault in _collective_sizes(instruction.work, sizes, rows)]
    return faults


def _collective_sizes(work: Collective, sizes: dict[str, int], row_bytes: dict[str, int]) -> list[str]:
    """Compare the bytes of a collective's operands, by role, with its work: the whole tensor, and one rank's shard.

    Operands ``tensor.x`` are parts of one tensor. ``largest`` is not moved: scales of what is gathered follow from it.
    A shard may be up to two rows longer than one rank's share of the tensor, because a block has two runs, each divided
    and rounded up. An all-to-all of uneven heads is priced for the rank with the most; a rank then receives other bytes
    than it sends.
    """
    uneven = work.kind == "all_to_all" and sizes["send"] != sizes["recv"]
    faults = []
    parts = {role: size for role, size in sizes.items() if role.startswith("tensor.")}
    sizes = {role: size for role, size in sizes.items() if role not in (*parts, "largest")}
    for role, size in (sizes | ({"tensor": sum(parts.values())} if parts else {})).items():
        if role == "shard":
            beyond = size * work.ranks - work.bytes
            if not 0 <= beyond <= 2 * work.ranks * row_bytes[role]:
                faults.append(f"a shard of {size} bytes is not 1/{work.ranks} of {work.bytes} bytes")
        elif role == "others":
            if size + sizes["shard"] != work.bytes:
                faults.append(f"a shard and {size} bytes of other shards do not add up to {work.bytes} bytes")
        elif size > work.bytes or (size < work.bytes and not uneven):
            faults.append(f"{role} has {size} bytes, but the {work.kind} is priced for {work.bytes}")
    return faults


def _aliases(instruction: Instruction) -> list[str]:
    faults = []
    for i, a in enumerate(instruction.operands):
        for b in instruction.operands[i + 1 :]:
            overlap = a.slot == b.slot and a.first < b.first + b.tokens and b.first < a.first + a.tokens
            if overlap and (a.mode | b.mode) & Mode.WRITE:
                faults.append(f"{a.role} and {b.role} overlap, and one of them is written")
    return faults


def _check_defined(program: Program, columns: Columns) -> list[str]:
    """Find reads of rows of dynamic buffers that nothing has written before."""
    given = [
        f.lifetime == "step" and f.buffer_class in {BufferClass.STATE, BufferClass.INPUT} for f in program.all_families
    ]
    written: dict[int, list[tuple[int, int]]] = defaultdict(list)
    ids = program.ids()
    faults = []
    rows = zip(
        columns.operand_instruction.tolist(),
        columns.operand_buffer.tolist(),
        columns.operand_first.tolist(),
        columns.operand_end.tolist(),
        columns.operand_mode.tolist(),
        strict=True,
    )
    pending: list[tuple[int, int, int]] = []
    current = -1
    for i, buffer, first, end, mode in rows:
        if i != current:
            for b, low, high in pending:
                written[b] = _joined(written[b], low, high)
            pending, current = [], i
        if given[columns.buffer_family[buffer]]:
            continue
        if mode & Mode.READ and not _covered(written[buffer], first, end):
            faults.append(f"{ids[i]} reads rows [{first}, {end}) of buffer {buffer} before they are written")
        if mode & Mode.WRITE:
            pending.append((buffer, first, end))
    return faults


def _joined(ranges: list[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges with one more; those that touch become one."""
    apart = [each for each in ranges if each[1] < first or each[0] > end]
    met = [each for each in ranges if each[1] >= first and each[0] <= end]
    return [*apart, (min([first, *(low for low, _ in met)]), max([end, *(high for _, high in met)]))]


def _covered(ranges: list[tuple[int, int]], first: int, end: int) -> bool:
    return any(low <= first and end <= high for low, high in ranges)


def _check_gathered(program: Program, columns: Columns) -> list[str]:
    """Find gathered buffers that are not written by one collective, receive or copy, or that several passes read.

    What makes FP8 copies of parameters writes those as a copy, and reads the parameters for the pass that follows it,
    which need not read them itself.
    """
    families = program.all_families
    # A helper stage plays one layer pass in two instances, of one kind at one place.
    passes = [(each.place, program.templates[each.template].kind) for each in program.instances]
    quantised = (TemplateKind.QUANTIZE, TemplateKind.QUANTIZE_AGAIN)
    copies = {
        number
        for number, template in enumerate(program.templates)
        if template.kind in (TemplateKind.COPY_OUT, TemplateKind.COPY_OUT_AGAIN, *quantised)
    }
    copied, made_from = set[int](), set[int]()
    writers: dict[int, dict[int, int]] = defaultdict(dict)
    """By buffer: the instructions that write it, with their lanes."""
    readers: dict[int, set[tuple[str, TemplateKind]]] = defaultdict(set)
    for buffer, i, mode in zip(
        columns.operand_buffer.tolist(),
        columns.operand_instruction.tolist(),
        columns.operand_mode.tolist(),
        strict=True,
    ):
        if families[columns.buffer_family[buffer]].buffer_class is BufferClass.GATHERED:
            if mode & Mode.WRITE:
                writers[buffer][i] = int(columns.lane[i])
                if int(columns.template[i]) in copies:
                    copied.add(buffer)
            if mode & Mode.READ and passes[int(columns.instance[i])][1] not in quantised:
                readers[buffer].add(passes[int(columns.instance[i])])
            elif mode & Mode.READ:
                made_from.add(buffer)
    faults = []
    for buffer in sorted(set(writers) | set(readers)):
        name = families[columns.buffer_family[buffer]].name
        called = (*COLLECTIVE_LANES.values(), Lane.RECV)
        if len(writers[buffer]) != 1 or (buffer not in copied and not set(writers[buffer].values()) <= set(called)):
            faults.append(f"buffer {buffer} ({name}) is not written by exactly one collective, receive or copy")
        if len(readers[buffer]) != 1 and (readers[buffer] or buffer not in made_from):
            faults.append(f"buffer {buffer} ({name}) is read by {len(readers[buffer])} passes instead of one")
    return faults
