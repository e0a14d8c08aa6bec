"""Shows the difference of plans and runs as text: the verdict, decisions, time by part and operator, memory."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.difference import Difference, Share, Side
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.units import counted, format_bytes, format_seconds, format_tokens
from memo_sim.views.bars import LANES
from memo_sim.views.goodput_columns import goodput_cells, goodput_headers
from memo_sim.views.palette import ordered_classes
from memo_sim.views.text_table import number, percent, text_table

EQUAL = 0.0005
"""Steps within this fraction are called equally fast."""
WORTH_NAMING = 0.05
"""Parts of the step that make up less of the difference are not in the verdict."""
MOST_PARTS = 3
MOST = 0.5
A_MILLION = 1e6
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def letter(at: int) -> str:
    """Return the short name of a side: A, B, ..."""
    return LETTERS[at] if at < len(LETTERS) else f"#{at + 1}"


def verdict_line(difference: Difference, at: int) -> str:
    """Return the sentence about a side: how much slower or faster than the first, and where that comes from."""
    first, side = difference.sides[0], difference.sides[at]
    ratio = side.step_s / first.step_s - 1 if first.step_s else 0.0
    steps = f"{format_seconds(side.step_s)} against {format_seconds(first.step_s)}"
    where = _where([(share.group, share.difference_s[at]) for share in difference.groups], side.step_s - first.step_s)
    if side.tgs and first.tgs and abs(side.tgs / first.tgs * (1 + ratio) - 1) > EQUAL:
        change = percent(side.tgs / first.tgs - 1, signed=True)
        text = f"{letter(at)} does {side.tgs:.1f} tokens per GPU and second, A {first.tgs:.1f} ({change})"
        text += f"{_where_by_token(difference, at, first.tgs, side.tgs)}. Steps differ in tokens or GPUs ({steps})"
    elif abs(ratio) < EQUAL:
        text = f"{letter(at)} is as fast as A ({steps})"
    else:
        slower = f"takes {1 + ratio:.3g} times as long as A" if ratio >= 1 else f"is {percent(ratio)} slower than A"
        speed = slower if ratio > 0 else f"takes {percent(-ratio)} less time than A"
        text = f"{letter(at)} {speed} ({steps}){where}"
    text += _of_memory(first, side)
    other = _other_question(first, side)
    return f"{letter(at)} answers another question ({other}). {text}." if other else f"{text}."


def _of_memory(first: Side, side: Side) -> str:
    """Return how live memory at the peak differs, and what the sides hold where PyTorch's allocator caches more."""
    live = side.peak_device_bytes - first.peak_device_bytes
    held = _held(side) - _held(first)
    if first.reserved_bytes is None and side.reserved_bytes is None:
        return f"; it needs {_more(live)} device memory" if live else ""
    text = f"; {_more(live)} device memory is live at its peak" if live else ""
    cached = f"with PyTorch's cache it holds {_more(held)}" if held else "with PyTorch's cache both hold the same"
    return f"{text}; {cached}"


def _held(side: Side) -> int:
    return side.peak_device_bytes if side.reserved_bytes is None else side.reserved_bytes


def _more(difference_bytes: int) -> str:
    return f"{format_bytes(abs(difference_bytes))} {'more' if difference_bytes > 0 else 'less'}"


def _other_question(first: Side, side: Side) -> str:
    """Return in what the questions differ: model and length; empty where they do not, or are not known."""
    if first.decisions is None or side.decisions is None:
        return ""
    models = (side.decisions.model.name, first.decisions.model.name)
    lengths = (format_tokens(side.decisions.seq_tokens), format_tokens(first.decisions.seq_tokens))
    differing = [pair for pair in (models, lengths) if pair[0] != pair[1]]
    return ", ".join(f"{mine} in place of {theirs}" for mine, theirs in differing)


def _where_by_token(difference: Difference, at: int, first_tgs: float, tgs: float) -> str:
    """Return which parts of the step make a token dearer or cheaper, in GPU seconds for a million tokens."""
    first, side = difference.sides[0], difference.sides[at]
    # A step has tgs x step_s tokens for each GPU.
    here, there = A_MILLION / (tgs * side.step_s), A_MILLION / (first_tgs * first.step_s)
    parts = [(share.group, share.seconds[at] * here - share.seconds[0] * there) for share in difference.groups]
    more_s = A_MILLION / tgs - A_MILLION / first_tgs
    change = f"{format_seconds(abs(more_s))} {'more' if more_s > 0 else 'less'}"
    return f". A million tokens need {change} of a GPU{_where(parts, more_s)}"


def _where(parts: Sequence[tuple[str, float]], total_s: float) -> str:
    """Return the parts of the step that differ most, of ``(name, difference in seconds)``."""
    named = sorted(parts, key=lambda part: -abs(part[1]))
    named = [part for part in named if abs(part[1]) >= WORTH_NAMING * abs(total_s)][:MOST_PARTS]
    if not named or not total_s:
        return ""
    listed = ", ".join(f"{name} {signed_seconds(seconds)}" for name, seconds in named)
    most = MOST < named[0][1] / total_s <= 1 + WORTH_NAMING
    return f", most of it: {listed}" if most else f": {listed}"


def signed_seconds(seconds: float) -> str:
    """Return a difference of seconds with its sign."""
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


