"""Checks the programs of all ranks of a job: calls match on all ranks of a group, and no rank waits for ever.

No process is started. The checkers of ``memo_sim`` see one rank per pipeline stage; here every rank has a program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import replace

import msgspec
import pytest

from memo_exec.distributed.groups import communicates
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import own_program, rank_program
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.communicators import p2p_key
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.ir.instruction import Lane, Template
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Exchange, PointToPoint
from memo_sim.program.layout.rank_order import stride
from tests.exec_cpu.small import decide, gpt

ONE_STAGE = [
    Layout(tp=2, sequence_parallel=True, dp=2, zero=3),
    Layout(tp=2, sequence_parallel=True, cp=2, dp=2, zero=1),
    Layout(cp=4, cp_exchange="all_gather", dp=2, zero=2),
    Layout(cp=2, ulysses=2, dp=2, zero=3),
]
STAGES = [
    Layout(pp=4, dp=2, zero=1),
    Layout(pp=2, cp=2, ulysses=2),
    Layout(pp=2, cp=4, overlap_p2p=False),
    Layout(pp=2, tp=2, sequence_parallel=True, dp=2, schedule="zero-bubble"),
    Layout(pp=2, cp=2, dp=2, zero=1, schedule="interleaved", virtual_stages=2),
    Layout(pp=2, tp=2, cp=2, schedule="gpipe"),
]
Calls = list[tuple[int, Hashable, object]]
"""Calls of one rank: the instruction, the lane and the participating ranks, and the work on which they must agree."""


def decisions(layout: Layout) -> Decisions:
    """Return decisions with four micro-batches, tokenwise, whose replicas communicate while they compute."""
    tokens = 512 * layout.tp * layout.cp * layout.ulysses
    half = 256 * layout.tp
    chosen = {"seq_tokens": tokens, "micro_batch": 1, "global_batch": 4 * layout.dp, "swapped_tokens": half}
    model = gpt(layers=4, max_positions=tokens)
    return decide(model, layout=layout, recompute="tokenwise", overlap="both", **chosen)


def programs_of(chosen: Decisions) -> list[Program]:
    meshes = [MeshCoordinates(chosen.layout, rank) for rank in range(chosen.layout.devices)]
    return [own_program(rank_program(chosen, mesh), chosen, mesh) for mesh in meshes]


def calls_of(program: Program, mesh: MeshCoordinates) -> Calls:
    found: Calls = []
    for number, (_, instruction) in enumerate(program.walk()):
        work = instruction.work
        if isinstance(work, PointToPoint):
            found.append((number, (p2p_key(work), mesh.rank % stride("pp", mesh.layout)), work))
        elif isinstance(work, Collective | Exchange):
            found.append((number, (instruction.lane, *mesh.members(work.group)), work))
    return found


def stuck(programs: list[Program], layout: Layout, *, one_queue: bool = False) -> int:
    """Return how many instructions never start.

    With ``one_queue`` a device plays the communication calls of all lanes in program order.
    """
    node: dict[tuple[int, int], Hashable] = {}
    before: dict[Hashable, set[Hashable]] = defaultdict(set)
    for rank, program in enumerate(programs):
        counts: Counter[Hashable] = Counter()
        for number, who, _ in calls_of(program, MeshCoordinates(layout, rank)):
            counts[who] += 1
            node[rank, number] = ("call", who, counts[who])
        for earlier, later in _orders(program, one_queue=one_queue):
            a, b = (node.get((rank, n), (rank, n)) for n in (earlier, later))
            before[b].add(a)
            before.setdefault(a, set())
    left = {each: len(waits) for each, waits in before.items()}
    after: dict[Hashable, list[Hashable]] = defaultdict(list)
    for each, waits in before.items():
        for wait in waits:
            after[wait].append(each)
    ready = [each for each, waits in left.items() if not waits]
    done = 0
    while ready:
        done += 1
        for each in after[ready.pop()]:
            left[each] -= 1
            if not left[each]:
                ready.append(each)
    return len(left) - done


def _orders(program: Program, *, one_queue: bool) -> Iterator[tuple[int, int]]:
    columns = expand(program)
    edges = derive_edges(columns)
    yield from zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True)
    last: dict[Hashable, int] = {}
    for number, (_, instruction) in enumerate(program.walk()):
        queues: list[Hashable] = [instruction.lane]
        if one_queue and communicates(instruction.work):
            queues.append("calls")
        for queue in queues:
            if queue in last:
                yield last[queue], number
            last[queue] = number


@pytest.mark.parametrize("layout", ONE_STAGE + STAGES, ids=str)
def test_every_rank_calls_alike_and_nobody_waits_for_ever(layout: Layout) -> None:
    programs = programs_of(decisions(layout))
    agreed: dict[Hashable, list[object]] = {}
    for rank, program in enumerate(programs):
        mine: dict[Hashable, list[object]] = defaultdict(list)
        for _, who, what in calls_of(program, MeshCoordinates(layout, rank)):
            mine[who].append(what)
        for who, calls in mine.items():
            assert agreed.setdefault(who, calls) == calls, f"rank {rank} of {who}"
    assert stuck(programs, layout) == 0


@pytest.mark.parametrize("layout", [ONE_STAGE[1], ONE_STAGE[3], STAGES[0], STAGES[2]], ids=str)
def test_stages_alone_need_streams_that_do_not_wait_for_each_other(layout: Layout) -> None:
    """This is why a run sets CUDA's number of hardware queues to the maximum (``world.side_by_side``)."""
    assert (stuck(programs_of(decisions(layout)), layout, one_queue=True) > 0) == (layout.pp > 1)


def test_stages_that_send_before_they_receive_are_found() -> None:
    """Two ranks that both send first, and receive on the same lane, wait for each other for ever."""
    layout = Layout(pp=2, schedule="interleaved", virtual_stages=2)
    programs = programs_of(decisions(layout))
    assert stuck(programs, layout) == 0
    assert stuck([_on_one_lane(program) for program in programs], layout) > 0


def _on_one_lane(program: Program) -> Program:
    def moved(template: Template) -> Template:
        lanes = {Lane.RECV: Lane.SEND}
        return replace(
            template,
            instructions=tuple(
                msgspec.structs.replace(i, lane=lanes.get(i.lane, i.lane)) for i in template.instructions
            ),
        )

    return replace(program, templates=tuple(moved(t) for t in program.templates))
