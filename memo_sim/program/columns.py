"""A program expanded to integer columns: one row an instruction, one row an operand.

This is the only form that is as long as the step; everything that looks at all instructions (edges, liveness, the
engine) works on these arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memo_sim.program.program import Program

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Columns:
    """Arrays over instructions (lane, instance, template, position in it) and over operands, in program order."""

    lane: Ints
    instance: Ints
    template: Ints
    position: Ints
    operand_instruction: Ints
    operand_buffer: Ints
    operand_first: Ints
    operand_end: Ints
    operand_mode: Ints
    buffer_bytes: Ints
    buffer_family: Ints
    buffer_dynamic: Flags
    """Whether a buffer's device memory is handed out and taken back during the step."""


def expand(program: Program) -> Columns:
    """Return the columns of ``program``."""
    templates = program.templates
    lengths = np.array([len(t.instructions) for t in templates], dtype=np.int64)
    template_of = np.array([i.template for i in program.instances], dtype=np.int64)
    instance_length = lengths[template_of]
    starts = np.concatenate(([0], np.cumsum(instance_length)[:-1])).astype(np.int64)
    total = int(instance_length.sum())
    instance = np.repeat(np.arange(len(template_of), dtype=np.int64), instance_length)
    position = np.arange(total, dtype=np.int64) - starts[instance]
    lane_table = np.zeros((len(templates), int(lengths.max(initial=1))), dtype=np.int64)
    for t, template in enumerate(templates):
        lane_table[t, : len(template.instructions)] = [int(i.lane) for i in template.instructions]
    template_column = template_of[instance]

    parts = [_template_operands(program, t, np.flatnonzero(template_of == t), starts) for t in range(len(templates))]
    stacked = [np.concatenate([p[c] for p in parts]) for c in range(5)]
    order = np.argsort(stacked[0], kind="stable")
    families = program.all_families
    counts = [f.count for f in families]
    return Columns(
        lane=lane_table[template_column, position],
        instance=instance,
        template=template_column,
        position=position,
        operand_instruction=stacked[0][order],
        operand_buffer=stacked[1][order],
        operand_first=stacked[2][order],
        operand_end=stacked[3][order],
        operand_mode=stacked[4][order],
        buffer_bytes=np.repeat(np.array([f.bytes for f in families], dtype=np.int64), counts),
        buffer_family=np.repeat(np.arange(len(families), dtype=np.int64), counts),
        buffer_dynamic=np.repeat(
            np.array([f.space == "device" and f.lifetime == "dynamic" for f in families], dtype=np.bool_), counts
        ),
    )


def _template_operands(program: Program, t: int, which: Ints, starts: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return the operand columns of all instances ``which`` of template ``t``."""
    template = program.templates[t]
    rows = [
        (p, o.slot, o.first, o.first + o.tokens, int(o.mode))
        for p, i in enumerate(template.instructions)
        for o in i.operands
    ]
    local = np.array(rows, dtype=np.int64).reshape(-1, 5)
    bases = program.family_bases
    own = {f.name for f in template.own}
    base = np.array([bases[f"{template.name}/{s}"] if s in own else bases[s] for s in template.slots], dtype=np.int64)
    bound = [s for s, name in enumerate(template.slots) if name not in own]
    index = np.zeros((len(which), len(template.slots)), dtype=np.int64)
    index[:, :] = np.arange(len(which), dtype=np.int64)[:, None]
    if bound and len(which):
        index[:, bound] = np.array([program.instances[i].indices for i in which], dtype=np.int64)
    buffers = (base[None, :] + index)[:, local[:, 1]] if len(template.slots) else np.zeros((len(which), 0), np.int64)
    shape = (len(which), len(local))
    columns = [starts[which][:, None] + local[None, :, 0], buffers]
    columns += [np.broadcast_to(local[None, :, c], shape) for c in (2, 3, 4)]
    first, second, third, fourth, fifth = (c.reshape(-1) for c in columns)
    return first, second, third, fourth, fifth
