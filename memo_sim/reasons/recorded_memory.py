"""What fills a device at the fullest instant of a recorded snapshot, beside what a plan of the same job predicts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from memo_sim.contract.recorded_step import ClassBytes, LiveBytes, RecordedMemory
from memo_sim.engine.simulate import Simulation
from memo_sim.memory.allocation_class import ACTIVATIONS, GATHERED, GRADIENTS, LOGITS, OPTIMIZER, WEIGHTS, WORKSPACE
from memo_sim.memory.source import Source
from memo_sim.program.ir.instruction import BufferClass, Family
from memo_sim.program.ir.kinds import BlockKind, FamilyKind

MOST_LIVE = 12
"""How many origins of buffers are listed."""
CLASSES = {
    **dict.fromkeys(
        (FamilyKind.PARAMS, FamilyKind.CAST, FamilyKind.PARAMS_FP8, FamilyKind.PARAMS_FP8_COLUMNS, FamilyKind.LARGEST),
        WEIGHTS,
    ),
    **dict.fromkeys((FamilyKind.MOMENT1, FamilyKind.MOMENT2), OPTIMIZER),
    **dict.fromkeys((FamilyKind.GRADS, FamilyKind.WHOLE_GRADS), GRADIENTS),
    **dict.fromkeys((FamilyKind.INPUT_GRADIENT, FamilyKind.DEFERRED), GRADIENTS),
    FamilyKind.GATHERED: GATHERED,
}
"""Classes of families by what they hold; master weights and all others follow other rules."""


def memory_of(found: Source, predicted: Mapping[str, int] | None = None) -> RecordedMemory:
    """Return what is alive at the fullest instant of a snapshot, by where it was allocated and by what it is for.

    ``predicted`` has the bytes of each class at the predicted peak of the job.
    """
    requests = found.requests
    changes: dict[int, int] = defaultdict(int)
    for lower, upper, size in zip(requests.lower, requests.upper, requests.size_bytes, strict=True):
        changes[lower] += size
        changes[upper] -= size
    live = most = 0
    at = min(changes)
    for instant in sorted(changes):
        live += changes[instant]
        if live > most:
            most, at = live, instant
    count: Counter[str] = Counter()
    size_of: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    origins = found.origins or [""] * len(requests.ids)
    rows = zip(requests.ids, requests.lower, requests.upper, requests.size_bytes, origins, strict=True)
    for name, lower, upper, size, kind in rows:
        if lower <= at < upper:
            origin = name.partition(" ")[2] or kind or "without a Python frame"
            count[origin] += 1
            size_of[origin] += size
            classes[kind] += size
    known = dict(predicted or {})
    by_class = [
        ClassBytes(name=name, bytes=size, predicted_bytes=known.pop(name, None)) for name, size in classes.most_common()
    ]
    by_class += [ClassBytes(name=name, bytes=0, predicted_bytes=size) for name, size in known.items() if size]
    return RecordedMemory(
        peak_bytes=most,
        buffers=count.total(),
        live=[LiveBytes(name=name, count=count[name], bytes=size) for name, size in size_of.most_common(MOST_LIVE)],
        notes=found.notes,
        by_class=by_class if found.origins else [],
        predicted_peak_bytes=None if predicted is None else sum(predicted.values()),
    )


def predicted_classes(simulation: Simulation) -> dict[str, int]:
    """Return the live bytes of a plan's peak by the classes of ``memory/allocation_class.py``.

    fp32 master weights are a framework's weights where the plan stores no other parameters.
    """
    memory = simulation.memory
    program, lives, at = memory.program, memory.device_lives, memory.device.instruction
    families = program.all_families
    in_head = [False] * len(program.families)
    in_head += [template.block is BlockKind.HEAD for template in program.templates for _ in template.own]
    used = lives.on_device & (lives.death >= lives.birth) & (lives.birth <= at) & (at <= lives.death)
    stored = any(family.kind is FamilyKind.PARAMS for family in families)
    found: Counter[str] = Counter()
    for number in used.nonzero()[0].tolist():
        family = int(lives.family[number])
        kind = _class_of(families[family], in_head=in_head[family], stored=stored)
        found[kind] += int(lives.bytes[number])
    return dict(found.most_common())


def _class_of(family: Family, *, in_head: bool, stored: bool) -> str:
    if family.kind is FamilyKind.MASTER:
        return OPTIMIZER if stored else WEIGHTS
    if family.kind in CLASSES:
        return CLASSES[family.kind]
    if family.buffer_class in (BufferClass.WORKSPACE, BufferClass.EXCHANGE):
        return WORKSPACE
    return LOGITS if in_head else ACTIVATIONS
