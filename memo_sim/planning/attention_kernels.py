"""Chooses a plan's attention kernel, and its number of head groups."""

from __future__ import annotations

import msgspec

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.planning.question import Question
from memo_sim.program.arena.library_workspaces import beside_arena, groups_beside
from memo_sim.program.attention.attention import longest_keys
from memo_sim.program.ir.work import Attention
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.compatibility import PLANNED_PLAIN_ATTENTION
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators.head_groups import fewest_head_groups


def head_groups(shape: Shape, base: Decisions, kernel: str) -> int:
    """Return the smallest number of head groups whose attention stays within the kernel's integers.

    When its workspace lies outside the arena, there may be more groups, to keep the workspace small.

    Raises:
        Infeasible: when no number of groups is enough.
    """
    shape = shape.attention
    chunk = base.attention_chunk_tokens if in_chunks(base) else 0
    work = Attention(
        batch=base.micro_batch,
        q_tokens=(chunk or shape.tokens) // base.micro_batch,
        k_tokens=(chunk or longest_keys(base, shape)) // base.micro_batch,
        mask="causal",
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=base.model.head_dim,
        backward=True,
        kernel=kernel,
        dtype=base.dtype,
    )
    fewest = fewest_head_groups(work)
    planned = msgspec.structs.replace(base, kernels=Kernels(attention=kernel))
    return groups_beside(work, fewest) if beside_arena(planned) else fewest


def attention_kernel(question: Question) -> str:
    """Return the pinned attention kernel, or the measured kernel of the dtype with the highest backward rate.

    Raises:
        Infeasible: when plain attention is asked for with a planned arena, or no kernel of the dtype was measured.
    """
    if question.pins.attention:
        base = question.decisions(Layout())
        asked = msgspec.structs.replace(base, kernels=Kernels(attention=question.pins.attention))
        if PLANNED_PLAIN_ATTENTION.breaks(asked):
            raise PLANNED_PLAIN_ATTENTION.refusal(asked)
        return question.pins.attention
    fastest: dict[str, float] = {}
    for table in question.hardware.attention:
        if table.dtype == question.dtype and table.attention_pass == "backward":
            fastest[table.kernel] = max(fastest.get(table.kernel, 0.0), *(row[2] for row in table.rows))
    if not fastest:
        raise Infeasible(
            "the profile has measured no attention kernel for this dtype",
            where=question.hardware.name,
            got=question.dtype,
            hint="calibrate the device again",
        )
    return max(fastest, key=lambda kernel: fastest[kernel])
