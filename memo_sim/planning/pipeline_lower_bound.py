"""Seconds that no plan of a pipeline's layout goes below: its kernels, and what each stage waits for the others.

Every policy of a layout plays the kernels that keeping everything plays, on every stage in the same order, and perhaps
more; and it hands over the same rows. So the plan that keeps everything is lowered, which is as dear as lowering any
other but serves all of them, and of it only this is played:

    a kernel starts when the kernel before it on its stage has ended, and when what it reads of another stage's has been
    computed there

Copies, collectives and the hand-overs themselves take no time, nothing waits for memory, and nothing contends. Rows cut
in blocks are no faster than whole (``floors.py``); rows of guests (SPPO 6.2) are cut alike whatever the policy, and are
always kept.

      stage 0   F0 F1 F2                B0          B0 starts when B0 of stage 1 has made its input's gradient
      stage 1      F0 F1 F2 B2 B1 B0                F0 starts when F0 of stage 0 has ended
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import numpy as np

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions
from memo_sim.costs.pricing import Pricer
from memo_sim.planning.subsequences import swap_each
from memo_sim.program.analysis.columns import Columns, Flags, Ints, expand
from memo_sim.program.analysis.rendezvous import all_rendezvous
from memo_sim.program.ir.instruction import Lane, Mode
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower

ROUNDING = 1e-9
"""Of a step time that is summed in another order than the engine's."""
Wait = tuple[int, int, int]
"""A kernel, the stage that it waits for, and the kernel there that makes what it reads."""


def kept(decisions: Decisions) -> Decisions:
    """Return the plan of the same layout that keeps everything."""
    whole = {"mlp_chunk_tokens": 0, "attention_chunk_tokens": 0}
    return swap_each(msgspec.structs.replace(decisions, recompute="none", **whole), 0)


def is_known(decisions: Decisions) -> bool:
    """Return whether ``least_step_s`` says anything of a plan: of one micro-batch's subsequences through stages."""
    layout = decisions.layout
    return layout.pp > 1 and layout.subsequences > 1 and decisions.micro_batches == 1


def least_step_s(decisions: Decisions, hardware: Hardware, cluster: Cluster) -> float:
    """Return the seconds that no plan goes below which has the layout of ``decisions``; those keep everything.

    Raises:
        Infeasible: when the plan cannot be lowered, or the profile has not measured its work.
    """
    programs = lower(decisions)
    pricer = Pricer(hardware, cluster, decisions.layout, rowwise=decisions.kernels.rowwise)
    columns = [expand(program) for program in programs]
    touches = [_Kernels(each) for each in columns]
    waits: list[list[Wait]] = [[] for _ in programs]
    for rendezvous in all_rendezvous(programs):
        sides = {int(columns[stage].lane[number]): (stage, number) for stage, number in rendezvous}
        if sides.keys() != {Lane.SEND, Lane.RECV}:
            continue
        (source, sent), (target, received) = sides[Lane.SEND], sides[Lane.RECV]
        made, read = touches[source].maker(sent), touches[target].reader(received)
        if made is not None and read is not None:
            waits[target].append((read, source, made))
    before_s = [_seconds_before(program, pricer) for program in programs]
    return _played_s(before_s, [sorted(each) for each in waits]) * (1 - ROUNDING)


def _seconds_before(program: Program, pricer: Pricer) -> list[float]:
    """Return the seconds of the kernels before each instruction, and of all."""
    rows = [
        [pricer.seconds(i.work) if i.lane is Lane.COMPUTE else 0.0 for i in template.instructions]
        for template in program.templates
    ]
    seconds = np.concatenate([rows[instance.template] for instance in program.instances])
    found: list[float] = np.concatenate(([0.0], np.cumsum(seconds))).tolist()
    return found


class _Kernels:
    """Which kernels of a stage write and read the buffers that are handed over."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        lane = columns.lane[columns.operand_instruction]
        handed = (lane == Lane.SEND) | (lane == Lane.RECV)
        shared = np.zeros(len(columns.buffer_bytes), dtype=np.bool_)
        shared[columns.operand_buffer[handed]] = True
        self._of_p2p = {int(columns.operand_instruction[at]): at for at in np.flatnonzero(handed).tolist()}
        """Where the one operand of each hand-over stands."""
        computed = np.flatnonzero((lane == Lane.COMPUTE) & shared[columns.operand_buffer])
        order = computed[np.argsort(columns.operand_buffer[computed], kind="stable")]
        buffers, firsts = np.unique(columns.operand_buffer[order], return_index=True)
        self._accesses: dict[int, Ints] = dict(zip(buffers.tolist(), np.split(order, firsts[1:]), strict=True))
        """Of each of those buffers the operands of kernels, in program order."""

    def maker(self, sent: int) -> int | None:
        """Return the last kernel before a send that writes rows of it; None where no kernel does."""
        found, mode = self._touching(sent, before=True)
        makers = found[(mode & Mode.WRITE) > 0]
        return int(makers[-1]) if len(makers) else None

    def reader(self, received: int) -> int | None:
        """Return the kernel that first needs what is received; None where that is overwritten, or not read."""
        found, mode = self._touching(received, before=False)
        return int(found[0]) if len(found) and mode[0] & Mode.READ else None

    def _touching(self, number: int, *, before: bool) -> tuple[Ints, Ints]:
        """Return the kernels before or behind a hand-over that touch its rows, and how."""
        columns, at = self._columns, self._of_p2p[number]
        accesses = self._accesses.get(int(columns.operand_buffer[at]), np.zeros(0, dtype=np.int64))
        kernels = columns.operand_instruction[accesses]
        apart = kernels < number if before else kernels > number
        begins_early = columns.operand_first[accesses] < columns.operand_end[at]
        ends_late = columns.operand_end[accesses] > columns.operand_first[at]
        chosen: Flags = apart & begins_early & ends_late
        return kernels[chosen], columns.operand_mode[accesses[chosen]]


def _played_s(before_s: Sequence[list[float]], waits: Sequence[list[Wait]]) -> float:
    """Return when the last kernel of any stage ends.

    ``before_s``: of each stage the seconds before its instructions. ``waits``: of each stage, in the order of its
    kernels. A stage is as late as its latest wait so far: ``late`` holds, for each kernel that waits, how late it is
    from there on.
    """
    late: list[tuple[list[int], list[float]]] = [([], []) for _ in waits]
    going = True
    while going:
        going = False
        for stage, mine in enumerate(waits):
            kernels, delays = late[stage]
            while len(kernels) < len(mine):
                kernel, source, made = mine[len(kernels)]
                known, _ = late[source]
                if len(known) < len(waits[source]) and waits[source][len(known)][0] <= made:
                    break  # how late that stage is there is not known yet
                made_s = before_s[source][made + 1] + _late_s(late[source], made)
                kernels.append(kernel)
                delays.append(max(delays[-1] if delays else 0.0, made_s - before_s[stage][kernel]))
                going = True
    return max(
        seconds[-1] + (delays[-1] if delays else 0.0) for seconds, (_, delays) in zip(before_s, late, strict=True)
    )


def _late_s(late: tuple[list[int], list[float]], kernel: int) -> float:
    """Return how late a stage's kernel starts."""
    kernels, delays = late
    at = bisect_right(kernels, kernel)
    return delays[at - 1] if at else 0.0
