"""The page of ``memo-sim compare``: the verdict, decisions that differ, steps and memory side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memo_sim.contract.difference import Difference, Share, Side
from memo_sim.contract.units import format_bytes, format_seconds
from memo_sim.views.difference_table import letter, signed_seconds
from memo_sim.views.goodput_columns import goodput_cells, goodput_headers
from memo_sim.views.palette import CLASSES, OTHER, PHASES, WAITS, ordered_classes
from memo_sim.views.report.page import Block, Bullets, Cell, Details, Page, Pairs, Paragraph, Section, Shares, Table
from memo_sim.views.report.page import Share as Bar
from memo_sim.views.text_table import number, percent

COLOURS = dict(PHASES.values()) | {"waits": WAITS["compute"]}
"""Colour by part of the step."""
SHOWN = 15
"""Operators that are not folded."""


def difference_page(found: Difference, *, command: str, created: str, version: str) -> Page:
    """Return the report of a comparison of plans, answers and measured runs."""
    names = [letter(at) for at in range(len(found.sides))]
    sections = [
        Section("What is compared", [_sides(found.sides)]),
        Section("Decisions that differ", _decisions(found, names)),
        Section("Where the steps go", [_bars(found, names), _table("part of the step", found.groups, found, names)]),
        Section("By operator and wait", _operators(found, names)),
        Section("Memory without the reserve", [_memory_bars(found.sides, names), _memory(found.sides, names)]),
        Section("Notes", [Bullets(found.notes)] if found.notes else []),
        Section("Provenance", [Pairs([("command", command), ("created", created), ("memo", version)])]),
    ]
    return Page(
        title=" and ".join(f"{name}: {side.name}" for name, side in zip(names, found.sides, strict=True)),
        subtitle="Plans, answers and measured runs side by side; differences are taken from A.",
        verdict=found.verdict,
        sections=[section for section in sections if section.blocks],
    )


def _sides(sides: Sequence[Side]) -> Table:
    goodputs = [side.goodput for side in sides]
    rows: list[list[Cell]] = [
        [
            letter(at),
            side.name,
            side.source,
            format_seconds(side.step_s),
            None if side.mfu is None else percent(side.mfu),
            number(side.tgs),
            format_bytes(side.peak_device_bytes),
            *goodput_cells(side.goodput, goodputs),
        ]
        for at, side in enumerate(sides)
    ]
    headers = ["", "file", "figures", "step", "MFU", "TGS", "device memory", *goodput_headers(goodputs)]
    return Table(headers, rows, "lll" + "r" * (len(headers) - 3))


def _decisions(found: Difference, names: Sequence[str]) -> list[Block]:
    if found.decisions:
        rows = [[choice.option, *choice.values] for choice in found.decisions]
        return [Table(["decision", *names], rows, "l" * (1 + len(names)))]
    known = sum(side.decisions is not None for side in found.sides) > 1
    return [Paragraph("The decisions are the same.")] if known else []


def _bars(found: Difference, names: Sequence[str]) -> Shares:
    """Return a bar for each side, divided by part of the step."""
    groups = sorted(found.groups, key=lambda share: -max(share.seconds))
    bars = [
        Bar(
            f"{name} ({side.origin})",
            [(_colour(group), group.seconds[at]) for group in groups if group.seconds[at] > 0],
        )
        for at, (name, side) in enumerate(zip(names, found.sides, strict=True))
    ]
    legend = {group.group: _colour(group) for group in groups}
    return Shares("step", bars, found.sides[0].step_s, list(legend.items()), of="of A")


def _colour(share: Share) -> str:
    return COLOURS.get(share.group, OTHER)


def _table(title: str, shares: Sequence[Share], found: Difference, names: Sequence[str]) -> Table:
    """Return seconds by side, and for every side but the first the difference and its part of the whole difference."""
    others = range(1, len(names))
    rows: list[list[Cell]] = []
    for share in shares:
        label = f"{share.group}: {share.name}" if share.name else share.group
        changes = [text for at in others for text in _change(share, at)]
        rows.append([label, *(format_seconds(s) if s else None for s in share.seconds), *changes])
    headers = [title, *names, *(text for at in others for text in (f"{names[at]} - A", f"of {names[at]} - A"))]
    return Table(headers, rows, "l" + "r" * (len(headers) - 1))


def _change(share: Share, at: int) -> tuple[Cell, Cell]:
    changed = share.difference_s[at]
    return (signed_seconds(changed), percent(share.of_difference[at])) if changed else (None, None)


def _operators(found: Difference, names: Sequence[str]) -> list[Block]:
    """Return the operators that make the difference, and the others folded."""
    if found.detail == "lanes":
        return []
    first, rest = found.shares[:SHOWN], found.shares[SHOWN:]
    blocks: list[Block] = [_table("operator or wait", first, found, names)]
    if rest:
        blocks.append(Details(f"{len(rest)} others", [_table("operator or wait", rest, found, names)]))
    return blocks


def _memory_bars(sides: Sequence[Side], names: Sequence[str]) -> Shares:
    """Return a bar for each side's peak, divided by class; what is not known by class has one colour."""
    classes = ordered_classes({name for side in sides for name in side.peak_by_class})
    bars = []
    for name, side in zip(names, sides, strict=True):
        parts = [(CLASSES.get(c, OTHER), float(side.peak_by_class.get(c, 0))) for c in classes]
        rest = side.peak_device_bytes - sum(size for _, size in parts)
        bars.append(Bar(f"{name} ({side.origin})", [*parts, (OTHER, float(max(0, rest)))]))
    legend = [(name, CLASSES.get(name, OTHER)) for name in classes]
    legend += [("not by class", OTHER)] if any(bar.parts[-1][1] for bar in bars) else []
    return Shares("peak", bars, float(sides[0].peak_device_bytes), legend, of="of A", shown=format_bytes, unit="memory")


def _memory(sides: Sequence[Side], names: Sequence[str]) -> Table:
    figures: dict[str, Callable[[Side], int | None]] = {
        "peak of a device": lambda side: side.peak_device_bytes,
        "peak of a node's host": lambda side: side.peak_host_bytes_per_node,
        "copied to the host": lambda side: None if side.moved_bytes is None else side.moved_bytes.d2h,
        "copied from the host": lambda side: None if side.moved_bytes is None else side.moved_bytes.h2d,
    }
    rows: list[list[Cell]] = [
        [
            f"peak: {name}",
            *(format_bytes(side.peak_by_class[name]) if name in side.peak_by_class else None for side in sides),
        ]
        for name in ordered_classes({name for side in sides for name in side.peak_by_class})
    ]
    for label, figure in figures.items():
        sizes = [figure(side) for side in sides]
        if any(size is not None for size in sizes):
            rows.append([label, *(None if size is None else format_bytes(size) for size in sizes)])
    return Table(["", *names], rows, "l" + "r" * len(names))
