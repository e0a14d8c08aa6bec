"""Lower bound of a pipeline's step time: the kernels of each stage, and their waits for other stages.

Every policy of a layout plays at least the kernels of the plan that keeps everything, in the same order on every stage,
and transfers the same rows between stages. So only that plan is lowered. This costs as much as lowering any other plan,
but serves all of them. It is then played with one rule:

    a kernel starts when the previous kernel of its stage has ended, and when what it reads from another stage has been
    computed there

Copies, collectives and p2p transfers take no time, nothing waits for memory, and lanes do not slow each other. Rows cut
into blocks are no faster than whole rows (``lower_bounds.py``). Rows of helper stages (SPPO 6.2) are cut the same way
in every policy, and are always kept.

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
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.lower import lower

ROUNDING = 1e-9
"""Relative rounding error of a step time whose terms are summed in another order than in the engine."""
Wait = tuple[int, int, int]
"""A kernel, the stage that it waits for, and the kernel there that makes what it reads."""


def kept(decisions: Decisions) -> Decisions:
    """Return the plan of the same layout that keeps everything."""
    whole = {"recompute_layers": ALL, "early_stop": False, "mlp_chunk_tokens": 0, "mlp_rebuild": "block"}
    whole |= {"attention_chunk_tokens": 0}
    return swap_each(msgspec.structs.replace(decisions, recompute="none", **whole), 0)


def is_known(decisions: Decisions) -> bool:
    """Return whether ``least_step_s`` applies to a plan: one micro-batch, in subsequences, through several stages."""
    layout = decisions.layout
    return layout.pp > 1 and layout.subsequences > 1 and decisions.micro_batches == 1


def least_step_s(decisions: Decisions, hardware: Hardware, cluster: Cluster) -> float:
    """Return a lower bound of the step seconds of all plans with the layout of ``decisions``, which keeps everything.

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
    """Return the seconds of the kernels before each instruction, and the sum of all kernels."""
    rows = [
        [pricer.seconds(i.work) if i.lane is Lane.COMPUTE else 0.0 for i in template.instructions]
        for template in program.templates
    ]
    seconds = np.concatenate([rows[number] for number in program.template_of.tolist()])
    found: list[float] = np.concatenate(([0.0], np.cumsum(seconds))).tolist()
    return found


class _Kernels:
    """The kernels of a stage that write or read the buffers of p2p transfers."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        lane = columns.lane[columns.operand_instruction]
        transfers = (lane == Lane.SEND) | (lane == Lane.RECV)
        shared = np.zeros(len(columns.buffer_bytes), dtype=np.bool_)
        shared[columns.operand_buffer[transfers]] = True
        self._of_p2p = {int(columns.operand_instruction[at]): at for at in np.flatnonzero(transfers).tolist()}
        """The row of each p2p transfer's only operand."""
        computed = np.flatnonzero((lane == Lane.COMPUTE) & shared[columns.operand_buffer])
        order = computed[np.argsort(columns.operand_buffer[computed], kind="stable")]
        buffers, firsts = np.unique(columns.operand_buffer[order], return_index=True)
        self._accesses: dict[int, Ints] = dict(zip(buffers.tolist(), np.split(order, firsts[1:]), strict=True))
        """By buffer: the rows of kernels' operands that touch it, in program order."""

    def maker(self, sent: int) -> int | None:
        """Return the last kernel before a send that writes rows of it; None when no kernel does."""
        found, mode = self._touching(sent, before=True)
        makers = found[(mode & Mode.WRITE) > 0]
        return int(makers[-1]) if len(makers) else None

    def reader(self, received: int) -> int | None:
        """Return the first kernel that reads received rows; None when they are overwritten first, or never read."""
        found, mode = self._touching(received, before=False)
        return int(found[0]) if len(found) and mode[0] & Mode.READ else None

    def _touching(self, number: int, *, before: bool) -> tuple[Ints, Ints]:
        """Return the kernels before or after a p2p transfer that touch its rows, and their access modes."""
        columns, at = self._columns, self._of_p2p[number]
        accesses = self._accesses.get(int(columns.operand_buffer[at]), np.zeros(0, dtype=np.int64))
        kernels = columns.operand_instruction[accesses]
        on_side = kernels < number if before else kernels > number
        begins_early = columns.operand_first[accesses] < columns.operand_end[at]
        ends_late = columns.operand_end[accesses] > columns.operand_first[at]
        chosen: Flags = on_side & begins_early & ends_late
        return kernels[chosen], columns.operand_mode[accesses[chosen]]


def _played_s(before_s: Sequence[list[float]], waits: Sequence[list[Wait]]) -> float:
    """Return the seconds at which the last kernel of any stage ends.

    ``before_s`` gives for each stage the seconds before each of its instructions. ``waits`` gives for each stage its
    waits, in the order of its kernels. A stage is delayed by the largest delay among its waits so far. ``late`` holds,
    for each kernel that waits, the stage's delay from there on.
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
                    break  # that stage's delay is not known yet
                made_s = before_s[source][made + 1] + _late_s(late[source], made)
                kernels.append(kernel)
                delays.append(max(delays[-1] if delays else 0.0, made_s - before_s[stage][kernel]))
                going = True
    return max(
        seconds[-1] + (delays[-1] if delays else 0.0) for seconds, (_, delays) in zip(before_s, late, strict=True)
    )


def _late_s(late: tuple[list[int], list[float]], kernel: int) -> float:
    """Return the delay in seconds at which a stage's kernel starts."""
    kernels, delays = late
    at = bisect_right(kernels, kernel)
    return delays[at - 1] if at else 0.0
