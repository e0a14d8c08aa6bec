"""Names the tensors that are live at an instruction, on one device or in host memory."""

from __future__ import annotations

import numpy as np

from memo_sim.contract.shortage import LiveTensor
from memo_sim.program.analysis.liveness import Liveness
from memo_sim.program.arena.requests import BufferNames
from memo_sim.program.ir.program import Program


def tensors_at(
    program: Program, lives: Liveness, instruction: int, *, device: bool, names: BufferNames | None = None
) -> list[LiveTensor]:
    """Return the buffers that are live at ``instruction`` in one memory of one rank, by name, the largest first.

    ``names`` by number include buffers that an eager framework adds behind the program's own; each stands for itself.
    """
    used = (lives.on_device == device) & (lives.death >= lives.birth)
    live = np.flatnonzero(used & (lives.birth <= instruction) & (instruction <= lives.death) & (lives.bytes > 0))
    of_program = BufferNames(program)
    names, own = names or of_program, len(of_program)
    added = [
        LiveTensor(
            name=names[number],
            buffer_class=lives.class_names[lives.class_of[number]],
            count=1,
            bytes=int(lives.bytes[number]),
        )
        for number in live[live >= own].tolist()
    ]
    live = live[live < own]
    family, size = lives.family[live], lives.bytes[live]
    counts = np.bincount(family, minlength=1)
    sizes = np.zeros(len(counts), dtype=np.int64)
    np.add.at(sizes, family, size)
    families = program.all_families
    found = [
        LiveTensor(
            name=families[number].name,
            buffer_class=families[number].buffer_class.value,
            count=int(counts[number]),
            bytes=int(sizes[number]),
        )
        for number in np.flatnonzero(counts).tolist()
    ]
    return sorted([*found, *added], key=lambda tensor: (-tensor.bytes, tensor.name))
