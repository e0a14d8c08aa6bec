"""Shows why a run is out of memory as text: what fills it at the peak, and the cheapest ways out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memo_sim.contract.plain_text import one_line
from memo_sim.contract.shortage import LiveTensor, Shortage, WayOut
from memo_sim.contract.units import counted, format_bytes, format_seconds, format_tokens
from memo_sim.views.bars import place_of
from memo_sim.views.palette import phase_label
from memo_sim.views.stage_numbers import from_one
from memo_sim.views.text_table import Cells, percent, text_table

SHOWN_TENSORS = 6
UNUSED = {"planned": "gaps in the arena"}
ALLOCATED = "held by PyTorch's allocator, not in use"
"""What a device needs beside live bytes and the reserve, by the memory policy."""
PARTS = {"embed": "the embedding", "head": "the head with the loss", "opt": "the optimizer"}
"""Parts of a step whose legend says less."""
MEANINGS = {
    "x": "inputs of layers",
    "norm1": "output of the first norm",
    "norm2": "output of the second norm",
    "qkv": "queries, keys and values",
    "attn": "output of attention",
    "resid": "sum after attention",
    "up": "output of the MLP's first product",
    "act": "output of the MLP's activation",
    "d_up": "gradient of the MLP's first product",
    "d_act": "gradient of the MLP's activation",
    "logits": "logits",
    "grads": "gradients",
    "master": "fp32 master weights",
    "moment1": "first moments of the optimizer",
    "moment2": "second moments of the optimizer",
    "params": "parameters",
}
"""What a tensor is, by the part of its name that says so."""


def shortage_text(found: Shortage, *, top: int = 3) -> str:
    """Return the verdict, what fills memory at the peak, and the ``top`` cheapest ways out."""
    blocks = [shortage_verdict(found), _filled(found), tensor_table(found.tensors[:SHOWN_TENSORS])]
    if not found.fits:
        blocks += _ways(found, top)
    if found.changes:
        blocks.append(one_line(f"Changed: {'; '.join(found.changes)}."))
    if found.not_read:
        blocks.append(one_line(f"Not read of the model's file: {', '.join(found.not_read)}."))
    return from_one("\n\n".join(blocks))


def shortage_verdict(found: Shortage) -> str:
    """Return one line: whether the run fits, and by how much."""
    batch = f"global batch {found.decisions.global_batch}"
    whole = f"{found.model} on {found.cluster}, {format_tokens(found.seq_tokens)} tokens, {batch}"
    which = "the run" if found.candidates == 1 else f"the best of {found.candidates} plans"
    if found.fits:
        step = f", step {format_seconds(found.step_s)}" if found.step_s is not None else ""
        free = f"{format_bytes(found.free_bytes)} of {format_bytes(found.capacity_bytes)} stay free on a device"
        return one_line(f"{whole}: {which} fits, {free} ({found.plan}{step}).")
    which = "the run" if found.candidates == 1 else f"none of {found.candidates} plans fits; the nearest"
    where = "on a device" if found.memory == "device" else "of a node's host memory"
    short = f"{format_bytes(found.shortfall_bytes)} are missing {where}"
    need = f"{format_bytes(found.needed_bytes)} are needed of {format_bytes(found.capacity_bytes)}"
    verb = "does not fit" if found.candidates == 1 else "is"
    plan = f" ({found.plan})" if found.candidates == 1 else f" {found.plan}"
    return from_one(one_line(f"{whole}: {which} {verb}{plan}: {short}, {need}."))


def peak_sizes(found: Shortage) -> dict[str, int]:
    """Return bytes at the peak by class, with the reserve by item and what an allocator or arena does not use."""
    sizes: dict[str, int] = dict(sorted(found.by_class.items(), key=lambda item: -item[1]))
    for item, size in found.reserve.items():
        sizes[f"reserve: {item.replace('_', ' ')}"] = size
    if (unused := found.needed_bytes - sum(sizes.values())) > 0:
        sizes[UNUSED.get(found.decisions.memory_policy, ALLOCATED)] = unused
    return sizes


def peak_title(found: Shortage) -> str:
    """Return which memory the sizes are of, and where in the step it peaks."""
    where = "a device" if found.memory == "device" else "the host memory of a node"
    return from_one(f"What fills {where} at its peak, {in_words(found.at)}")


def _filled(found: Shortage) -> str:
    """Return the classes at the peak, with the reserve and the allocator's unused bytes."""
    lines = f"{peak_title(found)}:\n{_size_table('class', peak_sizes(found))}"
    if found.allocator:
        text = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.allocator.items())
        lines += f"\nPyTorch's allocator fails with {text}."
    return lines


