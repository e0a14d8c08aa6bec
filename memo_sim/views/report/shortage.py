"""The page of a run that is short of memory: what fills it at the peak, and what each single change would cost."""

from __future__ import annotations

from memo_sim.contract.shortage import Shortage
from memo_sim.contract.units import counted, format_bytes, format_tokens
from memo_sim.views.palette import CLASSES, OTHER
from memo_sim.views.report.page import Block, Bullets, Heading, Page, Paragraph, Section, Share, Shares, Table
from memo_sim.views.report.sizes import provenance
from memo_sim.views.shortage_table import peak_sizes, peak_title, shortage_verdict, tensor_cells, way_cells, ways_notes

SHOWN_WAYS = 12


def shortage_page(found: Shortage, *, command: str, created: str, version: str) -> Page:
    """Return the report of a run that is short of memory, or of one that fits."""
    sizes = peak_sizes(found)
    bars = [Share(name, [(CLASSES.get(name, OTHER), float(size))]) for name, size in sizes.items() if size]
    filled = Shares("peak", bars, float(found.capacity_bytes), [], "of capacity", "memory", format_bytes)
    sections = [
        Section(peak_title(found), [filled]),
        Section("Largest tensors", [Table(*tensor_cells(found.tensors))]),
        Section("Ways out", [] if found.fits else _ways(found)),
        provenance(command, created, version),
    ]
    return Page(
        title=f"{found.model}, {format_tokens(found.seq_tokens)} tokens, {found.cluster}: memory",
        subtitle=f"{found.plan}. All figures are predicted.",
        verdict=[shortage_verdict(found)],
        good=found.fits,
        sections=[section for section in sections if section.blocks],
    )


def _ways(found: Shortage) -> list[Block]:
    tried = f"{counted(found.tried, 'change')} tried, {len(found.ways)} fit"
    tried += f"; {counted(found.pairs_tried, 'pair')} of the best tried, {len(found.pairs)} fit" * (not found.ways)
    blocks: list[Block] = [Paragraph(f"{tried}.", quiet=True)]
    parts = {"": found.ways, "Two changes each": found.pairs, "Changes that help, and are not enough": found.too_little}
    for heading, ways in parts.items():
        if ways:
            blocks += [*([Heading(heading)] if heading else []), Table(*way_cells(ways[:SHOWN_WAYS], found.memory))]
    notes = ways_notes(found, SHOWN_WAYS)
    return [*blocks, *([Bullets(notes)] if notes else [])]
