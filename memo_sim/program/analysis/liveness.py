"""When each buffer lives, and how much is alive at each instruction: a program's memory, known before it runs.

A dynamic buffer is born at the first instruction that touches it and dies after the last one, in program order. A
buffer with lifetime ``step`` lives for the whole step. The peak counts device bytes as an allocator would that serves
the program's requests: at each instruction, everything born and not yet dead, including the instruction's workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memo_sim.program.analysis.columns import NUMBER, Columns, Flags, FoldedColumns, Ints
from memo_sim.program.ir.program import Program


@dataclass(frozen=True)
class Liveness:
    """Birth, death and size of every buffer.

    Birth and death are instruction numbers, inclusive; birth -1 means that the buffer lives for the whole step.
    """

    birth: Ints
    death: Ints
    bytes: Ints
    family: Ints
    on_device: np.ndarray
    class_names: tuple[str, ...]
    class_of: Ints
    instructions: int


@dataclass(frozen=True)
class Peak:
    """The peak of one memory space: instruction number, total bytes, bytes by buffer class."""

    instruction: int
    bytes: int
    by_class: dict[str, int]


def liveness(program: Program, columns: Columns | FoldedColumns) -> Liveness:
    """Return the lives of all buffers of ``program``."""
    families = program.all_families
    count = len(columns.buffer_bytes)
    birth = np.full(count, columns.lane.size, dtype=NUMBER)
    death = np.full(count, -1, dtype=NUMBER)
    for operands in columns.operands:
        first, last = operands.first_and_last
        used = last >= 0
        buffers = operands.buffers(used)
        birth[buffers], death[buffers] = operands.instructions(np.array([first[used], last[used]]))
    lasting = np.array([f.lifetime == "step" for f in families], dtype=bool)[columns.buffer_family]
    birth[lasting] = -1
    death[lasting] = columns.lane.size
    names = tuple(sorted({f.buffer_class.value for f in families}))
    class_of_family = np.array([names.index(f.buffer_class.value) for f in families], dtype=NUMBER)
    device = np.array([f.space == "device" for f in families], dtype=bool)
    return Liveness(
        birth=birth,
        death=death,
        bytes=columns.buffer_bytes,
        family=columns.buffer_family,
        on_device=device[columns.buffer_family],
        class_names=names,
        class_of=class_of_family[columns.buffer_family],
        instructions=columns.lane.size,
    )


def live_bytes(lives: Liveness, *, device: bool, sizes: Ints | None = None) -> dict[str, Ints]:
    """Return the live bytes at every instruction by class, as arrays as long as the program."""
    sizes = lives.bytes if sizes is None else sizes
    used = (lives.on_device == device) & (lives.death >= lives.birth)
    curves: dict[str, Ints] = {}
    for c, name in enumerate(lives.class_names):
        chosen = used & (lives.class_of == c)
        if not chosen.any():
            continue
        curves[name] = _living(lives, chosen, sizes)
    return curves


def living(lives: Liveness, *, device: bool, sizes: Ints) -> Ints:
    """Return the live bytes at every instruction, of all classes; ``sizes``: of every buffer."""
    return _living(lives, (lives.on_device == device) & (lives.death >= lives.birth), sizes)


def _living(lives: Liveness, chosen: Flags, sizes: Ints) -> Ints:
    """Return the live bytes of the chosen buffers at every instruction."""
    change = np.zeros(lives.instructions + 2, dtype=np.int64)
    np.add.at(change, np.maximum(lives.birth[chosen], 0), sizes[chosen])
    np.add.at(change, np.minimum(lives.death[chosen] + 1, lives.instructions + 1), -sizes[chosen])
    return np.cumsum(change, out=change)[: lives.instructions]


def peak_of(lives: Liveness, *, device: bool) -> Peak:
    """Return the peak of device or host memory; the same as that of ``live_bytes``, without a curve for each class."""
    used = (lives.on_device == device) & (lives.death >= lives.birth)
    total = _living(lives, used, lives.bytes)
    at = int(np.argmax(total)) if len(total) else 0
    alive = used & (lives.birth <= at) & (lives.death >= at)
    by_class = np.bincount(lives.class_of[alive], weights=lives.bytes[alive], minlength=len(lives.class_names))
    return Peak(
        instruction=at,
        bytes=int(total[at]) if len(total) else 0,
        by_class={name: int(size) for name, size in zip(lives.class_names, by_class.tolist(), strict=True) if size},
    )


def peak(curves: dict[str, Ints]) -> Peak:
    """Return the first instruction with the largest sum over classes, and the live bytes there."""
    if not curves:
        return Peak(instruction=0, bytes=0, by_class={})
    total = np.sum(list(curves.values()), axis=0)
    at = int(np.argmax(total))
    by_class = {name: int(curve[at]) for name, curve in curves.items() if curve[at]}
    return Peak(instruction=at, bytes=int(total[at]), by_class=by_class)