def _size_table(name: str, sizes: Mapping[str, int]) -> str:
    total = sum(sizes.values())
    rows = [
        [key, format_bytes(size), percent(size / total if total else None)]
        for key, size in [*sizes.items(), ("total", total)]
        if size
    ]
    return text_table([name, "size", "share"], rows, "lrr")


def tensor_table(tensors: Sequence[LiveTensor]) -> str:
    """Return the tensors, one a row: name, meaning, class, how many there are, their size together."""
    return text_table(*tensor_cells(tensors))


def tensor_cells(tensors: Sequence[LiveTensor]) -> Cells:
    """Return headers, rows and alignment of the table of tensors."""
    rows: list[list[str | None]] = [
        [t.name, _meaning(t.name), t.buffer_class, f"{t.count}", format_bytes(t.bytes)] for t in tensors
    ]
    return ["largest tensors of a rank", "", "class", "number", "size"], rows, "lllrr"


def _meaning(name: str) -> str:
    last = name.rpartition("/")[2]
    words = last.split(".")
    return next((MEANINGS[word] for word in (last, *words) if word in MEANINGS), "")


def in_words(instruction: str) -> str:
    """Return where in the step an instruction is, with its id: ``in backward of layer 31 (m0/s0/l31/bwd/ffn_up)``."""
    place = place_of(instruction.rpartition(": ")[2])
    part = f"in {PARTS.get(place.phase, phase_label(place.phase))}" if place.name != place.where else "at"
    layer = f" of layer {place.layer}" if place.layer >= 0 else ""
    return f"{part}{layer} ({instruction})"


def _ways(found: Shortage, top: int) -> list[str]:
    best = found.ways[:top] or found.pairs[:top]
    memory = "device" if found.memory == "device" else "host"
    tried = f"{counted(found.tried, 'change')} tried"
    blocks = []
    if found.ways:
        more = f"; {len(found.ways) - len(best)} more fit" if len(found.ways) > len(best) else ""
        title = f"Ways out, one change each, the fastest first ({tried}{more}):"
        blocks.append(f"{title}\n{_way_table(best, memory)}")
    else:
        blocks.append(f"No single change makes it fit ({tried}).")
        if near := found.too_little[:top]:
            blocks[-1] += f" The nearest:\n{_way_table(near, memory)}"
        if found.pairs:
            more = f"; {len(found.pairs) - len(best)} more fit" if len(found.pairs) > len(best) else ""
            title = f"Ways out, two changes each, the fastest first ({counted(found.pairs_tried, 'pair')} tried{more}):"
            blocks.append(f"{title}\n{_way_table(best, memory)}")
        elif found.pairs_tried:
            blocks.append(f"No two changes make it fit ({counted(found.pairs_tried, 'pair')} of the best tried).")
    notes = ways_notes(found, top)
    return [*blocks, *(["\n".join(map(one_line, notes))] if notes else [])]


def ways_notes(found: Shortage, top: int) -> list[str]:
    """Return what else the ``top`` ways out mean, what the search would find, and what helps besides."""
    best = found.ways[:top] or found.pairs[:top]
    notes = [f"{way.options}: {way.note}." for way in best if way.note]
    if found.open is not None:
        left = ", ".join(found.open.leave_out) or "every knob"
        step = format_seconds(found.open.step_s or 0.0)
        batch = f" and {found.open.options}" if found.open.options else ""
        notes.append(f"With {left} left to the search{batch}: {found.open.plan}, {step}.")
    if not best:
        notes.append(
            "What helps besides: more devices (memo-sim gpus finds how many), or a shorter sequence (memo-sim longest"
            " finds how long)."
        )
    return notes


def _way_table(ways: Sequence[WayOut], memory: str) -> str:
    return text_table(*way_cells(ways, memory))


def way_cells(ways: Sequence[WayOut], memory: str) -> Cells:
    """Return headers, rows and alignment of the table of changes; ``memory`` is the one that is short."""
    short = not all(way.fits for way in ways)
    rows: list[list[str | None]] = [
        [
            f"{number}",
            way.options + (f" (without {', '.join(way.leave_out)})" if way.leave_out else ""),
            way.plan,
            *([format_bytes(way.shortfall_bytes)] if short else [format_seconds(way.step_s or 0.0)]),
            format_bytes(way.needed_bytes),
        ]
        for number, way in enumerate(ways, start=1)
    ]
    headers = ["", "options to type", "plan", "short by" if short else "step", f"{memory} needs"]
    return headers, rows, "rllrr"