def difference_table(found: Difference, *, top: int | None = None) -> str:
    """Return the whole document as text; ``top`` limits the rows of operators."""
    blocks = ["\n".join(map(one_line, found.verdict)), _sides(found.sides)]
    names = [letter(at) for at in range(len(found.sides))]
    if found.decisions:
        rows = [[choice.option, *choice.values] for choice in found.decisions]
        blocks.append(text_table(["decisions that differ", *names], rows))
    elif sum(side.decisions is not None for side in found.sides) > 1:
        blocks.append("The decisions are the same.")
    blocks.append(_lanes(found, names))
    blocks.append(_shares("step by part", found.groups, found.sides, names, top=None))
    if found.detail != "lanes":
        blocks.append(_shares("step by operator", found.shares, found.sides, names, top=top))
    blocks.append(_memory(found.sides, names))
    blocks += ["\n".join(map(one_line, found.notes))] if found.notes else []
    return "\n\n".join(blocks)


def _sides(sides: Sequence[Side]) -> str:
    goodputs = [side.goodput for side in sides]
    rows = [
        [
            letter(at),
            side.name,
            side.source,
            format_seconds(side.step_s),
            None if side.mfu is None else percent(side.mfu),
            number(side.tgs),
            *goodput_cells(side.goodput, goodputs),
        ]
        for at, side in enumerate(sides)
    ]
    headers = ["", "file", "figures", "step", "MFU", "TGS", *goodput_headers(goodputs)]
    return text_table(headers, rows, "lll" + "r" * (len(headers) - 3))


def _lanes(found: Difference, names: Sequence[str]) -> str:
    """Return the busy time of every lane, and the waits of the compute lane."""
    lanes = {name for side in found.sides for name, seconds in side.lanes.items() if seconds}
    ordered = [name for name in LANES if name in lanes] + sorted(lanes.difference(LANES))
    rows = [[f"{lane} busy", *(_seconds(side.lanes.get(lane)) for side in found.sides)] for lane in ordered]
    waits = [side.step_s - side.lanes.get("compute", 0.0) for side in found.sides]
    rows.insert(1, ["compute waits", *map(format_seconds, waits)])
    return text_table(["lane", *names], rows, "l" + "r" * len(names))


def _seconds(value: float | None) -> str | None:
    return format_seconds(value) if value else None


def _shares(
    title: str, shares: Sequence[Share], sides: Sequence[Side], names: Sequence[str], *, top: int | None
) -> str:
    """Return shares with their differences, the total below; shares of no side's time are left out."""
    rows: list[list[str | None]] = []
    others = range(1, len(sides))
    shown = shares[:top]
    for share in shown:
        label = f"{share.group}: {share.name}" if share.name else share.group
        rows.append([label, *map(_seconds, share.seconds), *_changes(share, others)])
    if rest := shares[len(shown) :]:
        label = f"{counted(len(rest), 'other')}"
        seconds = [sum(s.seconds[at] for s in rest) for at in range(len(sides))]
        differences = [sum(s.difference_s[at] for s in rest) for at in range(len(sides))]
        of = [sum(s.of_difference[at] or 0.0 for s in rest) for at in range(len(sides))]
        whole = Share(group=label, name="", seconds=seconds, difference_s=differences, of_difference=list(of))
        rows.append([label, *map(_seconds, seconds), *_changes(whole, others)])
    total = [side.step_s - sides[0].step_s for side in sides]
    whole = Share(
        group="step",
        name="",
        seconds=[side.step_s for side in sides],
        difference_s=total,
        of_difference=[1.0 if difference else None for difference in total],
    )
    rows.append(["step", *map(format_seconds, whole.seconds), *_changes(whole, others)])
    headers = [title, *names, *(text for at in others for text in (f"{names[at]} - A", f"of {names[at]} - A"))]
    return text_table(headers, rows, "l" + "r" * (len(headers) - 1))


def _changes(share: Share, others: range) -> list[str | None]:
    found: list[str | None] = []
    for at in others:
        changed = share.difference_s[at]
        found += [signed_seconds(changed), percent(share.of_difference[at])] if changed else [None, None]
    return found


def _memory(sides: Sequence[Side], names: Sequence[str]) -> str:
    """Return live bytes by class at the peak, the peaks of device and host, and the bytes that a rank copies."""
    sizes: dict[str, list[int | None]] = {
        f"peak: {name}": [side.peak_by_class.get(name, 0) if side.peak_by_class else None for side in sides]
        for name in ordered_classes({name for side in sides for name in side.peak_by_class})
    }
    sizes["peak of a device"] = [side.peak_device_bytes for side in sides]
    if any(side.reserved_bytes is not None for side in sides):
        sizes["reserved by PyTorch's allocator"] = [side.reserved_bytes for side in sides]
    sizes["peak of a node's host"] = [side.peak_host_bytes_per_node for side in sides]
    moved = [side.moved_bytes for side in sides]
    sizes["copied to the host"] = [None if each is None else each.d2h for each in moved]
    sizes["copied from the host"] = [None if each is None else each.h2d for each in moved]
    rows = [
        [label, *(None if size is None else format_bytes(size) for size in row)]
        for label, row in sizes.items()
        if any(size is not None for size in row)
    ]
    return text_table(["memory (without the reserve)", *names], rows, "l" + "r" * len(names))
